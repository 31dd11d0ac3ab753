"""The patch on every megatron-core that it knows: exact messages change no bit, quantised ones leave replicas equal,
and everything is refused that should be.

Each version runs in processes of its own, from a folder that has it unpacked as FOLDER/VERSION/megatron; the version
that is installed needs none. Eight versions, ten minutes on 2 cores:

    pip download --no-deps megatron-core==0.13.1     # and unzip the wheel into FOLDER/0.13.1, and so on
    MEGATRON_CORE_VERSIONS=FOLDER python -m pytest tests/megatron/test_versions.py -m slow

MEGATRON_CORE_PYTHON names another python, with a torch and a numpy of its own, as an image of NVIDIA's, and pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version as installed
from pathlib import Path

import pytest

from tests import ROOT
from tests.megatron.test_refused import ADAM, REFUSED

pytest.importorskip("megatron.core")
pytest.importorskip("megatron_core_patch")

FOLDERS = "MEGATRON_CORE_VERSIONS"
PYTHON = os.environ.get("MEGATRON_CORE_PYTHON", sys.executable)
VERSIONS = ("0.13.1", "0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.0", "0.19.2")
TESTS = (  # the first two, of two data-parallel ranks, compare bits with those of a run without the patch
    "test_exact.py::test_exact_messages_change_nothing[tp2 sp]",
    "test_exact.py::test_exact_messages_change_nothing[pp2 tied]",
    "test_quantised.py::test_every_shape[overlap-INT8 + INT4]",
    "test_refused.py::test_every_refusal",
)


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_version(version: str) -> None:
    """MEGATRON_CORE_VERSIONS=FOLDER python -m pytest ... -m slow"""
    command = [PYTHON, "-m", "pytest", "-s", "-p", "no:cacheprovider", "-m", "slow or not slow"]
    command += [f"tests/megatron/{name}" for name in TESTS]
    environ = {**os.environ, "PYTHONPATH": path_of(version)}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=400)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and f"{len(TESTS)} passed" in said, said
    # By the ranks' own word: once for each exact run, for the quantised one and that which it is compared with, and
    # for the refusals of an optimizer, which come behind the line.
    optimizers = sum(owner == ADAM for owner, *_ in REFUSED)
    assert said.count(f"megatron_core_patch on megatron-core {version}:") == 4 + optimizers, said


def path_of(version: str) -> str:
    """Return what PYTHONPATH must hold for a version, or skip the test where it is not there."""
    if version == installed("megatron-core") and sys.executable == PYTHON:
        return ""
    if FOLDERS not in os.environ:
        pytest.skip(f"{FOLDERS} names no folder that has megatron-core {version}")
    folder = Path(os.environ[FOLDERS]) / version
    if not (folder / "megatron" / "core").is_dir():
        pytest.skip(f"{FOLDERS}: {folder} holds no megatron/core")
    return str(folder)
