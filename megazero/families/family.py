"""This module defines what a model family is. Options have the names of the flags, with underscores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megazero.families.huggingface import HuggingFace

# Widths that are equal where every query head has its own key and value, and the heads fill the residual stream.
PLAIN_ATTENTION = (("num_query_groups", "num_attention_heads"), ("query_projection_size", "hidden_size"))


@dataclass(frozen=True)
class TensorNames:
    """This says what a family calls the tensors of a checkpoint, and how it stores them.

    ``model`` maps a module here to the module there. ``layer`` does the same within a layer, whose modules there
    begin with ``layer_prefix`` and the layer's number. In it, (module, part) stands for q, k, v as parts 0, 1, 2 of
    one tensor.
    ``transposed`` says that matrices of layers are stored [in, out].
    ``fused`` is the order of the rows of such a tensor. With "sides", it has all of q, then all of k, then all of
    v. With "heads", it has q, k, v of the first head, then of the second head, and so on.
    ``needs`` maps an option to the only value that these names can express. ``equal`` has pairs of options that
    must be equal for it.
    """

    model: Mapping[str, str]
    layer_prefix: str
    layer: Mapping[str, str | tuple[str, int]]
    transposed: bool = False
    fused: Literal["sides", "heads"] = "sides"
    needs: Mapping[str, Any] = field(default_factory=dict)
    equal: tuple[tuple[str, str], ...] = ()

    def can_express(self, options: object) -> bool:
        """Tell whether the choices in ``options``, an object with the options as attributes, have names here."""
        wanted = all(getattr(options, name) == value for name, value in self.needs.items())
        return wanted and all(getattr(options, one) == getattr(options, other) for one, other in self.equal)


@dataclass(frozen=True)
class Family:
    """This is one model family. ``name`` is the value of ``--model-family``.

    ``defaults`` maps an option to its value where nothing else is said.
    ``rounds_swiglu_down`` is Megatron's rule for the default width of a SwiGLU MLP; Llama's own code rounds up.
    """

    name: str
    defaults: Mapping[str, Any]
    names: TensorNames
    hugging_face: HuggingFace
    rounds_swiglu_down: bool = False

    def swiglu_width(self, hidden: int) -> int:
        """Return the default width of a SwiGLU MLP: 8/3 of the residual stream's, rounded to a multiple of 64.

        It is at least 64.
        """
        exact = hidden * 8
        return max(exact // 192, 1) * 64 if self.rounds_swiglu_down else -(-exact // 3 // 64) * 64
