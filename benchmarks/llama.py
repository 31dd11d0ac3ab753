"""The decoder of the benchmarks: a Llama whose sizes a shape names."""

from __future__ import annotations

from typing import Protocol

from megazero.models import ModelConfig, make_model


class Sizes(Protocol):
    """What a shape says of its model; sequence is the longest, in tokens."""

    @property
    def layers(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def ffn(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def sequence(self) -> int: ...


def llama(sizes: Sizes) -> ModelConfig:
    """Return the model section of a Llama of these sizes."""
    return make_model(
        model_family="llama",
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        ffn_hidden_size=sizes.ffn,
        num_attention_heads=sizes.heads,
        vocab_size=sizes.vocabulary,
        max_position_embeddings=sizes.sequence,
    )
