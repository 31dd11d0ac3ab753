"""config.json of every family: fields that are known, refused or set aside, and which architecture a mixture has."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from megazero.config import RunConfig
from megazero.config.errors import ConfigError
from megazero.config.model.architecture import architecture_of, from_hf_config
from megazero.config.model.mixers import mixers_of
from megazero.config.model.rules import check_model
from megazero.config.model.section import make_model
from megazero.config.model.spec import active_count, model_spec, parameter_count, training_flops
from megazero.config.run import stored_values
from megazero.families import FAMILIES
from megazero.families.layer_kinds import layer_kinds
from megazero.train.outputs import export_note
from megazero.verify.shrink import shrink
from tests import ROOT
from tests.family_models import FALCON, GPT2, LLAMA, NEOX, VARIANTS, transformers
from tests.messages import refused
from tests.unit.config.command_lines import WORLD, rows, run
from tools.families_page import families

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
UNROUNDED = {"original_max_position_embeddings": 4096, "truncate": False}
# As published (by memory), with what classes of today do not have any more.
PUBLISHED = {
    "llama-2-7b": (
        {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096}
        | {"hidden_act": "silu", "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False}
        | {"vocab_size": 32000, "pretraining_tp": 1, "torch_dtype": "float16", "_name_or_path": "x"},
        "llama",
    ),
    "qwen2.5-7b": (
        {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
        | {"num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 131072}
        | {"max_window_layers": 28, "rope_theta": 1000000.0, "sliding_window": 131072, "use_mrope": False}
        | {"use_sliding_window": False, "vocab_size": 152064, "hidden_act": "silu", "rms_norm_eps": 1e-06},
        "qwen2",
    ),
    "qwen3-30b-a3b": (
        {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48}
        | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "attention_bias": False}
        | {
            "max_position_embeddings": 40960,
            "max_window_layers": 48,
            "rope_theta": 1000000.0,
            "vocab_size": 151936,
        }
        | {"use_sliding_window": False, "sliding_window": None, "rope_scaling": None, "rms_norm_eps": 1e-06}
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
        | {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": 0.001,
            "hidden_act": "silu",
        }
        | {"output_router_logits": False, "tie_word_embeddings": False},
        "qwen3_moe",
    ),
    "mixtral-8x7b": (
        {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "hidden_act": "silu"}
        | {"num_experts_per_tok": 2, "max_position_embeddings": 32768, "rope_theta": 1000000.0}
        | {"router_aux_loss_coef": 0.02, "output_router_logits": False, "sliding_window": None}
        | {"rms_norm_eps": 1e-05, "vocab_size": 32000, "tie_word_embeddings": False, "use_cache": True},
        "mixtral",
    ),
    "olmoe-1b-7b": (
        {"model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16}
        | {"num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64, "norm_topk_prob": False}
        | {"num_experts_per_tok": 8, "max_position_embeddings": 4096, "rope_theta": 10000.0, "clip_qkv": None}
        | {"attention_bias": False, "router_aux_loss_coef": 0.01, "hidden_act": "silu", "rope_scaling": None}
        | {"rms_norm_eps": 1e-05, "vocab_size": 50304, "tie_word_embeddings": False},
        "olmoe",
    ),
    "qwen1.5-moe-a2.7b": (
        {"model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24}
        | {"num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4}
        | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "decoder_sparse_step": 1}
        | {"norm_topk_prob": False, "router_aux_loss_coef": 0.001, "max_position_embeddings": 8192}
        | {
            "use_sliding_window": False,
            "sliding_window": 32768,
            "max_window_layers": 21,
            "hidden_act": "silu",
        }
        | {
            "rope_theta": 1000000.0,
            "rms_norm_eps": 1e-06,
            "vocab_size": 151936,
            "tie_word_embeddings": False,
        },
        "qwen2_moe",
    ),
    "granite-3.0-1b-a400m": (
        {"model_type": "granitemoe", "hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 24}
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "num_local_experts": 32}
        | {"num_experts_per_tok": 8, "attention_multiplier": 0.015625, "embedding_multiplier": 12.0}
        | {"logits_scaling": 6.0, "residual_multiplier": 0.22, "max_position_embeddings": 4096}
        | {"rope_theta": 10000, "rope_scaling": None, "attention_bias": False, "attention_dropout": 0.1}
        | {"router_aux_loss_coef": 0.001, "output_router_logits": False, "hidden_act": "silu"}
        | {"rms_norm_eps": 1e-06, "vocab_size": 49155, "tie_word_embeddings": True},
        "granitemoe",
    ),
    "glm-4.5-air": (
        {"model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46}
        | {"num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True}
        | {"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_group": 1}
        | {"topk_group": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True}
        | {"first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "use_qk_norm": False, "use_cache": True}
        | {"partial_rotary_factor": 0.5, "rope_theta": 1000000, "rope_scaling": None, "rms_norm_eps": 1e-05}
        | {"max_position_embeddings": 131072, "vocab_size": 151552, "tie_word_embeddings": False}
        | {"hidden_act": "silu", "attention_dropout": 0.0},
        "glm4_moe",
    ),
    "dots.llm1": (
        {"model_type": "dots1", "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 62}
        | {"num_attention_heads": 32, "num_key_value_heads": 32, "attention_bias": False, "n_group": 1}
        | {"n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "topk_group": 1}
        | {"n_shared_experts": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "moe_layer_freq": 1}
        | {"first_k_dense_replace": 1, "scoring_func": "noaux_tc", "pretraining_tp": 1, "hidden_act": "silu"}
        | {"rope_theta": 10000000, "rope_scaling": None, "rms_norm_eps": 1e-05, "sliding_window": None}
        | {"max_position_embeddings": 32768, "vocab_size": 152064, "tie_word_embeddings": False},
        "dots1",
    ),
    "gpt-oss-20b": (
        {"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24}
        | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "attention_bias": True}
        | {"num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "swiglu_limit": 7.0}
        | {"layer_types": ["sliding_attention", "full_attention"] * 12, "sliding_window": 128}
        | {
            "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
            | UNROUNDED
        }
        | {"rope_theta": 150000, "max_position_embeddings": 131072, "initial_context_length": 4096}
        | {"rms_norm_eps": 1e-05, "hidden_act": "silu", "vocab_size": 201088, "tie_word_embeddings": False},
        "gpt_oss",
    ),
    "phi-4-mini": (
        {"model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32}
        | {"num_attention_heads": 24, "num_key_value_heads": 8, "partial_rotary_factor": 0.75}
        | {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_theta": 10000.0}
        | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.5] * 48}}
        | {"attention_bias": False, "mlp_bias": False, "lm_head_bias": False, "full_attn_mod": 1}
        | {"interpolate_factor": 1, "rms_norm_eps": 1e-05, "sliding_window": 262144, "hidden_act": "silu"}
        | {"vocab_size": 200064, "tie_word_embeddings": True},
        "phi3",
    ),
    "granite-3.3-8b": (
        {"model_type": "granite", "hidden_size": 4096, "intermediate_size": 12800, "num_hidden_layers": 40}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "attention_multiplier": 0.0078125}
        | {"embedding_multiplier": 12.0, "logits_scaling": 16.0, "residual_multiplier": 0.22}
        | {"max_position_embeddings": 131072, "rope_theta": 10000000.0, "rope_scaling": None}
        | {"attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0, "hidden_act": "silu"}
        | {"rms_norm_eps": 1e-05, "vocab_size": 49159, "tie_word_embeddings": True},
        "granite",
    ),
    "glm-4-9b-0414": (
        {"model_type": "glm4", "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40}
        | {"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": False}
        | {"partial_rotary_factor": 0.5, "rope_theta": 10000.0, "max_position_embeddings": 32768}
        | {"hidden_act": "silu", "rms_norm_eps": 1e-05, "vocab_size": 151552, "tie_word_embeddings": False},
        "glm4",
    ),
    "pythia-160m": (
        {"model_type": "gpt_neox", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
        | {"num_attention_heads": 12, "hidden_act": "gelu", "layer_norm_eps": 1e-05, "rotary_pct": 0.25}
        | {"max_position_embeddings": 2048, "rotary_emb_base": 10000, "use_parallel_residual": True}
        | {"vocab_size": 50304, "tie_word_embeddings": False},
        "gpt_neox",
    ),
    "falcon-40b": (
        {"model_type": "falcon", "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128}
        | {"num_kv_heads": 8, "new_decoder_architecture": True, "parallel_attn": True, "alibi": False}
        | {"bias": False, "multi_query": True, "vocab_size": 65024, "layer_norm_epsilon": 1e-05}
        | {"apply_residual_connection_post_layernorm": False},
        "falcon",
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name):
    config, family = PUBLISHED[name]
    model = from_hf_config(config)
    assert architecture_of(model).name == model.model_family == family


def test_a_field_by_which_transformers_only_checks_changes_nothing():
    config = PUBLISHED["llama-2-7b"][0]
    assert from_hf_config(config | {"ignore_keys_at_rope_validation": None}) == from_hf_config(config)


@pytest.mark.parametrize("family", sorted({values[0] for values in VARIANTS.values()}))
def test_every_field_of_the_installed_class_is_known(family):
    kind = getattr(transformers, f"{family}Config")
    record = {f.hugging_face.model_type: f.hugging_face for f in FAMILIES.values()}[kind.model_type]
    declared = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()  # 5.0's are no dataclasses
    names = {field.name for field in declared} | kind().to_dict().keys()
    assert [name for name in sorted(names) if not record.knows(name)] == []
    assert not record.knows("logit_scale")


def test_what_transformers_4_writes_of_generation_changes_nothing():
    config, _ = PUBLISHED["llama-2-7b"]
    written = {"temperature": 0.9, "top_p": 0.6, "max_length": 4096, "torchscript": False, "pruned_heads": {}}
    assert from_hf_config({**config, **written}) == from_hf_config(config)
    with pytest.raises(ValueError, match=r"pruned_heads = \{1: \[0\]\} is not supported"):
        from_hf_config({**config, "pruned_heads": {1: [0]}})


def split(typed):
    """The family and the changes of a row."""
    name, _, changes = typed.partition(" ")
    return name, eval(changes.removeprefix("SIGMOIDS "), {"ROPE": ROPE, "inf": math.inf})


def config_of(family: str, **changes) -> dict:
    values = {"GPT2": GPT2, "GPTNeoX": NEOX, "Falcon": FALCON}.get(family, LLAMA)
    return {**getattr(transformers, f"{family}Config")(**values).to_dict(), **changes}


# A class of transformers, a star for its own sizes, and fields of its config.json -> what the error names.
FIELDS = """
Llama {"model_type": "arcee"} -> model_type = 'arcee'
Llama {"model_type": "mpt"} -> model_type = 'mpt'
Llama {"hidden_size": "2"} -> hidden_size; text; '2'
Llama {"num_hidden_layers": [2]} -> num_hidden_layers
GPT2 {"n_embd": "x"} -> n_embd; whole number; 'x'
Llama {"rope_parameters": "2"} -> rope_parameters = '2'
Qwen2 {"layer_types": 5} -> layer_types = 5
Llama {"model_type": ["llama"]} -> model_type = ['llama']
Llama {"n_routed_experts": 8} -> n_routed_experts = 8
Llama {"hidden_act": "relu"} -> hidden_act = 'relu'; 'silu', 'swish'
Llama {"rope_parameters": {"rope_type": "proportional"}} -> rope_type; 'proportional'; yarn
Phi3 {"lm_head_bias": True} -> lm_head_bias = True; False
Llama {"rope_parameters": {"rope_type": "yarn"}} -> yarn; missing
Llama {"rope_parameters": {"rope_type": "longrope"}} -> short_factor; missing; long_factor
Phi3 {"rope_parameters": {"rope_type": "linear", "factor": 2.0}} -> rope_type; 'linear'
Llama {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": ROPE}
    -> rope_scaling = {'type': 'linear'; rope_parameters
Llama {"rope_theta": 500000.0, "rope_parameters": ROPE} -> rope_theta = 500000.0
Llama {"rope_parameters": {"rope_type": "linear"}} -> missing
Llama {"rope_parameters": {"rope_type": "default", "attention_factor": 2.0}} -> attention_factor
Llama {"partial_rotary_factor": 0.5} -> partial_rotary_factor = 0.5; 1
Llama {"hidden_size": 50} -> hidden_size = 50
Llama {"logit_scale": 0.1} -> logit_scale = 0.1
Llama {"sliding_window": 9} -> sliding_window = 9
Llama {"quantization_config": {"bits": 4}} -> quantization_config = {'bits': 4}
Llama {"per_layer_config": {"0": {}}} -> per_layer_config = {'0': {}}
Llama {"some_new_thing": 1} -> some_new_thing = 1
Llama {"auto_map": {}} -> auto_map = {}
GptOss {"quantization_config": {"quant_method": "mxfp4"}} -> quantization_config; Mxfp4Config(dequantize=True)
GptOss {"swiglu_alpha": 2.0} -> swiglu_alpha = 2.0
GptOss {"initial_context_length": 8192} -> initial_context_length = 8192
Qwen2 {"layer_types": ["full_attention", "sliding_attention"]} -> layer_types; use_sliding_window
Qwen2 {"layer_types": ["chunked_attention", "chunked_attention"]} -> layer_types; chunked_attention
Qwen2 {"layer_types": ["full_attention"]} -> layer_types; 1 layers; num_hidden_layers
SmolLM3 {"no_rope_layers": [1]} -> no_rope_layers; 1 layers; num_hidden_layers
Gemma3Text {"attn_logit_softcapping": 9.0} -> attn_logit_softcapping = 9.0
Gemma3Text {"use_bidirectional_attention": True} -> use_bidirectional_attention = True
Gemma2 {"hidden_activation": "silu"} -> hidden_activation = 'silu'
Gemma2 {"sliding_window": None} -> sliding_window; layer_types; sliding_attention
Olmo3 {"rope_parameters": {"full_attention": ROPE, "sliding_attention": {"rope_type": "yarn", "rope_theta": 10000.0}}}
    -> yarn
Olmo3 {"rope_parameters": {"full_attention": ROPE, "sliding_attention": {"type": "linear", "factor": 2}}} -> default
Olmo3 {"rope_parameters": {"full_attention": ROPE, "rope_theta": 500000.0}}
    -> rope_parameters; rope_theta; full_attention; sliding_attention
Gemma3Text {"rope_scaling": {"type": "linear", "factor": 8.0}, "rope_parameters": {"full_attention": ROPE}}
    -> rope_scaling = {'type': 'linear', 'factor': 8.0}; rope_parameters
Llama {"rope_parameters": {"rope_type": "linear", "type": "yarn", "factor": 2.0}}
    -> rope_type; 'linear'; 'yarn'; differ
Llama {"rope_parameters": {"rope_type": "linear", "factor": inf}}
    -> --rotary-scaling-factor takes a finite number, got inf
Llama {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}} -> rope_type = 'dynamic'; linear
Gemma2 {"query_pre_attn_scalar": 0} -> query_pre_attn_scalar = 0
Gemma2 {"query_pre_attn_scalar": -4} -> --softmax-scale
Gemma2 {"attn_logit_softcapping": -3.0} -> --attn-logit-softcapping -3
Mistral {"sliding_window": "16"} -> --sliding-window; text; '16'
Llama {"attention_bias": "false"} -> --add-attention-bias; 'false'
Llama {"rms_norm_eps": None} -> rms_norm_eps
Llama {"output_multiplier": 2.0} -> output_multiplier = 2.0
Olmo3 {"rope_parameters": None, "rope_theta": 10000.0} -> rope_parameters; rope_theta; differ
Olmo3 {"rope_parameters": None} -> rope_theta; missing
Qwen2 {"use_mrope": True} -> use_mrope = True; False
GPT2 {"add_cross_attention": True} -> add_cross_attention = True
GPT2 {"activation_function": "relu"} -> activation_function = 'relu'
GPT2 {"scale_attn_by_inverse_layer_idx": True} -> scale_attn_by_inverse_layer_idx = True
GPT2 {"hidden_size": 64} -> hidden_size = 64
Falcon {"alibi": True} -> alibi = True; False
Falcon {"parallel_attn": False} -> parallel_attn = False; True
Falcon {"num_ln_in_parallel_attn": 2} -> num_ln_in_parallel_attn = 2
Falcon {"multi_query": False, "num_kv_heads": 2} -> num_kv_heads = 2
Qwen3Moe* {"num_experts": 4} -> num_experts = 4
Qwen3Moe* {"decoder_sparse_step": 0} -> decoder_sparse_step = 0
Qwen2Moe* {"shared_expert_intermediate_size": 0} -> shared_expert_intermediate_size = 0
Mixtral* {"num_local_experts": None} -> num_local_experts = None
Mixtral* {"num_local_experts": 1} -> num_local_experts = 1
Mixtral* {"router_jitter_noise": 0.1} -> router_jitter_noise = 0.1; 0.0
Mixtral* {"num_experts_per_tok": "2"} -> num_experts_per_tok; text; '2'
Olmoe* {"clip_qkv": 8.0} -> clip_qkv = 8.0; None
Olmoe* {"num_experts": 0} -> num_experts = 0
Glm4Moe* {"norm_topk_prob": False} -> norm_topk_prob = False
DeepseekV3* {"num_key_value_heads": 64} -> num_key_value_heads = 64; only 128
DeepseekV3* {"qk_head_dim": 128} -> qk_head_dim = 128; only 192
DeepseekV3* {"attention_bias": True} -> attention_bias = True
DeepseekV3* {"topk_method": "greedy"} -> topk_method = 'greedy'; 'noaux_tc'
DeepseekV3* {"rope_parameters": {"rope_type": "yarn", "mscale_all_dim": 0.5}} -> mscale_all_dim; with mscale
DeepseekV2* {"norm_topk_prob": True} -> norm_topk_prob = True
DeepseekV2* {"topk_method": "noaux_tc"} -> topk_method = 'noaux_tc'; greedy, group_limited_greedy
Glm4Moe* {"n_shared_experts": 0} -> n_shared_experts = 0; above 0
Dots1* {} -> n_routed_experts; missing; num_experts_per_tok; n_shared_experts
Dots1* {"scoring_func": "softmax"} -> scoring_func = 'softmax'; 'noaux_tc'
GraniteMoe* {"shared_intermediate_size": 9} -> shared_intermediate_size = 9
"""


@pytest.mark.parametrize(("typed", "named"), rows(FIELDS))
def test_what_is_not_understood_is_an_error(typed, named):
    family, changes = split(typed)
    own = family.removesuffix("*")
    config = getattr(transformers, f"{own}Config")().to_dict() if own != family else config_of(family)
    with refused(*named):
        from_hf_config({**config, **changes})


@pytest.mark.parametrize(
    "family, parts",
    [
        ("Phimoe", ["a mixture of experts (num_local_experts = 16)"]),
        ("MiniCPM3", ["latent attention (kv_lora_rank = 256)"]),
        ("Llama4", ["chunked attention (attention_chunk_size = 8192)", "experts", "images (vision_config)"]),
        ("Qwen3_5MoeText", ["linear attention", "a mixture of experts"]),
        ("Mamba", ["state space layers"]),
        ("RecurrentGemma", ["recurrent layers"]),
        ("Bert", ["attention that looks ahead"]),
        ("T5", ["an encoder (is_encoder_decoder = True)"]),
        (
            "Gemma3",
            ["images (vision_config)", "its text_config is of gemma3_text, so a folder of that alone"],
        ),
        ("OPT", ["no reader"]),
    ],
)
def test_a_family_that_is_not_built_is_refused_by_what_it_has(family, parts):
    config = getattr(transformers, f"{family}Config")().to_dict()
    with pytest.raises(ValueError, match=f"model_type = '{config['model_type']}' is not built here") as error:
        from_hf_config(config)
    assert all(part in str(error.value) for part in parts), error.value


DEEPSEEK = {
    **{
        "attention_bias": False,
        "auto_map": {"AutoConfig": "theirs.Config"},
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
    },
    **{"hidden_act": "silu", "moe_layer_freq": 1, "pretraining_tp": 1, "seq_aux": True, "rms_norm_eps": 1e-6},
    **{
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "use_cache": True,
    },
    **{
        "tie_word_embeddings": False,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "rope_theta": 10000,
    },
}
SCALED = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}
SCALED |= {"original_max_position_embeddings": 4096}
V2 = {**DEEPSEEK, "model_type": "deepseek_v2", "norm_topk_prob": False, "scoring_func": "softmax"}
V2 |= {
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
}
V3 = {**DEEPSEEK, "model_type": "deepseek_v3", "norm_topk_prob": True, "scoring_func": "sigmoid"}
V3 |= {"topk_method": "noaux_tc", "num_nextn_predict_layers": 0}


def sizes(layers, hidden, heads, ffn, experts, width, rank):
    names = (
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "intermediate_size",
        "n_routed_experts",
    )
    names += ("moe_intermediate_size", "q_lora_rank", "num_key_value_heads")
    return dict(zip(names, (layers, hidden, heads, ffn, experts, width, rank, heads), strict=True))


# What config.json says, as published, and billions of parameters.
LATENTS = {
    "DeepSeek-V2-Lite": (
        {
            **V2,
            **sizes(27, 2048, 16, 10944, 64, 1408, None),
            "topk_method": "greedy",
            "routed_scaling_factor": 1.0,
        }
        | {"rope_scaling": {**SCALED, "mscale": 0.707, "mscale_all_dim": 0.707}},
        15.7,
    ),
    "DeepSeek-V2": (
        {**V2, **sizes(60, 5120, 128, 12288, 160, 1536, 1536), "n_group": 8, "topk_group": 3}
        | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0}
        | {"rope_scaling": {**SCALED, "mscale": 0.707, "mscale_all_dim": 0.707}},
        235.7,
    ),
    "DeepSeek-V3": (
        {
            **V3,
            **sizes(61, 7168, 128, 18432, 256, 2048, 1536),
            "n_group": 8,
            "topk_group": 4,
            "vocab_size": 129280,
        }
        | {"first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "num_experts_per_tok": 8}
        | {"n_shared_experts": 1, "num_nextn_predict_layers": 1, "max_position_embeddings": 163840}
        | {"rope_scaling": SCALED},
        671.0,
    ),
    "Moonlight-16B-A3B": (
        {**V3, **sizes(27, 2048, 16, 11264, 64, 1408, None), "vocab_size": 163840, "rms_norm_eps": 1e-5}
        | {
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "routed_scaling_factor": 2.446,
            "rope_theta": 50000.0,
        }
        | {"max_position_embeddings": 8192},
        16.0,
    ),
    "Kimi-K2": (
        {**V3, **sizes(61, 7168, 64, 18432, 384, 2048, 1536), "model_type": "kimi_k2", "vocab_size": 163840}
        | {
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "routed_scaling_factor": 2.827,
            "rope_theta": 50000.0,
        }
        | {"max_position_embeddings": 131072, "rope_scaling": {**SCALED, "factor": 32, "beta_fast": 1.0}},
        1026.4,
    ),
}


# Layers that predict further tokens, which transformers leaves out.
FURTHER = ("num_nextn_predict_layers",)


def test_published_layers_of_further_tokens_have_their_parameters():
    """685 billion of DeepSeek-V3 are 671.03, 11.61 and a second embedding and head (its README_WEIGHTS.md)."""
    model = from_hf_config(LATENTS["DeepSeek-V3"][0])
    again = 2 * model.vocabulary * model.hidden_size
    assert model.mtp_num_layers == 1
    assert (parameter_count(model) + again) / 1e9 == pytest.approx(684.5, abs=0.2)
    assert model_spec(model).layers[-1].numel / 1e9 == pytest.approx(11.61, abs=0.005)


@pytest.mark.parametrize("name", LATENTS)
def test_published_models_with_latents_are_read(name):
    published, billions = LATENTS[name]
    model = from_hf_config(published, FURTHER)
    kind = "DeepseekV2" if model.model_family == "deepseek_v2" else "DeepseekV3"
    known = {n: v for n, v in published.items() if n not in ("model_type", "auto_map")}
    with torch.device("meta"):
        theirs = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**known))
    assert parameter_count(model) == sum(p.numel() for p in theirs.parameters())
    assert parameter_count(model) / 1e9 == pytest.approx(billions, abs=0.06)
    scale = theirs.model.layers[0].self_attn.scaling
    assert mixers_of(model)[0].heads.scale == pytest.approx(scale, rel=1e-12)
    assert architecture_of(model).hugging_face.architecture == f"{kind}ForCausalLM"


def test_all_errors_come_at_once_and_fields_can_be_set_aside():
    strange = {
        "logits_scaling": 8.0,
        "moe_top_k": 2,
        "hidden_act": "relu",
        "rope_parameters": {"type": "llama4"},
    }
    config = config_of("Llama", **strange)
    del config["hidden_size"]
    with pytest.raises(ValueError) as error:
        from_hf_config(config)
    for part in ("logits_scaling = 8.0", "moe_top_k = 2", "hidden_act", "'llama4'", "hidden_size is missing"):
        assert part in str(error.value)
    plain = config_of("Llama")
    strange = {**plain, "logits_scaling": 8.0, "hidden_act": "relu"}
    assert from_hf_config(strange, ("logits_scaling", "hidden_act")) == from_hf_config(plain)
    with pytest.raises(ValueError, match="there is no field moe_top_k to accept; hidden_size is read, so it"):
        from_hf_config(plain, ("moe_top_k", "hidden_size"))


def test_what_an_absent_field_means_and_which_may_not_be():
    config = config_of("Llama")
    few = {name: config[name] for name in ("model_type", *LLAMA) if name in config}
    del few["num_key_value_heads"]
    model = from_hf_config(few, hidden_dropout=0.1)
    assert (model.num_query_groups, model.kv_channels, model.norm_epsilon) == (4, 12, 1e-6)
    assert model.hidden_dropout == 0.1 and model.untie_embeddings_and_output_weights
    with pytest.raises(ValueError, match="hidden_size is missing; intermediate_size is missing"):
        from_hf_config({n: v for n, v in few.items() if n not in ("hidden_size", "intermediate_size")})
    falcon = from_hf_config(PUBLISHED["falcon-40b"][0])
    assert (falcon.hidden_size, falcon.ffn_hidden_size, falcon.max_position_embeddings) == (8192, 32768, 2048)
    assert not falcon.untie_embeddings_and_output_weights
    mistral = from_hf_config({**few, "model_type": "mistral", "num_attention_heads": 8})
    assert mistral.sliding_window == 4096 and mistral.num_query_groups == 8
    assert from_hf_config({**few, "model_type": "qwen3", "num_key_value_heads": 2}).kv_channels == 128


@pytest.mark.parametrize(
    "fields, experts",
    [
        ({}, [1, 1, 1, 1]),
        ({"decoder_sparse_step": 2}, [0, 1, 0, 1]),
        ({"mlp_only_layers": [0, 3]}, [0, 1, 1, 0]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [0, 1, 0, 0]),
        ({"num_experts": 0}, [0, 0, 0, 0]),
        ({"mlp_only_layers": [0, 1, 2, 3]}, [0, 0, 0, 0]),
    ],
)
def test_which_layers_of_a_mixture_have_experts(fields, experts):
    config = transformers.Qwen3MoeConfig(num_hidden_layers=4, **fields).to_dict()
    model = from_hf_config(config)
    assert [int(kind.experts) for kind in layer_kinds(model)] == experts
    written = FAMILIES["qwen3_moe"].hugging_face.config(model)
    assert [int(kind.experts) for kind in layer_kinds(from_hf_config(written))] == experts


@pytest.mark.parametrize(
    "name, count, active",
    [
        ("qwen3-30b-a3b", 30_532_122_624, 3.35e9),
        ("mixtral-8x7b", 46_702_792_704, 12.88e9),
        ("olmoe-1b-7b", 6_919_161_856, 1.28e9),
        ("qwen1.5-moe-a2.7b", 14_315_784_192, 2.69e9),
        ("granite-3.0-1b-a400m", 1_334_628_352, 0.43e9),
        ("glm-4.5-air", 106_852_245_504, 13.4e9),
        ("dots.llm1", 142_774_373_888, 14.0e9),
        ("gpt-oss-20b", 20_914_757_184, 4.187e9),  # 3.6 billion, as published, without the embedding
    ],
)
def test_a_published_mixture_has_its_parameters(name, count, active):
    model = from_hf_config(PUBLISHED[name][0], FURTHER)
    assert parameter_count(model) == count
    assert active_count(model) == pytest.approx(active, rel=0.005)
    # Attention's products of positions besides; the embedding is looked up.
    per_token, looked_up = training_flops(model, [4096]) / 4096, model.vocabulary * model.hidden_size
    looked_up *= model.untie_embeddings_and_output_weights
    unseen = sum((1 - kind.window / 4096) ** 2 for kind in layer_kinds(model) if kind.window)
    attention = (model.num_layers - unseen) * 4096 * model.query_projection_size
    assert per_token == pytest.approx(6 * (active_count(model) - looked_up + attention), rel=1e-3)


def test_swish_is_silu():
    config = config_of("Llama")
    assert from_hf_config({**config, "hidden_act": "swish"}) == from_hf_config(config)


SIGMOIDS = {"num_experts": 8, "moe_shared_expert_intermediate_size": 64, "moe_ffn_hidden_size": 32}
SIGMOIDS |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


# A family and its options -> the architecture that has them, or what the error names: the nearest, and what it lacks.
ARCHITECTURES = """
llama {"add_qkv_bias": True} -> qwen2
llama {"qk_norm": "head"} -> qwen3
llama {"qk_norm": "head", "num_experts": 4} -> qwen3_moe
qwen3_moe {"num_experts": 4, "moe_layer_freq": (2,), "moe_router_pre_softmax": True} -> qwen3_moe
llama {"num_experts": 4} -> mixtral; --model-family mixtral
qwen3_moe {"num_experts": 4, "sliding_window": 8, "window_attn_skip_freq": (2,)} -> skip-freq 2
qwen3_moe {"num_experts": 4, "moe_shared_expert_intermediate_size": 16} -> --moe-shared-expert-intermediate-size 16
qwen2_moe {"num_experts": 4, "moe_shared_expert_intermediate_size": 16} -> qwen2_moe
qwen2_moe {"num_experts": 4} -> --moe-shared-expert-intermediate-size unset
qwen2_moe {} -> qwen2_moe
mixtral {"num_experts": 4, "moe_ffn_hidden_size": 20} -> mixtral
mixtral {"num_experts": 4, "moe_layer_freq": (2,)} -> qwen3_moe; --qk-norm none
olmoe {"num_experts": 4, "sliding_window": 8} -> olmoe; --sliding-window 8
llama {"qk_norm": "all-heads", "num_experts": 4, "moe_router_pre_softmax": True} -> olmoe
llama {"qk_norm": "all-heads"} -> --qk-norm all-heads
granitemoe {"num_experts": 4, "residual_multiplier": 0.5} -> granitemoe
granitemoe {"num_experts": 4, "swiglu": False} -> llama; --swiglu off; --num-e
glm4_moe {} -> glm4_moe
glm4_moe SIGMOIDS {} -> glm4_moe
glm4_moe SIGMOIDS {"moe_router_group_topk": 4, "moe_router_num_groups": 4} -> glm4_moe
glm4_moe SIGMOIDS {"moe_router_topk_scaling_factor": 1.0} -> glm4_moe
glm4_moe SIGMOIDS {"qk_norm": "head"} -> glm4_moe
dots1 SIGMOIDS {"moe_layer_freq": (0, 1)} -> dots1
glm4_moe SIGMOIDS {"moe_layer_freq": (1, 0)} -> glm4_moe; --ffn-hidden-size 128; --moe-layer-freq 2
glm4_moe SIGMOIDS {"moe_router_topk": 1} -> glm4_moe
glm4_moe SIGMOIDS {"moe_shared_expert_intermediate_size": 70} -> glm4_moe; --moe-shared-expert-intermediate-size 70
glm4_moe SIGMOIDS {"moe_router_enable_expert_bias": False} -> --moe-router-enable-expert-bias off
glm4_moe SIGMOIDS {"moe_router_topk": 4, "moe_router_group_topk": 1, "moe_router_num_groups": 2}
    -> --moe-router-group-best 4
deepseek_v3 SIGMOIDS {} -> deepseek_v3
deepseek_v3 SIGMOIDS {"multi_latent_attention": False} -> glm4_moe
deepseek_v2 SIGMOIDS {"moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False} -> deepseek_v2
mixtral SIGMOIDS {"moe_shared_expert_intermediate_size": None} -> --moe-router-score-f
nemotron_h {"hybrid_layer_pattern": "M*"} -> nemotron_h
nemotron_h SIGMOIDS {"hybrid_layer_pattern": "ME"} -> nemotron_h
nemotron_h {"hybrid_layer_pattern": "M*", "swiglu": True, "squared_relu": False} -> --hybrid-layer-pattern
nemotron_h {"hybrid_layer_pattern": "M*", "no_rope_freq": (2,)} -> nemotron_h; --no-rope-freq 2
llama {"sliding_window": 64} -> mistral
llama {"qk_norm": "all-heads", "transformer_block_type": "output-norm"} -> olmo2
qwen2 {"add_qkv_bias": False} -> llama
mistral {} -> mistral
olmo3 {"sliding_window": 8, "rotary_base": 500000.0, "rotary_window_base": 500000.0} -> olmo3
llama {"sliding_window": 8, "window_attn_skip_freq": (0, 0)} -> --window-attn-skip-freq 1
gpt {"swiglu": True} -> --position-embedding-type learned_absolute; --normalization LayerNorm
gpt {"openai_gelu": False} -> gpt
llama {"normalization": "LayerNorm"} -> llama; --normalization LayerNorm
llama {"kv_channels": 20, "hidden_size": 46, "ffn_hidden_size": 80} -> mistral
olmo2 {"kv_channels": 16} -> olmo2; --kv-channels 16
falcon {"transformer_block_type": "sequential", "num_query_groups": 2} -> starcoder2; --model-family starcoder2
falcon {"num_query_groups": 2} -> falcon
gpt_neox {"add_bias_linear": False} -> --add-bias-linear off
"""


@pytest.mark.parametrize(("typed", "named"), rows(ARCHITECTURES))
def test_which_architecture_a_mixture_has(typed, named):
    family, choices = split(typed)
    choices = {**SIGMOIDS, **choices} if "SIGMOIDS" in typed else choices
    sizes = {"num_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 9}
    model = make_model(model_family=family, **{**sizes, **choices})
    if named[0] in FAMILIES and not named[1:]:
        assert architecture_of(model).name == named[0]
    else:
        with refused(*named):
            architecture_of(model)


def test_a_run_says_at_its_start_that_it_cannot_be_exported():
    assert export_note(run("--model-family llama")) is None
    note = export_note(run("--model-family llama --normalization LayerNorm"))
    assert note is not None and "--normalization LayerNorm" in note


def test_choices_that_do_not_fit_together_are_refused():
    sizes = {"num_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "vocab_size": 9}
    with pytest.raises(ConfigError, match="--qk-norm all-heads needs --normalization RMSNorm"):
        check_model(make_model(**sizes, model_family="gpt", max_position_embeddings=8, qk_norm="all-heads"))
    # What has no effect is no fault of the decoder: the configuration notes it.
    check_model(make_model(**sizes, model_family="llama", max_position_embeddings=8, openai_gelu=False))


def test_verification_keeps_the_choices_of_a_family():
    config = run("--model-family olmo2 --sliding-window 64 --num-query-groups 2")
    small = shrink(config, WORLD, 8, 3).config.model
    kept = ("qk_norm", "transformer_block_type", "sliding_window", "position_embedding_type")
    assert all(getattr(small, name) == getattr(config.model, name) for name in kept)
    assert small.norm_epsilon == 1e-2


@pytest.mark.parametrize("length, longer", [(4096, False), (8192, True)])
def test_verification_keeps_the_side_of_the_original_length(length, longer):
    line = (
        "--rotary-scaling longrope --rotary-original-max-position 4096 --kv-channels 16 --rotary-percent 0.5"
    )
    line += " --rotary-short-factor 1,1,2,2 --rotary-long-factor 2,2,8,8"
    small = shrink(run(f"--model-family phi3 --seq-length {length} {line}"), WORLD, 8, 3).config.model
    assert (small.seq_length > small.rotary_original_max_position) == longer
    assert len(small.rotary_long_factor or ()) == small.rotary_channels // 2 >= 1


def test_a_configuration_stored_before_these_options_is_read():
    new = ("add_attention_bias", "openai_gelu", "qk_norm", "transformer_block_type")
    for family in ("llama", "gpt"):
        config = run(f"--model-family {family}")
        stored = config.to_dict()
        for name in (*new, "sliding_window"):
            del stored["model"][name]
        assert RunConfig.of(stored_values(stored)).model == config.model


def test_the_page_has_every_family_and_variant() -> None:
    page = (ROOT / "docs/reference/families.md").read_text()
    missing = [begin for begin, own in families() if not own or f"\n{begin} " not in page]
    assert not missing, "run: python -m tools.families_page > docs/reference/families.md"
    assert page.count("\n| `") == 1 + len(FAMILIES)
