"""What `megazero verify` runs instead of what was asked for, and the bytes it expects: pure functions."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from megazero.cli import COMMANDS, main
from megazero.comm.wire import Coding
from megazero.families.layer_kinds import layer_kinds
from megazero.mesh.grid import data_cuts
from megazero.mesh.levels import INTER
from megazero.plan.gathers import Copies, gathers
from megazero.verify.options import VerifyConfig, read_request
from megazero.verify.shrink import shrink, stage_layers
from megazero.verify.verification import other_layouts
from tests import ROOT
from tests.messages import names, refused

CONFIGS = sorted((ROOT / "pretrain" / "configs").glob("*.yaml"))
BASE = (
    "--model-family llama --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 "
    "--micro-batch-size 4 --lr 1e-4 --train-iters 1000 --mock-data --vocab-size 32000"
)


def shrunk(words: str, most: int = 16):
    request = read_request(f"{BASE} {words}".split())
    return shrink(request.config, request.world, most, request.options.verify_steps)


def test_the_ratio_of_two_learning_rates_is_kept() -> None:
    words = "--world-size 2 --ranks-per-node 2 --min-lr 1e-5 --decoupled-lr 3e-4 --decoupled-min-lr 1e-6"
    optimizer = shrunk(words).config.optimizer
    assert optimizer.lr and optimizer.decoupled_lr == pytest.approx(3 * optimizer.lr)


def test_what_a_cpu_does_not_run_is_told() -> None:
    words = "--world-size 2 --ranks-per-node 2 --device cuda --attention-backend flex"
    changes = shrunk(words).changes
    assert changes["attention_backend"] == ("flex", "auto")
    for name in ("torch", "triton"):  # they run anywhere
        assert "optimizer_impl" not in shrunk(f"--world-size 2 --optimizer-impl {name}").changes


@pytest.mark.parametrize(
    "asked, chunks", [("", 0), ("--loss-chunk-tokens auto", 6), ("--loss-chunk-tokens 8192", 6)]
)
def test_the_loss_has_chunks_if_it_had(asked: str, chunks: int) -> None:
    config = shrunk(f"--world-size 2 {asked}").config
    chunk, tokens = config.training.loss_chunk_tokens, config.batch.micro_batch_size * config.model.seq_length
    assert (-(-tokens // chunk) if chunk else 0) == chunks


def test_other_layouts_compute_the_same_loss() -> None:
    """On other layouts the loss is asked for again."""
    words = "--z-loss-strength 1e-3 --world-size 4 --ranks-per-node 4"
    found = shrunk(f"{words} --tensor-model-parallel-size 2")
    others = [config for _, config, _ in other_layouts(found.config, found.layout.world, 2)]
    assert len(others) == 2
    for run in (found.config, *others):
        assert run.training.z_loss_strength == 1e-3


def test_structure_is_kept_and_sizes_are_not() -> None:
    words = "--tensor-model-parallel-size 2 --sequence-parallel --num-query-groups 8 --ranks-per-node 4"
    found = shrunk(
        f"{words} --world-size 8 --global-batch-size 512 --vocab-size 32001 --recompute-granularity full --bf16"
    )
    model, run = found.config.model, found.config
    assert found.layout.world.world_size == 8 and found.layout.world.ranks_per_node == 4
    assert model.hidden_size <= 64 and model.seq_length <= 16 and model.num_layers == 2
    assert model.num_attention_heads > model.num_query_groups > 2  # grouped queries, several groups per rank
    assert model.vocab_size % model.make_vocab_size_divisible_by  # still padded
    assert run.parallel.sequence_parallel and run.training.recompute_granularity == "full"
    assert run.precision.params_dtype == "bf16" and run.zero.zero_preset == "zero1"
    assert run.num_micro_batches(found.layout.world) == 2 and run.batch.micro_batch_size == 2
    assert (
        found.changes["hidden_size"] == (4096, model.hidden_size) and "sequence_parallel" not in found.changes
    )


def test_each_kind_of_layer_stays_and_windows_stay_shorter_than_samples() -> None:
    words = "--world-size 2 --num-layers 12 --seq-length 64 --position-embedding-type rope --vocab-size 32000"
    windows = "--sliding-window 16 --window-attn-skip-freq 6 --rotary-window-base 100"
    model = shrunk(f"{words} {windows}").config.model
    assert [kind.window for kind in layer_kinds(model)] == [4, None] and model.seq_length == 8
    model = shrunk(f"{words} --sliding-window 64 --no-rope-freq [0,0,1]*4").config.model
    assert [(kind.window, kind.rotary) for kind in layer_kinds(model)] == [(64, True), (64, False)]


@pytest.mark.parametrize(
    "words, heads, groups",
    [
        ("--num-query-groups 1", 8, 1),
        ("--num-query-groups 2", 8, 2),
        ("--num-query-groups 2 --num-attention-heads 12 --kv-channels 64", 8, 2),
        ("--num-query-groups 8", 16, 8),
        ("", 8, 8),
    ],
)
def test_key_heads_that_ranks_share_stay_shared(words: str, heads: int, groups: int) -> None:
    model = shrunk(f"--world-size 4 --tensor-model-parallel-size 4 {words}").config.model
    assert (model.num_attention_heads, model.num_query_groups) == (heads, groups)


def test_an_exact_padded_size_and_partial_rotary_positions_stay() -> None:
    words = "--world-size 2 --tensor-model-parallel-size 2 --pad-vocab-size-to 32100 --rotary-percent 0.25"
    model = shrunk(f"{words} --vocab-size 32000 --squared-relu").config.model
    assert model.pad_vocab_size_to > replace(model, pad_vocab_size_to=None).padded_vocab_size(2)
    assert model.rotary_percent == 0.25 and model.kv_channels == 8 and model.squared_relu


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--num-layers 32 --pipeline-partition uniform", [2, 2]),
        ("--num-layers 31 --pipeline-partition uniform", [2, 1]),
        ("--pipeline-partition 20,12", [2, 1]),
        ("--num-virtual-stages-per-pipeline-rank 3 --pipeline-partition 6,5,5,5,5,6", [2, 1, 1, 1, 1, 1]),
        ("--num-layers-per-virtual-pipeline-stage 4", [1] * 8),
    ],
)
def test_uneven_stages_stay_uneven(words: str, wanted: list[int]) -> None:
    found = shrunk(f"--pipeline-model-parallel-size 2 --world-size 4 --global-batch-size 64 {words}")
    assert [len(stage.layers) for stage in found.config.stages()] == wanted
    assert found.config.pipeline_schedule == ("interleaved" if len(wanted) > 2 else "1f1b")
    assert found.config.num_micro_batches(found.layout.world) == (4 if len(wanted) > 2 else 3)


def test_a_large_world_keeps_its_levels() -> None:
    words = "--world-size 128 --ranks-per-node 8 --global-batch-size 512 --level-sizes 4"
    for more, sizes, shards in (
        ("--zero-preset zeropp --zero-hpz-partition-size 32", (2,), (4, 4, 8)),
        ("--zero-shard 8,32,128", (2,), (2, 4, 8)),
        ("--zero-preset zero2 --num-distributed-optimizer-instances 4", (2,), (1, 4, 4)),
        ("--zero-preset zeropp --use-tp-pp-dp-mapping --pipeline-model-parallel-size 2", (2,), (2, 2, 8)),
    ):
        found = shrunk(f"{words} {more}")
        world, parallel = found.layout.world, found.config.parallel
        assert parallel.level_sizes == sizes and found.config.shards(world).factors == shards
        h, rack = found.config.data_ranks(world)
        assert (h, rack, found.config.shard_ranks(world)) == (2, 4, 8), more


def test_a_large_world_keeps_every_cut() -> None:
    words = (
        "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --zero-preset zeropp --num-query-groups 8 "
        "--world-size 1024 --ranks-per-node 16 --global-batch-size 1024"
    )
    found = shrunk(words)
    layout, world = found.layout, found.layout.world
    h, d = found.config.data_ranks_per_node(world), found.config.data_parallel_size(world)
    assert world.world_size <= 16 and (layout.tp, layout.pp) == (2, 2) and (h, d) == (2, 4)
    assert found.config.shards(world).factors == layout.shards == (2, 2, 4)
    assert data_cuts(d, (h,), layout.shards) == [1, 2, 4]
    assert world.world_size // world.ranks_per_node > 1
    assert found.changes["tensor_model_parallel_size"] == (8, 2)
    names(" ".join(found.notes), "16 ranks for 1024", "4 data-parallel", "no rank between")
    assert (shrunk(words, most=64).layout.tp, shrunk(words, most=64).layout.pp) == (2, 8)
    with refused("--verify-ranks 8", "nearest: 16"):
        shrunk(words, most=8)


def test_pipelines_inside_nodes_stay_inside() -> None:
    words = "--pipeline-model-parallel-size 4 --use-tp-pp-dp-mapping --zero-preset zeropp --world-size 64"
    found = shrunk(f"{words} --ranks-per-node 8 --global-batch-size 256")
    world = found.layout.world
    assert (found.layout.pp, world.world_size, world.ranks_per_node) == (4, 16, 8)
    assert found.config.data_ranks_per_node(world) == 2


def test_explicit_factors_and_quantised_sizes_are_scaled() -> None:
    words = "--zero-shard 2,8,32 --zero-quantized-weights --zero-quantized-gradients --world-size 32"
    found = shrunk(f"{words} --ranks-per-node 8 --global-batch-size 256")
    assert found.config.zero.zero_shard == found.layout.shards == (2, 4, 8)
    wire = found.config.wire(found.layout.world)
    assert wire.weights and wire.gradients.get(INTER) and wire.block == 64 and wire.weights.block == 8
    assert (
        wire.exact_numel == found.config.model.hidden_size
    )  # norms are exact, as they were; matrices are not


def test_ramp_up_has_two_sizes() -> None:
    found = shrunk("--world-size 2 --rampup-batch-size 64 64 10000 --global-batch-size 512")
    start, increment, samples = found.config.batch.rampup_batch_size or (0, 0, 0)
    assert start + increment == found.config.batch.global_batch_size and samples == 2 * start


def test_own_flags_and_faults_of_the_command_line() -> None:
    request = read_request(
        f"{BASE} --verify-steps=6 --verify-output out --pipeline-model-parallel-size 2".split()
    )
    assert request.options == VerifyConfig(None, "out", 6, 16) and request.world.world_size == 4
    with refused("--verify-steps 2", "nearest: 4", "4097", "--world-size", "'many'", "--verify-output"):
        read_request(f"{BASE} --verify-steps 2 --world-size many --hidden-size 4097 --verify-output".split())


def test_one_replica_is_run() -> None:
    words = f"{BASE} --world-size 8 --ranks-per-node 2".replace("--train-iters 1000", "--train-samples 8000")
    request = read_request(f"{words} --outer-meet local:4 --outer-interval 64".split())
    found = shrink(request.config, request.world, 8, 4)
    assert found.config.outer.outer_meet is None and found.layout.world.world_size == 8
    assert any("one replica is run" in note for note in found.notes)


def test_wrong_configurations_end_with_status_2(capsys) -> None:
    assert main(f"verify {BASE} --num-attention-heads 33".split()) == 2
    assert "nearest hidden size" in capsys.readouterr().err


def test_help_and_plans_need_no_torch() -> None:
    code = (
        "import json, sys; from megazero.cli import COMMANDS, main; main(['--help'])\n"
        "import megazero.plan.communication\n"
        "assert not [name for name in COMMANDS if main([name, '--help'])]\n"
        "print(json.dumps('torch' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) is False
    assert all(name in done.stdout and command.help in done.stdout for name, command in COMMANDS.items())
    assert "--verify-steps N\n        optimizer steps of each run, 4 to 100" in done.stdout


def test_shipped_configurations_shrink() -> None:
    assert len(CONFIGS) == 5
    for path in CONFIGS:
        command = next(line for line in path.read_text().splitlines() if line.startswith("# megazero verify"))
        words = (
            command.removeprefix("# megazero verify ").replace("pretrain/configs", str(path.parent)).split()
        )
        request = read_request(words)
        found = shrink(
            request.config, request.world, request.options.verify_ranks, request.options.verify_steps
        )
        assert found.layout.world.world_size <= 16 and sum(stage_layers(request.config, found.layout.pp)) >= 2


# -- bytes ---------------------------------------------------------------------------------------------


def test_messages() -> None:
    # 64 digits of 4 bits and 8 scales of 2 bytes are 48 bytes; 3 exact elements of 4 bytes fill 16
    assert Coding(4, 8).message_bytes(64, 12) == 48 + 16


def test_what_stays_gathered_is_not_gathered_again() -> None:
    copies, sizes = Copies([[[0], [1], [2]]]), [1, 1, 1]
    once, twice = [("F", 0), ("B", 0)], [("F", 0), ("B", 0)] * 2
    assert gathers(copies, once, sizes) == {0: 2, 1: 2, 2: 1}
    assert gathers(copies, twice, sizes) == {0: 3, 1: 4, 2: 2}
    assert gathers(replace(copies, keep_gathered=True), twice, sizes) == {0: 1, 1: 1, 2: 1}
    tied = Copies([[[0], [1], [2, 0]]])  # the head needs the embedding, to the end of the backward
    assert gathers(tied, once, sizes) == {0: 2, 1: 2, 2: 1}
    split = [("F", 0), ("F", 0), ("I", 0), ("W", 0), ("I", 0), ("W", 0)]
    assert gathers(copies, split, sizes) == {0: 4, 1: 4, 2: 3}


@pytest.mark.parametrize(
    ("prefetch_bytes", "expected"),
    [(0, {0: 3, 1: 4, 2: 4, 3: 2}), (1, {0: 3, 1: 3, 2: 2, 3: 2}), (2, {0: 3, 1: 1, 2: 1, 3: 2})],
)
def test_what_comes_again_within_the_bytes_stays(prefetch_bytes: int, expected: dict[int, int]) -> None:
    """F 0 1 2 3, B 3 2 1 0, twice. Of 1 and 2 none stays while the others turn, the one beside them, or both."""
    copies = Copies([[[0], [1], [2], [3]]], prefetch_bytes=prefetch_bytes)
    program = [("F", 0), ("B", 0)] * 2
    assert gathers(copies, program, [1] * 4) == expected
