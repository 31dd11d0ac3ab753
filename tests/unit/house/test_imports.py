"""Imports go downward, optional packages stay optional, launchers are read in one place."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests import ROOT

FLOORS = (
    {"files", "bounded"},
    {"kernels", "families", "charts"},
    {"mesh"},
    {"checkpoint"},
    {"comm", "products"},
    {"zero", "tp", "cp", "pp", "moe"},
    {"config"},
    {"models", "data", "plan"},
    {"log"},
    {"ops"},
    {"convert"},
    {"train"},
    {"verify", "calibrate", "patches"},
    {"cli"},
    {"pretrain", "tools", "__main__", "megatron_core_patch", "fsdp2_patch"},
)
TOPS = ("pretrain", "tools", "megatron_core_patch", "fsdp2_patch")  # beside megazero
PIPELINE = ("megazero.pp.partition", "megazero.pp.schedules", "megazero.pp.timeline")
OPTIONAL = {
    "lm_eval",
    "pyarrow",
    "transformers",
    "wandb",
    "tensorboard",
    "tensorboardX",
    "matplotlib",
    "triton",
}
MEGATRON = {"megatron"}  # pip's
LAUNCHER = re.compile(
    r"(LOCAL_|GROUP_|ROLE_|CROSS_)?RANK|(LOCAL_|ROLE_)?WORLD_SIZE|(LOCAL|CROSS)_SIZE|MASTER_(ADDR|PORT)|"
    r"(SLURM|OMPI|PMIX?|MV2)_\w*|MPI_LOCAL\w*"
)


def sources() -> list[Path]:
    """Python files of the project, tests left out."""
    tops = [ROOT / name for name in ("megazero", "kernels", *TOPS)]
    return sorted(path for top in tops for path in top.rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_name(path: Path) -> str:
    """Dotted name; the kernels folder is installed as megazero.kernels."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "kernels":
        parts.insert(0, "megazero")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package(module: str) -> str | None:
    """The part of the tree a module belongs to; None for megazero itself and for other people's modules."""
    parts = module.split(".")
    if parts[0] in TOPS:
        return parts[0]
    return parts[1] if parts[0] == "megazero" and len(parts) > 1 else None


def floor(part: str) -> int:
    return next(level for level, parts in enumerate(FLOORS) if part in parts)


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[str, int]]:
    """(imported module, line) of every import, wherever it stands; ``from a import b`` gives a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = module.split(".")[: None if is_package else -1]
                kept = here[: len(here) - node.level + 1]
                base = ".".join([*kept, base] if base else kept)
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno


def upward(path: Path, tree: ast.Module) -> list[str]:
    """Imports of ``path``, whose text is ``tree``, that do not go to a lower floor or stay in its own package."""
    module = module_name(path)
    own, wrong = package(module), []
    if own is None:
        return [f"{path.name}: {name}" for name, _ in imports(tree, module, True) if package(name)]
    for name, line in imports(tree, module, path.name == "__init__.py"):
        other = package(name)
        if other is None or other == own:
            continue
        if floor(other) >= floor(own):
            wrong.append(f"{path.relative_to(ROOT)}:{line}: {own} imports {name}")
    return wrong


def test_imports_go_downward() -> None:
    parts = {package(module_name(path)) for path in sources()} - {None}
    known = set().union(*FLOORS)
    assert parts <= known, f"give {sorted(parts - known)} a floor"
    assert {"config", "zero", "train", "pretrain"} <= parts, "the walk found nothing"
    assert not [line for path in sources() for line in upward(path, parsed(path))]


@pytest.mark.parametrize(
    "where, text",
    [
        ("megazero/zero/unit.py", "from megazero.tp import TensorParallel"),
        ("megazero/zero/unit.py", "def f():\n    import megazero.train.setup"),
        ("megazero/comm/lane.py", "from megazero.zero import Engine"),
        ("megazero/config/run.py", "from megazero.plan.search import Search"),
        ("megazero/pp/executor.py", "from megazero.config import RunConfig"),
        ("megazero/mesh/mesh.py", "from ..config import RunConfig"),
        ("megazero/data/build.py", "from megazero import models"),
        ("kernels/__init__.py", "import megazero.config"),
        ("megazero/families/llama.py", "from megazero.config.model.section import ModelConfig"),
        ("megazero/__init__.py", "from megazero.config import RunConfig"),
        ("megazero/train/setup.py", "import tools.flags_page"),
        ("megazero/train/setup.py", "import megazero.cli.preprocess"),
    ],
)
def test_the_walk_sees_upward_imports(where: str, text: str) -> None:
    assert upward(ROOT / where, ast.parse(text))


def test_the_walk_accepts_downward_imports() -> None:
    for where, text in (
        ("megazero/train/setup.py", "from megazero import zero\nfrom . import trainer"),
        ("megazero/config/run.py", "from megazero.mesh.grid import data_ranks"),
        ("megazero/config/run.py", "from megazero.pp.partition import partition"),
    ):
        assert not upward(ROOT / where, ast.parse(text))


def test_no_module_imports_itself_through_others() -> None:
    names = {module_name(path): path for path in sources()}
    found = {
        module: {
            name if name in names else name.rpartition(".")[0]
            for name, _ in imports(parsed(path), module, path.name == "__init__.py")
        }
        & names.keys() - {module}
        for module, path in names.items()
    }
    while free := [module for module, needs in found.items() if not needs & found.keys()]:
        for module in free:
            del found[module]
    assert not found, f"circles among or behind {sorted(found)}"


def test_a_class_name_means_one_thing() -> None:
    places: dict[str, set[str]] = {}
    for path in sources():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, set()).add(path.relative_to(ROOT).as_posix())
    assert len(places) > 200 and not {name: where for name, where in places.items() if len(where) > 1}


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported: not functions' bodies, not what type checkers alone read."""
    for node in ast.iter_child_nodes(tree):
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not for_types and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield node
            yield from at_import(node)


