"""OLMo 2 (Walsh et al. 2024) is Llama whose norms follow attention and MLP, with norms of all queries and keys.

In OLMo 3 (Olmo Team 2025) three layers of four have a window, and rotary positions that are not scaled.
"""

from __future__ import annotations

from megazero.families import llama
from megazero.families.config_json.field_groups import biases
from megazero.families.config_json.huggingface import HuggingFace
from megazero.families.config_json.layer_groups import every_nth_full, two_rotaries
from megazero.families.config_json.rotary_fields import ROTARY, rotary
from megazero.families.family import Family

DEFAULTS = {**llama.DEFAULTS, "transformer_block_type": "output-norm", "qk_norm": "all-heads"}
FIELDS = {name: there for name, there in llama.FIELDS.items() if name != "kv_channels"}
ABSENT = {"num_query_groups": None, "norm_epsilon": 1e-5, "max_position_embeddings": 2048}

OLMO2 = Family(
    name="olmo2",
    defaults=DEFAULTS,
    names=(llama.NAMES,),
    hugging_face=HuggingFace(
        "olmo2",
        "Olmo2ForCausalLM",
        fields=FIELDS,
        absent=ABSENT,
        tied=False,
        only=llama.SILU,
        groups=(biases(mlp=False), ROTARY),
    ),
)
OLMO3 = Family(
    name="olmo3",
    defaults=DEFAULTS,
    names=(llama.NAMES,),
    hugging_face=HuggingFace(
        "olmo3",
        "Olmo3ForCausalLM",
        fields=FIELDS,
        absent=ABSENT,
        tied=False,
        only=llama.SILU,
        groups=(biases(mlp=False), two_rotaries(every_nth_full(4), rotary(absent_base=None), base=5e5)),
    ),
)
