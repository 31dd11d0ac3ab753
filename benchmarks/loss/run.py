"""One training run of a study, on every rank: the trainer's pieces in a loop of its own."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.loss.data import corpus, evaluation_samples, train_samples
from benchmarks.loss.variants import VARIANTS
from benchmarks.rank_threads import MeshOf
from benchmarks.steps import llama
from megazero import zero
from megazero.comm.codec import Blockwise
from megazero.comm.hops import Traffic
from megazero.data.sampler import Batches
from megazero.data.source import DatasetSource
from megazero.mesh.levels import INTER
from megazero.mesh.mesh import Mesh
from megazero.models import Decoder, initializer
from megazero.moe import BalanceLosses, ExpertParallel
from megazero.products import make_product
from megazero.products.product import PLAIN, Product
from megazero.tp import TensorParallel
from megazero.train.parallelize import DTYPES, units_of
from megazero.train.schedule.learning_rate import LearningRate
from megazero.zero.build import Init

RANKS = 4
NUDGE = 0.001
CHUNK = 32  # samples of one forward of an evaluation
BALANCE = 0.01  # the weight of the loss that balances experts
# Nesterov's momentum, and updates of AdamW's size, so that its rates are near AdamW's.
MUON_OPTIONS: Mapping[str, Any] = {"momentum": 0.95, "nesterov": True, "extra_scale": 0.2}


@dataclass(frozen=True)
class Settings:
    """What compared runs share; runs of other settings are not mixed with them.

    text: of data.py. node: ranks of a node. exact: parameters with at most so many elements are never quantised.
    micro_batch: samples of a rank. peak: of the learning rate, after a linear warm-up, then linearly to 0.
    experts: of each layer, each as wide as ffn, of which a token goes to two; 0: none.
    evaluation: samples after the last step.

    The sizes: a step costs 4 x 45 ms of CPU time, half of it the ranks' own (measured). Wide and shallow learns more
    per second than narrow and deep.
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
    evaluation: int = 1536
    dtype: str = "bf16"  # of parameters: bf16 or fp32
    text: str = "stdlib"
    node: int = 2
    exact: int = 16384  # the flags' default: here the norms
    device: str = "cpu"
    experts: int = 0

    def __post_init__(self) -> None:
        if self.evaluation % (RANKS * CHUNK):
            raise ValueError(f"evaluation = {self.evaluation} samples: a multiple of {RANKS * CHUNK}")
        if self.node < 1 or RANKS % self.node:
            raise ValueError(f"node = {self.node} ranks: it must divide {RANKS}; nearest: 1, 2 or {RANKS}")
        if not 0 < self.warmup < self.steps:
            raise ValueError(
                f"warmup = {self.warmup} must be at least 1, and shorter than steps = {self.steps}"
            )

    @property
    def tokens(self) -> int:
        """The tokens of a step, over all ranks."""
        return RANKS * self.micro_batch * self.sequence

    def decoder(self, ep: ExpertParallel | None = None, product: Product = PLAIN) -> Decoder:
        # Losses are sums, and the divisor of a step is its tokens: a rank's mean has its share of them.
        balance = BalanceLosses(over_samples=BALANCE, scale=lambda: self.tokens / RANKS)
        tp = TensorParallel(product=product)
        return Decoder(llama(self), tp, ep=ep, balance=balance, device="meta", dtype=DTYPES[self.dtype])


@dataclass(frozen=True)
class Run:
    """seed: of the order of the data and of the initial weights. nudge: 0, or which one weight starts 0.001 higher.
    Runs that differ in it alone show what training makes of rounding errors."""

    variant: str
    seed: int
    nudge: int = 0

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}, nudge {self.nudge}"


def ranks_of(settings: Settings, run: Run) -> int:
    """Return the ranks of a run: of a replica if it has some, which lie side by side in each process."""
    return settings.node if VARIANTS[run.variant].outer else RANKS


