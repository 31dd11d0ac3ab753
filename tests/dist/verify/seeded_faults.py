"""Seeded faults: each breaks one part of the engine or the pipeline while steps run, so that a certificate can be
seen to fail. ``partial(seeded, name)`` goes to ``verify``, and with the runs to the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megazero.comm import hops
from megazero.comm import peers as peers_module
from megazero.comm.codec import Blockwise
from megazero.comm.peers import Peers, Pending
from megazero.config import RunConfig
from megazero.cp import ContextParallel
from megazero.mesh.mesh import Mesh, all_gather_flat
from megazero.models.experts import Experts, MixtureOfExperts
from megazero.moe import Balance, dispatch
from megazero.pp.executor import Pipeline
from megazero.tp import TensorParallel
from megazero.zero import Engine
from megazero.zero import engine as engine_module
from megazero.zero.gradients import Gradients
from megazero.zero.slices import Slice
from megazero.zero.weights import Weights


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


@contextmanager
def seeded(name: str, engine: Engine, pipeline: Pipeline, config: RunConfig) -> Iterator[None]:
    """The fault of that name inside the block."""
    with ExitStack() as patches:
        FAULTS[name](Place(engine, pipeline, engine.mesh, config, patches))
        yield


def _skip_last_reduction(place: Place) -> None:
    """A step's last micro-batch adds nothing to the gradients."""
    count = place.engine.reducer
    take = Gradients.take

    def skipping(gradients: Gradients, name: str, param: torch.nn.Parameter) -> None:
        if count.micro_batches > 1 and gradients.backwards == count.micro_batches - 1:
            assert param.grad is not None
            param.grad = torch.zeros_like(param.grad)
        take(gradients, name, param)

    place.replace(Gradients, "take", skipping)


def _wrong_norm_group(place: Place) -> None:
    """Norms' partial gradients are not summed over the tensor-parallel ranks; whole ones are."""
    runs, tp = place.engine.optimizer.runs, place.mesh.tp

    def wrong(*_: Any) -> None:
        for run in runs:
            if run.traits.replicated and not run.traits.partial:
                run.grad.mul_(tp.size)

    place.replace(engine_module, "sum_partial", wrong)


def _missing_divisor(place: Place) -> None:
    """The loss is averaged over the tokens of one data-parallel rank instead of all."""
    engine, begin = place.engine, place.engine.begin_step
    place.replace(
        engine,
        "begin_step",
        lambda count, divisor, program: begin(count, divisor / place.mesh.dp_size, program),
    )


def _stale_secondary(place: Place) -> None:
    """After the first step the P copy is taken for current without a refresh."""
    units = [unit for unit in place.engine.units if unit.axes.p < unit.axes.os]
    end = place.engine._end_step

    def ending() -> None:
        end()
        for unit in units:
            unit.weights.refreshed()

    place.replace(Weights, "drop_copy", lambda weights: None)
    place.replace(place.engine, "_end_step", ending)


def _swapped_shard(place: Place) -> None:
    """Two ranks of a data-parallel axis take each other's gradient slices for their own."""
    axis = next(a for a in reversed(place.mesh.data_axes) if a.spec.role != "replica")
    norm = place.engine.norm
    write = norm.write

    def swapping(row: Tensor) -> None:
        for unit in place.engine.units:
            assert unit.gradients.grad is not None
            for own in Slice(unit.layout, unit.gradients.grad, unit.axes.g).rows(unit.axes.os, 1):
                every = own.new_empty(axis.size * own.numel())
                all_gather_flat(every, own.reshape(-1).clone(), group=axis.reduce_group)
                if axis.index < 2:
                    own.copy_(every.view(axis.size, 1, -1)[1 - axis.index])
        write(row)

    place.replace(norm, "write", swapping)


def _wrong_tied_sum(place: Place) -> None:
    """The two ends of the pipeline do not add up the gradients of their tied embedding."""
    place.replace(place.engine.reducer, "join_ends", lambda ends: None)


def _lost_activation(place: Place) -> None:
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


