"""What a model family is. Options have the names of the flags, with underscores."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megazero.families.config_json.huggingface import HuggingFace
from megazero.families.layer_kinds import layer_kinds

# What is equal where the heads fill the residual stream, and where every query head has its own key and value.
FILLING_HEADS = (("query_projection_size", "hidden_size"),)
PLAIN_ATTENTION = (("num_query_groups", "num_attention_heads"), *FILLING_HEADS)
# What most layers do not have.
PLAIN_LAYER = {"qk_norm": "none", "transformer_block_type": "sequential", "attention_output_gate": False}


_OF_EXPERT = re.compile(r"(.*\.)(\d+)\.(\w+\.\w+)")  # before it, its number, its own name


class ExpertPlace(NamedTuple):
    """Where an expert's parameter lies in a folder's tensor of all, [experts, in, out], of biases [experts, out]."""

    tensor: str
    expert: int
    columns: slice

    def of(self, whole: Any) -> Any:
        """Return the parameter [out, in] or [out] as a view of the tensor."""
        own = whole[self.expert][..., self.columns]
        return own.T if own.ndim == 2 else own


@dataclass(frozen=True)
class TensorNames:
    """A family's names for the tensors of a checkpoint, and how it stores them.

    ``model`` maps a module here to the module there. ``layer`` does the same within a layer, whose modules there
    begin with ``layer_prefix`` and the layer's number. In ``layer``, (module, part) stands for a part of one fused
    tensor, counted from 0: of q, k, v, or of the gate and the up projection. "{}" stands for an expert's number.
    Experts whose name is without it lie in one tensor [experts, out, in], whose parts follow each other along out.
    A parameter without a module of its own, such as attention.sinks, stands for itself.
    ``constants`` are tensors without dimensions that folders have in every layer, by name, with their only value.
    ``together`` maps an expert's parameter, by which a checkpoint has it, to what folders have instead: a tensor
    [experts, in, out] of all, or of biases [experts, out], and which of its columns are the parameter's.
    ``transposed`` says that matrices of layers are stored [in, out].
    ``groups`` maps a tensor of parts to the option that counts groups in it: it has the rows of the first group of
    every part, such as the query heads, the key and the value that belong together, then those of the second group,
    and so on. Another one has all of the first part, then all of the second.
    ``needs`` maps an option, or a property of ModelConfig such as gated_mlp, to the value, or to the tuple of values,
    that these names can express. ``equal`` has pairs of them that must be equal for it. ``aliases`` maps a name in
    some release of transformers to the name in files.
    """

    model: Mapping[str, str]
    layer_prefix: str
    layer: Mapping[str, str | tuple[str, int]]
    transposed: bool = False
    groups: Mapping[str, str] = field(default_factory=dict)
    needs: Mapping[str, Any] = field(default_factory=dict)
    equal: tuple[tuple[str, str], ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    together: Mapping[str, tuple[str, slice]] = field(default_factory=dict)
    constants: Mapping[str, float] = field(default_factory=dict)

    def stored(self, name: str) -> tuple[str, int | None]:
        """Return the tensor that holds a parameter of the decoder and, if it is fused, which part of it."""
        module, kind = (name, "weight") if name == "embedding.positions" else name.rsplit(".", 1)
        if not module.startswith("layers."):
            return f"{self.model[module]}.{kind}", None
        _, index, module = module.split(".", 2)
        if (own := self.layer.get(f"{module}.{kind}")) is not None:
            return f"{self.layer_prefix}{index}.{own}", None
        entry = self.layer[module]
        tensor, part = entry if isinstance(entry, tuple) else (entry, None)
        return f"{self.layer_prefix}{index}.{tensor}.{kind}", part

    def grouped_by(self, name: str) -> str | None:
        """Return the option that counts the groups in the tensor that holds a parameter of a layer."""
        entry = self.layer.get(name.split(".", 2)[2].rsplit(".", 1)[0])
        return self.groups.get(entry[0]) if isinstance(entry, tuple) else None

    def in_folders(self, stored: str) -> ExpertPlace | None:
        """Return where folders have an expert's parameter that they have no tensor of."""
        match = _OF_EXPERT.fullmatch(stored)
        if match is None or match[3] not in self.together:
            return None
        tensor, columns = self.together[match[3]]
        return ExpertPlace(match[1] + tensor, int(match[2]), columns)

    def taken(self, stored: str, tensor: Callable[[str], Any]) -> Any:
        """Return what a checkpoint has under this name, of a folder: a view. tensor: returns a folder's by name."""
        place = self.in_folders(stored)
        return tensor(stored) if place is None else place.of(tensor(place.tensor))

    def can_express(self, options: object) -> bool:
        """Tell whether the choices in ``options``, an object with the options as attributes, have names here."""
        if not all(module in self.layer for module in _mlp_modules(options)):
            return False
        wanted = all(
            getattr(options, name) in (value if isinstance(value, tuple) else (value,))
            for name, value in self.needs.items()
        )
        return wanted and all(getattr(options, one) == getattr(options, other) for one, other in self.equal)


