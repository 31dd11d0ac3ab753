"""The decoder is built as the description of its model says."""

from __future__ import annotations

from typing import Any

import pytest

from megazero.config.model.section import make_model
from megazero.config.model.spec import model_spec
from megazero.families import FAMILIES
from megazero.models import Decoder
from megazero.pp.partition import partition
from megazero.tp import TensorParallel

SIZES: dict[str, Any] = {
    **{"num_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "num_query_groups": 8},
    **{"max_position_embeddings": 16, "vocab_size": 50, "make_vocab_size_divisible_by": 4},
}
MIXTURES: list[dict[str, Any]] = [
    {},
    {
        "num_query_groups": 2,
        "qk_norm": "all-heads",
        "normalization": "RMSNorm",
        "multi_latent_attention": False,
    },
    {"qk_norm": "head", "normalization": "RMSNorm", "untie_embeddings_and_output_weights": True},
    {"position_embedding_type": "learned_absolute", "add_qkv_bias": True, "multi_latent_attention": False},
    {"transformer_block_type": "sandwich", "untie_embeddings_and_output_weights": False},
    {"num_experts": 4, "add_bias_linear": False, "moe_ffn_hidden_size": 24, "xielu": False},
    {"num_experts": 4, "add_bias_linear": False, "xielu": False, "moe_layer_freq": (0, 1, 1, 0)}
    | {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": True},
]


@pytest.mark.parametrize("mixture", MIXTURES, ids=range(len(MIXTURES)))
@pytest.mark.parametrize("family", FAMILIES)
def test_the_decoder_is_built_as_described(family: str, mixture: dict[str, Any]) -> None:
    """It asserts its names and shapes itself, on every tensor-parallel rank and pipeline stage."""
    model = make_model(**{**SIZES, "model_family": family, **mixture})
    names = set[str]()
    for tp in (1, 2, 4):
        for stage in partition(4, 2):
            part = Decoder(model, TensorParallel(None, tp - 1, tp), stages=[stage], device="meta")
            names |= part.specs.keys()
    tied = {"head.weight"} - ({"head.weight"} if model.untie_embeddings_and_output_weights else set())
    assert names - tied == model_spec(model).parameters.keys()
