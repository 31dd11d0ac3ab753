"""The model card tells where the weights began, their license, and the flags of the run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from megazero.config import World, make_config
from megazero.config.run import stored_values
from megazero.convert.card import card
from megazero.convert.folder import Folder
from megazero.convert.importing import Published
from megazero.train.state.progress import Progress
from tests.sizes import TINY


def told(progress: Progress, **said: Any) -> str:
    """The card of a checkpoint of a run with these options."""
    config = make_config({**TINY, **said}, World(4, 2))
    source: Any = SimpleNamespace(
        state={**progress.state(), "tokens": 5},
        values=stored_values(config.to_dict()),
        model=config.model,
        manifest=SimpleNamespace(step=progress.iteration),
        tensors=[],
        weights="trained",
    )
    return card(source, {})


def test_a_card_has_the_base_model_its_license_and_the_flags() -> None:
    license = {"license": "other", "license_name": "a: b"}
    progress = Progress(base="HuggingFaceTB/SmolLM2-135M", license=license)
    text = told(progress, zero_preset="zeropp", weight_decay=0.5, save="/home/me/a")
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["base_model"] == "HuggingFaceTB/SmolLM2-135M" and license.items() <= front.items()
    assert "| base model | HuggingFaceTB/SmolLM2-135M |" in text
    flags = text.split("```")[1].split("\n")
    assert {"--zero-preset zeropp", "--hidden-size 32", "--weight-decay 0.5"} <= {*flags}
    assert "/home/me" not in text and "--adam-beta1" not in text


def test_a_card_says_random_weights_or_that_nothing_was_recorded() -> None:
    progress = Progress()
    assert "| base model | random weights |" in told(progress) and "base_model:" not in told(progress)
    old = {name: value for name, value in progress.state().items() if name != "base"}
    assert Progress.of_state(old, "", 12).base == "not recorded"


HUB = "models--HuggingFaceTB--SmolLM2-135M/snapshots/93efa2f"  # of its cache


@pytest.mark.parametrize(
    "folder, fields, name",
    [
        ("folder", {"_name_or_path": "org/model"}, "org/model"),
        ("folder", {"_name_or_path": "/data/x", "_model_name_or_path": "org/other"}, "org/other"),
        ("folder", {"_name_or_path": "/data/x"}, "folder"),
        (HUB, {"_name_or_path": "org/base"}, "HuggingFaceTB/SmolLM2-135M"),
    ],
)
def test_a_published_model_is_called_by_its_name(folder: str, fields: dict[str, str], name: str) -> None:
    assert Published(Folder(Path(folder), fields, {})).base == name


@pytest.mark.parametrize(
    "card, license",
    [
        ("---\nlicense: apache-2.0\nlanguage: [en]\n---\n# Model\n", {"license": "apache-2.0"}),
        (
            "---\nlicense: other\nlicense_link: LICENSE\n---\n",
            {"license": "other", "license_link": "LICENSE"},
        ),
        ("---\nlicense: [\n---\n", {}),
        ("---\nlicense: 3\n---\n", {}),
        ("# Model\n---\nlicense: mit\n---\n", {}),
        (None, {}),
    ],
)
def test_the_license_is_what_the_models_card_says(
    card: str | None, license: dict[str, str], tmp_path: Path
) -> None:
    if card is not None:
        (tmp_path / "README.md").write_text(card)
    assert Published(Folder(tmp_path, {}, {})).license == license
