"""megatron-core on CPU ranks, and on ranks of one card.

"cuda" means "cpu" inside ``megatron_on_cpu``, and everything is as before after it.

megatron-core writes its device into its code, and says what a tensor is by the name of its type. Here its RNG, its
streams and its tensors are the CPU's, torch's norms know sequence parallelism, and nothing is compiled. No arithmetic
of megatron-core is replaced. ``megatron_on_card`` leaves the device as it is.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


class _CudaMeansCpu(TorchFunctionMode):
    """Every device of an operation is the CPU; ``Tensor.type()`` says what it would say on a GPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace("torch.", "torch.cuda.", 1)
        if "cuda" in str(kwargs.get("device")):
            kwargs = {**kwargs, "device": "cpu"}
        if function is torch.Tensor.to and "cuda" in str(args[1:2]):
            args = (args[0], "cpu", *args[2:])
        return function(*args, **kwargs)


def unshimmed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose operations are not looked at: it says no device. A look takes 3 us."""

    def call(*args: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args)

    return call


class _Stream:
    """A stream of a device that has none: what is issued is done."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def record_event(self, *_: Any) -> _Stream:
        return self

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


def _uncompiled(function: Any = None, *_: Any, **__: Any) -> Any:
    return function if function is not None else lambda f: f


def _torch_norm(config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
    """Return torch's norm whose parameters say that their gradients are partial sums under sequence parallelism."""
    kind = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}[config.normalization]
    norm = kind(hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


def _all_to_all_single(*args: Any, exchange: Any = dist.all_to_all_single, **kwargs: Any) -> Any:
    """Take sizes of splits that megatron-core would have moved from the GPU, and made lists of."""
    return exchange(
        *args, **{k: v.tolist() if "split" in k and torch.is_tensor(v) else v for k, v in kwargs.items()}
    )


def _fresh(reduce: Any) -> Any:
    """Return what a reduction does as a tensor of its own: experts add their biases to it in place, which autograd
    refuses of an input that comes back as it is."""
    return lambda x, *group: reduce(x, *group).clone()


def _of_torch() -> dict[str, Any]:
    """Return the names of torch.cuda that megatron-core uses, as those of the CPU."""
    stream = _Stream()
    nothing = contextlib.nullcontext
    return {
        "current_device": lambda: torch.device("cpu"),
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "Stream": _Stream,
        "Event": _Stream,
        "stream": lambda *_: nothing(),
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
    }


def _of_megatron() -> list[tuple[Any, str, Any]]:
    """Import megatron-core and return the names to replace in its modules, wherever it runs."""
    from megatron.core import dist_checkpointing, distributed, optimizer, pipeline_parallel  # noqa: F401
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs  # noqa: F401
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.moe import moe_utils

    return [
        (torch_norm.WrappedTorchNorm, "__new__", lambda _, *args, **kwargs: _torch_norm(*args, **kwargs)),
        # without TransformerEngine the router asks for a name that is not there
        (moe_utils, "te_general_gemm", None),
        (mappings, "_reduce", _fresh(mappings._reduce)),
    ]


def _of_megatron_on_cpu() -> list[tuple[Any, str, Any]]:
    """Return what is to be replaced besides on a CPU."""
    from megatron.core.tensor_parallel import random

    return [
        (dist, "all_to_all_single", _all_to_all_single),
        (random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
    ]


@contextlib.contextmanager
def megatron_on_card() -> Iterator[None]:
    """Let megatron-core run uncompiled, and without what TransformerEngine brings, for the time of the block."""
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        # At its import, megatron-core asks torch.compile for every function that it might fuse: 10 s of imports.
        first = "megatron.core" not in sys.modules
        with mock.patch.object(torch, "compile", _uncompiled) if first else contextlib.nullcontext():
            names = _of_megatron()
        for owner, name, value in names:
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        yield


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Let megatron-core run on this rank's CPU for the time of the block; import it if nobody has."""
    with contextlib.ExitStack() as stack:
        for name, value in _of_torch().items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(megatron_on_card())
        for owner, name, value in _of_megatron_on_cpu():
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        stack.enter_context(_CudaMeansCpu())
        yield
