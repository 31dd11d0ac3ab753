"""What the planner predicts of a run, chooses for --zero-preset auto, and refuses before anything is allocated."""

from __future__ import annotations

import shlex
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megazero.config import ConfigError, World, make_config, parse
from megazero.config.model.spec import parameter_count
from megazero.config.options.cluster import Cluster, cluster_of_run
from megazero.mesh.launch import Launch
from megazero.mesh.levels import INTER
from megazero.mesh.mesh import Mesh, create_mesh
from megazero.plan.base_layout import BaseLayout
from megazero.plan.layout import Layout
from megazero.plan.memory import GIB
from megazero.plan.seconds import Collectives
from megazero.plan.simulate import simulate
from megazero.train import forecast, setup
from megazero.verify.options import read_request
from tests.messages import refused
from tests.sizes import TINY
from tests.unit.plan.test_plan import ALONE, MODEL, WORDS, cluster, layout, write_cluster

PRESETS = ("ddp", "zero1", "zero2", "zero3", "hpz", "zeropp")


def chosen(on: Cluster, policy: str, **values: object) -> tuple[Layout, list[str]]:
    """What --zero-preset auto takes on a cluster."""
    world = World(on.world_size, on.ranks_per_node)
    asked = {**MODEL, **values, "ranks_per_node": on.ranks_per_node, "zero_preset": "auto", "cluster": "h100"}
    config = make_config({**asked, "loss_policy": policy}, world)
    base = BaseLayout(config, world, on, Collectives(on))
    config, notes = forecast.choose(config, base)
    return Layout(base, config.zero), notes


@pytest.mark.parametrize("policy", ["exact", "zeropp"])
@pytest.mark.parametrize("gib", [16.0, 0.04])
def test_auto_is_not_slower_than_any_preset_that_fits(policy: str, gib: float) -> None:
    on = cluster(gib=gib)
    best, notes = chosen(on, policy)
    others = [
        layout({"zero_preset": preset}, on) for preset in PRESETS if policy == "zeropp" or preset != "zeropp"
    ]
    fitting = [other for other in others if other.fits]
    assert best.fits and fitting and (gib > 1 or len(fitting) < len(others))
    # Times that agree to four digits are ordered by memory.
    assert all(simulate(best).seconds <= simulate(other).seconds * 1.001 for other in fitting)
    assert "zero_shard" in repr(best.config.zero) and "--zero-shard" in notes[0]
    assert (best.wire.gradients.get(INTER) is None) == (policy == "exact")


def test_auto_keeps_what_was_given() -> None:
    given = {"zero_quantized_weights": True, "zero_chunk_numel": 5000, "tensor_model_parallel_size": 2}
    best, _ = chosen(cluster(), "zeropp", **given)
    assert best.wire.weights is not None and best.wire.gradients.get(INTER) is None
    assert best.config.zero.zero_chunk_numel == 5000 and best.base.tp == 2


def test_what_does_not_fit_is_refused_with_the_nearest_that_does() -> None:
    plain = layout({"zero_preset": "ddp"}, cluster())
    forecast.refuse_too_large(plain, plain.memory.total)
    with pytest.raises(
        ValueError, match="does not fit: TP 1, PP 1, DP 8, P,G,OS 1,1,1.*nearest that fits"
    ) as told:
        forecast.refuse_too_large(plain, plain.memory.total / 2)
    flags = shlex.split(str(told.value).split("nearest that fits")[1].split("(")[1].split(")")[0])
    run = [*WORDS, *ALONE[:4], "--lr", "1", "--train-iters", "1", "--mock-data", "--ranks-per-node", "4"]
    advised = parse([*run, *flags], World(8, 4))
    on = cluster()
    nearest = Layout(BaseLayout(advised, World(8, 4), on, Collectives(on)), advised.zero)
    assert nearest.memory.total <= plain.memory.total / 2
    assert nearest.config.batch == plain.config.batch, "more was given up than was needed"
    with pytest.raises(ValueError, match="take more nodes"):
        forecast.refuse_too_large(plain, 1000.0)


