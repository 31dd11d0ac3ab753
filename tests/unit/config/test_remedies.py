"""Each message about a mistake names what to do."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path

import pytest

from megazero.config import ConfigError, World, make_config, parse, read_arguments
from megazero.config.options.data_inputs import missing_file
from megazero.config.options.fields import option
from megazero.config.read.folders import make_folders
from megazero.data.tokenizer import load_tokenizer
from megazero.train.command import main
from tests.sizes import LEAST, SMALL, TINY, words

RUN = [*LEAST.split(), "--micro-batch-size", "2", "--train-iters", "2"]


def faults(argv: list[str]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        parse(argv, World(1, 1))
    return error.value.errors


def test_a_config_file_that_cannot_be_read_is_the_only_error(tmp_path: Path) -> None:
    assert faults(["--config", "nope.yaml"]) == (
        "--config nope.yaml cannot be read: No such file or directory",
    )
    file = tmp_path / "run.yaml"
    file.write_text("lr: [")
    (one,) = faults(["--config", str(file)])
    assert "is not YAML" in one
    one, two = faults(
        ["--config", "nope.yaml", "--nope"]
    )  # what the flags themselves have wrong is said, too
    assert "--nope does not exist" in one + two


@pytest.mark.parametrize("name", ["callbacks", "skip-train-iteration-range", "zero-shard"])
def test_a_list_of_a_config_file_can_be_unset(name: str, tmp_path: Path) -> None:
    file, value = tmp_path / "run.yaml", {"callbacks": "[a:B]", "zero-shard": "[1, 1, 1]"}.get(name, "[3-4]")
    file.write_text(f"{name}: {value}\n")
    argv, field = ["--config", str(file), *RUN], name.replace("-", "_")
    default = parse(RUN, World(1, 1)).get(field)
    assert parse(argv, World(1, 1)).get(field) != default
    config = parse([*argv, f"--no-{name}"], World(1, 1))
    assert config.get(field) == default and any(
        f"from flags overrides {name} " in note for note in config.notes
    )
    file.write_text(f"{name}: []\n")
    assert parse(argv, World(1, 1)).get(field) == default


def test_unsetting_a_list_leaves_the_options_that_it_excludes(tmp_path: Path) -> None:
    (file := tmp_path / "run.yaml").write_text("zero-preset: zero2\n")
    assert parse(["--config", str(file), *RUN, "--no-zero-shard"], World(1, 1)).zero.zero_preset == "zero2"


@pytest.mark.parametrize("name", ["save", "log_dir"])
def test_a_folder_that_cannot_be_one_is_refused_with_what_to_do(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place, why in (("file", "is a file"), ("file/a/b", f"lies below {tmp_path}/file, which is a file")):
        with pytest.raises(ConfigError) as error:
            make_folders(make_config({**SMALL, name: f"{tmp_path}/{place}"}))
        (line,) = error.value.errors
        assert line.startswith(
            f"--{name.replace('_', '-')} {tmp_path}/{place} {why}; a folder is needed: name"
        )
    make_folders(make_config({**SMALL, name: f"{tmp_path}/a/b"}))
    assert (tmp_path / "a/b").is_dir()


def test_a_folder_below_what_takes_none_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="cannot be made: .* in /proc; name a folder where this user may write"
    ):
        make_folders(make_config({**SMALL, "save": "/proc/a"}))


def test_training_refuses_the_folder_before_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main([*words(TINY), "--save", f"{tmp_path}/file", "--log-dir", f"{tmp_path}/logs"]) == 2
    assert "is a file; a folder is needed" in capsys.readouterr().err


@dataclass(frozen=True)
class Words:
    """A command without places."""

    input: tuple[str, ...] = option(MISSING, "files", required=True)
    output_prefix: str = option(MISSING, "name", required=True)


def test_words_without_their_flags_are_told_which() -> None:
    with pytest.raises(ConfigError) as error:
        read_arguments(Words, ["corpus.jsonl", "data/corpus"])
    assert error.value.errors[:2] == (
        "'corpus.jsonl' does not belong to a flag; flags start with --; nearest: --input corpus.jsonl",
        "'data/corpus' does not belong to a flag; flags start with --; nearest: --output-prefix data/corpus",
    )
    with pytest.raises(ConfigError) as error:
        read_arguments(Words, ["x", "--input", "a", "--output-prefix", "b"])
    assert error.value.errors == ("'x' does not belong to a flag; flags start with --",)


@pytest.mark.parametrize(
    "said", ["a.bin", "a.idx", "a", "a_text_document.bin", "a_text_document.idx", "a.jsonl"]
)
def test_a_wrong_data_path_is_told_the_prefix_that_is_there(said: str, tmp_path: Path) -> None:
    for ending in ("bin", "idx"):
        (tmp_path / f"a_text_document.{ending}").write_text("")
    assert f"nearest: {tmp_path}/a_text_document)" in missing_file(f"{tmp_path}/{said}")
    assert "nearest" not in missing_file(f"{tmp_path}/other")


def test_a_tokenizer_of_another_kind_is_told_its_type(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(
        ValueError, match="not a SentencePiece model.*nearest: --tokenizer-type HuggingFaceTokenizer"
    ):
        load_tokenizer("SentencePieceTokenizer", tmp_path / "tokenizer.json")
    (tmp_path / "spm.model").write_bytes(b"\x0a\x0e")
    with pytest.raises(
        ValueError, match="not a tokenizer.json.*nearest: --tokenizer-type SentencePieceTokenizer"
    ):
        load_tokenizer("HuggingFaceTokenizer", tmp_path / "spm.model")
