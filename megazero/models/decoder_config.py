"""What the decoder is made of. Families (Llama, GPT-2, BLOOM) are values of this one configuration."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args, get_type_hints

Normalization = Literal["rmsnorm", "layernorm"]
Position = Literal["rope", "learned", "alibi"]
Activation = Literal["swiglu", "gelu"]
Recompute = Literal["none", "selective", "full"]
Layout = Literal["llama", "gpt2", "bloom"]


@dataclass(frozen=True)
class RopeScaling:
    """Stretching of rotary positions beyond the trained length.

    kind "linear": positions divided by ``factor`` (Chen et al. 2023). kind "llama3": wavelengths above
    ``original_length / low_frequency_factor`` divided by ``factor``, below ``original_length /
    high_frequency_factor`` kept, interpolated between (Llama 3.1).
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and choices of a decoder-only transformer with pre-norm residual layers.

    ffn_hidden_size: width of the feed-forward part (of each of gate and up for swiglu).
    num_kv_heads: key/value heads (grouped-query attention); None = num_heads.
    head_dim: None = hidden_size / num_heads.
    max_position_embeddings: rows of the learned position table, and the model's stated length.
    activation: "gelu" is the tanh form of GPT-2 and BLOOM.
    qkv_bias, linear_bias: biases of q, k, v; of the attention output and the feed-forward linears.
    layout: whose Hugging Face tensor names and shapes a checkpoint uses. "llama" can name every
        combination; "gpt2" and "bloom" need one key/value head per head and all biases.
    make_vocab_size_divisible_by: the vocabulary is padded to a multiple of this and of the TP size.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    vocab_size: int
    max_position_embeddings: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    normalization: Normalization = "rmsnorm"
    norm_eps: float = 1e-5
    position: Position = "rope"
    rope_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    activation: Activation = "swiglu"
    qkv_bias: bool = False
    linear_bias: bool = False
    embedding_norm: bool = False
    tied_embeddings: bool = False
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    recompute: Recompute = "none"
    init_std: float = 0.02
    make_vocab_size_divisible_by: int = 128
    layout: Layout = "llama"

    @property
    def kv_heads(self) -> int:
        """Key/value heads."""
        return self.num_kv_heads if self.num_kv_heads is not None else self.num_heads

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.head_dim if self.head_dim is not None else self.hidden_size // self.num_heads

    @property
    def query_size(self) -> int:
        """Output width of q_proj."""
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Output width of k_proj and of v_proj."""
        return self.kv_heads * self.head_size

    def validate(self, tp_size: int = 1) -> None:
        """ValueError listing every size or choice that cannot be built over ``tp_size`` ranks."""
        errors = [*self._choice_errors(), *self._positive_errors()]
        if not errors:
            errors = [*self._size_errors(tp_size), *self._family_errors()]
        if errors:
            raise ValueError("decoder configuration:\n  " + "\n  ".join(errors))

    def _choice_errors(self) -> list[str]:
        hints = get_type_hints(DecoderConfig)
        choices = {f.name: get_args(hints[f.name]) for f in fields(self)}
        errors = [
            f"{name} = {getattr(self, name)!r} is none of {', '.join(allowed)}"
            for name, allowed in choices.items()
            if allowed and all(isinstance(a, str) for a in allowed) and getattr(self, name) not in allowed
        ]
        for name in ("attention_dropout", "hidden_dropout"):
            if not 0 <= getattr(self, name) < 1:
                errors.append(f"{name} = {getattr(self, name)} is not in [0, 1)")
        if self.rope_scaling is not None and self.rope_scaling.kind not in ("linear", "llama3"):
            errors.append(f"rope_scaling kind = {self.rope_scaling.kind!r} is none of linear, llama3")
        return errors

    def _positive_errors(self) -> list[str]:
        names = "num_layers hidden_size ffn_hidden_size num_heads vocab_size max_position_embeddings"
        names += " kv_heads make_vocab_size_divisible_by"
        sizes = {name: getattr(self, name) for name in names.split()}
        return [f"{name} = {value} is not positive" for name, value in sizes.items() if value < 1]

    def _size_errors(self, tp_size: int) -> list[str]:
        errors = []
        if self.num_heads % self.kv_heads:
            errors.append(f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.kv_heads}")
        if self.head_dim is None and self.hidden_size % self.num_heads:
            errors.append(
                f"hidden_size = {self.hidden_size} does not divide by num_heads = {self.num_heads}; "
                f"the nearest multiple is {max(1, round(self.hidden_size / self.num_heads)) * self.num_heads}"
            )
        for name in ("num_heads", "num_kv_heads", "ffn_hidden_size"):
            value = self.kv_heads if name == "num_kv_heads" else getattr(self, name)
            if value % tp_size:
                errors.append(
                    f"{name} = {value} does not divide over tensor parallel size {tp_size}; "
                    f"the nearest multiple is {max(1, round(value / tp_size)) * tp_size}"
                )
        if self.position == "rope" and self.head_size % 2:
            errors.append(f"rotary positions need an even head size, not {self.head_size}")
        return errors

    def _family_errors(self) -> list[str]:
        errors = []
        if self.rope_scaling is not None and self.position != "rope":
            errors.append(f"rope_scaling needs position = rope, not {self.position}")
        if self.layout == "llama":
            return errors
        needed = {
            "normalization": "layernorm",
            "activation": "gelu",
            "qkv_bias": True,
            "linear_bias": True,
            "kv_heads": self.num_heads,
            "query_size": self.hidden_size,
            "position": "learned" if self.layout == "gpt2" else "alibi",
            "embedding_norm": self.layout == "bloom",
        }
        return errors + [
            f"layout = {self.layout} needs {name} = {value}, not {getattr(self, name)}; layout = llama takes any"
            for name, value in needed.items()
            if getattr(self, name) != value
        ]
