"""The table of commands, the words of a command line that is no training's, and the scripts that call commands."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import MISSING, dataclass
from pathlib import Path

import pytest

from megazero import __version__
from megazero.cli import COMMANDS, main
from megazero.config import ConfigError, read_arguments
from megazero.config.options.fields import option
from megazero.config.read.flags import arguments_help
from tests import ROOT

SCRIPTS = {"pretrain/pretrain_gpt.py": "train", "tools/preprocess_data.py": "preprocess"}


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"megazero {__version__}\n"


@pytest.mark.parametrize("words, near", [(["trian"], "train"), (["convert", "to-fh"], "convert to-hf")])
def test_an_unknown_word_names_the_nearest(
    words: list[str], near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert f"megazero {' '.join(words)} does not exist; nearest: megazero {near}\n" in capsys.readouterr().err


@pytest.mark.parametrize("script, command", SCRIPTS.items())
def test_scripts_call_commands(script: str, command: str) -> None:
    """Scripts written for Megatron name these files: each has the command's help and nothing of its own."""
    done = run(script, "--help")
    assert done.returncode == 0 and done.stdout == run("-m", "megazero", command, "--help").stdout
    assert command in done.stdout.splitlines()[0] and len((ROOT / script).read_text().splitlines()) < 12


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistake_is_told_without_torch(command: str, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('torch was imported')")
    done = run("-m", "megazero", command, "--no-such-flag", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 2 and "no-such-flag" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and "Error" not in done.stderr


# -- words ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Walk:
    """Words for these tests."""

    begin: str = option(MISSING, "where it begins", place="BEGIN")
    ends: tuple[str, ...] = option((), "where it may end", place="END")
    skip: tuple[str, ...] = option((), "what to skip")
    steps: int = option(1, "how many", low=1)
    slow: bool = option(False, "slowly")


@dataclass(frozen=True)
class Load:
    """Words without places."""

    load: tuple[str, ...] = option(MISSING, "what to load", required=True)
    depth: int = option(3, "how deep")


@pytest.mark.parametrize(
    "words", ["a b c --steps 2 --slow", "--slow a --steps=2 b c", "--steps 2 a b --slow c"]
)
def test_words_without_a_flag_fill_places_wherever_they_stand(words: str) -> None:
    assert read_arguments(Walk, words.split()) == Walk("a", ("b", "c"), steps=2, slow=True)


def test_beside_places_a_flag_of_many_values_stands_again_for_each() -> None:
    assert read_arguments(Walk, ["--skip", "x", "a", "--skip", "y", "b"]) == Walk(
        "a", ("b",), skip=("x", "y")
    )
    assert read_arguments(Load, ["--load", "x", "y", "--depth", "-1", "--load", "z"]) == Load(
        ("x", "y", "z"), -1
    )


@pytest.mark.parametrize(
    "section, words, faults",
    [
        (Walk, "--step=2", ["--step does not exist; nearest: --steps", "is required: where it begins"]),
        (Walk, "a --steps 0 --slow=yes", ["--steps 0 must be at least 1", "--slow takes no value, got yes"]),
        (Load, "a --depth x", ["--depth takes a whole number", "--load is required", "'a' does not belong"]),
        (Load, "--load --depth 1 2", ["--load takes at least one value", "--depth takes one value, got 1 2"]),
    ],
)
def test_all_mistakes_are_told_at_once(section: type, words: str, faults: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        read_arguments(section, words.split())
    assert all(any(fault in line for line in error.value.errors) for fault in faults), error.value


def test_help_lists_places_and_flags() -> None:
    text = arguments_help("usage\n", Walk)
    assert "\n  BEGIN\n        where it begins\n  END ...\n" in text
    assert "\n  --steps N\n        how many [default: 1]" in text
