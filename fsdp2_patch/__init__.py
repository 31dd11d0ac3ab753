"""ZeRO++ for a job on torch's FSDP2: its messages across nodes once per step, quantised if asked for, by one line.

    import fsdp2_patch
    fsdp2_patch.enable(model, weights="int8", gradients="int4")     # behind fully_shard(model), on every rank

docs/integrate/fsdp2.md says for whom it is, and what it takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from fsdp2_patch.patch import Fsdp2Patch
    from megazero.comm.hops import Traffic

__all__ = ["counters", "disable", "enable"]

_patch: Fsdp2Patch | None = None


def enable(model: nn.Module, weights: str = "none", gradients: str = "none", **options: Any) -> None:
    """Carry the messages of a model's FSDP2 from here on. Collective: every rank calls it with the same words.

    model: what ``fully_shard`` was called on, or a module that holds such (ModuleList of a pipeline's stages).
    weights: 'none' (exact), 'int8', 'int4' or 'int2', or 'int8-delta', 'int4-delta', 'int2-delta' for the
    differences to what the receivers hold; on a 1-D mesh alone. gradients: 'none', 'int8', 'int4', where they
    cross nodes; 'int4' after a Hadamard transform, unless ``gradient_transform='none'`` is given.
    options: ``ranks_per_node``, ``exact_numel`` and the others of docs/integrate/fsdp2.md.

    Raises ConfigError, a ValueError, on every rank with all that is wrong with the options, the model, its meshes or
    the version of torch; then nothing is patched.
    """
    from fsdp2_patch.patch import Fsdp2Patch
    from megazero.patches.options import MessageOptions, read_words

    global _patch
    if _patch is not None:
        raise RuntimeError("fsdp2_patch is on already: call disable() first")
    _patch = Fsdp2Patch(model, read_words(MessageOptions, weights, gradients, **options))


def disable() -> None:
    """Give FSDP2 its own collectives back, on every rank, between steps. Sums that wait are dropped."""
    global _patch
    if _patch is not None:
        _patch.remove()
        _patch = None


def counters() -> Traffic:
    """Return the counters of the bytes that this rank has sent through the patch, megazero's own.

    ``.bytes`` has them by (kind, link): ('reduce', 'inter_node') are gradients across nodes, ('refresh',
    'inter_node') weights across nodes, ('gather', 'intra_node') weights inside a node. ``.take()`` names them in one
    dict and starts again at 0.
    """
    if _patch is None:
        raise RuntimeError("fsdp2_patch is not on: call enable() first")
    return _patch.traffic
