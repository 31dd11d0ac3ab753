"""The project's pages: the README leads to every one, links lead somewhere, and files that are named exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
# Where pages may take a named file to lie: `zero/unit.py` is in the package, `test_tp.py` needs its folder.
TOPS = (ROOT, ROOT / "megazero")


def prose(page: Path) -> str:
    """A page without its blocks of code, in which brackets and paths are not the page's own."""
    return re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchor(heading: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def linked(page: Path) -> list[tuple[Path, str]]:
    """(file or folder, anchor or '') of every relative link and picture of a page."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    parts = [target.partition("#") for target in targets if not re.match(r"[a-z]+:", target)]
    return [((page.parent / path if path else page).resolve(), name) for path, _, name in parts]


def named(page: Path) -> list[tuple[str, str]]:
    """(path, what it is said to hold or '') of every `folder/file.py` or `folder/file.py: name` of a page; NAME and
    LOG_DIR stand for the reader's own."""
    found = re.findall(r"`([\w.-]+(?:/[\w.-]+)+\.(?:py|md|yaml))(?:: (\w+))?", prose(page))
    return [(path, name) for path, name in found if not re.search(r"\b(NAME|LOG_DIR)\b", path)]


def started(page: Path) -> list[str]:
    """The files of this tree that a page's commands start: python a/b.py, python -m a.b, also of a package a.b."""
    text = page.read_text("utf-8")
    found = re.findall(r"python(?:\s+-m)?\s+((?:benchmarks|pretrain|tests|tools)[./][\w./]*\w)", text)
    return [path if path.endswith(".py") else _module(path.replace(".", "/")) for path in found]


def _module(path: str) -> str:
    return f"{path}/__main__.py" if (ROOT / path).is_dir() else f"{path}.py"


def test_the_readme_and_the_index_lead_to_every_page() -> None:
    readme, index = ROOT / "README.md", ROOT / "docs" / "README.md"
    led = {path for page in (readme, index) for path, _ in linked(page)}
    missing = [page.relative_to(ROOT).as_posix() for page in PAGES if page != readme and page not in led]
    assert not missing, f"README.md and docs/README.md have no link to {', '.join(missing)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for path, name in linked(page):
        assert path.exists(), f"{page.name} links {path}, which is not there"
        if name:
            headings = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
            assert name in map(anchor, headings), (
                f"{page.name} links #{name}, which {path.name} does not have"
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist_and_hold_what_is_said(page: Path) -> None:
    for path, name in named(page):
        found = [top / path for top in TOPS if (top / path).exists()]
        assert found, f"{page.name} names {path}, which is not there"
        assert not name or re.search(rf"\b{name}\b", found[0].read_text("utf-8")), f"{path} has no {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_start_files_that_exist(page: Path) -> None:
    missing = [path for path in started(page) if not (ROOT / path).exists()]
    assert not missing, f"{page.name} starts {', '.join(missing)}"


def test_what_is_looked_for_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "[a](b.md#c-d) ![](e.png) [f](https://g.org) `zero/h.py: i`, `a/NAME.py` and `j/k.py`\n```\n[l](m)\n"
        "python -m\ntools.n x\n    python tools/o.py\n```\n"
    )
    assert linked(page) == [(tmp_path / "b.md", "c-d"), (tmp_path / "e.png", "")]
    assert named(page) == [("zero/h.py", "i"), ("j/k.py", "")]
    assert started(page) == ["tools/n.py", "tools/o.py"]
    page.write_text("python -m tests.unit")
    assert started(page) == ["tests/unit/__main__.py"]
    assert anchor("Step time, and `memory`") == "step-time-and-memory"
