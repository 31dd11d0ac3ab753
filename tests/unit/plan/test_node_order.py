"""Placement: topologies are read, nodes of a group come under one leaf, and nothing else changes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megazero.config import ConfigError
from megazero.mesh.mesh import check_hosts
from megazero.plan.command import main
from megazero.plan.layout import Layout
from megazero.plan.node_order import host_files, place, rings
from megazero.plan.topology import check_nodes, expand, parse_topology
from tests.unit.plan.test_plan import ALONE, WORDS, cluster, layout, write_cluster

CONF = """
# two spines over four leaves, whose nodes alternate
SwitchName=s0 Nodes=n[0,4]
SwitchName=s1 Nodes=n[1,5]  LinkSpeed=100
SwitchName=s2 \\
    Nodes=n[2,6]
SwitchName=s3 Nodes=n[3,7]
SwitchName=top0 Switches=s[0-1]
SwitchName=top1 Switches=s[2,3]
switchname=root switches=top[0-1]
"""
SCONTROL = """SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[0,4]
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[1,5]
SwitchName=s2 Level=0 LinkSpeed=1 Nodes=n[2,6]
SwitchName=s3 Level=0 LinkSpeed=1 Nodes=n[3,7]
SwitchName=root Level=1 LinkSpeed=1 Nodes=n[0-7] Switches=s[0-3]
"""
LIST = "s0: n0 n4\ns1: n1,n5\ns2: n[2,6]\ns3: n3 n7\n"
ALTERNATING = tuple(f"n{i}" for i in range(8))


def plan(nodes: int = 8, **values: object) -> Layout:
    return layout({"global_batch_size": 8 * nodes, **values}, cluster(nodes, 4))


def test_node_lists() -> None:
    assert expand("gpu[08-10],login,r[1-2]n[1,3]") == (
        "gpu08", "gpu09", "gpu10", "login", "r1n1", "r1n3", "r2n1", "r2n3",
    )  # fmt: skip
    for wrong in ("gpu[1-", "gpu]1[", "gpu[b-c]", "gpu[5-2]", "gpu[0-99999999]", "r[0-9999]n[0-9999]"):
        with pytest.raises(ValueError, match="no node list"):
            expand(wrong)


@pytest.mark.parametrize("text", [CONF, SCONTROL, LIST])
def test_three_ways_of_writing_say_the_same(text: str) -> None:
    found = parse_topology(text, "t")
    assert found.leaves == {f"s{i}": (f"n{i}", f"n{i + 4}") for i in range(4)}


def test_blocks_are_leaves_and_their_sizes_are_passed_over() -> None:
    conf = "BlockName=b1 Nodes=n[0-1]\nBlockName=b2 Nodes=n[2-3]\nBlockSizes=2,4\n"
    shown = """BlockName=b1 BlockIndex=0 Nodes=n[0-1] BlockSize=2
BlockName=b2 BlockIndex=1 Nodes=n[2-3] BlockSize=2
AggregatedBlock=b1,b2 BlockIndex=2 Nodes=n[0-3] BlockSize=4
"""
    for text in (conf, shown):
        assert parse_topology(text, "t").leaves == {"b1": ("n0", "n1"), "b2": ("n2", "n3")}


def test_paths_go_up_to_the_root() -> None:
    found = parse_topology(CONF, "t")
    assert found.path("s2") == ("root", "top1", "s2")


def test_groups_come_under_one_leaf() -> None:
    """G of 8 ranks: two nodes. As given no two neighbours share a leaf; then all of a pair's reductions do."""
    topology, tree = parse_topology(CONF, "t"), plan(zero_shard=(4, 8, 32))
    found = place(tree, topology, ALTERNATING)
    assert sorted(found.hosts) == sorted(ALTERNATING)
    pairs = {frozenset(found.hosts[i : i + 2]) for i in range(0, 8, 2)}
    assert pairs == {frozenset((f"n{i}", f"n{i + 4}")) for i in range(4)}
    near, far = (next(r for r in rings(tree) if r.stride == stride) for stride in (1, 2))
    assert (near.size, far.size) == (2, 4) and found.under == pytest.approx(near.sent * 8)
    assert found.total == pytest.approx(8 * (near.sent + far.sent))
    assert found.before == pytest.approx(8 * far.sent / 3), (
        "of a group of four each has one other under its leaf"
    )


def test_the_axis_that_sends_most_is_kept_together() -> None:
    """Stages across nodes send activations alone; two pipelines' gradients cross to the node 4 further on."""
    values = {"pipeline_model_parallel_size": 4, "zero_preset": "zero3"}
    tree = plan(**values)
    assert {r.name for r in rings(tree)} > {"pp"}
    topology = parse_topology("a: n0 n2\nb: n1 n3\nc: n4 n6\nd: n5 n7\n", "t")
    found = place(tree, topology, ALTERNATING)
    busiest = max(rings(tree), key=lambda ring: ring.sent)
    assert busiest.name != "pp"
    assert found.under == pytest.approx(busiest.sent * 8) and found.before < 0.1 * found.under


def test_ranks_that_share_samples_come_under_one_leaf_where_the_whole_group_does_not() -> None:
    """Pairs of nodes share samples; parameters are gathered over all four, of which a leaf has two."""
    tree = plan(4, context_parallel_size=8, num_query_groups=2, zero_preset="zero3")
    near, wide = (next(r for r in rings(tree) if r.size == size) for size in (2, 4))
    found = place(tree, parse_topology("a: n0 n2\nb: n1 n3\n", "t"), ALTERNATING[:4])
    assert found.before == pytest.approx(4 * wide.sent / 3)
    assert found.under == pytest.approx(4 * (wide.sent / 3 + near.sent))


