"""Two pipeline stages under data parallelism of 2, against torch's pipelining with FSDP2, on links of a given rate.

    python -m benchmarks.pipeline.step_time [--rates none 1gbit 200mbit] [--rounds 7]

2 nodes of 2 ranks (tests/netlab). Everyone trains the same decoder, cut at the same layer, on the same micro-batches
with 1F1B, in fp32, with fused AdamW and clipping by the global norm. Contestants take turns; ratios are within a
round. Writes its section of docs/results/pipeline.md (--out: another folder).
"""

from __future__ import annotations

import math
import statistics
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks import harness
from benchmarks.pipeline.bytes import ZEROPP_AT_ONE
from benchmarks.results import PAGES
from benchmarks.steps import Shape, Step, options_of, pipelined
from megazero.config import RunConfig, World, make_config
from megazero.models import Decoder
from megazero.pp.partition import StageSpec
from megazero.tp import vocab_parallel_cross_entropy
from megazero.train.distributed import make_mesh

CPU, PP, LR = torch.device("cpu"), 2, 1e-4
ACROSS, INSIDE = "stages across nodes", "stages inside nodes"
QUANTISED = "zeropp's formats"
WHOLE = "zero3, whole gradients"
OURS = {name: {"zero_preset": name} for name in ("zero1", "zero2", "zero3")} | {QUANTISED: ZEROPP_AT_ONE}
OURS[WHOLE] = {"zero_preset": "zero3", "zero_gradients_lifetime": "step"}
KEPT = {"FSDP2 kept": True, "FSDP2": False}
NAMES = tuple(
    f"{who}, {order}"
    for order in (ACROSS, INSIDE)
    for who in (*OURS, *KEPT)
    if (who, order) != (QUANTISED, ACROSS)  # no state crosses nodes there
)
TITLE = "Step time against torch's pipelining and FSDP2"
# Each with the peer whose communication it has: gathers once or with every use, reductions once or with every
# micro-batch. Only the peer's default form keeps gradients whole while parameters are dropped.
PAIRS = {
    "zero1": "FSDP2 kept",
    "zero2": "FSDP2 kept",
    "zero3": "FSDP2",
    WHOLE: "FSDP2",
    QUANTISED: "FSDP2 kept",
}
TEXT = """    python -m benchmarks.pipeline.step_time

2 stages x 2 data-parallel ranks on 2 nodes of 2 ranks, 1F1B, {micro_batches} micro-batches of {micro_batch} x
{sequence} tokens per data-parallel rank, {layers} layers of hidden 256 (ffn 688, vocabulary 4096), fp32, fused
AdamW, clipping.

torch runs `Schedule1F1B` of `torch.distributed.pipelining` with static shapes and `fully_shard` on every layer and
the stage. It keeps gradients whole and reduces them once per step, as zero1 does. *kept*:
`reshard_after_forward=False`, which gathers parameters once per step instead of at every use. zero2 and zero3 shard
gradients and reduce with every micro-batch. *whole gradients*: `--zero-gradients-lifetime step`, which keeps them
whole until one reduction per step. *zeropp's formats*: zero1 with 4-bit weight differences and INT4 gradients
across nodes, which equals zeropp at one data-parallel rank per node, with `--zero-gradient-transform none`.

Bytes: of the node that sent most. Ratios: of medians (least to most round by round); {rounds} rounds, contestants
in turn; {setting}. All losses of a step agree within {agree:.1e}, except with quantised messages.
Speed is of steps, not of losses: INT4 gradients may take 1.07 to 1.37 times the tokens for the same loss
([loss.md](loss.md#what-is-published)).

{table}
"""


