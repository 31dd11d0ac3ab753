"""The sharded decoder against the same decoder on one rank, in plain torch.

The sharded side is what the trainer runs: configuration, mesh, decoder, engine. The reference is a bare loop
over one whole decoder with torch's AdamW and clipping. Ranks send slices; the test process puts them together as
``megazero verify`` does, so tensor-parallel shards, padding and replicas are checked too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch._dynamo.utils import counters

from megazero.config import RunConfig, World
from megazero.mesh.mesh import Mesh
from megazero.models import Decoder
from megazero.models.decoder import Decisions
from megazero.models.multi_token import further_tokens
from megazero.models.positions import Documents
from megazero.moe import Decision
from megazero.tp import sequence_slice
from megazero.train.data.feeding import own_tokens
from megazero.train.distributed import make_mesh
from megazero.train.expert_balance import balance_losses
from megazero.train.parallelize import (
    DTYPES,
    MicroBatch,
    build_decoder,
    build_pipeline,
    make_policy,
    shard_decoder,
)
from megazero.verify.full_tensors import Assembler
from megazero.verify.training_run import documents_of
from tests.dist.capture import capture_gradients, local_slices
from tests.dist.parity_cases import EXPERTS, IDLE_RANKS, Case, Model
from tests.dist.pool import run_ranks

Slices = list[tuple[str, int, np.ndarray]]  # parameter, first flat element of the rank's own tensor, values
Tensors = dict[str, np.ndarray]  # whole parameters (one rank's shapes) by name, fp64
GRADIENT = {"fp32": 1e-6, "fp64": 1e-10}
LOSS = {"fp32": 1e-5, "fp64": 1e-10}
# Smallest norm that counts, as a share of the global norm. A key bias without rotary positions shifts all scores
# of a query alike, so its gradient is zero in exact arithmetic; in fp32 what is computed is noise of 1e-10 to 1e-9
# of the global norm, on one rank as on many (split-up batches on one rank, and fp64 truth, show the same).
FLOOR, FLOOR_OF_FP32_NOISE = 1e-6, 1e-2


def samples(config: RunConfig, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels, loss mask [global batch, s] of a step: a fifth of the tokens do not count."""
    count, length, vocabulary = (
        config.batch.global_batch_size,
        config.model.seq_length,
        config.model.vocab_size,
    )
    assert count and length and vocabulary
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, vocabulary, (count, length + 1), generator=generator)
    # Whole numbers: others depend on the default dtype, which is not the ranks' in ``in_fp64``.
    mask = (torch.randint(0, 5, (count, length), generator=generator) > 0).double()
    return ids[:, :-1], ids[:, 1:], mask


def forced(decoder: Decoder, tokens: torch.Tensor) -> Decisions | None:
    """Return to which of the first two experts each token of a rank [b, s] goes, where others are to be idle."""
    if any(getattr(decoder.config, name) != value for name, value in EXPERTS[IDLE_RANKS].items()):
        return None
    own = tokens.t()[sequence_slice(tokens.shape[1], decoder.tp)].reshape(-1, 1)
    return {i: Decision((own % 2).int()) for stage in decoder.stages for i in stage.layers}


