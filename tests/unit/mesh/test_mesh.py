"""Rank grid, cuts at the node boundary, CUDA's environment, host-name cross-check."""

import itertools
import os
from contextlib import ExitStack

import pytest

from megazero.mesh import launch
from megazero.mesh.grid import data_ranks, make_grid
from megazero.mesh.launch import (
    Launch,
    allocator_settings,
    computes_on_host,
    cuda_settings,
)
from megazero.mesh.levels import INTER, INTRA, make_levels
from tests.messages import refused


@pytest.mark.parametrize("tp,pp,nodes,per_node", [(1, 1, 2, 3), (2, 1, 2, 4), (2, 2, 4, 4), (1, 1, 1, 4)])
def test_axes_tile_the_world(tp, pp, nodes, per_node):
    world = nodes * per_node
    d = world // (tp * pp)
    h = data_ranks(make_levels(world, per_node), tp, pp)[0]
    legal = [k for k in range(1, d + 1) if d % k == 0 and (h % k == 0 or k % h == 0)]
    for shards in itertools.combinations_with_replacement(legal, 3):
        if shards[1] % shards[0] or shards[2] % shards[1]:
            continue
        grid = make_grid(world, per_node, tp, pp, shards)
        coordinates = {tuple(a.index(r) for a in grid.axes) for r in range(world)}
        assert len(coordinates) == world
        for axis in grid.axes:
            groups = {axis.ranks(r) for r in range(world)}
            assert sorted(itertools.chain(*groups)) == list(range(world))
            inside = all(len({r // per_node for r in g}) == 1 for g in groups)
            assert axis.link == (INTRA if inside else INTER), (axis, shards)


def test_zero3_over_two_nodes_is_cut_at_the_node():
    grid = make_grid(8, 4, tp=2, shards=(4, 4, 4))
    assert [(a.name, a.size, a.stride) for a in grid.data_axes] == [("p_intra", 2, 2), ("p_inter", 2, 4)]


def test_bad_sizes_name_the_nearest():
    with refused("--tensor-model-parallel-size", "nearest: 2"):
        make_grid(8, 4, tp=3)
    with refused("P = 3", "G = 4", "nearest legal: 4,4,4"):
        make_grid(4, 4, shards=(3, 4, 4))
    with refused("nearest ranks per node: 4"):
        make_grid(8, 5)


def test_host_names_are_cross_checked():
    from megazero.mesh.mesh import check_hosts

    assert check_hosts(["a", "a", "b", "b"], 2) == 2
    assert check_hosts(["a", "a", "b", "b"], None) == 2  # the launcher does not say
    with refused("2 ranks per node", "say 4"):
        check_hosts(["a"] * 4, 2)
    with pytest.raises(ValueError, match="not consecutive"):
        check_hosts(["a", "b", "a", "b"], 2)
    with pytest.raises(ValueError, match="different numbers"):
        check_hosts(["a", "a", "b"], 2)


CONNECTIONS, LOADING = "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"
NCCL = {"NCCL_RUNTIME_CONNECT": "0", "TORCH_NCCL_HIGH_PRIORITY": "1"}


@pytest.mark.parametrize(
    "connections, taken, noted",
    [(None, "32", False), ("1", "32", True), ("7", "32", True), ("many", "32", True), ("", "32", True)]
    + [("8", "8", False), ("16", "16", False), ("32", "32", False), ("64", "64", False)],
)
def test_connections_that_cannot_work_are_replaced_with_a_note(connections, taken, noted):
    settings, notes = cuda_settings({} if connections is None else {CONNECTIONS: connections}, 2)
    assert settings == {LOADING: "EAGER", CONNECTIONS: taken, **NCCL}
    assert [f"{CONNECTIONS}={connections} of the environment is replaced by 32" in n for n in notes] == [
        True
    ] * noted


@pytest.mark.parametrize(
    "environment, ranks, settings, notes",
    [
        ({LOADING: "EAGER"}, 2, {LOADING: "EAGER", CONNECTIONS: "32", **NCCL}, 0),
        ({LOADING: "LAZY"}, 2, {LOADING: "EAGER", CONNECTIONS: "32", **NCCL}, 1),
        ({LOADING: "LAZY"}, 1, {CONNECTIONS: "32"}, 0),  # it waits for nobody
        ({"NCCL_RUNTIME_CONNECT": "1"}, 2, {**NCCL, "NCCL_RUNTIME_CONNECT": "1"}, 0),  # the user's choice
    ],
)
def test_kernels_and_connections_of_ranks_are_loaded_at_the_start(environment, ranks, settings, notes):
    found, said = cuda_settings(environment, ranks)
    assert found.items() >= settings.items() and (LOADING in found) == (ranks > 1)
    assert len(said) == notes and all(f"{LOADING}=LAZY" in note for note in said)


@pytest.mark.parametrize(
    "libc, set_", [(("glibc", "2.36"), True), (("glibc", "2.38"), False), (("", ""), False)]
)
def test_small_caches_of_a_glibc_that_fragments_are_off_unless_the_user_says_else(monkeypatch, libc, set_):
    monkeypatch.setattr("platform.libc_ver", lambda: libc)
    assert list(allocator_settings({})) == ["GLIBC_TUNABLES"] * set_
    assert not allocator_settings({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"})


def test_ranks_compute_in_host_memory_where_no_gpu_is(monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "DEVICES", tmp_path)
    found = [[computes_on_host(device) for device in ("auto", "cpu", "cuda")]]
    (tmp_path / "nvidiactl").touch()  # the driver's own
    found.append([computes_on_host(device) for device in ("auto", "cpu", "cuda")])
    (tmp_path / "nvidia3").touch()
    found.append([computes_on_host(device) for device in ("auto", "cpu", "cuda")])
    assert found == [[True, True, False], [True, True, False], [False, True, False]]


def test_cuda_finds_its_settings_when_it_starts(monkeypatch):
    import torch

    from megazero.config import World, make_config
    from megazero.train import setup
    from tests.sizes import TINY

    found = []

    def starts() -> bool:
        found.append((os.environ[CONNECTIONS], os.environ[LOADING]))
        return False

    monkeypatch.setenv(CONNECTIONS, "1")
    monkeypatch.setenv(LOADING, "LAZY")
    for name in ("is_available", "device_count", "init", "current_device"):
        monkeypatch.setattr(torch.cuda, name, starts)
    with ExitStack() as stack, pytest.raises(ValueError, match="sees no CUDA device"):
        config = make_config({**TINY, "device": "cuda"}, World(2, 2))
        setup.prepare(config, Launch(world_size=2), stack)
    assert set(found) == {("32", "EAGER")}
