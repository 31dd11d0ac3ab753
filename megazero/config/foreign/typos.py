"""Suggests what an unknown name was meant to be: an option, a flag of Megatron or a key of DeepSpeed."""

from __future__ import annotations

from collections.abc import Sequence

from megazero.config.foreign import deepspeed, megatron
from megazero.config.foreign.derived import DERIVED, UNFUSED_GELU, UNFUSED_GELU_MEANS
from megazero.config.foreign.table import ACCEPT, REFUSE, TYPED
from megazero.config.nearest import closest
from megazero.config.options.fields import typed
from megazero.config.read.sources import all_switches
from megazero.config.run import all_options

# In difflib's measure: 2 x the letters in common / those of both names. There are some 2,000 names of other programs,
# so one of them is a little like any word (--use-lora, --use-normhead): it must be that name but for a letter or two.
ALIKE, ALIKE_ELSEWHERE = 0.65, 0.8
# How papers and other programs name the parallel sizes, with and without -size.
SHORT = {
    "tp": "tensor-model-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "cp": "context-parallel-size",
    "ep": "expert-model-parallel-size",
    "expert-parallel": "expert-model-parallel-size",
    "sp": "sequence-parallel",
}


def suggestion(key: str, prefix: str = "--", others: Sequence[str] = ()) -> str:
    """Return '; nearest: X' with what X is, or '' where no name is near. ``others`` are further legal names."""
    own = dict.fromkeys((*all_switches(), *others))
    keys = {name.rpartition(".")[2].replace("_", "-"): row for name, row in deepspeed.keys().items()}
    word = SHORT.get(key.lower().removesuffix("-size"), key.lower())
    near = closest(word, [*own, *megatron.flags(), *keys], ALIKE_ELSEWHERE) or closest(word, own, ALIKE)
    if near is None:
        return ""
    if near in own:
        return f"; nearest: {prefix}{near}"
    if near in megatron.flags():
        return f"; nearest: {prefix}{near} (Megatron's, {meaning(near)})"
    here = [f"here {all_options()[name].flag}" for name in keys[near].options]
    return f"; nearest: {keys[near].name} (DeepSpeed's, {here[0] if here else 'a key of --deepspeed-config'})"


def meaning(name: str) -> str:
    """Say what a flag of Megatron is here."""
    kind, meant = megatron.kind(name), megatron.flags()[name]
    if kind == REFUSE:
        return f"not built here: {meant[0].text}"
    if kind == ACCEPT:
        return "changes nothing here"
    sets = next(row.options for row in meant if row.options)
    if UNFUSED_GELU in sets:
        return f"here {UNFUSED_GELU_MEANS}"
    options = {**all_options(), **megatron.derived_options()}
    said = (
        options[option].flag if value == TYPED else typed(options[option], value)
        for option, value in sets.items()
        if option not in DERIVED or value == TYPED
    )
    return f"here {' '.join(said)}"
