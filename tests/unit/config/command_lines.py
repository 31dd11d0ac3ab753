"""Short command lines for the tests of the configuration: a base that is legal, and what is said of the rest."""

import json

import pytest

from megazero.config import ConfigError, World, begun, parse
from tests.sizes import SMALL, words

VALUES = {**SMALL, "train_iters": 10, "vocab_size": 100}
BASE = words(VALUES)
WORLD = World(8, 4)


def run(text="", world=WORLD):
    return begun(parse([*BASE, *text.split()], world), world)


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
