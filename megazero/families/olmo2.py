"""OLMo 2 (Walsh et al. 2024) is Llama whose norms follow attention and MLP, with norms of all queries and keys."""

from __future__ import annotations

from megazero.families import llama
from megazero.families.family import Family
from megazero.families.field_groups import ROTARY, biases
from megazero.families.huggingface import HuggingFace

OLMO2 = Family(
    name="olmo2",
    defaults={**llama.DEFAULTS, "transformer_block_type": "output-norm", "qk_norm": "all-heads"},
    names=(llama.NAMES,),
    hugging_face=HuggingFace(
        "olmo2",
        "Olmo2ForCausalLM",
        fields={name: there for name, there in llama.FIELDS.items() if name != "kv_channels"},
        absent={"num_query_groups": None, "norm_epsilon": 1e-5, "max_position_embeddings": 2048},
        tied=False,
        only=llama.SILU,
        groups=(biases(mlp=False), ROTARY),
    ),
)
