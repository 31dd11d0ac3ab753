"""One training run of loss.py, on every rank of a process group: the trainer's pieces in a loop of its own."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from benchmarks.contestants import llama
from benchmarks.loss_data import evaluation_samples, train_samples
from benchmarks.loss_variants import VARIANTS, Variant
from megazero import zero
from megazero.comm.codec import Blockwise
from megazero.config.options.sections import PrecisionConfig
from megazero.data.sampler import Batches
from megazero.mesh.grid import INTER
from megazero.mesh.mesh import create_mesh
from megazero.models import Decoder, initializer
from megazero.train.parallelize import DTYPES
from megazero.train.schedule.learning_rate import LearningRate
from megazero.train.schedule.loss_scaling import LossScaling
from megazero.zero.build import Init

RANKS, NODE = 4, 2  # two nodes of two
NUDGE = 0.001
EXACT = 16384  # the flags' default of parameters that are never quantised: here the norms
CHUNK = 32  # samples of one forward of an evaluation
TRACE = 8  # steps before a traced one whose master weights are kept, too


@dataclass(frozen=True)
class Settings:
    """What all compared runs share; runs of other settings are not mixed with them.

    micro_batch: samples of a rank. peak: of the learning rate, after a linear warm-up, then linearly to 0.
    evaluation: samples after the last step; curve: the first so many of them every ``interval`` steps.

    The sizes: a step costs 4 x 45 ms of CPU time, half of it the ranks' own (measured; 2 layers of 256: 4 x 58 ms),
    so that 40 runs take half an hour on two cores. Wide and shallow learns more per second than narrow and deep.
    """

    layers: int = 2
    hidden: int = 192
    ffn: int = 512
    heads: int = 3
    vocabulary: int = 1024
    sequence: int = 128
    micro_batch: int = 2
    steps: int = 400
    warmup: int = 40
    peak: float = 2e-3
    interval: int = 50
    curve: int = 256
    evaluation: int = 1536
    dtype: str = "bf16"  # of parameters; losses in fp16 are scaled as the trainer's are

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype = {self.dtype} is none of {', '.join(DTYPES)}")
        whole = RANKS * CHUNK
        for name in ("curve", "evaluation"):
            value = getattr(self, name)
            if value % whole or value < whole:
                nearest = max(whole, round(value / whole) * whole)
                raise ValueError(f"{name} = {value} samples: a multiple of {whole}; nearest: {nearest}")
        if not 0 < self.warmup < self.steps:
            raise ValueError(
                f"warmup = {self.warmup} must be shorter than steps = {self.steps}, and at least 1"
            )

    @property
    def tokens(self) -> int:
        """Of a step, over all ranks."""
        return RANKS * self.micro_batch * self.sequence

    def decoder(self) -> Decoder:
        config = llama(self)
        return Decoder(config, device="meta", dtype=DTYPES[self.dtype])


@dataclass(frozen=True)
class Run:
    """seed: of the order of the data and of the initial weights. nudge: 0, or which one weight starts 0.001 higher;
    runs that differ in it alone are what training makes of rounding errors."""

    variant: str
    seed: int
    nudge: int = 0

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}, nudge {self.nudge}"


def shard(
    settings: Settings, variant: Variant, init: Init | None = None, seed: int = 0
) -> tuple[Decoder, zero.Engine]:
    """The decoder under an engine of its own mesh. init: by default that of ``seed``."""
    mesh = create_mesh(shards=variant.factors(RANKS, NODE), ranks_per_node=NODE)
    model = settings.decoder()
    codecs = variant.codecs
    coded = [
        c
        for c in (codecs.weights, codecs.gradients_intra, codecs.gradients_inter)
        if isinstance(c, Blockwise)
    ]
    policy = zero.Policy(
        block=max([zero.Policy.block, *(codec.form.block for codec in coded)]),
        codecs=codecs,
        exact_numel=EXACT if variant.quantised else 0,
        seed=seed,
        loss_scaled=settings.dtype == "fp16",
    )
    engine = zero.shard(
        model,
        mesh=mesh,
        policy=policy,
        units=model.units(),
        optimizer=zero.default_adamw(lr=settings.peak, betas=(0.9, 0.95), weight_decay=0.1),
        clip_norm=1.0,
        init=init or initializer(model, seed),
    )
    return model, engine


def nudged(init: Init, model: Decoder, nudge: int) -> Init:
    """``init`` with one weight of one matrix 0.001 higher, which one being drawn by ``nudge``; 0: as it is."""
    if not nudge:
        return init
    matrices = [(name, p.numel()) for name, p in model.named_parameters() if p.ndim == 2]
    generator = torch.Generator().manual_seed(nudge)
    which, numel = matrices[int(torch.randint(len(matrices), (), generator=generator))]
    element = int(torch.randint(numel, (), generator=generator))

    def value(name: str) -> torch.Tensor:
        tensor = init(name)
        if name == which:
            tensor.view(-1)[element] += NUDGE
        return tensor

    return value


class Evaluation:
    """The fixed evaluation set, this rank's share of it in memory."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        rank = dist.get_rank()
        self.parts = {}
        for count in (settings.curve, settings.evaluation):
            share = count // RANKS
            numbers = range(rank * share, (rank + 1) * share)
            self.parts[count] = evaluation_samples(folder, settings.sequence, numbers)

    def __call__(self, model: Decoder, engine: zero.Engine, count: int) -> float:
        """Mean loss in nats per token over the first ``count`` samples, equal on all ranks."""
        total, (tokens, labels) = torch.zeros((), dtype=torch.float64), self.parts[count]
        with engine.evaluation():
            for x, y in zip(tokens.split(CHUNK), labels.split(CHUNK), strict=True):
                total += model(x, y).double().sum()
        dist.all_reduce(total)
        return total.item() / (count * tokens.shape[1])


