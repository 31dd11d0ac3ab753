"""What setup.cfg and the Makefile say of releases."""

from __future__ import annotations

import ast
import configparser
import re

from tests import ROOT

NOX = ast.parse((ROOT / "noxfile.py").read_text())
(VALUES,) = (
    n.value for n in NOX.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "RELEASES"
)
RELEASES = {python: of[0].split() for python, of in ast.literal_eval(VALUES).items()}


def requirements() -> dict[str, str]:
    """Package -> bounds, of what an installation needs and what transformers is for."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    options = config["options"]["install_requires"] + config["options.extras_require"]["hf"]
    return dict(re.match(r"([\w-]+)(.*)", line).groups() for line in options.split())  # type: ignore[union-attr, misc]


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part != "*"]


def test_the_oldest_release_is_the_lower_bounds() -> None:
    oldest = dict(requirement.split("==") for requirement in RELEASES["3.11"])
    floors = {name: bounds.removeprefix(">=").split(",")[0] for name, bounds in requirements().items()}
    assert {name: version.removesuffix(".*") for name, version in oldest.items()} == floors


def test_the_newest_release_is_below_the_upper_bound_and_the_next_is_not() -> None:
    (torch,) = (r.split("==")[1] for r in RELEASES["3.13"] if r.startswith("torch=="))
    major, minor = numbers(torch)[:2]
    assert requirements()["torch"].endswith(f"<{major}.{minor + 1}")
    default = re.search(r"^TORCH \?= torch==(\S+)$", (ROOT / "Makefile").read_text(), re.M)
    assert default and numbers("2.11") <= numbers(default[1]) <= numbers(torch)
