"""The names of megatron-core that the patch replaces, and in which versions they are known to mean the same."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

KNOWN = ((0, 13), (0, 19))  # the first and the last version that were tried
CORE = "megatron.core"
BUFFER = f"{CORE}.distributed.param_and_grad_buffer"
FINALIZE = f"{CORE}.distributed.finalize_model_grads"
DDP = f"{CORE}.distributed.distributed_data_parallel"
BASE = f"{CORE}.distributed.data_parallel_base"
OPTIMIZER = f"{CORE}.optimizer.distrib_optimizer"
STATE = f"{CORE}.parallel_state"

# Module -> name in it -> the parameters that the patch relies on; None: it is called by Megatron alone.
NEEDED: dict[str, dict[str, tuple[str, ...] | None]] = {
    BUFFER: {
        "_coalescing_manager": None,
        "dist_all_gather_func": None,
        "dist_reduce_scatter_func": None,
        "_ParamAndGradBucketGroup.start_param_sync": ("self", "force_sync"),
        "_ParamAndGradBucketGroup.finish_param_sync": ("self",),
        "_ParamAndGradBucketGroup.start_grad_sync": ("self",),
        "_ParamAndGradBucketGroup.register_grad_ready": ("self", "param"),
    },
    FINALIZE: {
        "_unshard_if_dtensor": ("tensor",),
        "_reshard_if_dtensor": ("tensor_to_shard", "reference_tensor"),
        "_allreduce_word_embedding_grads": ("model",),
    },
    DDP: {"DistributedDataParallel.__init__": ("self", "config", "ddp_config", "module")},
    BASE: {"_BaseDataParallel.__init__": ("self", "config", "module")},
    OPTIMIZER: {
        "DistributedOptimizer.__init__": ("self", "config"),
        "DistributedOptimizer.step_with_ready_grads": ("self",),
        "DistributedOptimizer.load_state_dict": ("self", "state_dict"),
    },
}


def lookup(module: str, path: str) -> tuple[Any, str]:
    """Return the object that holds a name, and the name in it. Raises AttributeError or ImportError."""
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    getattr(owner, name)
    return owner, name


def check_names() -> tuple[str, tuple[str, ...]]:
    """Return megatron-core's version, and notes for the user on a version that was not tried.

    Raises ValueError where megatron-core is older than the known versions, or where names or parameters that the
    patch needs are missing; then nothing may be patched.
    """
    try:
        version = str(importlib.import_module(CORE).__version__)
    except ImportError as error:
        raise ValueError(
            f"megatron_core_patch needs megatron-core, which cannot be imported: {error}"
        ) from error
    first, last = KNOWN
    number = tuple(int(part) for part in version.split(".")[:2])
    if number < first:
        raise ValueError(
            f"megatron-core {version} is older than {_text(first)}, the first that megatron_core_patch knows: update "
            "it"
        )
    missing = list(_missing())
    if missing:
        raise ValueError(
            f"megatron-core {version} lacks what megatron_core_patch replaces, so nothing is patched: "
            f"{'; '.join(missing)}. Known are {_text(first)} to {_text(last)}"
        )
    if number <= last:
        return version, ()
    note = f"megatron-core {version} is newer than {_text(last)}, the last that was tried: names and parameters fit"
    return version, (note,)


def _missing() -> Iterator[str]:
    for module, names in NEEDED.items():
        for path, parameters in names.items():
            try:
                owner, name = lookup(module, path)
            except (ImportError, AttributeError) as error:
                yield f"{module}.{path} ({error})"
                continue
            if parameters is not None:
                has = list(inspect.signature(getattr(owner, name)).parameters)
                lacking = [p for p in parameters if p not in has]
                if lacking:
                    yield f"{module}.{path} takes {', '.join(has)}, not {', '.join(lacking)}"


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


class Replaced:
    """Names that are replaced until ``restore``."""

    def __init__(self) -> None:
        self.originals: list[tuple[Any, str, Any]] = []

    def wrap(self, module: str, path: str, wrapper: Callable[[Any], Any]) -> None:
        """Replace a name by ``wrapper`` of what it means."""
        owner, name = lookup(module, path)
        original = getattr(owner, name)
        self.originals.append((owner, name, original))
        setattr(owner, name, wrapper(original))

    def restore(self) -> None:
        while self.originals:
            owner, name, original = self.originals.pop()
            setattr(owner, name, original)


@contextmanager
def replaced(module: Any, **names: Any) -> Iterator[None]:
    """Replace names of a module inside the block."""
    originals = {name: getattr(module, name) for name in names}
    for name, value in names.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in originals.items():
            setattr(module, name, value)
