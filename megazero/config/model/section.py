"""The model section says what the decoder is made of.

Names are Megatron's. What families set is in megazero.families.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar

from megazero.config.model.mixers import MIXERS, MixerOptions
from megazero.config.model.parameters import TWO_BRANCHES
from megazero.config.options.fields import ORDER, UPDATE, option, section_of
from megazero.families import FAMILIES, GENERAL_NAMES, TensorNames
from megazero.families.layer_kinds import NOTHING, LayerKind

# What an MLP may have instead of GELU behind one matrix, of which it has one.
ACTIVATIONS = ("squared_relu", "xielu", "geglu", "quick_geglu", "swiglu")
NOT_GELU = tuple(name for name in ACTIVATIONS if name != "geglu")
# Needs (options/needs.py).
GELU = "GELU (--no-swiglu, and no --squared-relu, --xielu or --quick-geglu)"
GATED = "swiglu or geglu or quick_geglu: a gated MLP (--swiglu, --geglu or --quick-geglu)"
EXPERTS = "num_experts > 1"
ROPE = "position_embedding_type = rope"
OWN_FACTOR = "not rotary_attention_factor: the computed attention factor (no --rotary-attention-factor)"
# The norms of a layer's mixer and of its feed-forward, in the order of use.
LAYER_NORMS = {
    "sequential": (("input_norm",), ("mlp_norm",)),
    "parallel": (("input_norm",), ()),
    "parallel-two-norms": (("input_norm",), ("mlp_norm",)),
    "output-norm": (("attention_output_norm",), ("mlp_output_norm",)),
    "sandwich": (("input_norm", "attention_output_norm"), ("mlp_norm", "mlp_output_norm")),
}


# What a layer that predicts a further token has more than others, and its names in checkpoints.
FURTHER_NAMES = {
    **{name: name for name in ("enorm", "hnorm", "eh_proj")},
    "output_norm": "shared_head.norm",
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig(MixerOptions):
    """The decoder. A vocabulary of None is that of the tokenizer, which is not read yet."""

    NEEDS: ClassVar = {
        **MixerOptions.NEEDS,
        **{"rotary_": ROPE, "yarn_": (ROPE, "rotary_scaling = yarn"), "moe_": EXPERTS},
    }

    ffn_hidden_size: int = option(
        MISSING,
        "width inside the MLP (default: 4 x hidden; with --swiglu 8/3 x hidden, to a multiple of 64: rounded down in "
        "family gpt, as in Megatron, else up, as in Llama)",
        low=1,
    )
    seq_length: int = option(
        MISSING, "tokens of one sample", low=1, required=True, small=8, resume=ORDER | UPDATE
    )
    max_position_embeddings: int = option(MISSING, "longest sequence (default: --seq-length)", low=1)
    position_embedding_type: str = option(
        MISSING, "how positions enter (by family)", choices=("rope", "learned_absolute")
    )
    rotary_base: float = option(10000.0, "base of rotary frequencies", above=0)
    rotary_percent: float = option(
        1.0, "share of each head's channels, the first ones, that rotary positions turn", above=0, high=1
    )
    rotary_interleaved: bool = option(
        False, "rotary positions turn neighbouring channels, not those half of them apart (GLM; by family)"
    )
    rotary_scaling: str = option(
        "none",
        "scaling of rotary frequencies for long contexts",
        choices=("none", "linear", "llama3", "yarn", "longrope"),
        consts={"use-rope-scaling": "llama3"},
    )
    rotary_scaling_factor: float = option(
        8.0,
        "factor of --rotary-scaling (default with yarn: 1, as in Megatron)",
        above=0,
        aliases=("rope-scaling-factor",),
        needs="rotary_scaling = linear|llama3|yarn|longrope",
    )
    rotary_original_max_position: int = option(
        8192,
        "llama3, yarn, longrope: context length before scaling (default with yarn: 4096, as in Megatron)",
        low=2,
        needs="rotary_scaling = llama3|yarn|longrope",
    )
    rotary_attention_factor: float | None = option(
        None,
        "yarn, longrope: factor of rotated queries and of keys (default: by the scaling's factor)",
        above=0,
        needs="rotary_scaling = yarn|longrope",
    )
    rotary_low_freq_factor: float = option(
        1.0, "llama3: low-frequency factor", above=0, needs="rotary_scaling = llama3"
    )
    rotary_high_freq_factor: float = option(
        4.0, "llama3: high-frequency factor", above=0, needs="rotary_scaling = llama3"
    )
    rotary_short_factor: tuple[float, ...] | None = option(
        None,
        "longrope: divisor of each frequency in samples up to the original length",
        needs="rotary_scaling = longrope",
    )
    rotary_long_factor: tuple[float, ...] | None = option(
        None, "longrope: divisor of each frequency in longer samples", needs="rotary_scaling = longrope"
    )
    yarn_beta_fast: float = option(
        32.0, "yarn: pairs with more rotations than this over the original length are not scaled", above=0
    )
    yarn_beta_slow: float = option(
        1.0, "yarn: pairs with fewer rotations than this over the original length are fully scaled", above=0
    )
    yarn_mscale: float = option(
        1.0,
        "yarn: m in the attention factor (0.1 m ln factor + 1) / (0.1 a ln factor + 1)",
        low=0,
        needs=OWN_FACTOR,
    )
    yarn_mscale_all_dim: float = option(0.0, "yarn: a in that attention factor", low=0, needs=OWN_FACTOR)
    yarn_correction_range_round_to_int: bool = option(
        True, "yarn: round the bounds that both betas give to whole pairs, outwards"
    )
    rotary_window_base: float | None = option(
        None,
        "base of rotary frequencies in layers with a window, where they are then not scaled (Gemma 3, OLMo 3; "
        "default: as in other layers)",
        above=0,
        needs="sliding_window",
    )
    no_rope_freq: tuple[int, ...] | None = option(
        None, "layers without rotary positions: every N-th, or a number per layer, 1 for none", needs=ROPE
    )
    sliding_window: int | None = option(
        None, "tokens that attention looks back through, its own included (default: all)", low=1
    )
    window_attn_skip_freq: tuple[int, ...] | None = option(
        None,
        "layers without --sliding-window: every N-th, or a number per layer, 0 for one without (default: none)",
        needs="sliding_window",
    )
    attn_logit_softcapping: float = option(
        0.0, "cap of attention's scores s, which become cap x tanh(s / cap); 0: none (by family)", low=0
    )
    final_logit_softcapping: float = option(
        0.0, "cap of the logits s, which become cap x tanh(s / cap); 0: none (by family)", low=0
    )
    transformer_block_type: str = option(
        "sequential",
        "norms and sums of a layer: attention, then MLP, each behind a norm; both side by side behind one norm, or "
        "two; each with a norm behind it; or each between two norms (by family)",
        choices=tuple(LAYER_NORMS),
    )
    norm_epsilon: float = option(1e-5, "epsilon inside norms", above=0)
    swiglu: bool = option(
        MISSING,
        "SwiGLU MLP, else GELU (by family; off with --geglu, --quick-geglu, --squared-relu and --xielu)",
    )
    geglu: bool = option(False, "GELU as the gate of the MLP instead of SwiGLU's SiLU (Gemma; by family)")
    quick_geglu: bool = option(
        False, "x sigmoid(1.702 x) as the gate of the MLP instead of SwiGLU's SiLU (gpt-oss; by family)"
    )
    activation_func_clamp_value: float | None = option(
        None,
        "bound of what the MLP's activation is computed of: from above, and on both sides of what the gate "
        "multiplies (by family; default: none)",
        above=0,
        needs=GATED,
    )
    glu_linear_offset: float = option(
        0.0, "number that is added to what the MLP's gate multiplies (by family)", needs=GATED
    )
    squared_relu: bool = option(False, "relu(x)^2 in the MLP instead of GELU")
    xielu: bool = option(
        False, "xIELU in the MLP instead of GELU: two numbers of each layer are learnt (Apertus; by family)"
    )
    openai_gelu: bool = option(
        True,
        "GELU by tanh, else by the error function (by family; off in family gpt without --add-bias-linear, as in "
        "Megatron)",
        needs=tuple(f"not {other}: {GELU}" for other in NOT_GELU),
    )
    add_bias_linear: bool = option(MISSING, "biases in linears (by family)", negative="disable-bias-linear")
    untie_embeddings_and_output_weights: bool = option(
        MISSING, "a head with its own weights, else the embedding's (by family)"
    )
    scale_embeddings: bool = option(
        False, "tokens' embeddings are multiplied by sqrt(hidden), rounded to their dtype (Gemma; by family)"
    )
    embedding_multiplier: float = option(1.0, "factor of the tokens' embeddings", above=0)
    residual_multiplier: float = option(
        1.0, "factor of attention's and of the MLP's output before each residual sum", above=0
    )
    logits_scaling: float = option(1.0, "divisor of the logits", above=0)
    num_experts: int | None = option(
        None,
        "experts of a layer's MLP, of which a router chooses --moe-router-topk for each token (0 and 1: none)",
        low=2,
        small=6,
    )
    moe_layer_freq: tuple[int, ...] = option(
        (1,),
        "layers with experts: the first of every N, or a number per layer, 1 for one with experts",
        needs=TWO_BRANCHES,
    )
    moe_ffn_hidden_size: int | None = option(None, "width of an expert (default: --ffn-hidden-size)", low=1)
    moe_router_topk: int = option(2, "experts that a token goes to", low=1, small=3)
    moe_router_pre_softmax: bool = option(
        False,
        "softmax of all experts' scores before some are chosen, else of the chosen ones'",
        needs="moe_router_score_function = softmax",
    )
    moe_router_score_function: str = option(
        "softmax",
        "what makes a router's scores probabilities; sigmoids of several chosen experts are divided by their sum",
        choices=(
            "softmax",
            "sigmoid",
        ),
    )
    moe_router_topk_scaling_factor: float | None = option(None, "factor of experts' probabilities", above=0)
    moe_router_num_groups: int | None = option(
        None,
        "groups that experts lie in, of which a token goes to experts of --moe-router-group-topk",
        low=1,
        needs="moe_router_group_topk",
    )
    moe_router_group_topk: int | None = option(
        None, "groups of --moe-router-num-groups whose experts a token may go to (default: all)", low=1
    )
    moe_router_group_best: int | None = option(
        None,
        "experts by whose scores a group counts (default: as in Megatron, --moe-router-topk // "
        "--moe-router-group-topk)",
        low=1,
        small=1,
        needs="moe_router_group_topk",
    )
    moe_router_enable_expert_bias: bool = option(
        False, "experts are chosen by their sigmoids and a bias each, which every step moves towards balance"
    )
    moe_shared_expert_intermediate_size: int | None = option(
        None, "width inside all shared experts together, which every token goes to (default: none)", low=1
    )
    moe_shared_expert_gate: bool = option(
        False,
        "the shared experts' output is multiplied by the sigmoid of a score of the token",
        needs="moe_shared_expert_intermediate_size",
    )
    mtp_num_layers: int = option(
        0,
        "layers behind the last one, of its kind, each of which predicts one more token ahead in training, of the "
        "output of the layer before it and of the embedding of the token that this one predicts (DeepSeek-V3)",
        low=0,
    )
    attention_dropout: float = option(
        0.0, "dropout of attention probabilities (by family)", low=0, below=1, resume=UPDATE
    )
    hidden_dropout: float = option(
        0.0, "dropout before each residual sum (by family)", low=0, below=1, resume=UPDATE
    )
    vocab_size: int | None = option(None, "vocabulary before padding (default: tokenizer's)", low=1, small=64)
    make_vocab_size_divisible_by: int = option(
        128, "the padded vocabulary is a multiple of this x the tensor-parallel size", low=1, small=8
    )
    pad_vocab_size_to: int | None = option(None, "size of the padded vocabulary, exactly", low=1)

    @property
    def all_layers(self) -> range:
        """Return the numbers of the layers, and of those behind them that predict further tokens."""
        return range(self.num_layers + self.mtp_num_layers)

    @property
    def embeds_at_both_ends(self) -> bool:
        """Tell whether a pipeline's first and last stage both need the embedding: as the head, or for further
        tokens."""
        return not self.untie_embeddings_and_output_weights or self.mtp_num_layers > 0

    @property
    def vocabulary(self) -> int:
        """Return the vocabulary before padding, once the tokenizer that decides it is read."""
        assert self.vocab_size is not None, "the tokenizer has not been read"
        return self.vocab_size

    @property
    def gated_mlp(self) -> bool:
        """Tell whether the MLP has a third matrix, which makes its gate."""
        return self.swiglu or self.geglu or self.quick_geglu

    @property
    def plain_swiglu(self) -> bool:
        """Tell whether the MLP is silu(gate) * up, of whatever values."""
        return self.swiglu and self.activation_func_clamp_value is None and not self.glu_linear_offset

    @property
    def expert_width(self) -> int:
        """Return the width inside one expert."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size

    @property
    def group_best(self) -> int | None:
        """Return by how many of its experts a group counts, if there are groups."""
        kept = self.moe_router_group_topk
        return self.moe_router_group_best or (self.moe_router_topk // kept if kept else None)

    @property
    def parallel_block(self) -> bool:
        """Tell whether attention and MLP of a layer have the same input."""
        return self.transformer_block_type.startswith("parallel")

    @property
    def rotary_channels(self) -> int:
        """Return how many of the first channels of a head are turned by rotary positions."""
        return int(self.kv_channels * self.rotary_percent)

    def norms_of(self, kind: LayerKind) -> tuple[str, ...]:
        """Return the norms of a layer, in the order of use: those of the branches that it has."""
        branches = zip((kind.mixer, kind.feed_forward), LAYER_NORMS[self.transformer_block_type], strict=True)
        return tuple(norm for branch, norms in branches if branch != NOTHING for norm in norms)

    def padded_vocab_size(self, tp: int) -> int:
        """Return pad_vocab_size_to if it is given.

        Otherwise return the smallest multiple of make_vocab_size_divisible_by x ``tp`` that holds the vocabulary.
        """
        if self.pad_vocab_size_to is not None:
            return self.pad_vocab_size_to
        unit = self.make_vocab_size_divisible_by * tp
        return -(-self.vocabulary // unit) * unit

    @property
    def tensor_names(self) -> TensorNames:
        """Return a checkpoint's names: the family's own where they can express the choices, and otherwise Llama's.

        Modules of a mixer that these do not name have its own names, those of further tokens DeepSeek-V3's.
        """
        own, layer, groups = self.family_names, dict[str, Any](), dict[str, str]()
        for mixer in MIXERS.values():
            layer |= mixer.names
            groups |= mixer.groups
        layer |= FURTHER_NAMES
        return replace(own, layer={**layer, **own.layer}, groups={**groups, **own.groups})

    @property
    def family_names(self) -> TensorNames:
        """Return the same, as a family's record has them."""
        own = FAMILIES[self.model_family].names
        return next(names for names in (*own, *GENERAL_NAMES) if names.can_express(self))


def complete(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options by name, with what the family and other sizes decide filled in. None means "not said"."""
    family = FAMILIES.get(values.get("model_family") or ModelConfig.model_family)
    said = {name: value for name, value in values.items() if value is not None}
    done = {**(family.defaults if family else {}), **said}
    if done.get("num_experts") in (0, 1):  # Megatron's and DeepSpeed's words for none
        del done["num_experts"]
    if any(said.get(name) for name in ACTIVATIONS):  # one MLP: what is said decides, not the family
        done |= {name: False for name in ACTIVATIONS if name not in said}
    if (
        family
        and family.exact_gelu_without_biases
        and done.get("add_bias_linear") is False
        and has_gelu(done)
    ):
        done = {"openai_gelu": False, **done}
    hidden, derived = done.get("hidden_size"), {"max_position_embeddings": done.get("seq_length")}
    for mixer in MIXERS.values():
        derived |= mixer.derived(done)
    if {**derived, **done}.get("rotary_scaling") == "yarn":
        derived |= {"rotary_scaling_factor": 1.0, "rotary_original_max_position": 4096}
    if done.get("use_mup"):
        derived |= _of_mup({**derived, **done})
    if done.get("hybrid_layer_pattern"):
        derived["num_layers"] = len(done["hybrid_layer_pattern"])
    if hidden:
        derived["ffn_hidden_size"] = (
            family.swiglu_width(hidden) if family and done.get("swiglu") else 4 * hidden
        )
    return {**derived, **done}


def _of_mup(done: Mapping[str, Any]) -> dict[str, Any]:
    """Return what muP divides logits by, and multiplies scores by (Megatron's TransformerConfig)."""
    hidden, width, power = (
        done.get("hidden_size"),
        done.get("kv_channels"),
        done.get("mup_attn_scale_power", 1.0),
    )
    scales = {}
    if hidden:
        scales["logits_scaling"] = hidden / (done.get("mup_base_hidden_size") or hidden)
    if width:
        scales["softmax_scale"] = done.get("mup_base_head_dim", 1.0) ** 0.5 / width**power
    return scales


def has_gelu(done: Mapping[str, Any]) -> bool:
    """Tell whether the MLP has GELU, of options that families completed."""
    return not any(done.get(name) for name in NOT_GELU)


def as_trained(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored section with what older releases did: without the option openai_gelu, GELU was by tanh."""
    family = FAMILIES.get(stored.get("model_family", ""))
    return {"openai_gelu": True, **stored} if family and family.exact_gelu_without_biases else dict(stored)


def make_model(**options: Any) -> ModelConfig:
    """Make a model section by itself, for a decoder outside of a run.

    Options are given by name and completed as a run's are; a sequence is as long as the positions if it is not said.
    The decoder checks what is said here. Raises TypeError for an option that does not exist, and ConfigError for
    those that are missing.
    """
    if unknown := options.keys() - {each.name for each in fields(ModelConfig)}:
        raise TypeError(f"a model has no {', '.join(sorted(unknown))}")
    return section_of(
        ModelConfig, complete({"seq_length": options.get("max_position_embeddings"), **options})
    )
