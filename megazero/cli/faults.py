"""Seeded faults: each breaks one part of the engine or the pipeline at run time, so that a certificate can be seen to
fail. Never on by itself: MEGAZERO_VERIFY_FAULT names one, or an argument of ``verify``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megazero.config import RunConfig
from megazero.mesh.collectives import all_gather_flat
from megazero.mesh.mesh import Mesh
from megazero.pp.executor import Pipeline
from megazero.zero import Engine, reduction
from megazero.zero import engine as engine_module
from megazero.zero.unit import Unit


@dataclass(frozen=True)
class Place:
    """Where a fault is put. patches: undone at the end."""

    engine: Engine
    pipeline: Pipeline
    mesh: Mesh
    config: RunConfig
    patches: ExitStack

    def replace(self, owner: Any, name: str, new: Any) -> None:
        self.patches.enter_context(patch.object(owner, name, new))


def asked_for() -> str | None:
    """The fault named in the environment. ValueError if there is none of that name."""
    name = os.environ.get("MEGAZERO_VERIFY_FAULT") or None
    if name is not None and name not in FAULTS:
        raise ValueError(f"MEGAZERO_VERIFY_FAULT={name} is not one of {', '.join(FAULTS)}")
    return name


@contextmanager
def applied(
    name: str | None, engine: Engine, pipeline: Pipeline, mesh: Mesh, config: RunConfig
) -> Iterator[bool]:
    """Yields whether the fault exists on this rank's layout; nothing is patched without a name."""
    with ExitStack() as patches:
        yield FAULTS[name](Place(engine, pipeline, mesh, config, patches)) if name else False


def _skip_last_reduction(place: Place) -> bool:
    """A step's last micro-batch adds nothing to the gradients."""
    count = place.engine.reducing
    stage = Unit.stage

    def skipping(unit: Unit, name: str, param: torch.nn.Parameter) -> None:
        if count.micro_batches > 1 and unit.backwards == count.micro_batches - 1:
            assert param.grad is not None
            param.grad = torch.zeros_like(param.grad)
        stage(unit, name, param)

    place.replace(Unit, "stage", skipping)
    return (place.config.batch.global_batch_size or 0) > (place.config.batch.micro_batch_size or 0) * (
        place.mesh.dp_size
    )


def _wrong_norm_group(place: Place) -> bool:
    """Norms' partial gradients are not summed over the tensor-parallel ranks; whole ones are."""
    if place.mesh.tp.size == 1:
        return False
    runs, tp = place.engine.optimizer.runs, place.mesh.tp

    def wrong(*_: Any) -> None:
        for run in runs:
            if run.traits.replicated and not run.traits.partial:
                run.grad.mul_(tp.size)

    place.replace(engine_module, "sum_partial", wrong)
    return True


def _missing_divisor(place: Place) -> bool:
    """The loss is averaged over the tokens of one data-parallel rank instead of all."""
    engine, begin = place.engine, place.engine.begin_step
    place.replace(
        engine,
        "begin_step",
        lambda count, divisor, program: begin(count, divisor / place.mesh.dp_size, program),
    )
    return place.mesh.dp_size > 1


def _stale_secondary(place: Place) -> bool:
    """After the first step the P copy is taken for current without a refresh."""
    units = [unit for unit in place.engine.units if unit.levels.p < unit.levels.os]
    end = place.engine._end_step

    def ending(updated: bool) -> None:
        end(updated)
        for unit in units:
            unit.copy_version = unit.master_version

    place.replace(Unit, "drop_copy", lambda unit: None)
    place.replace(place.engine, "_end_step", ending)
    return bool(units)


def _swapped_shard(place: Place) -> bool:
    """Two ranks of a data-parallel axis take each other's gradient slices for their own."""
    axis = next((a for a in reversed(place.mesh.data_axes) if a.spec.role != "replica"), None)
    if axis is None:
        return False
    exchange = place.engine._exchange

    def swapping() -> Any:
        for unit in place.engine.units:
            assert unit.grad is not None
            for own in unit.regions_of(unit.grad, unit.levels.os, unit.levels.g, 1):
                every = own.new_empty(axis.size * own.numel())
                all_gather_flat(every, own.reshape(-1).clone(), group=axis.reduce_group)
                if axis.index < 2:
                    own.copy_(every.view(axis.size, 1, -1)[1 - axis.index])
        return exchange()

    place.replace(place.engine, "_exchange", swapping)
    return True


def _wrong_tied_sum(place: Place) -> bool:
    """The two ends of the pipeline do not add up the gradients of their tied embedding."""
    place.replace(place.engine.reducing, "join_ends", lambda ends: None)
    return not place.config.model.untie_embeddings_and_output_weights and place.mesh.pp.size > 1


def _lost_activation(place: Place) -> bool:
    """The second stage computes micro-batch 1 from the activation of micro-batch 0."""
    links, receive = place.pipeline.links, place.pipeline.links.receive
    held: dict[int, Tensor] = {}

    def receiving(message: Any, source: int) -> Tensor:
        tensor = receive(message, source)
        if message.kind != "activation" or message.target_stage != 1:
            return tensor
        if message.micro_batch == 0:
            held[0] = tensor.detach().clone()
        return held[0].clone() if message.micro_batch == 1 else tensor

    place.replace(links, "receive", receiving)
    batch = place.config.batch
    several = (batch.global_batch_size or 0) > (batch.micro_batch_size or 0) * place.mesh.dp_size
    return place.mesh.pp.size > 1 and several


def _wrong_noise(place: Place) -> bool:
    """Ranks that round the same slice at random draw different numbers."""
    rounding, units, axes = place.engine.rounding, place.engine.units, place.mesh.data_axes
    noise, rank = rounding.noise, place.mesh.rank
    place.replace(rounding, "noise", lambda unit, hop, start=0: noise(unit, f"{hop} of rank {rank}", start))
    codecs = place.engine.policy.codecs
    # On the way back of replicas a share that several hold is rounded by each.
    outer = [axes[level - 1] for unit in units[:1] for level in range(unit.levels.os + 1, unit.levels.all)]
    return any(getattr(codecs.gradients(axis.link), "stochastic", False) for axis in outer)


def _wrong_bytes(place: Place) -> bool:
    """Every exchange of gradients is sent twice."""
    exchange = reduction.start_exchange
    flying: list[Any] = []  # not waited for: that would hold the other lanes' chains

    def twice(axis: Any, out: Tensor, messages: Tensor, traffic: Any) -> Any:
        spare = torch.empty_like(out)
        flying.append((exchange(axis, spare, messages, traffic), spare, messages))
        return exchange(axis, out, messages, traffic)

    place.replace(reduction, "start_exchange", twice)
    return place.mesh.dp_size > 1


FAULTS: dict[str, Callable[[Place], bool]] = {
    "skip-last-reduction": _skip_last_reduction,
    "wrong-norm-group": _wrong_norm_group,
    "missing-divisor": _missing_divisor,
    "stale-secondary": _stale_secondary,
    "swapped-shard": _swapped_shard,
    "wrong-tied-sum": _wrong_tied_sum,
    "lost-activation": _lost_activation,
    "wrong-noise": _wrong_noise,
    "wrong-bytes": _wrong_bytes,
}
