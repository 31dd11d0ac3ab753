"""The model card tells where the weights began, what each start said, and what was sent in fewer bits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from megazero.config import World, make_config
from megazero.config.run import stored_values
from megazero.config.summary import rounded_summary
from megazero.convert.card import card, card_options
from megazero.convert.folder import Folder
from megazero.convert.importing import Published
from megazero.train.state.progress import Progress
from tests.sizes import TINY


def started(progress: Progress, **said: Any) -> tuple[Progress, Any]:
    """The progress of a run that starts with these options on two nodes of two ranks, and its configuration."""
    config, world = make_config({**TINY, **said}, World(4, 2)), World(4, 2)
    return progress.started(card_options("llama", config.values()), rounded_summary(config, world)), config


def told(progress: Progress, config: Any, **more: Any) -> str:
    source: Any = SimpleNamespace(
        state={**progress.state(), "tokens": 5, **more},
        values=stored_values(config.to_dict()),
        model=config.model,
        manifest=SimpleNamespace(step=progress.iteration),
        tensors=[],
        weights="trained",
    )
    return card(source, {})


def test_a_card_has_the_base_model_and_what_each_start_changed() -> None:
    license = {"license": "other", "license_name": "a: b"}
    first, _ = started(
        Progress(base="HuggingFaceTB/SmolLM2-135M", license=license), zero_preset="zeropp", save="/home/me/a"
    )
    same, _ = started(first, zero_preset="zeropp", save="/home/me/b")
    assert same.starts == first.starts and len(first.starts) == 1  # places are no change
    later = Progress.of_state({**first.state(), "iteration": 7, "run_id": "a"}, "", 12)
    later, config = started(later, zero_preset="zero1", weight_decay=0.5)
    text = told(later, config)
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["base_model"] == "HuggingFaceTB/SmolLM2-135M" and license.items() <= front.items()
    assert "/home/me" not in text
    assert "| base model | HuggingFaceTB/SmolLM2-135M |" in text
    one, two = text.split("## Changed after iteration 7")
    assert "--zero-preset zeropp" in one and "--hidden-size 32" in one
    assert "Sent in fewer bits: weights (preset zeropp): refresh across nodes changes as INT4" in one
    assert "INT4 once per step" in one.split("gradients")[1]
    flags = two.split("```")[1].split("\n")[1:-1]
    assert sorted(flags) == ["--weight-decay 0.5", "--zero-preset zero1"] and "fewer bits" not in two


def test_a_card_says_random_weights_or_that_nothing_was_recorded() -> None:
    progress, config = started(Progress())
    assert "| base model | random weights |" in told(progress, config)
    assert "base_model:" not in told(progress, config)
    old = {name: value for name, value in progress.state().items() if name not in ("base", "starts")}
    kept = Progress.of_state(old, "", 12)
    assert kept.base == "not recorded" and "--hidden-size 32" in told(kept, config)


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
