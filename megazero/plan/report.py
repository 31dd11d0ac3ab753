"""Reports the planner's results: tables, flags, plan.json; and what to change if no layout fits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megazero.config import RunConfig
from megazero.config.layout.outer import planned_replicas
from megazero.config.model.spec import parameter_count, training_flops
from megazero.config.options.cluster import CALIBRATED, PUBLISHED, Cluster
from megazero.config.options.fields import show, typed
from megazero.config.options.sections import TOPK
from megazero.config.run import all_options
from megazero.config.schedule.batch_sizes import BatchSizes
from megazero.files import write_text
from megazero.plan.base_layout import BaseLayout
from megazero.plan.layout import Layout
from megazero.plan.memory import GIB, Memory
from megazero.plan.search import CHOICES, LEVELS, PARALLEL, STAGES, ZERO, Found, Search, smallest_layout
from megazero.plan.simulate import BILL, Timing, simulate

FORMATS = (
    "zero_params_lifetime",
    "zero_quantized_weights",
    "zero_weight_bits",
    "zero_quantized_weights_delta",
    "zero_quantized_gradients",
    "zero_gradient_bits",
    "zero_gradient_bits_intra_node",
    "zero_gradient_transform",
)
MOST_NODES = 64  # times as many as there are: the largest cluster that is tried if no layout fits
OUTER_STEPS = ("outer_meet", "outer_interval", "outer_format", "outer_bits", "outer_delay")
CHOSEN = (
    *PARALLEL,
    LEVELS,
    *STAGES,
    "recompute_granularity",
    "loss_chunk_tokens",
    "micro_batch_size",
    *ZERO,
    *FORMATS,
    *OUTER_STEPS,
)
UNITS = ((float(GIB), "GiB"), (GIB / 2**10, "MiB"), (GIB / 2**20, "KiB"))


def layout_flags(config: RunConfig) -> list[str]:
    """Return the flags of a layout: what the planner chooses, where it is not the default."""
    words: list[str] = []
    for name in CHOSEN:
        opt, value = all_options()[name], config.get(name)
        if (
            value is None
            or value == opt.default
            or name == "pipeline_schedule"
            and value in ("1f1b", "interleaved")
        ):
            continue
        words += typed(opt, value).split(" ", 1)
    return words


def model_flops_utilisation(layout: Layout, seconds: float) -> float:
    """Return MFU: the model's operations, recompute left out, by what the devices could have done in the time."""
    config, cluster = layout.config, layout.base.cluster
    batch = config.batch.samples_per_step(layout.base.batch_ranks)
    flops = batch * training_flops(config.model, [config.model.seq_length], layout.base.tp)
    return flops / seconds / cluster.world_size / cluster.device.peak(config.precision.params_dtype)


def tokens_per_second(layout: Layout, seconds: float) -> float:
    config = layout.config
    replicas = layout.states.outer.replicas if layout.states.outer else 1
    samples = replicas * config.batch.samples_per_step(layout.base.batch_ranks)
    return samples * config.model.seq_length / seconds


def _levels(base: BaseLayout) -> str:
    heads, keys = base.config.context_levels(base.world)
    return f"{heads}" if keys == 1 else f"{heads} x {keys}"


def describe(layout: Layout) -> str:
    """Return a layout in a few words."""
    base, shards = layout.base, layout.shards
    words = [f"TP {base.tp}", f"PP {base.pp}", f"DP {base.d}"]
    words += [f"CP {_levels(base)} of these"] * (base.cp > 1)
    nodes = layout.grid.ep_axes[1].size
    words += [f"EP {base.ep}" + f" of {nodes} nodes" * (nodes > 1)] * (base.ep > 1)
    if base.pp > 1:
        several = f" x {base.virtual}" if base.virtual > 1 else ""
        words.append(f"{base.schedule_name}{several}")
        words += ["tp-pp-dp"] * layout.config.parallel.use_tp_pp_dp_mapping
    words.append(f"P,G,OS {','.join(map(str, shards.factors))}")
    words += ["gathered"] * shards.keep_gathered
    words.append(f"micro-batch {layout.config.batch.micro_batch_size}")
    recompute = layout.config.training.recompute_granularity
    words += [f"recompute {recompute}"] * (recompute != "none")
    words += [f"loss of {layout.loss_chunk} tokens at once"] * (layout.loss_chunk is not None)
    if layout.states.outer is not None:
        words.append(outer_words(layout.config))
    return ", ".join(words)


