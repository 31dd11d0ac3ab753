"""Fields of config.json that mean the same in every family: inert, with a single legal value, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from megazero.families.config_json.missing import EXPERTS, LATENT, LINEAR, STATE_SPACE, part_of

# Such layers stand behind the model's own. Their tensors are left out only where this field is set aside.
MORE_TOKENS = "num_nextn_predict_layers"
# Of training alone: dropout, losses that balance experts. Patterns as of file names, here and below.
OF_TRAINING = (
    "*_dropout",
    "*_pdrop",
    "output_router_logits",
    "router_aux_loss_coef",
    "aux_loss_alpha",
    "seq_aux",
)
# They change nothing in the function that a model computes: names, dtypes, tokens of generation, training, layers
# that predict further tokens, labels of classifiers, the order of sums.
INERT = (
    *OF_TRAINING,
    "model_type",
    "architectures",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "*name_or_path",
    "_commit_hash",
    "_attn_implementation*",
    "_flash_attn_2_enabled",
    "_from_model_config",
    "transformers.js_config",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "unk_token_id",
    "initializer_range",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "output_scores",
    "ignore_keys_at_rope_validation",
    "return_dict",
    "id2label",
    "label2id",
    "num_labels",
    "problem_type",
    "task_specific_params",
    "summary_*",
    "scale_attention_softmax_in_fp32",
    "pretraining_tp",
    "attention_softmax_in_fp32",
    "n_ctx",
    "gradient_checkpointing",
    "reorder_and_upcast_attn",
    MORE_TOKENS,
    "num_mtp_layers",
    "is_llama_config",
    "cache_implementation",
    "is_decoder",
    "torchscript",
    "use_bfloat16",
    "tf_legacy_loss",
    "finetuning_task",
    "tokenizer_class",
    "prefix",
    "sep_token_id",
    "decoder_start_token_id",
    # Of generation, which transformers 4 kept here.
    "max_length",
    "min_length",
    "do_sample",
    "early_stopping",
    "num_beams",
    "num_beam_groups",
    "*_penalty",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "*no_repeat_ngram_size",
    "bad_words_ids",
    "num_return_sequences",
    "forced_?os_token_id",
    "remove_invalid_values",
    "*suppress_tokens",
    "return_dict_in_generate",
)
ONLY: Mapping[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "chunk_size_feed_forward": (0,),
    "add_cross_attention": (False,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "per_layer_config": (None, {}),
    "pruned_heads": ({},),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "quantization_config": (None,),
    "tie_last_hidden_states": (None,),
    "use_bidirectional_attention": (None, False),
    "apply_residual_connection_post_layernorm": (False,),
}
CURES: Mapping[str, str] = {
    "quantization_config": "weights are read in bf16, fp16 or fp32. transformers dequantises, of MXFP4 by "
    "from_pretrained(DIR, quantization_config=Mxfp4Config(dequantize=True)).save_pretrained(OTHER)"
}
# Of near relatives, by the reason.
REFUSED = (
    ("logit*_scal*", "scales the logits, which this family does not here"),
    ("embedding_multiplier", "scales the embedding, which this family does not here"),
    ("residual_multiplier", "scales the residual sums, which this family does not here"),
    ("attention_multiplier", "scales attention otherwise than by the width of a head"),
    ("query_pre_attn_scalar", "scales attention otherwise than by the width of a head"),
    ("clip_qkv", "clips queries, keys and values, which the decoder does not"),
    ("attn_logit_softcapping", "caps scores, which this family does not here"),
    ("final_logit_softcapping", "caps logits, which this family does not here"),
    ("rope_local_base_freq", "gives some layers other rotary positions, which this family does not here"),
    ("no_rope_layer*", "takes rotary positions from some layers, which this family does not here"),
    ("layer_types", "gives layers another kind of attention each, which this family does not here"),
    ("sliding_window", "is a window of attention, which this family does not have"),
    ("qk_layernorm", "is a norm of queries and keys that this family does not have here"),
    ("auto_map", "is custom code, which is not run"),
)


def of_training(name: str) -> bool:
    """Tell whether a field of config.json says how transformers trains the model, and nothing else."""
    return any(fnmatchcase(name, pattern) for pattern in OF_TRAINING)


def refusal(name: str) -> str:
    """Return why a field that no family's table knows is refused."""
    reasons = [reason for pattern, reason in REFUSED if fnmatchcase(name, pattern)]
    if part := part_of(name):
        reasons.append(
            f"is of {part}, which "
            f"{'this family' if part in (EXPERTS, LATENT, LINEAR, STATE_SPACE) else 'the decoder'} does not have"
        )
    return reasons[0] if reasons else "is not known here, and may change what the model computes"