def test_leaves_that_are_no_multiples_of_groups() -> None:
    topology = parse_topology("a: n[0-2]\nb: n[3-5]\nc: n[6-7]\n", "t")
    hosts = ("n0", "n3", "n1", "n4", "n2", "n6", "n5", "n7")
    found = place(plan(zero_shard=(4, 8, 32)), topology, hosts)
    pairs = [set(found.hosts[i : i + 2]) for i in range(0, 8, 2)]
    assert sum(any(pair <= set(nodes) for nodes in topology.leaves.values()) for pair in pairs) == 3


@pytest.mark.parametrize(
    "values",
    [
        {"zero_preset": "zero3"},
        {"zero_preset": "zeropp"},
        {"zero_shard": (1, 8, 16)},
        {"zero_preset": "zero3", "optimizer": "muon"},
        {
            "zero_preset": "zeropp",
            "pipeline_model_parallel_size": 4,
            "untie_embeddings_and_output_weights": False,
        },
        {"zero_preset": "zero3", "outer_interval": 8, "outer_replicas": 2},
        {
            **{"zero_preset": "zero3", "num_experts": 16, "moe_ffn_hidden_size": 64},
            **{"expert_model_parallel_size": 8, "moe_dispatch_across_nodes": "exact"},
        },
    ],
    ids=str,
)
def test_bytes_of_axes_are_those_of_the_layout(values: dict[str, object]) -> None:
    tree = plan(4, **values)
    stages = [
        sum(n for (kind, link), n in stage.items() if link == "inter_node" and kind != "scalar")
        for stage in tree.bytes_by_stage
    ]
    crossing = sum(stages) / len(stages) + tree.bytes_of_meetings[0]
    assert sum(ring.sent for ring in rings(tree)) == pytest.approx(crossing * 4, rel=1e-6)


def test_ranks_and_collectives_stay_what_they_are() -> None:
    """Only hosts change: every node's ranks are consecutive, and each rank's groups are of the same ranks."""
    tree = plan(zero_shard=(4, 8, 32))
    found = place(tree, parse_topology(CONF, "t"), ALTERNATING)
    assert found.hosts != ALTERNATING
    names = host_files(found, 4)["slurm_hosts"].split()
    assert len(names) == tree.base.world.world_size and check_hosts(names, None) == 4
    assert names[::4] == list(found.hosts)
    assert host_files(found, 4)["hosts"].splitlines()[0] == f"{found.hosts[0]} slots=4"


def test_every_fault_of_a_topology_is_reported_at_once() -> None:
    text = """SwitchName=a Nodes=n[0-3
Switch=b Nodes=n4
SwitchName=c
SwitchName=d Nodes=n5 LinkSpeed
SwitchName=e Nodes=n6
SwitchName=e Nodes=n7
SwitchName=top Switches=e,f
"""
    with pytest.raises(ConfigError) as error:
        parse_topology(text, "topology.conf")
    found = "\n".join(error.value.errors)
    for part in (
        "line 1: 'n[0-3' is no node list",
        "line 2: no SwitchName",
        "line 3: switch c has neither Nodes nor Switches",
        "line 4: 'LinkSpeed' is not of the form Key=Value",
        "line 6: switch e stands twice",
        "switch top is over f, which has no line",
    ):
        assert part in found, (part, found)
    for text, said in (
        ("", "names no leaf switch"),
        ("a: n0\nb: n0\n", "node n0 lies under two leaf switches"),
    ):
        with pytest.raises(ConfigError, match=said):
            parse_topology(text, "t")


def test_nodes_that_a_topology_lacks() -> None:
    topology = parse_topology(LIST, "t")
    assert check_nodes(topology, (), 8) == [] and check_nodes(topology, ("n1", "n3"), 2) == []
    assert check_nodes(topology, ("n1", "m3"), 2)[0].startswith("--topology-nodes: the topology has no m3")
    assert "the topology has 8 nodes, and the plan is for 16; nearest: --nodes 8" in check_nodes(
        topology, (), 16
    )
    assert "--topology-nodes with 4 of them" in check_nodes(topology, (), 4)[0]
    assert "twice" in check_nodes(topology, ("n1", "n1"), 2)[0]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "topology.conf").write_text("SwitchName=a Nodes=n[0,2]\nSwitchName=b Nodes=n[1,3]\n")
    words = [*WORDS, "--cluster", write_cluster(tmp_path / "lab.yaml", 1), "--nodes", "4"]
    words += ["--plan-output", str(tmp_path / "out"), "--topology", str(tmp_path / "topology.conf")]
    words += [*ALONE, "--zero-shard", "4,8,16"]
    assert main([*words, "--topology-nodes", "n[0-3]"]) == 0
    said = capsys.readouterr().out
    assert "placement of 4 nodes under 2 leaf switches" in said
    before, after = (float(share) for share in re.findall(r"([\d.]+)% (?:stay|in the order)", said))
    assert after > before
    assert "--distribution=arbitrary" in said and "rank order: the default" in said
    hosts = [line.split()[0] for line in (tmp_path / "out" / "hosts").read_text().splitlines()]
    assert [set(hosts[:2]), set(hosts[2:])] in ([{"n0", "n2"}, {"n1", "n3"}], [{"n1", "n3"}, {"n0", "n2"}])
    assert main([*words, "--topology-nodes", "n[0-2],m3"]) == 2
    assert "the topology has no m3" in capsys.readouterr().err
    assert main([*words[:-2], "--topology", str(tmp_path / "none.conf"), "--nodes", "5"]) == 2
    assert "none.conf cannot be read" in capsys.readouterr().err
