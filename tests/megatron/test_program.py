"""NVIDIA's own pretrain_gpt.py on 4 CPU ranks, as it is and by the launcher's word, with the flags of the page.

It needs Megatron-LM of the installed megatron-core's version, and ``six``. Three minutes on 2 cores:

    git clone --branch core_v0.16.1 https://github.com/NVIDIA/Megatron-LM FOLDER
    MEGATRON_LM=FOLDER python -m pytest tests/megatron/test_program.py -m slow
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import ROOT

pytest.importorskip("megatron.core")
pytest.importorskip("megatron_core_patch")

FOLDER = "MEGATRON_LM"
FOLDER_PATH = Path(os.environ.get(FOLDER, ".")).resolve()
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
ONE_QUEUE = "CUDA_DEVICE_MAX_CONNECTIONS"  # Megatron asks for 1 with tensor parallelism
PATCH = ["-m", "megatron_core_patch", "--ranks-per-node", "2"]
# What a CPU, and a model of its size, need otherwise than the page's script says. None: the flag is left out.
HERE: dict[str, str | None] = {
    "--num-layers": "2",
    "--hidden-size": "64",
    "--num-attention-heads": "4",
    "--seq-length": "32",
    "--max-position-embeddings": "32",
    "--global-batch-size": "8",
    "--train-iters": "5",
    "--data-path": None,
    "--tokenizer-type": "NullTokenizer",
    "--vocab-file": None,
    "--merge-file": None,
    "--save": None,
    "--load": None,
    "--eval-iters": "0",
}
ALWAYS = shlex.split(
    "--distributed-backend gloo --transformer-impl local --mock-data --vocab-size 127 --num-workers 0 "
    "--log-interval 1 --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm "
    "--attention-dropout 0 --hidden-dropout 0 --lr-decay-iters 5"
)
SOME = r", \d+ of \d+ exact, being small or a router's"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FOLDER not in os.environ, reason=f"{FOLDER} names no folder of Megatron-LM"),
]


def test_exact_messages_change_nothing() -> None:
    """The page's flags, and TP 2 with SP: two data-parallel ranks, whose sums have one order. -m slow"""
    flags = [*adapted(page_flags()[1]), "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    plain, said = run([], flags)
    exact, told = run(PATCH, flags)
    assert exact == plain and len(plain) == int(str(HERE["--train-iters"]))
    assert "megatron_core_patch" not in said
    assert "2 data-parallel ranks = 2 nodes x 1: gradients exact fp32 across nodes" in told


def test_the_pages_messages() -> None:
    """The page's own words for the patch, on four data-parallel ranks. -m slow"""
    patch, script = page_flags()
    flags = adapted(script)
    plain, _ = run([], flags)
    sent, told = run([*PATCH, *patch, "--zero-exact-numel", "1024"], flags)
    assert sent != plain
    assert [loss for loss, _ in sent] == pytest.approx([loss for loss, _ in plain], rel=0.01)
    assert re.search(
        f"4 data-parallel ranks = 2 nodes x 2{SOME}: gradients exact fp32 inside a node, int4", told
    )
    assert "weights differences of bf16 as int4" in told
    assert len(re.findall(r"step \d: (?:gradients|weights) differ from exact ones by", told)) == 4


def test_the_pages_two_lines_under_slurm(tmp_path: Path) -> None:
    """The page's second script as it is, but for PP 2, by programs that stand for SLURM's.

    They start 4 tasks here, each in a node of its own by its host's name. -m slow
    """
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode:
        pytest.skip("a process may not have a host name of its own here")
    script = page_scripts()[1].replace("--pipeline-model-parallel-size 4", "--pipeline-model-parallel-size 2")
    lines = re.findall(r"^# {5}(\S.*)$", script, re.MULTILINE)
    assert len(lines) == 2 and "--pipeline-model-parallel-size 2" in script
    main = 'if __name__ == "__main__":\n'
    program = (FOLDER_PATH / "pretrain_gpt.py").read_text()
    assert program.count(main) == 1
    lines[1] = lines[1].removesuffix(")") + ", exact_numel=1024)"  # the model here is small
    program = program.replace(main, main + "".join(f"    {line}\n" for line in lines))
    (tmp_path / "pretrain_zeropp.py").write_text(program)
    (tmp_path / "page.sh").write_text(script)
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/sh\necho localhost\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", str(tmp_path / "page.sh"), *adapted(page_flags()[1])]
    losses, told = finish(command, tmp_path, PATH=path)
    assert len(losses) == int(str(HERE["--train-iters"]))
    assert re.search(f"2 data-parallel ranks = 2 nodes x 1{SOME}: gradients int4", told)
    assert "weights differences of bf16 as int4" in told


SRUN = """#!/bin/bash
export SLURM_NTASKS=4 SLURM_NTASKS_PER_NODE=1
for task in 0 1 2 3; do
    SLURM_PROCID=$task SLURM_LOCALID=0 unshare --uts bash -c 'hostname "node$SLURM_PROCID"; exec "$@"' _ "$@" &
    ranks="$ranks $!"
done
for rank in $ranks; do wait "$rank" || exit 1; done
"""


def page_scripts() -> list[str]:
    page = (ROOT / "docs" / "integrate" / "megatron-patch.md").read_text()
    return re.findall(r"```sh\n(#!.*?)```", page, re.DOTALL)


def page_flags() -> tuple[list[str], list[str]]:
    """Return the words of the page's first script: the patch's, and those of pretrain_gpt.py."""
    words = shlex.split(page_scripts()[0].replace("\\\n", " "), comments=True)
    script = words.index("pretrain_gpt.py")
    return words[words.index("megatron_core_patch") + 1 : script], words[script + 1 :]


def adapted(flags: Sequence[str]) -> list[str]:
    """Return the page's flags with the values of ``HERE``, and ``ALWAYS``."""
    found: list[str] = []
    instead: str | None = ""  # of the last flag: what stands for its values; '' are its own
    for word in flags:
        if word.startswith("--"):
            instead = HERE.get(word, "")
            found += [] if instead is None else [word, *instead.split()]
        elif instead == "":
            found.append(word)
    return [*found, *ALWAYS]


def run(patch: Sequence[str], flags: Sequence[str]) -> tuple[list[tuple[float, float]], str]:
    """Run the program under torchrun; return what ``finish`` does."""
    command = [*TORCHRUN, *patch, str(FOLDER_PATH / "pretrain_gpt.py"), *flags]
    return finish(
        command, FOLDER_PATH, **({ONE_QUEUE: "1"} if "--tensor-model-parallel-size" in flags else {})
    )


def finish(command: Sequence[str], folder: Path, **words: str) -> tuple[list[tuple[float, float]], str]:
    """Run a command; return each iteration's loss and norm as they are printed, and all that is printed."""
    paths = [str(ROOT / "tests" / "megatron" / "program"), str(ROOT), os.environ.get("PYTHONPATH")]
    environ = {
        **os.environ,
        "MEGATRON_LM": str(FOLDER_PATH),
        # Without an empty entry, the working directory, whose megatron.core is not the installed one.
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **words,
    }
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-10_000:]
    lines = re.findall(r"lm loss: (\S+) .*?grad norm: (\S+)", said)
    return [(float(loss), float(norm)) for loss, norm in lines], said
