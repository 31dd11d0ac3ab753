"""Dropout whose masks are functions of a key, not of a generator's history.

The key names the micro-batch, the layer and the site (and the tensor- and context-parallel rank where the activation
is a part).
So a recompute draws the same mask, ranks that hold the same activation draw the same mask, no other random stream
moves, and torch.compile sees arithmetic only. An element is dropped if the hash of its place in the stream of the key
(kernels/noise.py) is below the probability, to 2 ** -32.

Forward of [8192, 512] on one CPU thread takes 17 ms in fp32, F.dropout 20 ms.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.config.model.section import ModelConfig
from megazero.cp import ContextParallel
from megazero.kernels.noise import hash_words, stream_keys
from megazero.tp import TensorParallel

Key = tuple[int, ...]
# Sites of dropout within a layer, part of the key.
_ATTENTION, _ATTENTION_OUTPUT, _MLP_OUTPUT = range(3)


class LayerDropout(NamedTuple):
    """The keys of one layer for one micro-batch. None where nothing is dropped.

    attention: that of the attention probabilities. outputs: int32 [2, 2], the words of attention's output and MLP's.
    """

    attention: Key | None = None
    outputs: Tensor | None = None


NO_DROPOUT = LayerDropout()


def dropout_of_layers(
    config: ModelConfig,
    tp: TensorParallel,
    cp: ContextParallel,
    key: int,
    layers: Iterable[int],
    device: torch.device,
) -> dict[int, LayerDropout]:
    """Return the dropout of the layers of these numbers, for the micro-batch that ``key`` names."""
    numbers, attention, outputs = list(layers), config.attention_dropout > 0, None
    if config.hidden_dropout > 0:
        sites = [(key, n, site) for n in numbers for site in (_ATTENTION_OUTPUT, _MLP_OUTPUT)]
        words = key_words([sharded_key(k, tp, cp, sharded=tp.sharded_sequence) for k in sites], device)
        outputs = words.view(len(numbers), 2, 2)
    return {
        n: LayerDropout(
            sharded_key((key, n, _ATTENTION), tp, cp, sharded=True) if attention else None,
            None if outputs is None else outputs[i],
        )
        for i, n in enumerate(numbers)
    }


def sharded_key(key: Key, tp: TensorParallel, cp: ContextParallel, *, sharded: bool) -> Key:
    """Return ``key``, extended by the tp rank where the activation is this rank's own part, and by the cp rank, whose
    tokens or heads it always is."""
    return (*key, tp.rank if sharded else 0, *([cp.rank] if cp.size > 1 else []))


def key_words(keys: Sequence[Key], device: torch.device) -> Tensor:
    """Return the two words of each key as ``keyed_dropout`` takes them, int32 [keys, 2]. The host does not wait."""
    words = torch.tensor([stream_keys(*key) for key in keys], dtype=torch.int32)
    return words.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else words


def keyed_dropout(x: Tensor, probability: float, words: Tensor | None) -> Tensor:
    """Return ``x`` (any shape and dtype) after dropout with the mask of a key's ``words``, int32 [2]. Without words,
    or with probability 0, return ``x`` itself. The backward keeps the mask, one byte per element.
    """
    if words is None or probability == 0:
        return x
    counters = torch.arange(x.numel(), dtype=torch.int32, device=x.device).add_(words[0])
    below = round(probability * 2**32) - 2**31  # as hashes are signed
    dropped = hash_words(counters, words[1]) < below
    return x.masked_fill(dropped.view(x.shape), 0).mul_(1 / (1 - probability))


@contextmanager
def keyed_randomness(device: torch.device, key: Key | None) -> Iterator[None]:
    """Seed the device's default generator from ``key`` inside the block, and put its state back after.

    For torch's kernels, which draw their masks themselves. Without a key do nothing.
    """
    if key is None:
        yield
        return
    if device.type == "cuda":
        torch.cuda.init()
        index = device.index if device.index is not None else torch.cuda.current_device()
        generator = torch.cuda.default_generators[index]
    else:
        generator = torch.default_generator
    state = generator.get_state()
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    generator.manual_seed(int.from_bytes(digest, "little") >> 1)
    try:
        yield
    finally:
        generator.set_state(state)
