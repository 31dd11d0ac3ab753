"""Users' mistakes and dying ranks: one clear error with its cause and cure, an exit status, nothing harmed."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megazero.checkpoint import store
from megazero.data.tokenizer import TokenizerInfo, write_meta
from megazero.train import setup
from tests.dist.pool import run_ranks
from tests.dist.runs import TINY, Processes, digest, free_port, refusals, train_all, write_data

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(ROOT / "pretrain" / "pretrain_gpt.py")


# -- flags: before torch is imported -----------------------------------------------------------------


def program(folder: Path, flags: str, rank: int = 0, world: int = 4) -> subprocess.CompletedProcess:
    """pretrain_gpt.py as one rank of a launcher's world, where importing torch is an error."""
    (folder / "torch").mkdir(exist_ok=True)
    (folder / "torch" / "__init__.py").write_text("raise AssertionError('torch was imported')")
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    env |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "4"}
    return subprocess.run(
        [sys.executable, PROGRAM, *flags.split()], env=env, capture_output=True, text=True, timeout=60
    )


GOOD = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --lr 1e-3 "
    "--train-iters 4 --mock-data --vocab-size 50 "
)
FLAGS = {
    "all at once": (
        "--hidden-sise 64 --num-attention-heads 3 --num-query-groups 2 --ffn-hidden-size 50 --seq-length 9 "
        "--tensor-model-parallel-size 4 --sequence-parallel --global-batch-size 7 --save-interval 2",
        [
            "--hidden-sise does not exist; nearest: --hidden-size",
            "--num-attention-heads 3 do not divide into --num-query-groups 2",
            "--hidden-size 32 does not divide by --num-attention-heads 3",
            "--num-attention-heads 3 does not divide by --tensor-model-parallel-size 4",
            "--num-query-groups 2 does not divide by --tensor-model-parallel-size 4",
            "--ffn-hidden-size 50 does not divide by --tensor-model-parallel-size 4",
            "--seq-length 9 does not divide by --tensor-model-parallel-size 4",
            "--global-batch-size 7 is not a multiple of micro-batch size 2",
            "--save-interval 2 has no effect without --save",
        ],
    ),
    "shard factors": ("--zero-shard 2,3,4", ["shard factors P,G,OS = 2,3,4", "nearest legal: "]),
    "a preset without room": (
        "--zero-preset hpz --ranks-per-node 1",
        ["hpz", "nearest"],
    ),
    "nodes": ("--ranks-per-node 3", ["3", "nearest"]),
    "a value": ("--lr 1e-3x --seed -1", ["--lr", "1e-3x", "--seed -1 must be at least 0; nearest: 0"]),
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


def test_one_rank_speaks_for_all_and_help_needs_no_torch(tmp_path: Path) -> None:
    other = program(tmp_path, GOOD + "--global-batch-size 7", rank=1)
    assert other.returncode == 2 and not other.stderr
    assert program(tmp_path, "--help").returncode == 0
    assert "torch was imported" in program(tmp_path, GOOD).stderr  # the trap works


# -- data --------------------------------------------------------------------------------------------


def cut(path: Path, size: int) -> None:
    os.truncate(path, size)


def other_tokenizer(prefix: Path, **changes: object) -> None:
    info = setup.NullTokenizer(50).info
    write_meta(prefix, dataclasses.replace(info, **changes))  # type: ignore[arg-type]


def wide(prefix: Path) -> None:
    """Tokens that no vocabulary of 51 has, from a tool that records no tokenizer."""
    write_data(prefix, top=60)


DATA = {
    "no .idx": (lambda p: Path(f"{p}.idx").unlink(), r"\.idx does not exist; --data-path takes"),
    "no .bin": (lambda p: Path(f"{p}.bin").unlink(), r"\.bin does not exist; --data-path takes"),
    "empty .idx": (lambda p: cut(Path(f"{p}.idx"), 0), r"\.idx is empty; copy it again"),
    "empty .bin": (lambda p: cut(Path(f"{p}.bin"), 0), r"\.bin is empty: 0 bytes, but .* copy both"),
    "short .idx": (lambda p: cut(Path(f"{p}.idx"), 99), r"\.idx is truncated: 99 bytes, .* copy it again"),
    "short header": (lambda p: cut(Path(f"{p}.idx"), 20), r"\.idx is truncated: 20 bytes"),
    "short .bin": (lambda p: cut(Path(f"{p}.bin"), 100), r"\.bin is truncated: 100 bytes, .* copy both"),
    "foreign .idx": (
        lambda p: Path(f"{p}.idx").write_text("a text file, " * 50),
        r"\.idx is not a Megatron index: .*tools/preprocess_data",
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
        r"\.meta\.json is damaged .*tools/preprocess_data",
    ),
    "no token to validate on": (
        lambda p: write_data(p, 3),
        "the valid split gets 0 of 3 documents .* --split",
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
    told = run_ranks(2, refusals, jobs, timeout=60)
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
    "absent": (shutil.rmtree, {}, "holds no complete checkpoint.* --allow-fresh-start"),
    "empty": (lambda r: shutil.rmtree(newest(r)), {}, "holds no complete checkpoint.* --allow-fresh-start"),
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
    "another width": (
        None,
        {"hidden_size": 64},
        r"of another model: .*model \(.*checkpoint \(.*Start with the model sizes",
    ),
    "another depth": (None, {"num_layers": 3}, r"of another model: .*layers\.2\..*checkpoint absent"),
    "another family": (None, {"model_family": "gpt", "num_query_groups": 8}, "of another model: "),
    "another vocabulary": (None, {"vocab_size": 53}, r"of another model: .*\(53, 32\).*\(51, 32\)"),
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
    run_ranks(2, train_all, [{**base, "save": str(good)}])
    jobs = []
    for number, (spoil, changes, _) in enumerate(CHECKPOINTS.values()):
        root = tmp_path / str(number)
        shutil.copytree(good, root)
        if spoil:
            spoil(root)
        texts = {k: v.format(tokenizer=tokenizer) if isinstance(v, str) else v for k, v in changes.items()}
        jobs.append({**base, "train_iters": 3, **texts, "load": str(root), "save": str(root)})
    before = digest(tmp_path)
    told = run_ranks(2, refusals, jobs, timeout=60)
    for number, (case, (_, _, message)) in enumerate(CHECKPOINTS.items()):
        for rank in range(2):
            text = told[rank][number]
            assert text and re.search(message, text, re.DOTALL), (case, text)
            assert text.startswith("CheckpointError: ") and str(tmp_path / str(number)) in text, (case, text)
    assert digest(tmp_path) == before
    (went_on,), _ = run_ranks(2, train_all, [{**base, "train_iters": 3, "load": str(good)}])
    assert went_on.start == 2 and len(went_on.losses) == 1


def test_a_broken_newest_checkpoint_is_told_when_an_older_one_stands_in(tmp_path: Path) -> None:
    base = {"log_dir": str(tmp_path / "logs"), "train_iters": 2, "lr_warmup_iters": 0, "global_batch_size": 2}
    base["save"] = str(tmp_path / "run")
    run_ranks(1, train_all, [{**base, "save_interval": 1}])
    shorten(tmp_path / "run", "*.distcp")
    (seen,) = run_ranks(1, train_all, [{**base, "load": str(tmp_path / "run")}])[0]
    assert seen.start == 1 and len(seen.notes) == 1
    assert re.search("iter_0000002 was left out: .*is incomplete.*bytes long", seen.notes[0]), seen.notes


# -- ranks that die, hang, diverge or are told to stop -------------------------------------------------

LONG = {
    "train_iters": 100_000,
    "global_batch_size": 2,
    "micro_batch_size": 1,
    "distributed_timeout_minutes": 0.5,
}
MESSAGE = re.compile(r"^\[rank (\d)\] (\w+): (.*)$", re.MULTILINE)


def errors(text: str) -> list[tuple[str, str]]:
    """(kind, words) of every error line of a rank's log."""
    return [(kind, words) for _, kind, words in MESSAGE.findall(text)]


def iterations(log_dir: Path) -> int:
    path = log_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_other_with_one_message(tmp_path: Path, victim: int) -> None:
    save = {"save": str(tmp_path / "run"), "save_interval": 2, "save_keep_last": 2}
    values = {**LONG, **save, "zero_preset": "zero3", "log_dir": str(tmp_path / "logs")}
    ranks = Processes.start(2, values, tmp_path)
    ranks.wait_for(lambda: iterations(tmp_path / "logs") > 5)
    os.kill(ranks.ranks[victim].pid, signal.SIGKILL)
    began = time.monotonic()
    codes = ranks.statuses(60)
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim] == 1, ranks.texts()
    assert time.monotonic() - began < 30  # noticed at once, not at the time-out
    ((kind, words),) = errors(ranks.texts()[1 - victim])
    assert kind == "RankFailure" and f"rank {1 - victim} on " in words
    assert re.search(r"in (iteration|saving iteration) \d+: a collective failed because of", words), words
    assert "--load" in words and "killed process" in words
    assert "Traceback" not in ranks.texts()[1 - victim]
    latest = store.latest(tmp_path / "run")
    assert latest is not None and store.verify(latest).step >= 4


def test_a_rank_that_hangs_ends_the_other_at_the_time_out(tmp_path: Path) -> None:
    values = {**LONG, "distributed_timeout_minutes": 0.1, "log_dir": str(tmp_path / "logs")}
    ranks = Processes.start(2, values, tmp_path)
    ranks.wait_for(lambda: iterations(tmp_path / "logs") > 2)
    os.kill(ranks.ranks[1].pid, signal.SIGSTOP)
    began = time.monotonic()
    ranks.ranks[0].join(40)
    waited, code = time.monotonic() - began, ranks.ranks[0].exitcode
    ranks.stop()
    assert code == 1 and 3 < waited < 30, (code, waited, ranks.texts())
    ((kind, words),) = errors(ranks.texts()[0])
    assert kind == "RankFailure" and "within the time-out (time-out 6 s)" in words, words
    assert "--distributed-timeout-minutes" in words


def die_at_the_second_sync(rank: int) -> None:
    """In rank 1, SIGKILL in the middle of writing a checkpoint."""
    sync, left = os.fsync, [1]

    def counted(descriptor: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        sync(descriptor)

    if rank == 1:
        os.fsync = counted


def test_a_rank_killed_while_saving_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    save = {"save": str(tmp_path / "run"), "save_interval": 1, "save_keep_last": 1}
    values = {**LONG, **save, "log_dir": str(tmp_path / "logs")}
    run_ranks(2, train_all, [{**values, "train_iters": 3}])
    before = digest(tmp_path / "run")
    ranks = Processes.start(2, {**values, "load": save["save"]}, tmp_path, prepare=die_at_the_second_sync)
    codes = ranks.statuses(60)
    assert codes == [1, -signal.SIGKILL], ranks.texts()
    ((kind, words),) = errors(ranks.texts()[0])
    assert kind == "RankFailure" and "saving iteration 4" in words, words
    latest = store.latest(tmp_path / "run")
    assert latest is not None and latest.name == "iter_0000003"
    after = digest(tmp_path / "run")
    assert {name: after[name] for name in before} == before
    assert any(".partial-" in name for name in after)
    resumed, _ = run_ranks(2, train_all, [{**values, "load": save["save"], "train_iters": 4}])
    assert resumed[0].start == 3 and os.listdir(tmp_path / "run") == ["iter_0000004"]


def test_a_loss_that_is_nan_stops_every_rank_and_harms_no_checkpoint(tmp_path: Path) -> None:
    common = {"log_dir": str(tmp_path / "logs"), "global_batch_size": 4, "clip_grad": 0}
    common |= {"lr_decay_style": "constant", "lr_warmup_iters": 0}
    run_ranks(2, train_all, [{**common, "train_iters": 2, "save": str(tmp_path / "run")}])
    before = digest(tmp_path / "run")
    values = {**common, "load": str(tmp_path / "run"), "save": str(tmp_path / "run"), "lr": 1e38}
    ranks = Processes.start(2, values, tmp_path)
    assert ranks.statuses(60) == [1, 1], ranks.texts()
    for rank in range(2):
        ((kind, words),) = errors(ranks.texts()[rank])
        assert kind == "NonFiniteLoss" and "iteration 4: the loss is nan" in words, words
        assert "rank 0 (loss nan, samples 12, 14)" in words and "rank 1 (loss nan, samples 13, 15)" in words
        assert "resume from it with a lower --lr" in words and "Traceback" not in ranks.texts()[rank]
    assert digest(tmp_path / "run") == before
    resumed, _ = run_ranks(2, train_all, [{**common, "train_iters": 3, "load": str(tmp_path / "run")}])
    assert resumed[0].start == 2 and np.isfinite(resumed[0].losses[0][1])


def test_sigterm_saves_and_ends_well(tmp_path: Path) -> None:
    values = {**LONG, "save": str(tmp_path / "run"), "log_dir": str(tmp_path / "logs")}
    ranks = Processes.start(2, {**values, "exit_signal_handler": True}, tmp_path)
    ranks.wait_for(lambda: iterations(tmp_path / "logs") > 2)
    os.kill(ranks.ranks[1].pid, signal.SIGTERM)  # one rank is told, both stop at the same iteration
    assert ranks.statuses(60) == [0, 0], ranks.texts()
    done = iterations(tmp_path / "logs")
    assert f"stopping after iteration {done}: another rank received a signal" in ranks.texts()[0]
    latest = store.latest(tmp_path / "run")
    assert latest is not None and store.verify(latest).step == done


def blind(rank: int) -> None:
    """Rank 1 sees another tokenizer than the data's, as on a node with an older copy."""
    if rank == 1:
        setup.tokenizer_info = lambda config: TokenizerInfo("0" * 64, 51, 50)


def test_a_mistake_of_one_rank_alone_is_said_by_it(tmp_path: Path) -> None:
    prefix = tmp_path / "data"
    write_data(prefix)
    other_tokenizer(prefix)
    values = {**LONG, "mock_data": None, "data_path": (str(prefix),), "log_dir": str(tmp_path / "logs")}
    ranks = Processes.start(2, {**values, "train_iters": 3}, tmp_path, prepare=blind)
    assert ranks.statuses(60) == [1, 1], ranks.texts()
    ((kind, words),) = errors(ranks.texts()[1])
    assert kind == "ValueError" and "was made with another tokenizer" in words
    ((kind, words),) = errors(ranks.texts()[0])
    assert kind == "RankFailure" and "in the preparation" in words, words


def test_a_mistake_of_all_ranks_is_said_once(tmp_path: Path) -> None:
    values = {**TINY, "load": str(tmp_path / "nowhere"), "log_dir": str(tmp_path / "logs")}
    ranks = Processes.start(2, values, tmp_path)
    assert ranks.statuses(60) == [1, 1], ranks.texts()
    (line,) = [line for text in ranks.texts() for line in errors(text)]
    assert line[0] == "CheckpointError" and "nowhere holds no complete checkpoint" in line[1]


def test_the_program_under_torchrun_fails_when_a_rank_is_killed(tmp_path: Path) -> None:
    flags = [
        f"--{name.replace('_', '-')}={value}" for name, value in {**TINY, **LONG}.items() if value is not True
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += [PROGRAM, *flags, "--mock-data", "--log-dir", str(tmp_path / "logs")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())}
    with open(tmp_path / "log", "wb") as log:
        run = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
    end = time.monotonic() + 90
    while iterations(tmp_path / "logs") < 3 and time.monotonic() < end and run.poll() is None:
        time.sleep(0.1)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
    if not children.exists():
        run.terminate()
        pytest.skip("no /proc to find the ranks in")
    ranks = children.read_text().split()
    assert len(ranks) == 2, (tmp_path / "log").read_text()
    os.kill(int(ranks[-1]), signal.SIGKILL)
    assert run.wait(60) != 0
    assert "exitcode  : -9" in (tmp_path / "log").read_text()