def config_of(shape: Shape, who: str, order: str, per_node: int) -> RunConfig:
    values = {
        **options_of(shape),
        "untie_embeddings_and_output_weights": True,
        "micro_batch_size": shape.micro_batch,
        "global_batch_size": shape.micro_batches * shape.micro_batch * dist.get_world_size() // PP,
        "params_dtype": "fp32",
        "lr": LR,
        "weight_decay": 0.0,
        "clip_grad": 1.0,
        "train_iters": 1,
        "mock_data": True,
        "pipeline_model_parallel_size": PP,
        "use_tp_pp_dp_mapping": order == INSIDE,
        "ranks_per_node": per_node,
    }
    return make_config({**values, **OURS[who]}, World(dist.get_world_size(), per_node))


def tokens_of(shape: Shape, dp_rank: int) -> Tensor:
    """Return a data-parallel rank's tokens, which are its labels, too: [micro-batches * micro-batch, s]."""
    size = (shape.micro_batches * shape.micro_batch, shape.sequence)
    return torch.randint(0, shape.vocabulary, size, generator=torch.Generator().manual_seed(dp_rank))


def ours(who: str, order: str, shape: Shape, per_node: int) -> Step:
    config = config_of(shape, who, order, per_node)
    mesh = make_mesh(config, World(dist.get_world_size(), per_node), CPU)
    return pipelined(config, mesh, tokens_of(shape, mesh.dp_rank), shape.micro_batches)[0]


class PeerStage(nn.Module):
    """A stage of the same decoder as torch's pipelining takes it; the last one returns logits [b, s, vocabulary]."""

    def __init__(self, decoder: Decoder, spec: StageSpec) -> None:
        super().__init__()
        self.decoder, self.spec = decoder, spec

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder.run_stage(self.spec, x)


def peer(keep: bool, order: str, shape: Shape, per_node: int) -> Step:
    """Return a step of Schedule1F1B over stages under fully_shard. torch's pipelining reduces once per step by
    itself.

    keep: gathered parameters stay for the step (reshard_after_forward=False), so they are gathered once, too.
    """
    names = ("pp", "dp") if order == ACROSS else ("dp", "pp")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    pp, dp = mesh["pp"], mesh["dp"]
    config = config_of(shape, "zero1", order, per_node)
    spec = config.stages()[pp.get_local_rank()]
    decoder = Decoder(config.model, stages=[spec])
    decoder.initialize(config.training.seed)
    module = PeerStage(decoder, spec)
    for part in (*decoder.layers.values(), module):
        fully_shard(part, mesh=dp, reshard_after_forward=False if keep else None)
    o = config.optimizer
    betas = o.adam_beta1, o.adam_beta2
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=LR, betas=betas, eps=o.adam_eps, weight_decay=0.0, fused=True
    )
    tokens = tokens_of(shape, dp.get_local_rank())
    schedule = _schedule(module, spec, shape, pp.get_group(), tokens.numel())

    def step() -> harness.Taken:
        losses: list[Tensor] = []
        if spec.embedding:
            schedule.step(tokens, return_outputs=False)
        else:
            schedule.step(target=tokens, losses=losses, return_outputs=False)
        norm = _clip(module, pp.get_group())
        optimizer.step()
        optimizer.zero_grad()
        return harness.Taken(sum(losses, torch.zeros(())).detach() * tokens.numel(), norm)

    return step


def _schedule(module: PeerStage, spec: StageSpec, shape: Shape, group: Any, tokens: int) -> Schedule1F1B:
    """Return the schedule, with static shapes, so that none are exchanged."""
    ids = torch.zeros(shape.micro_batch, shape.sequence, dtype=torch.int64)
    x = torch.zeros(shape.sequence, shape.micro_batch, shape.hidden)
    logits = torch.zeros(shape.micro_batch, shape.sequence, shape.vocabulary)
    inputs, outputs = (ids, x) if spec.embedding else (x.requires_grad_(), logits)
    stage = PipelineStage(module, spec.index, PP, CPU, inputs, outputs.requires_grad_(), group=group)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        head = module.decoder.head
        assert head is not None
        losses = vocab_parallel_cross_entropy(output.transpose(0, 1), target.t(), head.shard, head.tp)
        return losses.sum() / tokens

    return Schedule1F1B(stage, shape.micro_batches, loss_fn=loss, scale_grads=False)


