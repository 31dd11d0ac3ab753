"""What the site has beside docs/: the pages at the repository's root, and the interfaces of three packages from their
docstrings. mkdocs calls these functions (mkdocs.yml).
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
# Page of the site -> file of the repository.
OF_ROOT = {
    "readme.md": "README.md",
    **{f"develop/{n.lower()}": n for n in ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")},
}
INTERFACES = {
    "zero": "megazero.zero",
    "fsdp2_patch": "fsdp2_patch.patch",
    "megatron_core_patch": "megatron_core_patch.patch",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for page, name in OF_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    for name, module in INTERFACES.items():
        files.append(
            File.generated(config, f"reference/api-{name}.md", content=f"# {name}\n\n::: {module}\n")
        )
    return files


def on_page_markdown(text: str, page: Any, config: Any, files: Files) -> str:
    """Turn links into those of the site. What is no page, a file of the code, is named by its path alone."""
    of_page = {name: shown for shown, name in OF_ROOT.items()}
    source = OF_ROOT.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def moved(link: re.Match[str]) -> str:
        image, words, target, anchor = link.groups()
        name = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        shown = of_page.get(name, name.removeprefix("docs/"))
        if not (name in of_page or name.startswith("docs/")):
            return words if words.strip("`") == name else f"{words} (`{name}`)"
        at = posixpath.relpath(shown, posixpath.dirname(page.file.src_uri) or ".")
        return f"{image}[{words}]({at}{anchor or ''})"

    return LINK.sub(moved, text)
