"""Users' mistakes and dying ranks: one clear error with its cause and cure, an exit status, nothing harmed."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megazero.data.tokenizer import NullTokenizer, write_meta
from tests import ROOT
from tests.dist.pool import run_ranks
from tests.dist.runs import digest, refusals, train_all, write_data
from tests.sizes import LEAST

PROGRAM = str(ROOT / "pretrain" / "pretrain_gpt.py")


# -- flags: before torch is imported -----------------------------------------------------------------


def program(folder: Path, flags: str, rank: int = 0, world: int = 4) -> subprocess.CompletedProcess:
    """pretrain_gpt.py as one rank of a launcher's world, where importing torch is an error."""
    (folder / "torch").mkdir(exist_ok=True)
    (folder / "torch" / "__init__.py").write_text("raise AssertionError('torch was imported')")
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    env |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "4"}
    return subprocess.run(
        [sys.executable, PROGRAM, *flags.split()], env=env, capture_output=True, text=True, timeout=120
    )


GOOD = f"{LEAST} --micro-batch-size 2 --train-iters 4 "
FLAGS = {
    "all at once": (
        "--hidden-sise 64 --num-attention-heads 3 --num-query-groups 2 --ffn-hidden-size 50 --seq-length 9 "
        "--tensor-model-parallel-size 4 --sequence-parallel --global-batch-size 7 --zero-weight-bits 8",
        [
            "--hidden-sise does not exist; nearest: --hidden-size",
            "--num-attention-heads 3 do not divide into --num-query-groups 2",
            "--hidden-size 32 does not divide by --num-attention-heads 3",
            "--num-attention-heads 3 does not divide by --tensor-model-parallel-size 4",
            "--ffn-hidden-size 50 does not divide by --tensor-model-parallel-size 4",
            "--seq-length 9 does not divide by --tensor-model-parallel-size 4",
            "--global-batch-size 7 is not a multiple of micro-batch size 2",
            "--zero-weight-bits 8 has no effect without --zero-quantized-weights",
        ],
    ),
    "shard factors": ("--zero-shard 2,3,4", ["shard factors P,G,OS = 2,3,4", "nearest legal: "]),
    "a preset without room": (
        "--zero-preset hpz --ranks-per-node 1",
        ["hpz", "nearest"],
    ),
    "nodes": ("--ranks-per-node 3", ["3", "nearest"]),
    "a value": (
        "--lr 1e-3x --seed -1",
        ["--lr", "1e-3x", "--seed -1 must be at least 0; the default is 1234"],
    ),
    "a key of a file": (
        "--config {folder}/run.yaml --deepspeed-config {folder}/ds.json",
        ["micro-batch-sise does not exist; nearest: ", "zero_force_ds_cpu_optimiser is not supported"],
    ),
}


@pytest.mark.parametrize("case", FLAGS)
def test_flags_end_with_2_and_every_error_before_torch(tmp_path: Path, case: str) -> None:
    (tmp_path / "run.yaml").write_text("micro_batch_sise: 3\n")
    (tmp_path / "ds.json").write_text('{"zero_force_ds_cpu_optimiser": true}')
    flags, wanted = FLAGS[case]
    done = program(tmp_path, GOOD + flags.format(folder=tmp_path))
    assert done.returncode == 2, done.stderr
    assert [part for part in wanted if part not in done.stderr] == [], done.stderr
    assert "Traceback" not in done.stderr and "--help lists every flag" in done.stderr
    assert (
        f"{len([x for x in done.stderr.splitlines() if x.startswith('  -')])} configuration error"
        in done.stderr
    )