def test_the_memory_of_the_devices_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config({**MODEL, "global_batch_size": 1, "params_dtype": "fp32"}, World(1, 1))
    cpu = torch.device("cpu")
    same, seen, notes = forecast.foresee(config, World(1, 1), cpu)
    assert seen is not None and same is config and not notes and seen.seconds is None
    assert seen.memory.total < 1 * GIB < forecast.room_of(cpu, 1)
    monkeypatch.setattr(forecast, "host_memory", lambda: {"MemAvailable": 10**6})
    with pytest.raises(ValueError, match="does not fit"):
        forecast.foresee(config, World(1, 1), cpu)
    unchecked = replace(config, planning=replace(config.planning, memory_check=False))
    assert forecast.foresee(unchecked, World(1, 1), cpu)[1] is not None
    monkeypatch.setattr(forecast, "host_memory", dict)
    assert forecast.foresee(config, World(1, 1), cpu)[1] is not None
    wide = make_config({**MODEL, "global_batch_size": 1, "params_dtype": "fp64"}, World(1, 1))
    assert forecast.foresee(wide, World(1, 1), cpu)[1] is None


def test_room_is_measured_again_when_communicators_have_taken_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    config, order = make_config({**TINY, "global_batch_size": 1}, World(1, 1)), list[str]()
    make = setup.make_mesh

    def made(*given: object) -> Mesh:
        order.append("communicators")
        return make(*given)  # type: ignore[arg-type]

    def room_of(*_: object) -> float:
        order.append("room")
        return 1e12 if len(order) < 2 else 1000.0

    monkeypatch.setattr(setup, "make_mesh", made)
    for module in (forecast, setup):
        monkeypatch.setattr(module, "room_of", room_of)
    with ExitStack() as stack, pytest.raises(ValueError, match="does not fit"):
        setup.prepare(config, Launch(), stack)
    assert order == ["room", "communicators", "room"]
    unchecked = replace(config, planning=replace(config.planning, memory_check=False))
    with ExitStack() as stack:
        setup.prepare(unchecked, Launch(), stack)


def test_a_run_is_told_of_how_many_tokens_it_holds_logits() -> None:
    values = {**MODEL, "global_batch_size": 1, "loss_chunk_tokens": "auto", "seq_length": 8192}
    found = {}
    for vocabulary in (1000, 200_000):
        sizes = {"vocab_size": vocabulary, "max_position_embeddings": 8192, "memory_check": False}
        config, seen, notes = forecast.foresee(
            make_config({**values, **sizes}, World(1, 1)), World(1, 1), torch.device("cpu")
        )
        assert seen is not None and "--loss-chunk-tokens auto: " in notes[0]
        found[vocabulary] = config.training.loss_chunk_tokens
    assert found[1000] is None and found[200_000] in (1024, 2048, 4096)
    with refused("--attention-backend flex", "CPU"):
        config = make_config({**values, "attention_backend": "flex"}, World(1, 1))
        forecast.foresee(config, World(1, 1), torch.device("cpu"))
    with pytest.raises(ValueError, match=r"auto: the planner does not know fp64; give a number"):
        make_config({**values, "params_dtype": "fp64"}, World(1, 1))
    words = [*WORDS, *ALONE, *["--lr", "1", "--train-iters", "1", "--mock-data", "--loss-chunk-tokens"]]
    for wrong in ("0", "some"):
        with refused("--loss-chunk-tokens", wrong, "auto" if wrong == "some" else "at least 1"):
            parse([*words, wrong])


