"""NVIDIA's apex (github.com/NVIDIA/apex): whether it is there as a run needs it, and its optimizer for slices."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from megazero.config.options.sections import TrainingConfig

# By option: the module of apex that it takes, and the compiled extension behind that.
NEEDED = {
    "optimizer_impl": ("apex.optimizers", "amp_C"),
    "norm_impl": ("apex.normalization", "fused_layer_norm_cuda"),
}
BUILD = (
    "build NVIDIA's with its extensions: git clone https://github.com/NVIDIA/apex, then "
    "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation ./apex"
)


def refuse_without_apex(training: TrainingConfig, device: torch.device) -> None:
    """Raise ValueError, with a line for each option, if a run asks for apex and this rank cannot have it."""
    asked = [name for name in NEEDED if getattr(training, name) == "apex"]
    lines = [
        f"--{name.replace('_', '-')} apex: {problem}; or use --{name.replace('_', '-')} torch"
        for name in asked
        for problem in _problems(*NEEDED[name], device)
    ]
    if lines:
        raise ValueError("\n".join(lines))


def _problems(module: str, extension: str, device: torch.device) -> Iterator[str]:
    if device.type != "cuda":
        yield f"it runs on CUDA, and this rank computes on {device.type}: --device cuda"
        return
    found = find_spec("apex")
    if found is None:
        yield f"apex is not installed; {BUILD} (pip install apex is another project)"
        return
    places = [Path(place) for place in found.submodule_search_locations or ()]
    if not any((place / "multi_tensor_apply").is_dir() for place in places):
        where = ", ".join(map(str, places)) or found.origin
        yield (
            f"the apex in {where} is not NVIDIA's (PyPI's apex is a toolkit for Pyramid); pip uninstall apex, and "
            f"{BUILD}"
        )
        return
    try:
        import_module(extension)
        import_module(module)
    except ImportError as error:
        yield f"apex has no extension {extension} that works with this torch ({error}); {BUILD}"


def fused_adam(groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """Return apex's FusedAdam over the groups, with decoupled weight decay. Parameters are fp32 on CUDA.

    It counts steps in its groups, not in its states (``SliceOptimizer.scalars``).
    """
    from apex.optimizers import FusedAdam

    return FusedAdam(groups, adam_w_mode=True, **options)