def outer_words(config: RunConfig) -> str:
    """Return outer steps in a few words."""
    outer = config.outer
    sent = outer.outer_format if outer.outer_format == TOPK else f"{outer.outer_bits} bits"
    words = f"each of {planned_replicas(outer)} replicas with a batch of {config.batch.global_batch_size}, "
    words += f"{sent} every {outer.outer_interval} steps"
    return words + (f", {outer.outer_delay} on their way" if outer.outer_delay else "")


def table(best: Sequence[Found]) -> list[str]:
    """Return a line per layout, the best first."""
    lines = [" #   step s    MFU  GiB/rank  GB/node  layout; messages"]
    for number, found in enumerate(best, 1):
        layout, seconds = found.layout, found.timing.seconds
        lines.append(
            f"{number:2}  {seconds:7.3f}  {model_flops_utilisation(layout, seconds):5.1%}  "
            f"{layout.memory.total / GIB:8.1f}  {layout.bytes_across_nodes / 1e9:7.1f}  {describe(layout)}; "
            f"{found.formats}"
        )
    return lines


def size_unit(most: float) -> tuple[float, str]:
    """Return the bytes and the name of the unit in which sizes up to ``most`` bytes are read: GiB, if it is some."""
    return next(((size, name) for size, name in UNITS if most >= size / 10), (1.0, "B"))


def memory_items(memory: Memory, unit: float = GIB) -> str:
    """Return the items of a rank's memory, in ``unit`` bytes."""
    least = min(memory.total, GIB) / 200
    return ", ".join(f"{name} {size / unit:.2f}" for name, size in memory.items().items() if size >= least)


def details(found: Found) -> list[str]:
    """Return the bill and the memory of one layout."""
    layout, timing = found.layout, found.timing
    bill = ", ".join(
        f"{words} {timing.bill[name]:.3f}" for name, words in BILL.items() if timing.bill[name] >= 0.0005
    )
    return [
        f"seconds of a step: {timing.seconds:.3f} = {bill}",
        f"GiB of a rank: {layout.memory.total / GIB:.2f} of {layout.room / GIB:.2f} = {memory_items(layout.memory)}",
        f"{tokens_per_second(layout, timing.seconds):,.0f} tokens per second",
    ]


def stage_lines(layout: Layout) -> list[str]:
    """Return a line for each stage of training, where there are several: its steps, and how long they take."""
    config, base = layout.config, layout.base
    sizes, stages, lines = BatchSizes.of(config, base.batch_ranks), config.training_stages, list[str]()
    end = config.training.train_samples or sizes.consumed_after(config.training.train_iters or 0)
    for stage in stages if len(stages) > 1 else ():
        batch = sizes.batch_size(stage.begin)
        steps = (min(stage.end or end, end) - stage.begin) // batch
        said = f"stage from sample {stage.begin:,} on: {steps:,} steps of {batch} x {stage.seq_length} tokens"
        if batch % sizes.quantum:
            lines.append(
                f"{said}, which needs other ranks or micro-batches: the batch is no multiple of {sizes.quantum}"
            )
            continue
        own = replace(
            config.at_length(stage.seq_length), batch=replace(config.batch, global_batch_size=batch)
        )
        seconds = simulate(
            Layout(BaseLayout(own, base.world, base.cluster, base.collectives), own.zero)
        ).seconds
        lines.append(f"{said}, {seconds:.3g} s each, {steps * seconds / 3600:.3g} hours")
    return lines