def shard(mesh_of: MeshOf, settings: Settings, run: Run) -> tuple[Decoder, zero.Engine]:
    """Return the decoder, and its engine on a mesh of its own."""
    node, variant = settings.node, VARIANTS[run.variant]
    shards = variant.factors(ranks_of(settings, run), node)
    together = RANKS if variant.dispatch else 1  # ranks that share the experts
    mesh = mesh_of(shards=shards, ranks_per_node=node, device=settings.device, ep=together)
    traffic = Traffic()
    name, options = variant.product
    experts = ExpertParallel.of(mesh, traffic, codec=variant.dispatch)
    model = settings.decoder(experts, make_product(name, **options))
    codecs = variant.codecs
    every = codecs.codings
    policy = zero.Policy(
        block=max([zero.Policy.block, *(c.form.block for c in every if isinstance(c, Blockwise))]),
        codecs=codecs,
        exact_numel=settings.exact if variant.quantised else 0,
        seed=run.seed,
        outer=variant.outer and variant.outer.steps,
    )
    adamw = {"lr": settings.peak, "betas": (0.9, 0.95), "weight_decay": 0.1, **variant.adamw}
    own: dict[str, Any] = {"optimizer": zero.default_adamw(**adamw)}
    if variant.muon:
        own["optimizer"] = partial(zero.Muon, **adamw, **MUON_OPTIONS)
        matrices = {n: p.cut for n, p in model.specs.items() if p.multiplies and not p.vocabulary}
        own["traits"] = partial(traits, matrices)
    engine = zero.shard(
        model,
        mesh=mesh,
        policy=policy,
        units=units_of(model, 1, mesh),
        traffic=traffic,
        clip_norm=1.0,
        init=nudged(initializer(model, run.seed), model, run.nudge),
        **own,
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


def evaluated(
    folder: Path, settings: Settings, model: Decoder, engine: zero.Engine, anchor: bool = True
) -> float:
    """Return the mean loss in nats per token over the fixed evaluation set, equal on all ranks. anchor: of what
    replicas share, else of this one's own weights."""
    mesh = engine.mesh
    share = settings.evaluation // mesh.world_size
    numbers = range(mesh.rank * share, (mesh.rank + 1) * share)
    tokens, labels = (x.to(mesh.device) for x in evaluation_samples(folder, settings.sequence, numbers))
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    with engine.evaluation(anchor):
        for x, y in zip(tokens.split(CHUNK), labels.split(CHUNK), strict=True):
            total += model(x, y).double().sum()
    return sum_over_ranks(mesh, total.item()) / (settings.evaluation * settings.sequence)


def train(mesh_of: MeshOf, folder: Path, settings: Settings, run: Run) -> dict[str, Any]:
    """Train and evaluate; collective. Return what is kept of a run: ``loss`` over the evaluation set, with outer
    replicas that of the anchor beside ``replicas``, the mean of their own; ``sent`` bytes per step from one node,
    mean relative rounding ``errors``, the ``skipped`` steps, digests of the final masters and of the text, and
    seconds, of the CPU time those of this process."""
    began, cpu = time.perf_counter(), time.process_time()
    meets, ranks = VARIANTS[run.variant].outer, ranks_of(settings, run)
    replicas = [shard(mesh_of, settings, run) for _ in range(RANKS // ranks)]
    model, engine = replicas[0]
    mesh, stride = engine.mesh, RANKS * settings.micro_batch
    sent, skipped, errors = 0, 0, dict[str, list[float]]()
    data = train_samples(folder, settings.sequence, run.seed, settings.steps * stride)
    with ExitStack() as stack:
        places = (ranks * number + mesh.batch_rank for number in range(len(replicas)))
        dealt = [
            stack.enter_context(
                Batches(DatasetSource(data), micro_batch_size=settings.micro_batch, rank=place, size=RANKS)
            )
            for place in places
        ]
        for step in range(1, settings.steps + 1):
            for (own, each), batches in zip(replicas, dealt, strict=True):
                each.traffic.take()
                info = one_step(settings, own, each, batches, step)
                sent += each.traffic.total(INTER)
                skipped += info.skipped
                for kind, error in info.errors.items():
                    errors.setdefault(kind, []).append(error)
            if meets and step % meets.interval == 0:
                sent += meet([each for _, each in replicas], meets.lr)
    found = {"loss": evaluated(folder, settings, model, engine)}
    if meets:
        found["replicas"] = fmean(evaluated(folder, settings, *each, anchor=False) for each in replicas)
    return {
        **asdict(run),
        **found,
        "skipped": skipped,
        "sent": sum_over_ranks(mesh, sent) / (RANKS // settings.node) / settings.steps,
        "errors": {kind: fmean(values) for kind, values in errors.items()},
        "digest": ".".join(digest(each) for _, each in replicas),
        "corpus": corpus(folder),
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
    }


def meet(engines: Sequence[zero.Engine], lr: float) -> int:
    """Let replicas of one process meet. Returns the bytes that this rank of all of them sends."""
    outer = [engine.outer for engine in engines if engine.outer is not None]
    packed = [each.pack() for each in outer]
    for each, own in zip(outer, packed, strict=True):
        each.take_up([[*sent.messages] for sent in packed], [1] * len(packed), lr, own)
    return len(packed) * (len(packed) - 1) * packed[0].messages.numel()


def one_step(
    settings: Settings, model: Decoder, engine: zero.Engine, batches: Batches, step: int
) -> zero.StepInfo:
    """Train step number ``step``, from 1."""
    rate = learning_rate(settings)
    for group in engine.param_groups:
        group["lr"] = rate(step - 1)
    (batch,) = batches.next_step(1)
    mesh = engine.mesh
    tokens, labels = (batch[key].to(mesh.device) for key in ("tokens", "labels"))
    engine.begin_step(1, divisor=settings.tokens * mesh.world_size / RANKS)
    model(tokens, labels).sum().backward()
    return engine.step()


def learning_rate(settings: Settings) -> LearningRate:
    return LearningRate(
        peak=settings.peak,
        decay=settings.steps,
        warmup=settings.warmup,
        warmup_init=settings.peak / settings.warmup,
        style="linear",
    )


def digest(engine: zero.Engine) -> str:
    """Return a digest of the bits of all ranks' slices of the master weights. Collective."""
    own = hashlib.sha256()
    for unit in engine.units:
        own.update(unit.master.value.cpu().numpy().tobytes())
    number = torch.tensor([int.from_bytes(own.digest()[:7], "big")], device=engine.mesh.device)
    return hashlib.sha256(engine.mesh.gather_rows(number).cpu().numpy().tobytes()).hexdigest()


def sum_over_ranks(mesh: Mesh, value: float) -> float:
    row = torch.tensor([value], dtype=torch.float64, device=mesh.device)
    return mesh.gather_rows(row).sum().item()