def train(folder: Path, settings: Settings, run: Run, trace: Path | None = None) -> dict[str, Any]:
    """Train and evaluate; collective. Returns what is kept of a run: ``loss`` over the whole evaluation set, the
    ``curve`` [step, loss] over its first part, ``sent`` bytes per step from one node, mean relative rounding
    ``errors``, the final master's ``digest``.

    trace: folder for the master weights of TRACE + 1 consecutive steps at half way and at the end.
    """
    began, cpu = time.perf_counter(), time.process_time()
    variant = VARIANTS[run.variant]
    meta = settings.decoder()
    init = nudged(initializer(meta, run.seed), meta, run.nudge)
    model, engine = shard(settings, variant, init, run.seed)
    evaluate = Evaluation(folder, settings)
    curve = [(0, evaluate(model, engine, settings.curve))]
    keep = _Trace(trace, settings.steps) if trace else None
    scaling = LossScaling.of(PrecisionConfig(params_dtype=settings.dtype))
    sent = skipped = 0
    errors: dict[str, list[float]] = {}
    data = train_samples(folder, settings.sequence, run.seed, settings.steps * RANKS * settings.micro_batch)
    with Batches(
        data, micro_batch_size=settings.micro_batch, rank=engine.mesh.dp_rank, size=RANKS
    ) as batches:
        for step in range(1, settings.steps + 1):
            engine.traffic.take()
            info = one_step(settings, model, engine, batches, step, scaling)
            skipped += info.skipped
            for kind, error in info.errors.items():
                errors.setdefault(kind, []).append(error)
            sent += engine.traffic.total(INTER)
            if keep:
                keep(step, engine)
            if step % settings.interval == 0 or step == settings.steps:
                curve.append((step, evaluate(model, engine, settings.curve)))
    loss = evaluate(model, engine, settings.evaluation)
    all_sent, all_cpu = _sum_over_ranks([sent, time.process_time() - cpu])
    return {
        **asdict(run),
        "loss": loss,
        "curve": curve,
        "skipped": skipped,
        "sent": all_sent / (RANKS // NODE) / settings.steps,
        "errors": {kind: fmean(values) for kind, values in errors.items()},
        "digest": digest(whole_master(engine)),
        "seconds": time.perf_counter() - began,
        "cpu_seconds": all_cpu,
    }


def one_step(
    settings: Settings,
    model: Decoder,
    engine: zero.Engine,
    batches: Batches,
    step: int,
    scaling: LossScaling | None = None,
) -> zero.StepInfo:
    """Step number ``step``, from 1. scaling: that of the run; by default losses are not scaled."""
    scaling = scaling or LossScaling()
    rate = learning_rate(settings)
    for group in engine.optimizer.torch.param_groups:
        group["lr"] = rate(step - 1 - scaling.skipped(by_samples=False))
    (batch,) = batches.next_step(1)
    factor, divisor = scaling.factors(settings.tokens, RANKS)
    engine.begin_step(1, divisor=divisor)
    (model(batch["tokens"], batch["labels"]).sum() * factor).backward()
    info = engine.step()
    scaling.update(info.skipped, RANKS * settings.micro_batch)
    return info


def learning_rate(settings: Settings) -> LearningRate:
    return LearningRate(
        peak=settings.peak,
        decay=settings.steps,
        warmup=settings.warmup,
        warmup_init=settings.peak / settings.warmup,
        style="linear",
    )


class _Trace:
    """Writes the whole master after traced steps, on rank 0."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder = folder
        self.wanted = {step for last in traced(steps) for step in range(max(1, last - TRACE), last + 1)}

    def __call__(self, step: int, engine: zero.Engine) -> None:
        if step not in self.wanted:
            return
        master = whole_master(engine)
        if dist.get_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(master, trace_file(self.folder, step))


def traced(steps: int) -> tuple[int, int]:
    """The steps whose masters the codecs are compared on: half way (weights still move) and the last."""
    return steps // 2, steps


def trace_file(folder: Path, step: int) -> Path:
    return folder / f"master-{step:06}.safetensors"


def whole_master(engine: zero.Engine) -> dict[str, torch.Tensor]:
    """The master weights by parameter, fp32, on every rank. Slices do not overlap, so adding zeros is exact."""
    assert all(unit.levels.os == unit.levels.all for unit in engine.units), "replicas would be added up"
    whole = {slot.name: torch.zeros(slot.shape) for unit in engine.units for slot in unit.layout.slots}
    for name, low, high, values in own_slices(engine):
        whole[name].view(-1)[low:high] = values
    for tensor in whole.values():
        dist.all_reduce(tensor)
    return whole


def own_slices(engine: zero.Engine) -> list[tuple[str, int, int, torch.Tensor]]:
    """(parameter, first and last + 1 of its flat elements, view of this rank's master) of the OS slices."""
    return [
        (slot.name, low, high, unit.master[at : at + high - low])
        for unit in engine.units
        for slot, low, high, at in unit.layout.ranges(unit.levels.os)
    ]


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Of names and bits."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode())
        total.update(tensors[name].contiguous().numpy().tobytes())
    return total.hexdigest()


def _sum_over_ranks(values: list[float]) -> list[float]:
    row = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(row)
    return row.tolist()