def as_dict(layout: Layout, timing: Timing, formats: str) -> dict[str, Any]:
    """Return one layout as plain JSON values. Times are in seconds, sizes in bytes."""
    return {
        "flags": layout_flags(layout.config),
        "formats": formats,
        "seconds": timing.seconds,
        "bill": timing.bill,
        "memory": layout.memory.items(),
        "memory_total": layout.memory.total,
        "memory_room": layout.room,
        "bytes_across_nodes": layout.bytes_across_nodes,
        "model_flops_utilisation": model_flops_utilisation(layout, timing.seconds),
        "tokens_per_second": tokens_per_second(layout, timing.seconds),
    }


def write_json(
    path: Path,
    cluster: Cluster,
    policy: str,
    values: Mapping[str, Any],
    best: Sequence[Found],
) -> None:
    """Write plan.json, which is replaced as a whole."""
    content = {
        "version": 1,
        "cluster": cluster.name,
        "nodes": cluster.nodes,
        "ranks_per_node": cluster.ranks_per_node,
        "loss_policy": policy,
        "given": {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()},
        "layouts": [as_dict(found.layout, found.timing, found.formats) for found in best],
    }
    write_text(path, json.dumps(content, indent=1) + "\n")


def headline(config: RunConfig, cluster: Cluster) -> str:
    """Return the question in one line."""
    return (
        f"{parameter_count(config.model) / 1e9:.3g} billion parameters, batch {config.batch.global_batch_size} of "
        f"{config.model.seq_length} tokens, {config.precision.params_dtype}, on {cluster.nodes} nodes of "
        f"{cluster.ranks_per_node}: {cluster.name}"
    )


def source_of_rates(cluster: Cluster) -> str:
    """Return where a cluster's rates come from, in one line."""
    if cluster.rates == CALIBRATED or cluster.layers:
        return "rates: calibrated on these ranks"
    if cluster.rates == PUBLISHED:
        return "rates: as published runs reached them (docs/results/published.md); megazero calibrate measures yours"
    return (
        "rates: of data sheets, which published runs missed by 20% at the median (docs/results/published.md); "
        "megazero calibrate measures yours"
    )


def advice(values: Mapping[str, Any], cluster: Cluster, search: Search) -> list[str]:
    """Return lines that explain why nothing fits and what would. ``search`` has been run."""
    smallest = smallest_layout(values, cluster)
    if smallest is None:
        list(search.bases())  # asks the rules of those, too, that are too large
        lines = ["no layout is legal; the rules that most of them break:"]
        common = sorted(search.errors.items(), key=lambda item: -item[1])[:5]
        return [*lines, *(f"  - {line}" for line, _ in common)]
    over = smallest.memory.total - smallest.room
    found = [*_released(values, cluster), *_more_nodes(values, cluster)]
    return [
        f"no layout fits in the {smallest.room / GIB:.1f} GiB that a rank has for tensors. The one that needs the "
        f"least ({describe(smallest)}) needs {smallest.memory.total / GIB:.1f}, {over / GIB:.1f} too much.",
        "What would do:",
        *(
            f"  - {line}"
            for line in found or ["nothing of more nodes or other choices: the model is too large"]
        ),
    ]


def _released(values: Mapping[str, Any], cluster: Cluster) -> Iterator[str]:
    """Yield the given choices without which some layout fits."""
    for name in (name for name in CHOICES if values.get(name) is not None):
        rest = {other: value for other, value in values.items() if other != name}
        layout = smallest_layout(rest, cluster)
        if layout is not None and layout.fits:
            chosen = layout.config.get(name)
            said = f"{all_options()[name].flag} {show(values[name])}"
            yield f"without {said}: {describe(layout)}" + (
                f" ({show(chosen)} instead)" if chosen is not None else ""
            )


def _more_nodes(values: Mapping[str, Any], cluster: Cluster) -> Iterator[str]:
    """Yield the least number of nodes, of twice, thrice, ... as many, on which some layout fits."""
    times = 2
    while times <= MOST_NODES:
        layout = smallest_layout(values, cluster.with_nodes(cluster.nodes * times))
        if layout is not None and layout.fits:
            yield f"{cluster.nodes * (times - 1)} more nodes, {cluster.nodes * times} in all: {describe(layout)}"
            return
        times += 1 if times < 4 else times // 2