def qkv(tensor: str) -> dict[str, str | tuple[str, int]]:
    """Return the names of queries, keys and values that lie in one tensor."""
    return {f"attention.{part}_proj": (tensor, number) for number, part in enumerate("qkv")}


# The parts of Mamba-2's input linear, of which those from the second to the fourth are convolved.
MAMBA_PARTS = ("z", "x", "b", "c", "dt")


def mamba(module: str) -> dict[str, str | tuple[str, int]]:
    """Return the names of Mamba-2, whose input linears lie in one tensor, and its convolutions in another."""
    return {
        "attention": module,
        **{f"attention.{part}_proj": (f"{module}.in_proj", n) for n, part in enumerate(MAMBA_PARTS)},
        **{f"attention.{part}_conv": (f"{module}.conv1d", n) for n, part in enumerate(MAMBA_PARTS[1:4])},
        **{f"attention.{name}": f"{module}.{name}" for name in ("norm", "out_proj")},
    }


def gate_and_up(tensor: str) -> dict[str, str | tuple[str, int]]:
    """Return the names of an MLP's gate and up projection that lie in one tensor."""
    return {"mlp.gate_proj": (tensor, 0), "mlp.up_proj": (tensor, 1)}


def _mlp_modules(options: Any) -> Iterator[str]:
    """Yield the modules of layers' MLPs that only some families have names of."""
    experts = {kind.experts for kind in layer_kinds(options)}
    if False in experts:
        yield "mlp.up_proj"
        if options.xielu:
            yield "mlp.activation"
    if True in experts:
        yield "mlp.router"
        if options.moe_shared_expert_intermediate_size is not None:
            yield "mlp.shared_expert.up_proj"
            if options.moe_shared_expert_gate:
                yield "mlp.shared_gate"


@dataclass(frozen=True)
class Family:
    """One model family. ``name`` is the value of ``--model-family``.

    ``defaults`` maps an option to its default value. Of ``names``, the first that can express the choices counts.
    ``rounds_swiglu_down`` is Megatron's rule for the default width of a SwiGLU MLP; Llama's own code rounds up.
    ``exact_gelu_without_biases`` is Megatron's, too: its fused kernel for biases and GELU has the tanh form.
    """

    name: str
    defaults: Mapping[str, Any]
    names: tuple[TensorNames, ...]
    hugging_face: HuggingFace
    rounds_swiglu_down: bool = False
    exact_gelu_without_biases: bool = False

    def swiglu_width(self, hidden: int) -> int:
        """Return the default width of a SwiGLU MLP: 8/3 of the residual stream's, rounded to a multiple of 64.

        It is at least 64.
        """
        exact = hidden * 8
        return max(exact // 192, 1) * 64 if self.rounds_swiglu_down else -(-exact // 3 // 64) * 64