def _clip(module: nn.Module, pp: Any) -> Tensor:
    """Clip by the norm over all stages, and return it."""
    parameters = list(module.parameters())
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    square = norm.full_tensor() ** 2  # type: ignore[attr-defined]
    dist.all_reduce(square, group=pp)
    torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, square.sqrt())
    return square.sqrt()


def build(name: str, shape: Shape, per_node: int) -> Step:
    who, order = name.rsplit(", ", 1)
    make = partial(ours, who) if who in OURS else partial(peer, KEPT[who])
    return make(order, shape, per_node)


def compare(names: list[str], sizes: dict[str, int], rounds: int) -> dict[str, Any]:
    """Return for each contestant its turns' seconds, bytes (of the node that sent most) and losses per token."""
    shape = Shape(**sizes)
    tokens = shape.tokens * dist.get_world_size() // PP
    losses: dict[str, list[float]] = {name: [] for name in names}

    def turn(name: str, step: Step) -> tuple[float, int]:
        found: list[harness.Taken] = []
        measured = harness.measure_most(lambda: found.append(step()))
        loss = found[0].loss.double()
        dist.all_reduce(loss)
        losses[name].append(loss.item() / tokens)
        return measured

    steps = {name: build(name, shape, harness.ranks_per_node()) for name in names}
    harness.require_training({name: harness.learned([step(), step()]) for name, step in steps.items()})
    # The first round builds connections and optimizer states, the second fills caches.
    taken = harness.take_turns(
        {name: partial(turn, name, step) for name, step in steps.items()}, rounds, warm_up=2
    )
    out = {}
    for name, turns in taken.items():
        seconds, sent = zip(*turns, strict=True)
        out[name] = {"seconds": seconds, "sent": sent, "losses": losses[name]}
    return out


def disagreement(results: dict[str, Any]) -> float:
    """Return the largest relative difference of two contestants' losses in one step, among those with exact
    messages."""
    exact = (result["losses"] for name, result in results.items() if not name.startswith(QUANTISED))
    columns = zip(*exact, strict=True)
    return max((max(column) - min(column)) / min(column) for column in columns)


def rows(rate: str, results: dict[str, Any]) -> list[list[str]]:
    out = []
    for name, result in results.items():
        who, order = name.rsplit(", ", 1)
        seconds, other = result["seconds"], results.get(f"{PAIRS.get(who)}, {order}")
        ratio = f"{harness.of_medians(seconds, other['seconds'])} of {PAIRS[who]}" if other else ""
        sent = f"{statistics.median(result['sent']) / 1e6:.2f}"
        out.append([rate, order, who, harness.spread(seconds), sent, ratio])
    return out


def main() -> None:
    parser = harness.parser(
        __doc__,
        rates=["none", "1gbit", "200mbit"],
        rounds=7,
        micro_batches=4,
        micro_batch=2,
        sequence=256,
        layers=8,
        timeout=(1200.0, "seconds per rate"),
        out=PAGES,
    )
    parser.add_argument("--contestants", nargs="+", choices=NAMES, default=list(NAMES))
    options = parser.parse_args()
    sizes = {name: getattr(options, name) for name in ("micro_batches", "micro_batch", "sequence", "layers")}
    every, agree = [], -math.inf
    for lab in harness.labs_at(options.rates):
        asked = (options.contestants, sizes, options.rounds)
        results = harness.run(compare, *asked, lab=lab, timeout=options.timeout)
        agree = max(agree, disagreement(results))
        every += rows(str(lab.rate), results)
    header = ["rate", "order", "contestant", "s per step", "MB sent by a node", "ratio"]
    facts = {**sizes, "rounds": options.rounds, "agree": agree, "setting": harness.setting()}
    text = TEXT.format(**facts, table=harness.table(header, every))
    print(text)
    harness.write_section(options.out / "pipeline.md", TITLE, text)


if __name__ == "__main__":
    harness.start(main)