@pytest.mark.parametrize(("dtype", "width"), [("fp32", 12), ("bf16", 14)])
def test_the_copy_of_a_save_behind_the_training_is_foreseen(
    monkeypatch: pytest.MonkeyPatch, dtype: str, width: int
) -> None:
    """On a CPU it is of the memory that the ranks have; beside CUDA devices a line says how much of the host's."""
    saved = {"save": "x", "save_interval": 1, "global_batch_size": 1, "params_dtype": dtype}
    plain, behind = (make_config({**MODEL, **saved, "async_save": on}, World(1, 1)) for on in (False, True))
    cpu, cuda, room = torch.device("cpu"), torch.device("cuda"), [1e12]
    monkeypatch.setattr(forecast, "room_of", lambda *_: room[0])
    without = forecast.foresee(plain, World(1, 1), cpu)[1]
    seen = forecast.foresee(behind, World(1, 1), cpu)[1]
    beside = forecast.foresee(behind, World(1, 1), cuda)[1]
    assert without is not None and seen is not None and beside is not None
    copied = width * parameter_count(behind.model)
    assert seen.total - without.total == pytest.approx(copied, rel=0.01) and without.copied == 0
    assert "--async-save's copy" in seen.lines()[0] and "--async-save" not in str(without.lines())
    alone = forecast.foresee(plain, World(1, 1), cuda)[1]
    assert alone is not None and beside.total == alone.total and "copy in host memory" in beside.lines()[1]
    room[0] = alone.total
    forecast.foresee(plain, World(1, 1), cpu)
    forecast.foresee(behind, World(1, 1), cuda)
    with refused("does not fit", "--async-save"):
        forecast.foresee(behind, World(1, 1), cpu)


def test_predicted_beside_measured() -> None:
    config = make_config({**MODEL, "global_batch_size": 1}, World(1, 1))
    seen = forecast.foresee(config, World(1, 1), torch.device("cpu"))[1]
    assert seen is not None
    mesh = create_mesh(ranks_per_node=1)
    cpu = torch.device("cpu")
    timed = replace(seen, seconds=2.0, resident=replace(seen, resident=0).grown(cpu) - GIB // 2)
    line = timed.beside(mesh, [9.0, 3.0, 1.0])
    assert line is not None and "0.5" in line and "step 2 s predicted, 3 measured" in line
    assert timed.beside(mesh, []) is None
    assert "step 2" not in str(replace(timed, seconds=None).beside(mesh, [1.0]))


def test_mistakes(tmp_path: Path) -> None:
    words = [*WORDS, *ALONE, "--lr", "1", "--train-iters", "1", "--mock-data"]
    with refused("--zero-preset auto", "--cluster", by=ConfigError):
        parse([*words, "--zero-preset", "auto"], World(8, 4))
    with refused("--cluster h10", "h100", by=ConfigError):
        parse([*words, "--cluster", "h10"])
    with pytest.raises(ConfigError, match="no layout yet"):
        read_request([*words, "--zero-preset", "auto", "--cluster", "h100", "--world-size", "4"])
    file = write_cluster(tmp_path / "lab.yaml", 1)
    assert cluster_of_run(file, 12, 4).nodes == 3 and cluster_of_run(file, 2, 2).ranks_per_node == 2
    with refused("4 ranks", "2 on each of 4", by=ConfigError):
        cluster_of_run(file, 8, 2)


def test_auto_keeps_to_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Path(write_cluster(tmp_path / "lab.yaml", 16))
    on = cluster_of_run(str(file), 8, 4).with_room(0.04 * GIB)
    assert on.device.room == pytest.approx(0.04 * GIB)
    world = World(8, 4)
    asked = {**MODEL, "ranks_per_node": 4, "zero_preset": "auto", "cluster": str(file)}
    config = make_config(asked, world)
    monkeypatch.setattr(forecast, "host_memory", lambda: {"MemAvailable": int(4 * 0.04 * GIB)})
    config, seen, _ = forecast.foresee(config, world, torch.device("cpu"))
    assert seen is not None and seen.memory.total < 0.04 * GIB and config.zero.zero_shard != (1, 1, 1)
