"""One training run of a study, on every rank: the trainer's pieces in a loop of its own."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.loss.data import TEXTS, corpus, evaluation_samples, train_samples
from benchmarks.loss.snapshot import Snapshot, held, restore
from benchmarks.loss.variants import EVERY, Variant
from benchmarks.rank_threads import MeshOf
from benchmarks.steps import llama
from megazero import zero
from megazero.comm.codec import Blockwise
from megazero.comm.hops import Traffic
from megazero.config.options.sections import PrecisionConfig
from megazero.data.sampler import Batches
from megazero.mesh.grid import INTER
from megazero.mesh.mesh import Mesh
from megazero.models import Decoder, initializer
from megazero.moe import BalanceLosses, ExpertParallel
from megazero.moe.balance import SEQUENCE_AUX
from megazero.train.parallelize import DTYPES, make_outer, units_of
from megazero.train.schedule.learning_rate import LearningRate
from megazero.train.schedule.loss_scaling import LossScaling
from megazero.zero.build import Init

RANKS = 4
NUDGE = 0.001
CHUNK = 32  # samples of one forward of an evaluation
BALANCE = 0.01  # the weight of the loss that balances experts
LOOP = (
    "step",
    "sent",
    "skipped",
    "seconds",
    "cpu_seconds",
    "curve",
    "loads",
    "errors",
)  # of Training, kept by a snapshot
TRACE = 8  # steps before a traced one whose master weights are kept, too
# Nesterov's momentum, and updates of AdamW's size, so that its rates are near AdamW's.
MUON_OPTIONS: Mapping[str, Any] = {"momentum": 0.95, "nesterov": True, "extra_scale": 0.2}


@dataclass(frozen=True)
class Settings:
    """Shared by all compared runs; runs of other settings are not mixed with them.

    text: of data.py. node: ranks of a node. exact: parameters with at most so many elements are never quantised.
    micro_batch: samples of a rank. peak: of the learning rate, after a linear warm-up, then linearly to 0.
    experts: of each layer, each as wide as ffn, of which a token goes to two; 0: none.
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
    text: str = "stdlib"
    node: int = 2
    exact: int = 16384  # the flags' default: here the norms
    device: str = "cpu"
    experts: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype = {self.dtype} is none of {', '.join(DTYPES)}")
        whole = RANKS * CHUNK
        for name in ("curve", "evaluation"):
            value = getattr(self, name)
            if value % whole or value < whole:
                nearest = max(whole, round(value / whole) * whole)
                raise ValueError(f"{name} = {value} samples: a multiple of {whole}; nearest: {nearest}")
        if self.text not in TEXTS:
            raise ValueError(f"text = {self.text} is none of {', '.join(TEXTS)}")
        if self.node < 1 or RANKS % self.node:
            raise ValueError(f"node = {self.node} ranks: it must divide {RANKS}; nearest: 1, 2 or {RANKS}")
        if not 0 < self.warmup < self.steps:
            raise ValueError(
                f"warmup = {self.warmup} must be shorter than steps = {self.steps}, and at least 1"
            )

    @property
    def tokens(self) -> int:
        """The tokens of a step, over all ranks."""
        return RANKS * self.micro_batch * self.sequence

    def decoder(self, ep: ExpertParallel | None = None) -> Decoder:
        # Losses are sums, and the divisor of a step is its tokens: a rank's mean has its share of them.
        balance = BalanceLosses(SEQUENCE_AUX, BALANCE, scale=lambda: self.tokens / RANKS)
        return Decoder(llama(self), ep=ep, balance=balance, device="meta", dtype=DTYPES[self.dtype])


@dataclass(frozen=True)
class Run:
    """seed: of the order of the data and of the initial weights. nudge: 0, or which one weight starts 0.001 higher.
    Runs that differ in it alone show what training makes of rounding errors."""

    variant: str
    seed: int
    nudge: int = 0

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}, nudge {self.nudge}"


