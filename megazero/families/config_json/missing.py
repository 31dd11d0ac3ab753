"""Parts of Hugging Face's models that the decoder lacks, known by fields of config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

EXPERTS, LATENT, STATE_SPACE = "a mixture of experts", "latent attention", "state space layers"
LINEAR = "linear attention"
# By part: the fields that only models with it have, the most telling first. Patterns as of file names.
FIELDS: Mapping[str, tuple[str, ...]] = {
    EXPERTS: (
        "num_local_experts",
        "n_routed_experts",
        "num_experts*",
        "moe_num_experts",
        "num_shared_experts",
        "n_shared_experts",
        "moe_*",
        "expert_ffn_hidden_size",
    ),
    LATENT: ("kv_lora_rank", "q_lora_rank"),
    "chunked attention": ("attention_chunk_size",),
    "sparse attention": ("index_topk*", "index_n_heads"),
    LINEAR: ("linear_num_*_heads", "linear_num_heads", "linear_attn_config"),
    STATE_SPACE: ("mamba_*", "ssm_*", "state_size"),
    "convolutions": ("conv_L_cache",),
    "recurrent layers": ("lru_width",),
    "keys and values that layers share": ("num_kv_shared_layers",),
    "embeddings for each layer": ("hidden_size_per_layer_input",),
    "images": ("vision_config", "image_token_*"),
    "sound": ("audio_config", "audio_encoder*"),
    "an encoder": ("is_encoder_decoder",),
    "attention that looks ahead": ("type_vocab_size",),
    "code of its own, which is not run": ("auto_map",),
}


def missing(config: Mapping[str, Any]) -> list[str]:
    """Return the parts of a model that the decoder lacks, each with the field that shows it.

    config: config.json of a model_type that no family reads. The list is empty if no field tells.
    """
    inner = config.get("text_config")
    found = dict(_parts(inner)) if isinstance(inner, Mapping) else {}
    found |= dict(_parts(config))
    return [f"{part} ({said})" for part, said in found.items()]


def _parts(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each part and the field that shows it. A later field is the more telling one."""
    for kind in sorted(map(str, set(config.get("layer_types") or ()))):
        if kind not in ("full_attention", "sliding_attention"):
            yield kind.replace("_", " "), "layer_types"
    for part, patterns in FIELDS.items():
        said = [n for p in patterns for n, value in config.items() if value and fnmatchcase(n, p)]
        if said:
            value = config[said[0]]
            yield part, said[0] if isinstance(value, Mapping) else f"{said[0]} = {value!r}"


def part_of(name: str) -> str | None:
    """Return the part that only models with this field have, or None."""
    found = (p for p, patterns in FIELDS.items() if any(fnmatchcase(name, pattern) for pattern in patterns))
    return next(found, None)