def loss_sum(decoder: Decoder, config: RunConfig, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    tokens, labels, mask = batch
    packed = documents_of(config, tokens)
    documents = Documents(packed.get("position_ids"), packed.get("document_starts"))
    ahead, weights = config.model.mtp_num_layers, mask.to(DTYPES[config.precision.params_dtype])
    return decoder(
        *(tokens, labels),
        documents=documents,
        loss_weights=weights,
        decisions=forced(decoder, tokens),
        further=further_tokens(labels, weights, ahead) if ahead else None,
    )


# -- one rank ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """losses, norms: of each step. initial: weights."""

    losses: list[float]
    norms: list[float]
    initial: Tensors


def _whole_decoder(model: Model) -> Decoder:
    config = model.config()
    balance = replace(balance_losses(config), samples=model.block, together=model.together)
    weight = config.training.mtp_loss_scaling_factor
    decoder = Decoder(
        config.model, balance=balance, mtp_loss_scaling_factor=weight, dtype=DTYPES[model.dtype]
    )
    decoder.initialize(config.training.seed)
    return decoder


def _backward(decoder: Decoder, config: RunConfig, step: int) -> float:
    """Mean loss over the valid tokens of the step's whole batch; gradients in .grad."""
    batch = samples(config, step)
    for balance in decoder.balances().values():
        balance.clear()
    total = loss_sum(decoder, config, batch)
    (total / batch[2].sum().item()).backward()
    return total.double().item() / batch[2].sum().item()


def _arrays(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: t.detach().double().numpy().copy() for name, t in tensors.items()}


@cache
def reference(model: Model, steps: int) -> Reference:
    config, decoder = model.config(), _whole_decoder(model)
    o, plain = config.optimizer, decoder.no_weight_decay()
    assert o.lr
    params = dict(decoder.named_parameters())
    groups = [
        {"params": [p for n, p in params.items() if n not in plain], "weight_decay": o.weight_decay},
        {"params": [p for n, p in params.items() if n in plain], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=o.lr, betas=(o.adam_beta1, o.adam_beta2), eps=o.adam_eps)
    initial, losses, norms = _arrays(params), [], []
    for step in range(steps):
        adamw.zero_grad()
        losses.append(_backward(decoder, config, step))
        norms.append(float(torch.nn.utils.clip_grad_norm_(decoder.parameters(), o.clip_grad)))
        adamw.step()
    return Reference(losses, norms, initial)


def gradients_at(model: Model, weights: Tensors, step: int) -> Tensors:
    """One rank's gradient of a step at these weights: divided, not clipped."""
    decoder = _whole_decoder(model)
    with torch.no_grad():
        for name, p in decoder.named_parameters():
            p.copy_(torch.from_numpy(weights[name]))
    _backward(decoder, model.config(), step)
    return _arrays({n: p.grad for n, p in decoder.named_parameters() if p.grad is not None})


# -- many ranks --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What one rank says of a case. slices: by event; losses: own sums; prints: hash of each gathered parameter.

    place: as of the assembler's pieces. last: the rank has the last pipeline stage, and losses. graphs: how many
    torch.compile has made, after each step.
    """

    tp_rank: int
    place: int
    last: bool
    losses: list[float]
    norms: list[float]
    slices: dict[str, Slices]
    prints: dict[str, str]
    graphs: list[int]


def run_cases(cases: Sequence[Case], steps: Mapping[int, int]) -> list[list[Outcome]]:
    """Run cases for ``steps`` of their number of ranks: for each, what every rank says.

    One call of the pool for each mesh: torch cannot make a group again that was destroyed in the same world
    (2.13: the name is the same, and the store still holds the old addresses).
    """
    groups: dict[tuple, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.mesh, []).append(case)
    done: dict[Case, list[Outcome]] = {}
    for group in groups.values():
        world = group[0].world
        ranks = run_ranks(world, _on_rank, group, steps[world], timeout=120 + 30 * len(group))
        done.update(zip(group, map(list, zip(*ranks, strict=True)), strict=True))
    return [done[case] for case in cases]


def _on_rank(cases: Sequence[Case], steps: int) -> list[Outcome]:
    mesh = make_mesh(cases[0].config(), World(cases[0].world, cases[0].per_node), torch.device("cpu"))
    out = []
    for case in cases:
        try:
            out.append(_run(case, case.config(), mesh, steps))
        except Exception as error:
            raise RuntimeError(f"case {case.id}: {error}") from error
        mesh.release()
    return out


def _run(case: Case, config: RunConfig, mesh: Mesh, steps: int) -> Outcome:
    torch._dynamo.reset()
    counters.clear()
    decoder = build_decoder(config, mesh)
    # small blocks, so that slices cut parameters
    engine = shard_decoder(decoder, config, mesh, policy=replace(make_policy(config, mesh), block=8))
    pipeline = build_pipeline(decoder, engine, config, mesh)
    store: dict[str, Any] = {}
    capture_gradients(engine, store)
    slices = {"initial": _masters(engine)}
    losses, norms, graphs = [], [], []
    for step in range(steps):
        if step == steps - 1:
            slices["before last"] = _masters(engine)
        batch = samples(config, step)
        divisor = batch[2].sum().item()
        engine.begin_step(case.micro_batches, divisor, pipeline.program(case.micro_batches))
        step_batches = [
            _own_part(config, batch, r, mesh, decoder) for r in _own_rows(case, config, mesh.batch_rank)
        ]
        losses.append(pipeline.step(step_batches).item())
        info = engine.step()
        norms.append(info.grad_norm)
        graphs.append(counters["stats"]["unique_graphs"])
        if step in (0, steps - 1):
            slices["last" if step else "first"] = _export(store["slices"])
    slices["final"] = _masters(engine)
    with engine.gathered():
        prints = {n: _print(p) for n, p in decoder.named_parameters()}
    place, last = mesh.rank % max(mesh.tp.size, mesh.grid.ep), pipeline.loss_rank == pipeline.rank
    return Outcome(mesh.tp.index, place, last, losses, norms, slices, prints, graphs)


def _print(p: torch.Tensor) -> str:
    values = (
        p.detach().clone()
    )  # a storage that numpy has seen cannot be resized again: the engine's must not
    return hashlib.sha1(values.numpy().tobytes()).hexdigest()


def _own_rows(case: Case, config: RunConfig, batch_rank: int) -> Iterator[slice]:
    """Samples of each micro-batch of a data-parallel rank, as the sampler deals them."""
    size = config.batch.micro_batch_size
    for micro in range(case.micro_batches):
        start = (micro * case.dp // case.cp + batch_rank) * size
        yield slice(start, start + size)


def _own_part(
    config: RunConfig, batch: Sequence[torch.Tensor], rows: slice, mesh: Mesh, decoder: Decoder
) -> MicroBatch:
    tokens, labels, mask = (part[rows] for part in batch)
    fields = {"tokens": tokens, "labels": labels, "loss_mask": mask.to(DTYPES[config.precision.params_dtype])}
    own = own_tokens({**fields, **documents_of(config, tokens)}, mesh, config.model.mtp_num_layers)
    return MicroBatch(**own, decisions=forced(decoder, own["tokens"]))


def _masters(engine: Any) -> Slices:
    return _export(local_slices(engine, lambda unit, a, b: unit.master.value[a:b]))


def _export(slices: Sequence[tuple[str, int, torch.Tensor]]) -> Slices:
    return [(name, low, values.numpy()) for name, low, values in slices]


# -- putting together and comparing ------------------------------------------------------------------


class Mismatch(AssertionError):
    """Replicas that differ, elements nobody sent, padding that is not zero."""


@cache
def _assembler(model: Model, tp: int, ep: int) -> Assembler:
    config = model.config()
    parallel = replace(config.parallel, tensor_model_parallel_size=tp, expert_model_parallel_size=ep)
    return Assembler(replace(config, parallel=parallel))


def assemble(case: Case, outcomes: Sequence[Outcome], event: str) -> Tensors:
    """Whole parameters from all ranks' slices. Raises Mismatch."""
    pieces = ((o.place, *piece) for o in outcomes for piece in o.slices[event])
    found = _assembler(case.model, case.tp, case.ep).assemble(pieces)
    wrong = [f"{name}: replicas differ over {over}" for name, over in found.differing.items()] + found.faults
    if wrong:
        raise Mismatch(f"{event} {'; '.join(wrong[:3])}")
    return found.whole


def gradient_errors(model: Model, got: Tensors, want: Tensors) -> dict[str, float]:
    """||difference|| / max(||g||, floor x global norm), by parameter."""
    total = np.sqrt(sum(np.sum(g**2) for g in want.values()))
    noise = "k_proj.bias" if model.dtype == "fp32" and model.family == "gpt" else "none"
    floors = {name: FLOOR_OF_FP32_NOISE if name.endswith(noise) else FLOOR for name in want}
    return {
        name: float(np.linalg.norm(got[name] - g) / max(np.linalg.norm(g), floors[name] * total))
        for name, g in want.items()
    }


def nearest_errors(model: Model, got: Tensors, weights: Tensors, step: int) -> dict[str, float]:
    """Of the gradients of a step at these weights, from one rank's in the model's dtype or in fp64.

    An fp32 rank is itself 4e-7 to 7e-7 from one in fp64 with 2 to 5 layers, whatever the weights' size, so that two
    of them are up to 1.06e-6 apart; what is wrong is far from both.
    """
    found = [
        gradient_errors(model, got, gradients_at(each, weights, step))
        for each in {model, replace(model, dtype="fp64")}
    ]
    return {name: min(errors[name] for errors in found) for name in got}


def faults(case: Case, outcomes: Sequence[Outcome]) -> list[str]:
    """Everything in which the ranks' runs differ from one rank's beyond the tolerances."""
    try:
        return list(_faults(case, outcomes))
    except Mismatch as error:
        return [str(error)]


def _faults(case: Case, outcomes: Sequence[Outcome]) -> Iterator[str]:
    want = reference(case.model, len(outcomes[0].norms))
    whole = {event: assemble(case, outcomes, event) for event in outcomes[0].slices}
    yield from (f"initial {n} differs" for n, w in want.initial.items() if (whole["initial"][n] != w).any())
    for event, weights, step in (
        ("first", "initial", 0),
        ("last", "before last", len(outcomes[0].norms) - 1),
    ):
        for name, error in nearest_errors(case.model, whole[event], whole[weights], step).items():
            if not error <= GRADIENT[case.dtype]:
                yield f"{event} gradient of {name}: {error:.3g}"
    yield from _curve_faults(case, outcomes, want)
    yield from _replica_faults(case, outcomes)


def _curve_faults(case: Case, outcomes: Sequence[Outcome], want: Reference) -> Iterator[str]:
    """Losses of all steps. Norms: in fp64 of all; in fp32 of the first, since Adam makes updates of full size
    from rounding noise in gradients that are near zero (the loss hardly sees them, the norm does: 4e-5)."""
    counts = [samples(case.model.config(), step)[2].sum().item() for step in range(len(outcomes[0].norms))]
    own = [o.losses for o in outcomes if o.tp_rank == 0 and o.last]
    losses = [sum(column) / count for column, count in zip(zip(*own, strict=True), counts, strict=True)]
    norms = outcomes[0].norms[: None if case.dtype == "fp64" else 1]
    for what, got, expected in (("loss", losses, want.losses), ("norm", norms, want.norms)):
        errors = [abs(a - b) / abs(b) for a, b in zip(got, expected[: len(got)], strict=True)]
        if not max(errors) <= LOSS[case.dtype]:
            yield f"{what} at step {int(np.argmax(errors)) + 1}: {max(errors):.3g}"


def _replica_faults(case: Case, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Gathered parameters are the same bits on all data-parallel replicas, replicated ones on all ranks."""
    assembler = _assembler(case.model, case.tp, case.ep)
    whole = assembler.replicated
    replicas: dict[tuple[str, int], set[str]] = {}
    for o in outcomes:
        for held, fingerprint in o.prints.items():
            name = assembler.name(held)
            part = 0 if name in whole else assembler.part(name, o.place)
            replicas.setdefault((name, part), set()).add(fingerprint)
    for (name, _), prints in replicas.items():
        if len(prints) > 1:
            yield f"gathered {name} is not the same bits on all its replicas"
    for rank, outcome in enumerate(outcomes):
        if outcome.norms != outcomes[0].norms:
            yield f"rank {rank} has other gradient norms than rank 0"
        if outcome.losses != outcomes[rank - outcome.tp_rank].losses:
            yield f"rank {rank} has other losses than the first of its tensor-parallel ranks"