def _wrong_noise(place: Place) -> None:
    """Ranks that round moments of the same slice draw different numbers."""
    rounding, rank = place.engine.rounding, place.mesh.rank
    noise = rounding.noise
    place.replace(rounding, "noise", lambda unit, what, start=0: noise(unit, f"{what} of rank {rank}", start))


def _wrong_bytes(place: Place) -> None:
    """Every exchange of gradients is sent twice."""
    exchange = hops.start_exchange
    flying: list[Any] = []  # not waited for: that would hold the other lanes' chains

    def twice(axis: Any, out: Tensor, messages: Tensor, traffic: Any) -> Any:
        spare = torch.empty_like(out)
        flying.append((exchange(axis, spare, messages, traffic), spare, messages))
        return exchange(axis, out, messages, traffic)

    place.replace(hops, "start_exchange", twice)


def _unswapped_gradient(place: Place) -> None:
    """Of what context-parallel ranks swap, gradients stay where they are."""

    def staying(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None

    place.replace(peers_module._Swap, "backward", staticmethod(staying))


def _shifted_part(place: Place) -> None:
    """A context-parallel rank takes its part of a sequence for that of the one before."""
    own = ContextParallel.own

    def shifted(cp: ContextParallel, x: Tensor, dim: int = 0) -> Tensor:
        heads = replace(cp.heads, rank=(cp.heads.rank - 1) % cp.heads.size)
        return own(replace(cp, heads=heads), x, dim)

    place.replace(ContextParallel, "own", shifted)


def _wrong_chunk(place: Place) -> None:
    """Ranks that gather keys take their queries for those of another group."""
    queries = ContextParallel.queries

    def others(cp: ContextParallel, length: int) -> list[range]:
        inside, across = (replace(peers, rank=(peers.rank + 1) % peers.size) for peers in cp.keys)
        return queries(replace(cp, keys=(inside, across)), length)

    place.replace(ContextParallel, "queries", others)


def _unsummed_keys(place: Place) -> None:
    """Of the gradients of gathered keys and values, a rank takes its own."""

    scatter = Peers.start_scatter

    def own(peers: Peers, x: Tensor, ordered: bool = False) -> Pending:
        if not ordered:  # activations of tensor-parallel ranks
            return scatter(peers, x)
        swapped = peers.start_swap(x.unflatten(0, (peers.size, -1)))
        return swapped._replace(finish=lambda: swapped.finish()[peers.rank])

    place.replace(Peers, "start_scatter", own)


def _unlike_signs(place: Place) -> None:
    """Every node transforms the keys and values that cross nodes with signs of its own."""
    gathered = peers_module._gathered_in_code

    def own(keys: Tensor, peers: Peers, codec: Blockwise, observers: Any) -> Tensor:
        return gathered(keys, peers, replace(codec, seed=peers.rank), observers)

    place.replace(peers_module, "_gathered_in_code", own)


def _doubled_swap(place: Place) -> None:
    """Every swap of context-parallel ranks is done twice."""
    swap = Peers.start_swap

    def twice(peers: Peers, rows: Tensor) -> Pending:
        swap(peers, rows).wait()
        return swap(peers, rows)

    place.replace(Peers, "start_swap", twice)


def _recounted_tokens(place: Place) -> None:
    """A recompute counts its tokens, and adds its losses, once more."""
    attach = Balance.attach

    def again(balance: Balance, routed: Any, decision: Any, *rest: Any) -> Tensor:
        decision.counts = None
        return attach(balance, routed, decision, *rest)

    place.replace(Balance, "attach", again)


def _own_counts(place: Place) -> None:
    """A tensor-parallel rank balances by its own tokens alone."""
    place.replace(MixtureOfExperts, "_summed", lambda mixture, counts: counts)


def _partial_router(place: Place) -> None:
    """Of the tensor-parallel ranks' gradients of a router each keeps its own."""
    total = engine_module.sum_partial

    def wrong(runs: Any, *rest: Any) -> None:  # norms have no weight decay, routers have
        total([run for run in runs if run.traits.options or not run.traits.partial], *rest)

    place.replace(engine_module, "sum_partial", wrong)


def _of_experts(engine: Engine) -> list[Any]:
    """The units of experts that ranks share; some are in chunks."""
    return [unit for unit in engine.units if unit.name.partition("[")[0].endswith("experts")]


def _dropped_expert_reduction(place: Place) -> None:
    """Gradients of experts are not summed over the ranks that hold the same ones."""
    units, take = _of_experts(place.engine), Gradients.take
    names = {name for unit in units for name in unit.params}
    second = any(axis.index for unit in units for axis in unit.axes.inside)

    def alone(gradients: Gradients, name: str, param: torch.nn.Parameter) -> None:
        if second and name in names:
            assert param.grad is not None
            param.grad = torch.zeros_like(param.grad)
        take(gradients, name, param)

    place.replace(Gradients, "take", alone)


def _wrong_expert_offset(place: Place) -> None:
    """A rank computes with its first expert what its second has to, and the other way round."""
    forward = Experts.forward

    def shifted(experts: Experts, rows: Tensor, probabilities: Tensor, ends: Tensor) -> Tensor:
        counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
        parts = [part.split(counts) for part in (rows, probabilities)]
        first, second, *rest = range(len(counts))
        order = [second, first, *rest]
        swapped = [torch.cat([part[i] for i in order]) for part in parts]
        moved = torch.tensor([counts[i] for i in order]).cumsum(0).int()
        out = forward(experts, *swapped, moved).split([counts[i] for i in order])
        return torch.cat([out[i] for i in order])

    place.replace(Experts, "forward", shifted)


def _norm_without_experts(place: Place) -> None:
    """The global norm leaves out the gradients of experts that ranks share."""
    norm, experts = place.engine.norm, _of_experts(place.engine)
    write = norm.write

    def without(row: Tensor) -> None:
        held = [run.grad.clone() for run in norm.runs]
        for run in norm.runs:
            if run.unit in experts:
                run.grad.zero_()
        write(row)
        for run, grad in zip(norm.runs, held, strict=True):
            run.grad.copy_(grad)

    place.replace(norm, "write", without)


def _stale_sizes(place: Place) -> None:
    """Ranks that share experts take the numbers of rows of the first micro-batch for those of all."""
    held: dict[int, Any] = {}
    sizes = dispatch._row_counts

    def stale(counts: Tensor, peers: Peers) -> Any:
        found = sizes(counts, peers)
        return held.setdefault(len(counts), found)

    place.replace(dispatch, "_row_counts", stale)


def _doubled_dispatch(place: Place) -> None:
    """Rows go to their experts twice."""
    route = Peers.route

    def twice(peers: Peers, rows: Tensor, *sizes: Any) -> Tensor:
        route(peers, rows, *sizes)
        return route(peers, rows, *sizes)

    place.replace(Peers, "route", twice)


def _own_scales(place: Place) -> None:
    """Ranks that share a sequence do not agree on the scale of an input in fp8."""
    place.replace(TensorParallel, "_largest", lambda tp, number: number * 2**tp.rank)


FAULTS: dict[str, Callable[[Place], None]] = {
    "skip-last-reduction": _skip_last_reduction,
    "wrong-norm-group": _wrong_norm_group,
    "missing-divisor": _missing_divisor,
    "stale-secondary": _stale_secondary,
    "swapped-shard": _swapped_shard,
    "wrong-tied-sum": _wrong_tied_sum,
    "lost-activation": _lost_activation,
    "wrong-noise": _wrong_noise,
    "wrong-bytes": _wrong_bytes,
    "unswapped-gradient": _unswapped_gradient,
    "shifted-part": _shifted_part,
    "doubled-swap": _doubled_swap,
    "recounted-tokens": _recounted_tokens,
    "own-counts": _own_counts,
    "partial-router": _partial_router,
    "wrong-chunk": _wrong_chunk,
    "unsummed-keys": _unsummed_keys,
    "unlike-signs": _unlike_signs,
    "dropped-expert-reduction": _dropped_expert_reduction,
    "wrong-expert-offset": _wrong_expert_offset,
    "norm-without-experts": _norm_without_experts,
    "stale-sizes": _stale_sizes,
    "doubled-dispatch": _doubled_dispatch,
    "own-scales": _own_scales,
}
