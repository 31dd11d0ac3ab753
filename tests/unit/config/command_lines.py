"""Short command lines for the tests of the configuration: a base that is legal, and what is said of the rest."""

import json
import re

import pytest

from megazero.config import ConfigError, World, begun, parse
from tests.sizes import SMALL, words

VALUES = {**SMALL, "train_iters": 10, "vocab_size": 100}
BASE = words(VALUES)
WORLD = World(8, 4)
# What stands for several flags in tables.
SHORT = {
    "HEADS": "--hidden-size 96 --num-attention-heads 12",
    "YARN": "--rotary-scaling yarn --position-embedding-type rope",
    "EXPERTS": "--num-experts 12 --disable-bias-linear",
    "EIGHT": "--num-experts 8 --disable-bias-linear",
    "LONG": "--context-parallel-size 8 --seq-length 64 --num-attention-heads 8 --num-query-groups 8 --kv-channels 4",
    "OUTER": "--outer-meet local:2 --outer-interval 4 --ranks-per-node 2",
    "PP": "--pipeline-model-parallel-size 2",
    "CP": "--context-parallel-size 2",
}


def rows(table):
    """The rows of a table: a command line -> words, set apart by semicolons. An indented line continues its row."""
    lines = re.sub(r"\n +", " ", table.strip()).splitlines()
    pairs = (line.partition(" ->")[::2] for line in lines)
    return [(line, [word.strip() for word in named.split(";")]) for line, named in pairs]


def run(text="", world=WORLD):
    said = " ".join(SHORT.get(word, word) for word in text.split())
    return begun(parse([*BASE, *said.split()], world), world)


def base_without(name):
    return words({key: value for key, value in VALUES.items() if key != name})


def errors(text="", world=WORLD):
    with pytest.raises(ConfigError) as caught:
        run(text, world)
    return caught.value.errors


def write(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content)
    return str(path)


def deepspeed(tmp_path, content):
    return "--deepspeed-config " + write(tmp_path, "ds.json", json.dumps(content))