# What a pipeline cannot be, and every line that is said of it.
FOUR = "--num-layers 4 --pipeline-model-parallel-size 2 "
INTERLEAVED = FOUR + "--num-virtual-stages-per-pipeline-rank 2 "
GROUPS = "micro-batch size 2 x data-parallel size 2 x 2 pipeline ranks (schedule interleaved) = 8"
PIPELINES = {
    "fewer layers than ranks": (
        "--pipeline-model-parallel-size 4",
        [
            "--pipeline-model-parallel-size 4: 2 layers cannot fill 4 stages (4 ranks x 1 each), each at least one; "
            "nearest: 2 ranks, or 4 layers"
        ],
    ),
    "fewer layers than virtual stages": (
        "--num-layers 3 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
        [
            "--pipeline-model-parallel-size 2: 3 layers cannot fill 4 stages (2 ranks x 2 each), each at least one"
        ],
    ),
    "layers that do not divide": (
        "--num-layers 10 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
        [
            "--num-layers 10 do not divide by --pipeline-model-parallel-size 2 x "
            "--num-layers-per-virtual-pipeline-stage 2 = 4; nearest: 1 or 5"
        ],
    ),
    "virtual stages that the schedule has not": (
        INTERLEAVED + "--pipeline-schedule zb-h1",
        ["--pipeline-schedule zb-h1: schedule zb-h1 has one stage per rank, not 2; nearest: interleaved"],
    ),
    "no virtual stages": (
        FOUR + "--pipeline-schedule interleaved",
        ["schedule interleaved needs at least 2 stages per rank, not 1; nearest: 1f1b"],
    ),
    "micro-batches": (
        INTERLEAVED + "--global-batch-size 12",
        [f"--global-batch-size 12 is not a multiple of {GROUPS}; nearest: 8 or 16"],
    ),
    "micro-batches of a ramp-up": (
        INTERLEAVED + "--global-batch-size 24 --rampup-batch-size 12 4 100",
        [
            f"--rampup-batch-size starts at 12, which is not a multiple of {GROUPS}; nearest: 8 or 16",
        ],
    ),
    "a partition": (
        "--num-layers 8 --pipeline-model-parallel-size 4 --pipeline-partition 3,3,3",
        [
            "layers per stage 3,3,3: 3 numbers for 4 stages, their sum is 9, the model has 8 layers; nearest: 2,2,2,2"
        ],
    ),
    "the world": (
        "--num-layers 6 --pipeline-model-parallel-size 3",
        ["4 ranks do not divide by tensor-parallel size 1 x pipeline size 3; nearest world size: 3"],
    ),
    "names": (
        FOUR + "--pipeline-schedule 1f1 --pipeline-partition balance",
        [
            "--pipeline-schedule 1f1 is not one of gpipe, 1f1b, interleaved, zb-h1; nearest: 1f1b",
            "--pipeline-partition balance is not one of balanced, uniform, type:transformer|embedding or layers per "
            "stage such as 5,6,6,5; nearest: balanced",
        ],
    ),
    "several at once": (
        "--num-layers 3 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--pipeline-schedule gpipe --global-batch-size 7 --zero-preset zero4",
        [
            "--pipeline-schedule gpipe: schedule gpipe has one stage per rank, not 2; nearest: interleaved",
            "3 layers cannot fill 4 stages",
            "--global-batch-size 7 is not a multiple of micro-batch size 2 x data-parallel size 2 = 4; nearest:",
            "--zero-preset zero4",
        ],
    ),
}


@pytest.mark.parametrize("case", PIPELINES)
def test_pipelines_that_cannot_be_end_with_2_and_nothing_written(tmp_path: Path, case: str) -> None:
    flags, wanted = PIPELINES[case]
    places = " --global-batch-size 8" if "--global-batch-size" not in flags else ""
    places += f" --log-dir {tmp_path}/logs --save {tmp_path}/run"
    done = program(tmp_path, GOOD + flags + places)
    assert done.returncode == 2 and not done.stdout, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("  - ")]
    assert len(lines) == len(wanted), done.stderr
    assert [part for part in wanted if part not in done.stderr] == [], done.stderr
    assert "Traceback" not in done.stderr and os.listdir(tmp_path) == ["torch"]


def test_one_rank_speaks_for_all_and_help_needs_no_torch(tmp_path: Path) -> None:
    other = program(tmp_path, GOOD + "--global-batch-size 7", rank=1)
    assert other.returncode == 2 and not other.stderr
    assert program(tmp_path, "--help").returncode == 0
    assert "torch was imported" in program(tmp_path, GOOD).stderr  # the trap works


# -- data --------------------------------------------------------------------------------------------


def cut(path: Path, size: int) -> None:
    os.truncate(path, size)


def other_tokenizer(prefix: Path, **changes: object) -> None:
    info = NullTokenizer(50).info
    write_meta(prefix, dataclasses.replace(info, **changes))  # type: ignore[arg-type]


def wide(prefix: Path) -> None:
    """Tokens that no vocabulary of 51 has, from a tool that records no tokenizer."""
    write_data(prefix, top=60)