def shard(
    mesh_of: MeshOf,
    settings: Settings,
    variant: Variant,
    init: Init | None = None,
    seed: int = 0,
    nudge: int = 0,
    **options: Any,
) -> tuple[Decoder, zero.Engine]:
    """Return the decoder, and its engine on a mesh of its own. init: by default ``seed``'s with this ``nudge``.
    options: of ``zero.shard``."""
    node = settings.node
    replicas = RANKS // node if variant.outer else 1
    shards = variant.factors(RANKS // replicas, node)
    together = RANKS if variant.dispatch else 1  # ranks that share the experts
    mesh = mesh_of(shards=shards, ranks_per_node=node, device=settings.device, outer=replicas, ep=together)
    traffic = Traffic()
    model = settings.decoder(ExpertParallel.of(mesh, traffic, codec=variant.dispatch))
    codecs = variant.codecs
    coded = [
        c
        for c in (codecs.weights, codecs.gradients_intra, codecs.gradients_inter)
        if isinstance(c, Blockwise)
    ]
    policy = zero.Policy(
        block=max([zero.Policy.block, *(codec.form.block for codec in coded)]),
        codecs=codecs,
        exact_numel=settings.exact if variant.quantised else 0,
        seed=seed,
        loss_scaled=settings.dtype == "fp16",
        outer=make_outer(variant.outer) if variant.outer and replicas > 1 else None,
    )
    adamw = {"lr": settings.peak, "betas": (0.9, 0.95), "weight_decay": 0.1, **variant.adamw}
    own: dict[str, Any] = {"optimizer": zero.default_adamw(**adamw)}
    if variant.muon:
        own["optimizer"] = partial(zero.Muon, **adamw, **MUON_OPTIONS)
        own["traits"] = partial(traits, model.matrices())
    engine = zero.shard(
        model,
        mesh=mesh,
        policy=policy,
        units=units_of(model, 1, mesh),
        traffic=traffic,
        clip_norm=1.0,
        init=init or nudged(initializer(model, seed), model, nudge),
        **{**own, **options},
    )
    return model, engine


def traits(matrices: Mapping[str, int | None], name: str, param: torch.nn.Parameter) -> zero.Traits:
    return zero.Traits((("weight_decay", 0.0),) if param.ndim < 2 else (), matrix=name in matrices)


def nudged(init: Init, model: Decoder, nudge: int) -> Init:
    """Return ``init`` with one weight of one matrix 0.001 higher; ``nudge`` draws which one, 0 none."""
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
    """This rank's share of the fixed evaluation set, in memory."""

    def __init__(self, folder: Path, settings: Settings, mesh: Mesh) -> None:
        self.mesh, self.parts = mesh, {}
        for count in (settings.curve, settings.evaluation):
            share = count // RANKS
            numbers = range(mesh.rank * share, (mesh.rank + 1) * share)
            tokens, labels = evaluation_samples(folder, settings.sequence, numbers)
            self.parts[count] = tokens.to(mesh.device), labels.to(mesh.device)

    def __call__(self, model: Decoder, engine: zero.Engine, count: int, anchor: bool = True) -> float:
        """Return the mean loss in nats per token over the first ``count`` samples, equal on all ranks. anchor: with
        outer replicas, the loss of what they share; else each evaluates its ranks' samples."""
        tokens, labels = self.parts[count]
        total = torch.zeros((), dtype=torch.float64, device=tokens.device)
        with engine.evaluation(anchor):
            for x, y in zip(tokens.split(CHUNK), labels.split(CHUNK), strict=True):
                total += model(x, y).double().sum()
        (whole,) = sum_over_ranks(self.mesh, [total.item()])
        return whole / (count * tokens.shape[1])


class Training:
    """One run on one rank: what is trained, and what is recorded."""

    def __init__(self, mesh_of: MeshOf, folder: Path, settings: Settings, run: Run) -> None:
        self.settings, self.run = settings, run
        variant = EVERY[run.variant]
        if variant.gone:
            raise ValueError(f"{run.variant}: no message has {variant.gone} any more; nearest: int4-hadamard")
        self.model, self.engine = shard(mesh_of, settings, variant, seed=run.seed, nudge=run.nudge)
        self.mesh = self.engine.mesh
        self.evaluate = Evaluation(folder, settings, self.mesh)
        self.scaling = LossScaling.of(PrecisionConfig(params_dtype=settings.dtype))
        self.step = self.sent = self.skipped = 0
        self.seconds = self.cpu_seconds = 0.0
        self.curve: list[tuple[int, float]] = []
        self.loads: list[tuple[int, float]] = []
        self.errors: dict[str, list[float]] = {}

    def advance(self, batches: Batches) -> None:
        self.step += 1
        self.engine.traffic.take()
        info = one_step(self.settings, self.model, self.engine, batches, self.step, self.scaling)
        if self.wants_point:
            self.engine.settle()  # what is on its way counts here, not in the evaluation
        self.skipped += info.skipped
        for kind, error in info.errors.items():
            self.errors.setdefault(kind, []).append(error)
        self.sent += self.engine.traffic.total(INTER)

    def measure(self) -> None:
        """Add a point to the curve. It refreshes the weights across nodes, which the next step then need not, so
        these bytes count; after the last step there is no next."""
        self.engine.traffic.take()
        self.curve.append((self.step, self.evaluate(self.model, self.engine, self.settings.curve)))
        if self.step < self.settings.steps:
            self.sent += self.engine.traffic.bytes["refresh", INTER]
        if self.settings.experts and self.step:
            self.loads.append((self.step, self._load()))

    def _load(self) -> float:
        """Return how many times the mean of tokens the fullest expert of any layer got since the last point."""
        balances = list(self.model.balances().values())
        own = [float(n) for balance in balances for n in balance.load.tolist()]
        loads = torch.tensor(sum_over_ranks(self.mesh, own)).view(len(balances), -1)
        for balance in balances:
            balance.clear()
        return float((loads.amax(1) / loads.mean(1)).max())

    @property
    def wants_point(self) -> bool:
        return self.step % self.settings.interval == 0 or self.step == self.settings.steps

    def state(self) -> dict[str, Any]:
        """Return what this rank continues from. Collective."""
        return {
            "loop": {name: getattr(self, name) for name in LOOP},
            "scaling": self.scaling.state(),
            "engine": held(self.engine),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        for name, value in state["loop"].items():
            setattr(self, name, value)
        self.scaling.load_state(state["scaling"])
        restore(self.engine, state["engine"])

    def record(self) -> dict[str, Any]:
        settings, outer = self.settings, self.engine.outer
        (sent,) = sum_over_ranks(self.mesh, [self.sent])
        evaluate = partial(self.evaluate, self.model, self.engine, settings.evaluation)
        return {
            **asdict(self.run),
            "loss": evaluate(),
            **({"replicas": evaluate(anchor=False)} if outer else {}),
            "curve": self.curve,
            **({"loads": self.loads} if settings.experts else {}),
            "skipped": self.skipped,
            "sent": sent / (RANKS // settings.node) / settings.steps,
            "errors": {kind: fmean(values) for kind, values in self.errors.items()},
            "digest": digest(whole_master(self.engine)),
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
        }


def train(
    mesh_of: MeshOf,
    folder: Path,
    settings: Settings,
    run: Run,
    trace: Path | None = None,
    snapshot: Snapshot | None = None,
) -> dict[str, Any] | None:
    """Train and evaluate; collective. Returns what is kept of a run: ``loss`` over the whole evaluation set, with
    outer replicas that of the anchor beside ``replicas``, the mean of theirs; the ``curve`` [step, loss] over its
    first part, of experts the ``loads`` [step, the fullest expert's tokens over the mean], ``sent`` bytes per step
    from one node, mean relative rounding ``errors``, the final master's ``digest``, the ``corpus`` of the text, and
    seconds, of the CPU time those of this process.

    trace: folder for the master weights of TRACE + 1 consecutive steps at half way and at the end. snapshot: the run
    goes on from it if it is there; when its time is over, the run is left there and None returned.
    """
    began, cpu = time.perf_counter(), time.process_time()
    training = Training(mesh_of, folder, settings, run)
    state = snapshot.load(training.mesh) if snapshot else None
    if state is None:
        training.measure()
    else:
        training.load_state(state)
    keep = _Trace(trace, settings.steps) if trace else None
    before = training.seconds, training.cpu_seconds
    stride = RANKS * settings.micro_batch
    data = train_samples(folder, settings.sequence, run.seed, settings.steps * stride)
    with Batches(
        data,
        micro_batch_size=settings.micro_batch,
        rank=training.mesh.batch_rank,
        size=RANKS,
        consumed=training.step * stride,
    ) as batches:
        while training.step < settings.steps:
            training.advance(batches)
            if keep:
                keep(training.step, training.engine)
            if training.wants_point:
                training.measure()
                training.seconds = before[0] + time.perf_counter() - began
                training.cpu_seconds = before[1] + time.process_time() - cpu
                if snapshot and training.step < settings.steps and snapshot.due(training.mesh):
                    snapshot.save(training.mesh, training.state())
                    return None
    record = training.record() | {"corpus": corpus(folder)}
    record |= {"seconds": before[0] + time.perf_counter() - began}
    return record | {"cpu_seconds": before[1] + time.process_time() - cpu}


def one_step(
    settings: Settings,
    model: Decoder,
    engine: zero.Engine,
    batches: Batches,
    step: int,
    scaling: LossScaling | None = None,
) -> zero.StepInfo:
    """Train step number ``step``, from 1. scaling: the run's; by default losses are not scaled."""
    scaling = scaling or LossScaling()
    rate = learning_rate(settings)
    for group in engine.param_groups:
        group["lr"] = rate(step - 1 - scaling.skipped(by_samples=False))
    (batch,) = batches.next_step(1)
    mesh = engine.mesh
    tokens, labels = (batch[key].to(mesh.device) for key in ("tokens", "labels"))
    factor, divisor = scaling.factors(settings.tokens / mesh.grid.outer, mesh.dp_size)
    engine.begin_step(1, divisor=divisor)
    (model(tokens, labels).sum() * factor).backward()
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
        if engine.mesh.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(master, trace_file(self.folder, step))


def traced(steps: int) -> tuple[int, int]:
    """Return the steps whose masters the codecs are compared on: half way (weights still move) and the last."""
    return steps // 2, steps


def trace_file(folder: Path, step: int) -> Path:
    return folder / f"master-{step:06}.safetensors"


def whole_master(engine: zero.Engine) -> dict[str, torch.Tensor]:
    """Return the first outer replica's master weights by parameter, in fp32 on every rank's CPU. Slices do not
    overlap, so adding zeros is exact. Of experts that ranks share it is the sum of what they hold."""
    assert all(unit.axes.os == unit.axes.all for unit in engine.units), "replicas would be added up"
    whole = {slot.name: torch.zeros(slot.shape) for unit in engine.units for slot in unit.layout.slots}
    for name, low, high, values in own_slices(engine):
        whole[name].view(-1)[low:high] = values
    for tensor in whole.values():
        rows = engine.mesh.gather_rows(tensor.view(-1).to(engine.mesh.device))
        tensor.view(-1).copy_(rows[: engine.mesh.grid.replica_size].sum(0))
    return whole


def own_slices(engine: zero.Engine) -> list[tuple[str, int, int, torch.Tensor]]:
    """Return (parameter, first and last + 1 of its flat elements, view of this rank's master) of each OS slice."""
    return [
        (slot.name, low, high, unit.master.value[at : at + high - low])
        for unit in engine.units
        for slot, low, high, at in unit.layout.ranges(unit.axes.os)
    ]


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a digest of names and bits."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode())
        total.update(tensors[name].contiguous().numpy().tobytes())
    return total.hexdigest()


def sum_over_ranks(mesh: Mesh, values: list[float]) -> list[float]:
    row = torch.tensor(values, dtype=torch.float64, device=mesh.device)
    return mesh.gather_rows(row).sum(0).tolist()
