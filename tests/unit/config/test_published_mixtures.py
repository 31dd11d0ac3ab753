"""Command lines of published mixtures of experts resolve to the model that was trained, or that is published.

Sources: NVIDIA's Megatron-LM (examples/mixtral, functional tests), and THUDM's slime (scripts/models at 624b824a),
which names only the model. What is expected comes from the published config.json, or from Megatron's rules, written
here once more.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from megazero.config import RunConfig, World, begun, parse
from megazero.config.model.architecture import from_hf_config, is_architecture
from megazero.config.model.spec import parameter_count
from megazero.families.layer_kinds import layer_kinds
from tests.unit.config.test_families import PUBLISHED

# Of a run from such a model: slime's scripts leave them to its own.
TRAINING = (
    "--seq-length 4096 --micro-batch-size 1 --global-batch-size 64 --lr 1e-6 --train-iters 10 --mock-data "
)
TRAINING += "--bf16 --attention-dropout 0 --hidden-dropout 0"
SLIME = (
    "--disable-bias-linear --group-query-attention --kv-channels 128 --normalization RMSNorm --swiglu "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --rotary-base 1000000 "
    "--moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-router-dtype fp32 --moe-permute-fusion "
    "--moe-aux-loss-coeff 0"
)
QWEN3 = (
    f"{SLIME} --qk-layernorm --num-query-groups 4 --norm-epsilon 1e-6 --rotary-percent 1.0 --vocab-size 151936 "
    "--moe-router-score-function softmax --moe-router-topk 8 --num-experts 128 --moe-token-drop-policy probs"
)
GLM = (
    f"{SLIME} --num-attention-heads 96 --num-query-groups 8 --add-qkv-bias --rotary-percent 0.5 --vocab-size 151552 "
    "--moe-router-pre-softmax --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0 --moe-router-load-balancing-type seq_aux_loss --moe-router-topk 8"
)
GLM45 = PUBLISHED["glm-4.5-air"][0] | {
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "num_hidden_layers": 92,
}
GLM45 |= {"moe_intermediate_size": 1536, "n_routed_experts": 160, "first_k_dense_replace": 3}
GLM45 |= {"use_qk_norm": True, "routed_scaling_factor": 2.5}
# run: (command line, config.json of the published model, billions of its parameters)
MODELS: dict[str, tuple[str, dict[str, Any], float]] = {
    "Qwen3-30B-A3B": (
        f"{QWEN3} --num-attention-heads 32 --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 "
        f"--moe-ffn-hidden-size 768 --moe-layer-freq [{','.join(['1'] * 48)}]",
        PUBLISHED["qwen3-30b-a3b"][0],
        30.5,
    ),
    "GLM-4.5-Air": (
        f"{GLM} --num-layers 46 --hidden-size 4096 --ffn-hidden-size 10944 --moe-ffn-hidden-size 1408 "
        "--moe-shared-expert-intermediate-size 1408 --moe-layer-freq [0]*1+[1]*45 --num-experts 128",
        PUBLISHED["glm-4.5-air"][0],
        106.9,
    ),
    "GLM-4.5": (
        f"{GLM} --qk-layernorm --num-layers 92 --hidden-size 5120 --ffn-hidden-size 12288 --moe-ffn-hidden-size 1536 "
        "--moe-shared-expert-intermediate-size 1536 --moe-router-topk-scaling-factor 2.5 "
        "--moe-layer-freq [0]*3+[1]*89 --num-experts 160",
        GLM45,
        352.8,
    ),
}


def read(line: str, world: World) -> RunConfig:
    return begun(parse(line.split(), world), world)


@pytest.mark.parametrize("name", MODELS)
def test_a_scripts_model_is_the_published_one(name: str) -> None:
    line, published, parameters = MODELS[name]
    ours, theirs = read(f"{line} {TRAINING}", World(8, 8)).model, from_hf_config(published)
    # Megatron's softmax before the choice means nothing to sigmoids; the scripts train no further tokens.
    free = {"model_family", "moe_layer_freq"}
    free |= {"moe_router_pre_softmax", "mtp_num_layers"} if "GLM" in name else set()
    for field in dataclasses.fields(ours):
        if is_architecture(field.name, "rope") and field.name not in free:
            assert getattr(ours, field.name) == getattr(theirs, field.name), field.name
    assert layer_kinds(ours) == layer_kinds(theirs)
    assert parameter_count(ours) / 1e9 == pytest.approx(parameters, rel=2e-3)


MIXTRAL = (
    "--use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32 "
    "--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01 --attention-dropout "
    "0.0 --hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion "
    "--no-position-embedding --rotary-base 1000000 --num-experts 8 --moe-router-topk 2 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce --mock-data "
    "--vocab-size 32000 --split 99990,8,2 --micro-batch-size 1 --global-batch-size 256 "
    "--lr 1e-4 --train-iters 500000 --lr-decay-iters "
    "320000 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-iters 500 --clip-grad 1.0 --bf16 "
    "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8 "
    "--use-distributed-optimizer --sequence-parallel --log-interval 1 --save-interval 10000 --eval-interval 1000 "
    "--eval-iters 10 --no-load-optim --no-load-rng"
)
FUNCTIONAL = (
    "--use-mcore-models --micro-batch-size 4 --global-batch-size 32 --train-iters 50 --mock-data --split 949,50,1 "
    "--distributed-backend nccl --lr 0.00015 --lr-decay-style cosine --min-lr 1.0e-5 --clip-grad 1.0 "
    "--lr-warmup-fraction .01 --transformer-impl transformer_engine --sequence-parallel --disable-bias-linear --bf16 "
    "--vocab-size 50257 --moe-grouped-gemm --log-params-norm --log-num-zeros-in-grad --no-bias-gelu-fusion"
)
EIGHT = (
    f"{FUNCTIONAL} --num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 "
    "--max-position-embeddings 1024 --weight-decay 1e-2 --lr-decay-iters 320000 --tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 1 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --num-experts 8 "
    "--moe-router-load-balancing-type aux_loss --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --deterministic-mode "
    "--no-gradient-accumulation-fusion --attention-softmax-in-fp32 --ckpt-format torch_dist "
    "--dist-ckpt-optim-fully-reshardable --dist-ckpt-strictness log_all --attention-backend unfused"
)
# The test's latent attention and its head for a second token are left out: neither is built.
DEEPSEEK = (
    f"{FUNCTIONAL} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--num-virtual-stages-per-pipeline-rank 4 --expert-model-parallel-size 4 --context-parallel-size 1 "
    "--expert-tensor-parallel-size 1 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--exit-duration-in-mins 230 --no-check-for-nan-in-loss-and-grad --no-rope-fusion --cross-entropy-loss-fusion "
    "--cross-entropy-fusion-impl native --manual-gc --manual-gc-interval 100 --seq-length 4096 --num-layers 16 "
    "--hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 32 --kv-channels 128 --max-position-embeddings "
    "4096 --position-embedding-type rope --rotary-base 10000 --make-vocab-size-divisible-by 3232 --normalization "
    "RMSNorm --norm-epsilon 1e-6 --swiglu --untie-embeddings-and-output-weights --attention-dropout 0.0 "
    "--hidden-dropout 0.0 --weight-decay 0.1 --qk-layernorm --adam-beta1 0.9 --adam-beta2 0.95 --num-experts 32 "
    "--moe-layer-freq ([0]*1+[1]*15) --moe-ffn-hidden-size 1024 --moe-shared-expert-intermediate-size 1024 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-router-topk 4 --moe-token-dispatcher-type alltoall "
    "--moe-router-pre-softmax --moe-aux-loss-coeff 1e-4 --moe-router-group-topk 2 --moe-router-num-groups 4 "
    "--moe-router-topk-scaling-factor 2.0 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 1e-3 --moe-router-dtype fp32 --moe-permute-fusion --init-method-std 0.02"
)
RUNS = {"Mixtral 8x7B": (64, MIXTRAL), "8 experts": (8, EIGHT), "DeepSeek's proxy": (16, DEEPSEEK)}


def megatron(line: str) -> dict[str, Any]:
    """What Megatron makes of the words on experts (arguments.py, gpt_layer_specs.py of core_v0.16)."""
    said = dict(re.findall(r"--([\w-]+)(?: ([^-\s]\S*))?", line))

    def number(name: str, default: float | None = None) -> float | None:
        return float(said[name]) if name in said else default

    layers, count = int(said["num-layers"]), int(said["num-experts"])
    frequency = said.get("moe-layer-freq", "1")
    every = (
        [int(i % int(frequency) == 0) for i in range(layers)] if frequency.isdecimal() else eval(frequency)
    )  # noqa: S307
    return {
        "layers": every,
        "num_experts": count,
        "expert_width": number("moe-ffn-hidden-size")
        or number("ffn-hidden-size", 4 * float(said["hidden-size"])),
        "moe_shared_expert_intermediate_size": number("moe-shared-expert-intermediate-size"),
        "moe_router_topk": number("moe-router-topk", 2),
        "moe_router_score_function": said.get("moe-router-score-function", "softmax"),
        "moe_router_pre_softmax": "moe-router-pre-softmax" in said,
        "moe_router_topk_scaling_factor": number("moe-router-topk-scaling-factor"),
        "moe_router_num_groups": number("moe-router-num-groups"),
        "moe_router_group_topk": number("moe-router-group-topk"),
        "moe_router_enable_expert_bias": "moe-router-enable-expert-bias" in said,
        "moe_router_bias_update_rate": number("moe-router-bias-update-rate", 1e-3),
        "moe_router_load_balancing_type": (said.get("moe-router-load-balancing-type", "aux_loss"),),
        "moe_aux_loss_coeff": (number("moe-aux-loss-coeff", 0.0),),
        "moe_z_loss_coeff": number("moe-z-loss-coeff"),
        "expert_model_parallel_size": number("expert-model-parallel-size", 1),
    }


@pytest.mark.parametrize("name", RUNS)
def test_a_script_resolves_as_in_megatron(name: str) -> None:
    ranks, line = RUNS[name]
    config = read(line, World(ranks, 8))
    values = {**config.values(), "expert_width": config.model.expert_width}
    values["layers"] = [int(kind.experts) for kind in layer_kinds(config.model)]
    expected = {key: value for key, value in megatron(line).items() if key in values}
    assert {key: values[key] for key in expected} == expected and len(expected) >= 15