DATA = {
    "no .idx": (lambda p: Path(f"{p}.idx").unlink(), r"\.idx does not exist; the data path is"),
    "no .bin": (lambda p: Path(f"{p}.bin").unlink(), r"\.bin does not exist; the data path is"),
    "empty .idx": (lambda p: cut(Path(f"{p}.idx"), 0), r"\.idx is empty; copy it again"),
    "empty .bin": (lambda p: cut(Path(f"{p}.bin"), 0), r"\.bin is empty: 0 bytes, but .* copy both"),
    "short .idx": (lambda p: cut(Path(f"{p}.idx"), 99), r"\.idx is truncated: 99 bytes, .* copy it again"),
    "short header": (lambda p: cut(Path(f"{p}.idx"), 20), r"\.idx is truncated: 20 bytes"),
    "short .bin": (lambda p: cut(Path(f"{p}.bin"), 100), r"\.bin is truncated: 100 bytes, .* copy both"),
    "foreign .idx": (
        lambda p: Path(f"{p}.idx").write_text("a text file, " * 50),
        r"\.idx is not a Megatron index: .*megazero preprocess",
    ),
    "other .idx": (
        lambda p: shutil.copy(write_data(p.with_name("longer"), 50) + ".idx", f"{p}.idx"),
        r"\.bin is truncated: .* copy both",
    ),
    "tokenizer of another size": (
        lambda p: other_tokenizer(p, vocab_size=99),
        "another tokenizer: vocabulary size 99, this run's has 51; name the data's tokenizer",
    ),
    "tokenizer of the same size": (
        lambda p: other_tokenizer(p, fingerprint="0" * 64),
        "another tokenizer: sha256 000.* name the data's tokenizer",
    ),
    "tokens beyond the vocabulary": (wide, "token 5[0-9].* vocabulary"),
    "a damaged record": (
        lambda p: Path(f"{p}.meta.json").write_text("{"),
        r"\.meta\.json is damaged .*megazero preprocess",
    ),
    "no token to validate on": (
        lambda p: write_data(p, 3),
        "the valid split gets 0 of 3 documents .* larger share \\(--split",
    ),
}


def test_bad_data(tmp_path: Path) -> None:
    jobs = []
    for number, (spoil, _) in enumerate(DATA.values()):
        prefix = tmp_path / str(number) / "data"
        write_data(prefix)
        spoil(prefix)
        values = {"mock_data": None, "data_path": (str(prefix),), "eval_iters": 1, "split": "90,10,0"}
        jobs.append({**values, "log_dir": str(tmp_path / "logs"), "data_cache_path": str(tmp_path / "cache")})
    before = digest(tmp_path)
    told = run_ranks(2, refusals, jobs, timeout=300)
    for number, (case, (_, message)) in enumerate(DATA.items()):
        for rank in range(2):
            text = told[rank][number]
            assert text and re.search(message, text), (case, text)
            assert str(tmp_path / str(number)) in text or "token" in case, (case, text)
    after = digest(tmp_path)
    assert {name: after[name] for name in before} == before


# -- checkpoints -------------------------------------------------------------------------------------


def newest(root: Path) -> Path:
    return root / "iter_0000002"


def remove(root: Path, name: str) -> None:
    (newest(root) / name).unlink()


def shorten(root: Path, pattern: str) -> None:
    path = sorted(newest(root).glob(pattern))[-1]
    os.truncate(path, path.stat().st_size - 1)


def flip(root: Path, pattern: str) -> None:
    path = sorted(newest(root).glob(pattern))[-1]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


CURE = "Restore the file or load an older checkpoint"
# case: (what happens to the files, what the run asks for, what it is told)
CHECKPOINTS = {
    "absent": (shutil.rmtree, {"save": None}, "holds no complete checkpoint.* --allow-fresh-start"),
    "empty": (
        lambda r: shutil.rmtree(newest(r)),
        {"save": None},
        "holds no complete checkpoint.* --allow-fresh-start",
    ),
    "absent, and that is to be an error": (
        shutil.rmtree,
        {"exit_on_missing_checkpoint": True},
        "holds no complete checkpoint.* leave --exit-on-missing-checkpoint out to start from random weights",
    ),
    "absent, and its weights are wanted": (shutil.rmtree, {"finetune": True}, "holds no complete checkpoint"),
    "another trainer's": (
        lambda r: (shutil.rmtree(newest(r)), (r / "latest").write_text("global_step2")),
        {},
        "no complete checkpoint; 'latest' there is DeepSpeed's, whose checkpoints are not read here$",
    ),
    "no manifest": (
        lambda r: remove(r, "manifest.json"),
        {},
        "no complete checkpoint.*iter_0000002.*no 'manifest.json'",
    ),
    "damaged manifest": (
        lambda r: flip(r, "manifest.json"),
        {},
        "no complete checkpoint.*iter_0000002.*manifest.json' is damaged",
    ),
    "a file is missing": (
        lambda r: remove(r, "state.json"),
        {},
        "no complete checkpoint.*'state.json' is missing",
    ),
    "a file is short": (
        lambda r: shorten(r, "*.distcp"),
        {},
        "no complete checkpoint.*distcp' is .* bytes long",
    ),
    "a flipped bit": (lambda r: flip(r, "*.distcp"), {}, f"distcp' has checksum .*{CURE}"),
    "a flipped bit in state.json": (
        lambda r: flip(r, "state.json"),
        {},
        f"'state.json' has checksum .*{CURE}",
    ),
    "a flipped bit in .metadata": (lambda r: flip(r, ".metadata"), {}, f"'.metadata' has checksum .*{CURE}"),
    "named, and damaged": (lambda r: flip(r, "*.distcp"), {"ckpt_step": 2}, f"distcp' has checksum .*{CURE}"),
    "named, and short": (
        lambda r: (shutil.copytree(newest(r), r / "iter_0000001"), shorten(r, "*.distcp")),
        {"ckpt_step": 2},
        "iter_0000002' is incomplete.*bytes long",
    ),
    "named, and absent": (None, {"ckpt_step": 1}, "holds no checkpoint of step 1; nearest: 2"),
    "one folder above": (
        lambda r: shutil.move(newest(r), r / "checkpoint" / "iter_0000002"),
        {"save": None, "allow_fresh_start": True},
        "no complete checkpoint; a checkpoint lies at .*: name .*/checkpoint to load it$",
    ),
    "superseded": (
        lambda r: newest(r).rename(r / "iter_0000002.superseded"),
        {},
        "no complete checkpoint; a checkpoint lies at .*superseded: name .*superseded to load it$",
    ),
    "a folder of Hugging Face": (
        lambda r: (shutil.rmtree(newest(r)), (r / "config.json").write_text("{}")),
        {"save": None, "allow_fresh_start": True},
        "no complete checkpoint; 'config.json' there is Hugging Face's: --load hf:.* starts from its weights$",
    ),
    "another width": (
        None,
        {"hidden_size": 64},
        "--hidden-size 64 is not the model of the checkpoint in .*, which has --hidden-size 32; leave it out",
    ),
    "another depth": (None, {"num_layers": 3}, "--num-layers 3 is not the model of .* --num-layers 2;"),
    "another family": (
        None,
        {"model_family": "gpt", "num_query_groups": 8},
        "family gpt is .* has --model-family llama",
    ),
    "another vocabulary": (None, {"vocab_size": 53}, "--vocab-size 53 is not .* has --vocab-size 51;"),
    "another optimizer": (
        None,
        {"optimizer": "sgd"},
        r"holds optimizer state \['exp_avg', 'exp_avg_sq'\], --optimizer sgd needs .*--no-load-optim",
    ),
    "another tokenizer": (
        None,
        {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "{tokenizer}", "vocab_size": None},
        "was trained with another tokenizer.* --finetune",
    ),
}


