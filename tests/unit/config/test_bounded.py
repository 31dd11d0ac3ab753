"""Crafted files are refused in a sentence, at once: a bomb of aliases, deep nesting, a sparse file, 10^9 layers."""

from __future__ import annotations

import string
from pathlib import Path

import pytest

from megazero import bounded
from megazero.checkpoint.errors import CheckpointError
from megazero.checkpoint.manifest import MANIFEST_FILE, read_manifest
from megazero.config import ConfigError, World, parse
from megazero.config.options.cluster import load_cluster
from megazero.config.read.files import read_json
from megazero.families import FAMILIES
from megazero.families.layer_kinds import MOST_LAYERS

DEEP = "nested more deeply"


def bomb(levels: int = 8) -> str:
    """Ten aliases a level: 10^8 values in 330 bytes."""
    names = string.ascii_lowercase[:levels]
    lines = ["a: &a [" + ",".join("x" * 10) + "]"]
    lines += [
        f"{name}: &{name} [{','.join([f'*{below}'] * 10)}]"
        for below, name in zip(names, names[1:], strict=False)
    ]
    return "\n".join(lines)


CRAFTED = {
    "aliases": (bomb(), "more than 100,000 values"),
    "an alias within itself": ("a: &a [*a]", "more than 100,000 values"),
    "deep": ("a: " + "[" * 100_000, DEEP),
    "long": ("# " + "x" * bounded.MOST_YAML, "at most 1,048,576"),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_yaml_is_one_error_of_every_reader(name: str, tmp_path: Path) -> None:
    text, words = CRAFTED[name]
    file = tmp_path / "crafted.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"--config {file} is not YAML: .*{words}"):
        parse(["--config", f"{file}"], World(1, 1))
    with pytest.raises(ConfigError, match=words):
        load_cluster(f"{file}")


def test_aliases_within_reason_are_read(tmp_path: Path) -> None:
    file = tmp_path / "good.yaml"
    file.write_text("base: &base {lr: 0.1, seed: 3}\nmodel: {<<: *base, seed: 4}\nseed: 1\nseed: 2\n")
    assert bounded.read_yaml(file) == (
        {"base": {"lr": 0.1, "seed": 3}, "model": {"lr": 0.1, "seed": 4}, "seed": 2},
        ["seed"],
    )


def test_deep_json_is_an_error_of_every_reader(tmp_path: Path) -> None:
    file = tmp_path / MANIFEST_FILE
    file.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=DEEP):
        read_json(file, "it is needed")
    with pytest.raises(CheckpointError, match=DEEP):
        read_manifest(tmp_path)
    with pytest.raises(ConfigError, match=f"--deepspeed-config {file} is not JSON: .*{DEEP}"):
        parse(["--deepspeed-config", f"{file}"], World(1, 1))


def test_a_sparse_manifest_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / MANIFEST_FILE, "wb") as file:
        file.truncate(10 << 30)
    with pytest.raises(CheckpointError, match="it has 10,737,418,240 bytes, and such a file has at most"):
        read_manifest(tmp_path)


def test_what_tells_no_size_is_read_to_the_limit_only(tmp_path: Path) -> None:
    assert bounded.read_bytes("/proc/self/stat", most=4096)  # a size of 0, and bytes
    with pytest.raises(ValueError, match="at most 10,000"):
        bounded.read_bytes("/dev/zero", most=10_000)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_number_of_layers_that_nothing_has_is_refused_before_they_are_counted_out(family: str) -> None:
    flags = f"--model-family {family} --num-layers 1000000000 --hidden-size 32 --num-attention-heads 4"
    with pytest.raises(ConfigError, match=f"--num-layers 1000000000 must be at most {MOST_LAYERS}"):
        parse([*flags.split(), "--sliding-window", "4", "--window-attn-skip-freq", "2"], World(1, 1))
    published = FAMILIES[family].hugging_face
    fields = dict.fromkeys(published.fields.values(), 8) | {published.fields["num_layers"]: 10**9}
    with pytest.raises(ValueError, match=f"1000000000 layers; at most {MOST_LAYERS} can be meant"):
        published.options(fields)
