"""ZeRO++ for a Megatron-LM job: its distributed optimizer's messages quantised and in two hops, by one line.

    import megatron_core_patch
    megatron_core_patch.enable(weights="int4-delta", gradients="int4")     # before pretrain(...)

or ``torchrun ... -m megatron_core_patch --zero-quantized-gradients ... pretrain_gpt.py ARGS``.
docs/integrate/megatron-patch.md says for whom it is and what it takes. megatron-core is imported when the patch is
turned on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_core_patch.options import PatchOptions
    from megatron_core_patch.patch import Patch
    from megazero.comm.hops import Traffic

__all__ = ["counters", "disable", "enable"]

_patch: Patch | None = None


def enable(weights: str = "none", gradients: str = "none", **options: Any) -> None:
    """Carry the messages of Megatron's distributed optimizer from here on.

    It is called before Megatron builds its DistributedDataParallel. weights: 'none' (exact), 'int8', 'int4' or
    'int2', or 'int8-delta', 'int4-delta', 'int2-delta' for the differences to what the receivers hold. gradients:
    'none', 'int8', 'int4', where they cross nodes; 'int4' after a Hadamard transform, unless
    ``gradient_transform='none'`` is given. With 'none' messages take two hops, too.
    options: ``ranks_per_node``, ``exact_numel`` and the others of docs/integrate/megatron-patch.md.

    Raises ValueError for options that are not legal, and for a megatron-core in which a name is missing; then
    nothing is patched.
    """
    from megatron_core_patch.options import PatchOptions
    from megazero.patches.options import read_words

    turn_on(read_words(PatchOptions, weights, gradients, **options))


def turn_on(options: PatchOptions) -> None:
    """Do as ``enable``, with the options as flags say them."""
    from megatron_core_patch.patch import Patch

    global _patch
    if _patch is not None:
        raise RuntimeError("megatron_core_patch is on already: call disable() first")
    _patch = Patch(options, switch_off=disable)


def disable() -> None:
    """Give every name of Megatron its own meaning back. What was built under the patch is not used after that."""
    global _patch
    if _patch is not None:
        _patch.remove()
        _patch = None


def counters() -> Traffic:
    """Return the counters of the bytes that this rank has sent, megazero's own.

    ``.bytes`` has them by (kind, link): ('reduce', 'inter_node') are gradients across nodes, ('refresh',
    'intra_node') weights inside a node. ``.take()`` names them in one dict and starts again at 0.
    """
    if _patch is None:
        raise RuntimeError("megatron_core_patch is not on: call enable() first")
    return _patch.traffic