def save_tokenizer(folder: Path) -> str:
    """A word-level tokenizer of 51 entries."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {f"w{i}": i for i in range(50)} | {"<|endoftext|>": 50}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="w0")
    path = str(folder / "tokenizer.json")
    tokenizers.Tokenizer(model).save(path)
    return path


def test_bad_checkpoints(tmp_path: Path) -> None:
    base = {
        "log_dir": str(tmp_path / "logs"),
        "zero_preset": "zero3",
        "train_iters": 2,
        "global_batch_size": 2,
    }
    base["lr_warmup_iters"] = 0
    good, tokenizer = tmp_path / "good", save_tokenizer(tmp_path)
    run_ranks(2, train_all, [{**base, "save": str(good)}], timeout=300)
    jobs = []
    for number, (spoil, changes, _) in enumerate(CHECKPOINTS.values()):
        root = tmp_path / str(number)
        shutil.copytree(good, root)
        if spoil:
            spoil(root)
        texts = {k: v.format(tokenizer=tokenizer) if isinstance(v, str) else v for k, v in changes.items()}
        jobs.append({**base, "train_iters": 3, "load": str(root), "save": str(root), **texts})
    before = digest(tmp_path)
    told = run_ranks(2, refusals, jobs, timeout=300)
    for number, (case, (_, _, message)) in enumerate(CHECKPOINTS.items()):
        for rank in range(2):
            text = told[rank][number]
            assert text and re.search(message, text, re.DOTALL), (case, text)
            assert text.startswith(("CheckpointError: ", "ConfigError: ")), (case, text)
            assert str(tmp_path / str(number)) in text, (case, text)
    assert digest(tmp_path) == before
    (went_on,), _ = run_ranks(2, train_all, [{**base, "train_iters": 3, "load": str(good)}], timeout=300)
    assert went_on.start == 2 and len(went_on.losses) == 1


def test_a_broken_newest_checkpoint_is_told_when_an_older_one_stands_in(tmp_path: Path) -> None:
    base = {"log_dir": str(tmp_path / "logs"), "train_iters": 2, "lr_warmup_iters": 0, "global_batch_size": 2}
    base["save"] = str(tmp_path / "run")
    run_ranks(1, train_all, [{**base, "save_interval": 1}], timeout=300)
    shorten(tmp_path / "run", "*.distcp")
    (seen,) = run_ranks(1, train_all, [{**base, "load": str(tmp_path / "run")}], timeout=300)[0]
    assert seen.start == 1 and len(seen.notes) == 2 and "iter_0000002.superseded" in seen.notes[1]
    assert re.search("iter_0000002 was left out: .*is incomplete.*bytes long", seen.notes[0]), seen.notes
