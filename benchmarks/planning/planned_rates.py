"""Chart the planner's seconds per step over the rate of a node's link, for three models on 4 and 16 nodes of H100.

    python -m benchmarks.planning.planned_rates         # some minutes on one core

Writes docs/results/planned_rates.md and .png. comparison.py measures such curves in the lab, scaled down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import harness
from benchmarks.results import PAGES
from megazero.charts import new_figure, save
from megazero.config.options.cluster import Cluster, load_cluster
from megazero.plan.options import with_stand_ins
from megazero.plan.search import Found, Search

PAGE, CHART = PAGES / "planned_rates.md", PAGES / "planned_rates.png"
RATES = (10.0, 25.0, 50.0, 100.0, 200.0, 400.0, 800.0)  # Gb/s of a node
NODES = (4, 16)
SAMPLES = 4  # of a step, for each GPU
LLAMA: Mapping[str, Any] = {
    "model_family": "llama",
    "num_query_groups": 8,
    "seq_length": 8192,
    "vocab_size": 128256,
    "untie_embeddings_and_output_weights": True,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "8B": {
        **LLAMA,
        **{"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32},
    },
    "70B": {
        **LLAMA,
        **{"num_layers": 80, "hidden_size": 8192, "ffn_hidden_size": 28672, "num_attention_heads": 64},
    },
    "Qwen3-30B-A3B": {
        **{"model_family": "qwen3_moe", "num_layers": 48, "hidden_size": 2048, "num_attention_heads": 32},
        **{"num_query_groups": 4, "kv_channels": 128, "ffn_hidden_size": 6144, "num_experts": 128},
        **{"moe_router_topk": 8, "moe_ffn_hidden_size": 768, "seq_length": 8192, "vocab_size": 151936},
    },
}
FLAT = {"pipeline_model_parallel_size": 1}
WHOLE = {**FLAT, "tensor_model_parallel_size": 1, "expert_model_parallel_size": 1}
LINES: Mapping[str, Mapping[str, Any]] = {
    "FSDP2": {**WHOLE, "zero_preset": "zero3"},
    "HSDP, once a step": {**WHOLE, "zero_preset": "hsdp"},
    "ZeRO-1 with TP": {**FLAT, "zero_preset": "zero1"},
    "zeropp": {**FLAT, "zero_preset": "zeropp"},
}


def at_rates(model: str, nodes: int) -> dict[str, list[Found | None]]:
    """Return the fastest layout of each line at each rate; None: none fits."""
    cluster = load_cluster("h100").with_nodes(nodes)
    batch = {"global_batch_size": SAMPLES * cluster.world_size, "ranks_per_node": cluster.ranks_per_node}
    values = with_stand_ins({**MODELS[model], "params_dtype": "bf16", **batch})
    return {
        name: [_fastest({**values, **line}, cluster.with_slow_link(rate, 0.0)) for rate in RATES]
        for name, line in LINES.items()
    }


def _fastest(values: dict[str, Any], cluster: Cluster) -> Found | None:
    return next(iter(Search(values, cluster, "exact").best(1)), None)


def table(found: Mapping[str, Sequence[Found | None]]) -> str:
    rows = [
        [name, *(f"{one.timing.seconds:.2f}" if one else "does not fit" for one in each)]
        for name, each in found.items()
    ]
    return harness.table(["seconds of a step at Gb/s", *(f"{rate:g}" for rate in RATES)], rows)


def main() -> None:
    harness.parser(__doc__).parse_args()
    figure = new_figure(11, 12)
    charts = figure.subplots(len(MODELS), len(NODES)).ravel()
    parts = [TEXT]
    for axes, (model, nodes) in zip(charts, ((m, n) for m in MODELS for n in NODES), strict=True):
        found = at_rates(model, nodes)
        title = f"{model} on {nodes} nodes of 8 H100"
        for number, (name, each) in enumerate(found.items()):
            there = [(rate, one.timing.seconds) for rate, one in zip(RATES, each, strict=True) if one]
            if there:
                axes.plot(*zip(*there, strict=True), marker="o", label=name, color=f"C{number}")
        axes.set(title=title, xscale="log", yscale="log", xlabel="Gb/s of a node", ylabel="seconds of a step")
        axes.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
        axes.legend(fontsize=7)
        parts += [f"## {title}", table(found)]
    save(figure, CHART)
    PAGE.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


TEXT = f"""\
# Seconds per step over the link's rate, as planned

    python -m benchmarks.planning.planned_rates

The planner's fastest layout of each preset for {SAMPLES} samples of 8,192 tokens a GPU, without pipelines:
micro-batch, recompute and, for ZeRO-1 and zeropp, tensor parallelism and ranks that share experts are chosen.
Nothing here is measured.
[published.md](published.md) says how far the planner is from runs that others measured;
[comparison.md](comparison.md) has such curves as measured with a small model. What 4-bit messages cost in tokens is
not in these figures: `megazero plan --pays` sets it against them.

![seconds per step over the link's rate]({CHART.name})"""


if __name__ == "__main__":
    harness.start(main)
