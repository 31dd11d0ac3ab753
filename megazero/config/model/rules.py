"""Rules between the options of a model, and over tensor-parallel ranks. The decoder calls them, too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from megazero.config.errors import ConfigError
from megazero.config.model.mixers import MIXERS, mixers_of
from megazero.config.model.section import ACTIVATIONS, ModelConfig
from megazero.config.nearest import around, common_divisors, multiples_around
from megazero.config.options.fields import fault, section_options, show
from megazero.families.layer_kinds import DENSE, LETTERS, MARKS, NOTHING, feed_forwards, mixers


def rotary(model: ModelConfig) -> Iterator[str]:
    """Report heads that have no pairs to rotate, and frequencies that are out of order."""
    if model.position_embedding_type != "rope":
        return
    mixer = mixers_of(model)[0]
    if mixer.heads is None:
        return
    flag, width = mixer.rotated_by, mixer.heads.rotated
    turned = int(width * model.rotary_percent)
    if width % 2:
        yield f"{flag} {width} must be even for rotary positions; nearest: {width - 1 or 2} or {width + 1}"
    elif turned % 2 or not turned:
        channels = dict.fromkeys(
            min(max(int(word), 2), width) for word in multiples_around(turned, 2).split(" or ")
        )
        yield (
            f"--rotary-percent {model.rotary_percent:g} of {flag} {width} is {turned} channels, which must be even "
            f"and above 0; nearest: {' or '.join(f'{math.ceil(1e4 * c / width) / 1e4:g}' for c in channels)}"
        )
    else:
        yield from _rotary_scaling(model, turned // 2)


def _rotary_scaling(model: ModelConfig, pairs: int) -> Iterator[str]:
    kind = model.rotary_scaling
    if kind == "llama3" and model.rotary_low_freq_factor >= model.rotary_high_freq_factor:
        yield (
            f"--rotary-low-freq-factor {model.rotary_low_freq_factor:g} must be below "
            f"--rotary-high-freq-factor {model.rotary_high_freq_factor:g}; nearest: the defaults 1 and 4"
        )
    if kind == "yarn" and model.yarn_beta_slow > model.yarn_beta_fast:
        yield (
            f"--yarn-beta-slow {model.yarn_beta_slow:g} exceeds --yarn-beta-fast {model.yarn_beta_fast:g}; nearest: "
            "the defaults 1 and 32"
        )
    if kind == "yarn" and model.rotary_base <= 1:
        yield f"--rotary-base {model.rotary_base:g} must be above 1 with --rotary-scaling yarn; usual: 10000"
    for option in ("rotary_short_factor", "rotary_long_factor") if kind == "longrope" else ():
        flag, factors = f"--{option.replace('_', '-')}", getattr(model, option) or ()
        if len(factors) != pairs:
            yield (
                f"{flag} has {len(factors)} numbers, and --rotary-scaling longrope needs one for each of the "
                f"{pairs} pairs of rotary channels"
            )
        elif min(factors) <= 0:
            yield f"{flag} has {min(factors):g}; its numbers must be above 0"


def mlp(model: ModelConfig) -> Iterator[str]:
    """Report several activations for one MLP, and one of an MLP for experts."""
    if model.xielu and model.num_experts is not None:
        yield "--xielu with --num-experts: experts have no numbers of their own to learn; nearest: --squared-relu"
    flags = [f"--{name.replace('_', '-')}" for name in ACTIVATIONS if getattr(model, name)]
    if len(flags) > 1:
        yield f"{' and '.join(flags)} exclude each other; leave {'one' if len(flags) == 2 else 'two'} out"


def pattern(model: ModelConfig) -> Iterator[str]:
    """Report letters that are no layers, and patterns that the rest of the model does not fit."""
    letters, layers, block = model.hybrid_layer_pattern, model.num_layers, model.transformer_block_type
    if letters is None:
        return
    typed = f"--hybrid-layer-pattern {letters}"
    if other := "".join(sorted({*letters} - LETTERS.keys())):
        near = "".join(letter for letter in letters if letter in LETTERS)
        yield (
            f"{typed} has {' '.join(other)}, and layers are {' '.join(LETTERS)} (latent attention is * with "
            f"--multi-latent-attention); nearest: {near or '*-'}"
        )
    elif len(letters) != layers:
        yield f"{typed} has {len(letters)} letters for --num-layers {layers}; nearest: --num-layers {len(letters)}"
    elif not {*letters} & {letter for letter, (mixer, _) in LETTERS.items() if mixer != NOTHING}:
        yield f"{typed} has no layer that mixes tokens; add M, G or *"
    if "E" in letters and model.num_experts is None:
        yield f"{typed} has layers of experts, E, and there are none; add --num-experts, or take - for an MLP"
    if model.num_experts is not None and "E" not in letters:
        yield f"--num-experts {model.num_experts}: {typed} gives no layer these experts; add E, or leave them out"
    if model.parallel_block:
        yield f"--transformer-block-type {block} has two branches side by side, and {typed} one; nearest: sequential"


def frequencies(model: ModelConfig) -> Iterator[str]:
    """Report lists of layers that do not have a number for each layer, or other ones than 0 and 1."""
    for name in MARKS:
        listed, layers = getattr(model, name), model.num_layers
        if listed is None or (len(listed) == 1 and listed[0] >= 1):
            continue
        nth = "every N-th layer is" if MARKS[name].last else "the first of every N layers is"
        typed = f"--{name.replace('_', '-')} {show(listed)}"
        if len(listed) == 1:
            yield f"{typed} must be at least 1, as {nth} meant; nearest: 1, or leave it out"
        elif len(listed) != layers:
            yield f"{typed} has {len(listed)} numbers for --num-layers {layers}; give one for each, or one for all"
        elif other := sorted(set(listed) - {0, 1}):
            yield f"{typed} lists layers by 0 and 1, got {show(tuple(other))}"
        elif name == "moe_layer_freq" and model.num_experts is not None and not any(listed):
            yield f"{typed} gives no layer the {model.num_experts} experts; nearest: 1, or no --num-experts either"


def further(model: ModelConfig) -> Iterator[str]:
    """Report learned positions with layers that predict further tokens, as Megatron does: each would need its own."""
    if model.mtp_num_layers and model.position_embedding_type == "learned_absolute":
        yield (
            f"--mtp-num-layers {model.mtp_num_layers} does not go with --position-embedding-type learned_absolute; "
            "nearest: --position-embedding-type rope"
        )


def experts(model: ModelConfig) -> Iterator[str]:
    """Report routers that cannot choose as asked."""
    count, topk = model.num_experts, model.moe_router_topk
    if count is None:
        return
    if topk > count:
        yield f"--moe-router-topk {topk} exceeds --num-experts {count}; nearest: {count}"
    if model.moe_router_enable_expert_bias and model.moe_router_score_function == "softmax":
        yield (
            "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid: the bias is as large as a "
            "score of one expert, whatever the others' are"
        )
    yield from _groups(model, count)


def _groups(model: ModelConfig, count: int) -> Iterator[str]:
    """Report groups of experts that a token's experts do not fit in."""
    groups, kept, topk = model.moe_router_num_groups, model.moe_router_group_topk, model.moe_router_topk
    best = model.moe_router_group_best
    if kept is None:
        return
    if groups is None:
        yield f"--moe-router-group-topk {kept} needs --moe-router-num-groups, of which it is a part"
    elif count % groups:
        yield (
            f"--num-experts {count} does not divide into --moe-router-num-groups {groups}; nearest groups: "
            f"{around(common_divisors(count), groups)}"
        )
    elif kept > groups:
        yield f"--moe-router-group-topk {kept} exceeds --moe-router-num-groups {groups}; nearest: {groups}"
    elif best is not None and best > count // groups:
        yield (
            f"--moe-router-group-best {best} exceeds a group's {count // groups} experts; nearest: {count // groups}"
        )
    elif best is None and kept > topk:
        yield (
            f"--moe-router-group-topk {kept} exceeds --moe-router-topk {topk}: a group counts by its best "
            f"{topk} // {kept} experts, which are none; nearest: {topk}"
        )
    elif kept * count // groups < topk:
        least = -(-topk * groups // count)
        yield (
            f"--moe-router-group-topk {kept} groups of {count // groups} experts have fewer than --moe-router-topk "
            f"{topk}; nearest: {least}"
        )


def padded_vocabulary(model: ModelConfig, tp: int) -> Iterator[str]:
    """Report a padded size that the vocabulary does not fit in, or that ``tp`` ranks cannot share evenly.

    Also report a padded size that is not the multiple that is asked for as well (the default is not asked for).
    """
    padded, size, divisor = model.pad_vocab_size_to, model.vocab_size, model.make_vocab_size_divisible_by
    if padded is None:
        return
    least = -(-(size or 1) // tp) * tp
    if size is not None and padded < size:
        yield f"--pad-vocab-size-to {padded} is below the vocabulary's {size}; nearest: {least}"
    elif padded % tp:
        yield (
            f"--pad-vocab-size-to {padded} does not divide by --tensor-model-parallel-size {tp}; nearest: "
            f"{multiples_around(max(padded, least), tp)}"
        )
    elif divisor != ModelConfig.make_vocab_size_divisible_by and padded % divisor:
        yield (
            f"--pad-vocab-size-to {padded} is not a multiple of --make-vocab-size-divisible-by {divisor}; leave "
            "that out"
        )


def sequence(model: ModelConfig) -> Iterator[str]:
    """Report samples that are longer than the positions go."""
    length, longest = model.seq_length, model.max_position_embeddings
    if length > longest:
        yield f"--seq-length {length} exceeds --max-position-embeddings {longest}; nearest: {longest}"


def tensor_parallel(model: ModelConfig, tp: int, sequence_parallel: bool = False) -> Iterator[str]:
    """Report sizes that ``tp`` ranks cannot share evenly.

    There may be fewer key/value heads than ranks; the ranks then share them evenly.
    """
    shared, copied = _shared(model)
    sizes = {**shared, **{flag: count for flag, count in copied.items() if count >= tp}}
    if DENSE in feed_forwards(model):
        sizes["--ffn-hidden-size"] = model.ffn_hidden_size
    if model.num_experts is not None and model.moe_shared_expert_intermediate_size is not None:
        sizes["--moe-shared-expert-intermediate-size"] = model.moe_shared_expert_intermediate_size
    if sequence_parallel:
        sizes["--seq-length"] = model.seq_length
    legal = common_divisors(*sizes.values())
    for flag, count in copied.items():
        if tp % min(count, tp):
            legal = [size for size in legal if size % count == 0 or count % size == 0]
            yield (
                f"{flag} {count} cannot be shared evenly by --tensor-model-parallel-size {tp}; nearest size "
                f"that fits all: {around(legal, tp)}"
            )
    for flag, size in sizes.items():
        if size % tp:
            yield (
                f"{flag} {size} does not divide by --tensor-model-parallel-size {tp}; nearest size that fits all: "
                f"{around(legal, tp)}"
            )


def head_shares(model: ModelConfig, tp: int) -> list[int]:
    """Return the numbers of ranks that can share the heads of a tensor-parallel rank evenly."""
    heads, groups = ([max(1, count // tp) for count in counts.values()] for counts in _shared(model))
    return [k for k in common_divisors(*heads) if all(n % k == 0 or k % n == 0 for n in groups)]


def _shared(model: ModelConfig) -> tuple[dict[str, int], dict[str, int]]:
    """Return what ranks share of all mixers, by flag, and of it what several of them may hold copies of."""
    shared, copied = dict[str, int](), dict[str, int]()
    for mixer in mixers_of(model):
        evenly, again = mixer.shared()
        shared, copied = shared | evenly, copied | again
    return shared, copied


def context_parallel(
    model: ModelConfig, tp: int, ranks: int, size: int, flag: str = "--context-parallel-size"
) -> Iterator[str]:
    """Report heads of a tensor-parallel rank that the ``ranks`` of ``flag`` cannot share evenly, and mixers without
    heads, whose state none of all ``size`` ranks hands on."""
    if stateful := [name for name in mixers(model) if MIXERS[name](model).heads is None]:
        if size > 1:
            yield (
                f"--context-parallel-size {size} does not go with layers of {' and '.join(stateful)}, whose state "
                "goes through whole samples; nearest: 1"
            )
        return
    legal, (shared, copied) = head_shares(model, tp), _shared(model)
    if ranks in legal or min(shared.values()) < tp:  # that is reported elsewhere
        return
    heads = " over ".join(f"{max(1, count // tp)}" for count in (shared | copied).values())
    of = f" on each of {tp} tensor-parallel ranks" if tp > 1 else ""
    yield (
        f"{flag} {ranks} does not share {heads} heads{of} evenly: each rank attends with its own "
        f"heads; nearest size that fits: {around(legal, ranks)}, or any with --cp-comm-type all_gather"
    )


Rule = Callable[[ModelConfig], Iterator[str]]


def _of_mixer(name: str, rule: Rule) -> Rule:
    """Return the rule of models that have the mixer in some layer."""
    return lambda model: rule(model) if name in mixers(model) else iter(())


# Of any decoder.
RULES: tuple[Rule, ...] = (
    *(_of_mixer(name, rule) for name, mixer in MIXERS.items() for rule in mixer.rules),
    *(rotary, mlp, pattern, frequencies, further, experts),
)


def check_model(model: ModelConfig, tp: int = 1, heads: int = 1, cp: int = 1) -> None:
    """Check what a decoder over ``tp`` x ``cp`` ranks, of which ``heads`` swap heads, asks of its sizes and choices.
    Raises ConfigError with every fault.

    Options without an effect are no faults of a decoder: config/validate.py alone judges those.
    """
    options = {
        o.name: replace(o, required=o.name == "vocab_size") for o in section_options("model", ModelConfig)
    }
    errors = [error for name, option in options.items() if (error := fault(option, getattr(model, name)))]
    if not errors:
        errors = [line for rule in RULES for line in rule(model)]
        errors += [*tensor_parallel(model, tp), *padded_vocabulary(model, tp)]
        errors += context_parallel(model, tp, heads, cp) if cp > 1 and not errors else []
    if errors:
        raise ConfigError(errors)
