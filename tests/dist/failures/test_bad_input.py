"""Users' mistakes and dying ranks: one clear error with its cause and cure, an exit status, nothing harmed."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megazero.data.tokenizer import NullTokenizer, write_meta
from tests import ROOT
from tests.dist.pool import run_ranks
from tests.dist.runs import digest, refusals, train_all, write_data
from tests.messages import names
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
SOME_WRONG = (
    "--hidden-sise 64 --num-attention-heads 3 --ffn-hidden-size 50 --seq-length 9 --tensor-model-parallel-size 4 "
    "--sequence-parallel --zero-weight-bits 8"
)
# a command line, and the words of each of its errors
FLAGS: dict[str, tuple[str, list[tuple[str, ...]]]] = {
    "all at once": (
        SOME_WRONG,
        [
            ("--hidden-sise", "--hidden-size"),
            ("--hidden-size 32", "--num-attention-heads 3"),
            ("--num-attention-heads 3", "--tensor-model-parallel-size 4"),
            ("--ffn-hidden-size 50", "--tensor-model-parallel-size 4"),
            ("--seq-length 9", "--tensor-model-parallel-size 4"),
            ("--zero-weight-bits 8", "--zero-quantized-weights"),
        ],
    ),
    "a pipeline and its batch": (  # tests/unit/config/test_pipeline.py has every mistake
        "--num-layers 1 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--pipeline-schedule gpipe --global-batch-size 7",
        [("gpipe", "interleaved"), ("1 layers", "4 stages"), ("--global-batch-size 7", "nearest")],
    ),
    "shard factors": ("--zero-shard 2,3,4", [("2,3,4", "nearest")]),
    "a preset without room": ("--zero-preset hpz --ranks-per-node 1", [("hpz", "nearest")]),
    "nodes": ("--ranks-per-node 3", [("3", "nearest")]),
    "a value": ("--lr 1e-3x --seed -1", [("--lr", "1e-3x"), ("--seed -1", "1234")]),
    "a key of a file": (
        "--config {folder}/run.yaml --deepspeed-config {folder}/ds.json",
        [("micro-batch-sise", "nearest"), ("zero_force_ds_cpu_optimiser",)],
    ),
}


@pytest.mark.parametrize("case", FLAGS)
def test_flags_end_with_2_and_every_error_before_torch(tmp_path: Path, case: str) -> None:
    (tmp_path / "run.yaml").write_text("micro_batch_sise: 3\n")
    (tmp_path / "ds.json").write_text('{"zero_force_ds_cpu_optimiser": true}')
    flags, wanted = FLAGS[case]
    places = f" --log-dir {tmp_path}/logs --save {tmp_path}/run"
    done = program(tmp_path, GOOD + flags.format(folder=tmp_path) + places)
    assert done.returncode == 2 and not done.stdout, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("  - ")]
    for words in wanted:
        assert any(all(word in line for word in words) for line in lines), (words, done.stderr)
    names(done.stderr, f"{len(lines)} configuration error", "--help")
    assert "Traceback" not in done.stderr and not {"logs", "run"} & {*os.listdir(tmp_path)}


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


# what is spoilt, and the words of what is said
DATA: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "no .idx": (lambda p: Path(f"{p}.idx").unlink(), (".idx", "does not exist")),
    "no .bin": (lambda p: Path(f"{p}.bin").unlink(), (".bin", "does not exist")),
    "empty .idx": (lambda p: cut(Path(f"{p}.idx"), 0), (".idx is empty", "copy it again")),
    "empty .bin": (lambda p: cut(Path(f"{p}.bin"), 0), (".bin is empty", "copy both")),
    "short .idx": (lambda p: cut(Path(f"{p}.idx"), 99), (".idx", "99 bytes", "copy it again")),
    "short header": (lambda p: cut(Path(f"{p}.idx"), 20), (".idx", "20 bytes")),
    "short .bin": (lambda p: cut(Path(f"{p}.bin"), 100), (".bin", "100 bytes", "copy both")),
    "foreign .idx": (lambda p: Path(f"{p}.idx").write_text("text, " * 99), (".idx", "megazero preprocess")),
    "other .idx": (
        lambda p: shutil.copy(write_data(p.with_name("longer"), 50) + ".idx", f"{p}.idx"),
        (".bin is truncated", "copy both"),
    ),
    "tokenizer of another size": (
        lambda p: other_tokenizer(p, vocab_size=99),
        ("another tokenizer", "99", "51"),
    ),
    "tokenizer of the same size": (
        lambda p: other_tokenizer(p, fingerprint="0" * 64),
        ("another tokenizer", "sha256 000"),
    ),
    "tokens beyond the vocabulary": (wide, ("token 5", "vocabulary")),
    "a damaged record": (
        lambda p: Path(f"{p}.meta.json").write_text("{"),
        (".meta.json", "megazero preprocess"),
    ),
    "no token to validate on": (lambda p: write_data(p, 3), ("valid", "0 of 3 documents", "--split")),
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
    for number, (case, (_, words)) in enumerate(DATA.items()):
        for rank in range(2):
            text = told[rank][number] or ""
            names(text, *words)
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


def without(root: Path) -> Path:
    """Remove the checkpoint, and return the folder."""
    shutil.rmtree(newest(root))
    return root


SEARCHED = {"save": None, "allow_fresh_start": True}
CURE, NONE, LIES = "load an older checkpoint", "no complete checkpoint", "a checkpoint lies at"
# what happens to the files, what the run asks for, the words of what it is told
CHECKPOINTS: dict[str, tuple[Callable[[Path], object] | None, dict[str, object], tuple[str, ...]]] = {
    "absent": (shutil.rmtree, {"save": None}, (NONE, "--allow-fresh-start")),
    "empty": (without, {"save": None}, (NONE, "--allow-fresh-start")),
    "absent, and that is to be an error": (
        shutil.rmtree, {"exit_on_missing_checkpoint": True}, (NONE, "--exit-on-missing-checkpoint"),
    ),
    "absent, and its weights are wanted": (shutil.rmtree, {"finetune": True}, (NONE,)),
    "another trainer's": (
        lambda r: (without(r) / "latest").write_text("global_step2"), {}, (NONE, "'latest'", "DeepSpeed"),
    ),
    "no manifest": (lambda r: remove(r, "manifest.json"), {}, (NONE, "iter_0000002", "manifest.json")),
    "damaged manifest": (lambda r: flip(r, "manifest.json"), {}, (NONE, "manifest.json' is damaged")),
    "a file is missing": (lambda r: remove(r, "state.json"), {}, (NONE, "state.json")),
    "a file is short": (lambda r: shorten(r, "*.distcp"), {}, (NONE, "distcp", "bytes long")),
    "a flipped bit": (lambda r: flip(r, "*.distcp"), {}, ("distcp", "checksum", CURE)),
    "a flipped bit in state.json": (lambda r: flip(r, "state.json"), {}, ("state.json", "checksum", CURE)),
    "a flipped bit in .metadata": (lambda r: flip(r, ".metadata"), {}, (".metadata", "checksum", CURE)),
    "named, and damaged": (lambda r: flip(r, "*.distcp"), {"ckpt_step": 2}, ("distcp", "checksum", CURE)),
    "named, and short": (
        lambda r: (shutil.copytree(newest(r), r / "iter_0000001"), shorten(r, "*.distcp")),
        {"ckpt_step": 2},
        ("iter_0000002", "incomplete", "bytes long"),
    ),
    "named, and absent": (None, {"ckpt_step": 1}, ("step 1", "nearest: 2")),
    "one folder above": (
        lambda r: shutil.move(newest(r), r / "checkpoint" / "iter_0000002"), SEARCHED, (LIES, "/checkpoint"),
    ),
    "superseded": (
        lambda r: newest(r).rename(r / "iter_0000002.superseded"), {}, (LIES, "iter_0000002.superseded"),
    ),
    "a folder of Hugging Face": (
        lambda r: (without(r) / "config.json").write_text("{}"), SEARCHED, ("'config.json'", "--load hf:"),
    ),
    "another width": (None, {"hidden_size": 64}, ("--hidden-size 64", "--hidden-size 32")),
    "another depth": (None, {"num_layers": 3}, ("--num-layers 3", "--num-layers 2")),
    "another family": (
        None, {"model_family": "gpt", "num_query_groups": 8}, ("family gpt", "--model-family llama"),
    ),
    "another vocabulary": (None, {"vocab_size": 53}, ("--vocab-size 53", "--vocab-size 51")),
    "another optimizer": (None, {"optimizer": "sgd"}, ("exp_avg_sq", "--optimizer sgd", "--no-load-optim")),
    "another tokenizer": (
        None,
        {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "{tokenizer}", "vocab_size": None},
        ("another tokenizer", "--finetune"),
    ),
}  # fmt: skip


def save_tokenizer(folder: Path) -> str:
    """A word-level tokenizer of 51 entries."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {f"w{i}": i for i in range(50)} | {"<|endoftext|>": 50}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="w0")
    path = str(folder / "tokenizer.json")
    tokenizers.Tokenizer(model).save(path)
    return path


def test_bad_checkpoints(tmp_path: Path) -> None:
    base = {"log_dir": str(tmp_path / "logs"), "train_iters": 2, "lr_warmup_iters": 0, "global_batch_size": 2}
    base["zero_preset"] = "zero3"
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
    for number, (case, (_, _, words)) in enumerate(CHECKPOINTS.items()):
        for rank in range(2):
            text = told[rank][number] or ""
            names(text, *words)
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
    names(seen.notes[0], "iter_0000002", "incomplete", "bytes long")
