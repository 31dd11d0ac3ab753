"""The tree as it lies and as a wheel: kernels/ is megazero.kernels in both, with nothing installed beside them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# On PYTHONPATH their .pth files do nothing, and so neither does an editable install of this tree.
PACKAGES = [path for path in sys.path if path.endswith("-packages")]


def files_of(modules: str, where: Path, *paths: object) -> list[Path]:
    """The files that ``import modules`` loads in a new interpreter without site-packages, started in ``where``."""
    names = modules.split(", ")
    code = f"import sys, {modules}; print(*(sys.modules[name].__file__ for name in {names!r}), sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=where,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [(where / line).resolve() for line in done.stdout.splitlines()]


@pytest.mark.parametrize("inside", [True, False], ids=["in the tree", "from elsewhere"])
def test_a_bare_checkout_has_its_kernels(inside: bool, tmp_path: Path) -> None:
    where, path = (ROOT, ".") if inside else (tmp_path, ROOT)
    assert files_of("megazero.kernels", where, path) == [ROOT / "kernels" / "__init__.py"]


def test_the_patches_leave_torch_as_it_is_and_need_numpy_beside_it_alone() -> None:
    """Their pages' install lines take no requirements; what only megazero's own trainer needs may be missing."""
    for page in ("megatron-patch", "fsdp2"):
        install = (ROOT / "docs" / f"{page}.md").read_text().split("## In ten lines")[1].split("```")[1]
        assert "pip install --no-deps ." in install
    others = ("yaml", "rich", "safetensors", "sentencepiece", "tokenizers", "transformers")
    code = f"""
import sys
for name in {others}:
    sys.modules[name] = None
import fsdp2_patch, megatron_core_patch.__main__, megatron_core_patch.patch
from fsdp2_patch import patch
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_bare_checkout_runs_the_engine(tmp_path: Path) -> None:
    files = files_of("megazero.zero, megazero.kernels.quantize", tmp_path, ROOT, *PACKAGES)
    assert files == [ROOT / "megazero" / "zero" / "__init__.py", ROOT / "kernels" / "quantize.py"]


@pytest.mark.slow
def test_a_wheel_has_every_package(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for name in ("megazero", "kernels", "megatron_core_patch", "fsdp2_patch"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, source]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = tmp_path.glob("megazero-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        held = {name for name in packed.namelist() if name.endswith((".py", ".tsv", ".yaml"))}
        packed.extractall(target)
    packages = [*source.glob("mega*/**/*"), *source.glob("fsdp2_patch/*")]
    files = [path for path in packages if path.suffix in (".py", ".tsv", ".yaml")]
    own = {path.relative_to(source).as_posix() for path in files}
    assert held == own | {f"megazero/kernels/{path.name}" for path in source.glob("kernels/*.py")}
    files = files_of("megazero.zero, megazero.kernels.quantize", tmp_path, target, *PACKAGES)
    assert files == [
        target / "megazero" / "zero" / "__init__.py",
        target / "megazero" / "kernels" / "quantize.py",
    ]
