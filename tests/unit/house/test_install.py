"""The tree as it lies and as a wheel: kernels/ is megazero.kernels in both, with nothing installed beside them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import pytest

from tests import ROOT

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


def test_a_module_has_one_name() -> None:
    """The kernels are a link in the package. A second folder on the package's path would hold the package itself."""
    assert os.readlink(ROOT / "megazero" / "kernels") == "../kernels"
    assert importlib.util.find_spec("megazero.kernels.quantize") is not None
    assert importlib.util.find_spec("megazero.megazero") is None


def test_the_patches_leave_torch_as_it_is_and_need_numpy_beside_it_alone() -> None:
    """Their pages' install lines take no requirements; what only megazero's own trainer needs may be missing."""
    assert {install_line(page) for page in ("megatron-patch", "fsdp2")} == {"pip install --no-deps ."}
    others = ("yaml", "rich", "safetensors", "sentencepiece", "tokenizers", "transformers")
    code = f"""
import sys
for name in {others}:
    sys.modules[name] = None
import fsdp2_patch, megatron_core_patch.__main__, megatron_core_patch.patch
from fsdp2_patch import patch
# Models need a newer torch than the patches do.
assert not [name for name in sys.modules if name.startswith("megazero.models")]
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def install_line(page: str) -> str:
    """The command of a page's first lines."""
    lines = (
        (ROOT / "docs" / "integrate" / f"{page}.md").read_text().split("## In ten lines")[1].split("```")[1]
    )
    (line,) = (line.partition("#")[0].strip() for line in lines.splitlines() if line.startswith("pip"))
    return line


def checkout(target: Path) -> None:
    """Copy what a wheel is made of."""
    for name in ("megazero", "kernels", "megatron_core_patch", "fsdp2_patch"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target)


FILES = (".py", ".tsv", ".yaml", ".css", ".js")


@pytest.mark.slow
def test_a_wheel_has_every_package(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    checkout(source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, source]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = tmp_path.glob("megazero-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        held = {name for name in packed.namelist() if name.endswith(FILES)}
        packed.extractall(target)
    packages = [*source.glob("mega*/**/*"), *source.glob("fsdp2_patch/*")]
    files = [path for path in packages if path.suffix in FILES]
    own = {path.relative_to(source).as_posix() for path in files}
    assert held == own | {f"megazero/kernels/{path.name}" for path in source.glob("kernels/*.py")}
    files = files_of("megazero.zero, megazero.kernels.quantize", tmp_path, target, *PACKAGES)
    assert files == [
        target / "megazero" / "zero" / "__init__.py",
        target / "megazero" / "kernels" / "quantize.py",
    ]


@pytest.mark.slow
def test_the_readmes_first_minutes_need_the_wheel_alone(tmp_path: Path) -> None:
    """An installed megazero makes data, trains on two ranks, stops, continues and writes text, without a checkout."""
    source, here, bin_ = tmp_path / "source", tmp_path / "here", tmp_path / "venv" / "bin"
    checkout(source)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=120)
    (site,) = tmp_path.glob("venv/lib/*/site-packages")
    (site / "shared.pth").write_text(
        "\n".join(PACKAGES)
    )  # what megazero requires; a .pth file in them does nothing
    (here / "text").mkdir(parents=True)
    for page in ROOT.glob("docs/**/*.md"):
        shutil.copy(page, here / "text")
    readme = (ROOT / "README.md").read_text("utf-8").split("## The first minutes")[1]
    script, settings = (readme.split(f"```{language}\n")[1].split("```")[0] for language in ("sh", "yaml"))
    (here / "run.yaml").write_text(settings)
    install, *commands = script.replace("\\\n", " ").splitlines()
    assert install == "pip install ." and len(settings.splitlines()) <= 11
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ["PATH"] = f"{bin_}{os.pathsep}{environ['PATH']}"
    run = partial(subprocess.run, env=environ, capture_output=True, text=True, timeout=600)
    done = run([bin_ / "python", "-m", "pip", "install", "--no-deps", source])
    assert done.returncode == 0, done.stdout + done.stderr
    for command in commands:
        done = run(command, shell=True, cwd=here)
        stops = "--exit-interval" in command
        assert done.returncode == (75 if stops else 0), f"{command}\n{done.stdout}{done.stderr}"
    assert done.stdout.startswith("The ")
    assert {folder.name for folder in here.glob("runs/a/iter_*")} == {"iter_0000020", "iter_0000040"}
