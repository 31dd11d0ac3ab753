"""docs/guide/planning.md has the tables that the planner computes now, and the figures that the page speaks of."""

from __future__ import annotations

from benchmarks.planning.memory import draw, predict, words_of
from benchmarks.planning.page import bloom_table, memory_table
from benchmarks.planning.papers import bloom_layout, table_4
from megazero.config.options.cluster import parse_cluster
from megazero.mesh.grid import INTER
from tests import ROOT
from tests.unit.plan.test_plan import cluster, layout

PAGE = ROOT / "docs" / "guide" / "planning.md"


def test_tables_are_current() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for table in (memory_table(), bloom_table()):
        assert table in page, "run python -m benchmarks.planning.page"


def test_who_runs_out_of_memory() -> None:
    for model, tokens, system, runs, sizes in table_4():
        assert (sizes["none"] <= 30.5) == runs, (model, tokens, system)


def test_predictions_beside_measured_memory_are_current() -> None:
    table = PAGE.read_text(encoding="utf-8").split("| seed |")[1].split("\n\n")[0].splitlines()[2:]
    assert table
    for line in table:
        seed, layout, _, _, _, predicted, _ = (cell.strip() for cell in line.strip("|").split("|"))
        values = {words_of(drawn): drawn for drawn in draw(int(seed), 20)}[layout]
        assert round(predict(values).total / 2**20) == int(predicted), (
            layout,
            "run benchmarks/planning/memory.py",
        )


def test_the_published_layout_fits() -> None:
    assert bloom_layout().fits


def test_the_cluster_file_of_the_page_is_legal() -> None:
    text = PAGE.read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0]
    cluster = parse_cluster(text, "docs/guide/planning.md")
    assert cluster.collectives and cluster.layers


def test_the_scalars_of_the_formula_are_those_that_are_counted() -> None:
    """Of two nodes, each rank sends its row once to the other."""
    (sent,) = layout({"zero_preset": "zeropp"}, cluster(2, 4)).bytes_by_stage
    page = (ROOT / "docs" / "guide" / "parallelism.md").read_text(encoding="utf-8")
    assert f"+ {sent['scalar', INTER]} (Y - 1) h    bytes" in page