def test_optional_packages_are_imported_in_functions_only() -> None:
    for path in sources():
        for node in at_import(parsed(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)} imports {name}"
                assert not OPTIONAL & set(name.split(".")), where
                assert name.split(".")[0] not in MEGATRON, where


def test_imports_in_functions_are_few_and_say_why() -> None:
    """They keep torch or an optional package out. Others save time, or lead to torch: a comment says which."""
    found = []
    for path in (path for path in sources() if path.is_relative_to(ROOT / "megazero")):
        lines, tree = path.read_text().splitlines(), parsed(path)
        functions = (f for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef)))
        for name, line in {each for f in functions for each in imports(f, module_name(path), False)}:
            if not set(name.split(".")) & (OPTIONAL | {"torch"}):
                found.append(f"{path.relative_to(ROOT)}:{line}: {lines[line - 1].strip()}")
    assert not [each for each in found if "  # " not in each]
    assert 0 < len({each.partition(" ")[0] for each in found}) <= 14, found


def loaded_after(modules: list[str]) -> set[str]:
    """Top-level names in sys.modules of a new interpreter that imported ``modules``."""
    code = (
        "import importlib, json, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_megazero_and_its_configuration_need_neither_torch_nor_numpy() -> None:
    modules = [
        "megazero",
        "megazero.config",
        "megazero.families",
        "megazero.mesh.grid",
        "megazero.mesh.launch",
        *PIPELINE,
    ]
    loaded = loaded_after(modules)
    assert not loaded & (OPTIONAL | {"torch", "numpy"})


def test_importing_the_whole_tree_loads_no_optional_package() -> None:
    modules = [
        name
        for name in map(module_name, sources())
        if name.startswith("mega") and not name.endswith("__main__") and ".kernels" not in name
    ]
    loaded = loaded_after(["torch.distributed", *modules])
    by_torch = {"triton"} if "torch" in loaded else set()  # torch itself loads it where it has CUDA
    assert "torch" in loaded and not loaded & (OPTIONAL - by_torch | MEGATRON)


def test_launcher_variables_are_read_in_one_place() -> None:
    found = {}
    for path in sources():
        for node in ast.walk(parsed(path)):
            value = node.value if isinstance(node, ast.Constant) else None
            if isinstance(value, str) and LAUNCHER.fullmatch(value):
                found.setdefault(path.relative_to(ROOT).as_posix(), []).append(f"{node.lineno}: {value}")
    assert "megazero/mesh/launch.py" in found, "the walk found nothing"
    assert set(found) == {"megazero/mesh/launch.py"}, found
