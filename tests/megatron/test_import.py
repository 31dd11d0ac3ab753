"""What megatron-core trained and saved on TP 2 x PP 2 goes on here: its logits, its gradients, and a run from its
weights.

One case runs always. All of them, and NVIDIA's own program with its arguments where MEGATRON_LM names its folder (as
for test_program.py):

    python -m pytest tests/megatron/test_import.py -m "slow or not slow"
"""

from __future__ import annotations

import argparse
import os
import shlex
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megazero.checkpoint import store
from megazero.convert.command import main
from megazero.convert.megatron.weights import MegatronWeights
from megazero.convert.source import Source
from megazero.models import Decoder
from megazero.models.hf_weights import load_hf_state_dict
from tests.dist.checkpoint.test_hugging_face import begin
from tests.dist.pool import run_ranks
from tests.megatron.case import Case
from tests.megatron.cases import of_one_rank
from tests.megatron.model import LATENT, ROUTED, SINKS, build_chunks, model_config
from tests.megatron.test_program import ALWAYS, FOLDER, FOLDER_PATH, TORCHRUN, finish
from tests.megatron.test_resume import save, write
from tests.megatron.training import a_job, megatron_ranks
from tests.oracle import in_fp64

pytest.importorskip("megatron.core")

ITERATION = "iter_0000002"
CASES = {
    "latents, experts": Case(dp=2, ep=2, experts=4, latent=True, tied=False, steps=2),
    "llama": Case(tp=2, pp=2, layers=4, gated=True, tied=False, steps=2),
    "gpt, tied": Case(tp=2, pp=2, layers=4, steps=2),
    "virtual stages, sp": Case(tp=2, sp=True, pp=2, vpp=2, layers=4, gated=True, steps=2, micro_batches=4),
    "bf16": Case(tp=2, pp=2, layers=4, gated=True, bf16=True, steps=2),
    "latents": Case(tp=2, pp=2, layers=4, latent=True, tied=False, steps=2),
    "sinks": Case(tp=2, pp=2, layers=4, sinks=True, tied=False, steps=2),
    "sinks, experts": Case(dp=2, ep=2, experts=4, sinks=True, tied=False, steps=2),
    "experts": Case(experts=4, gated=True, tied=False, steps=2),
    "experts on two ranks": Case(dp=2, ep=2, experts=4, tied=False, steps=2),
}
RUN = {"train_iters": 2, "seq_length": 16, "micro_batch_size": 1, "global_batch_size": 4, "lr": 1e-3}
RUN |= {"mock_data": True, "eval_iters": 1, "device": "cpu", "finetune": True}


def arguments(case: Case) -> argparse.Namespace:
    """Return what megatron's program would keep of the command line of a case."""
    return argparse.Namespace(
        num_layers=case.layers,
        hidden_size=case.hidden,
        ffn_hidden_size=4 * case.hidden,
        num_attention_heads=case.heads,
        group_query_attention=case.gated or case.sinks,
        num_query_groups=2 if case.gated or case.sinks else 1,
        swiglu=case.gated,
        quick_geglu=case.sinks,
        add_bias_linear=case.sinks or not (case.gated or case.experts or case.latent),
        qk_layernorm=case.latent,
        **(LATENT if case.latent else {}),
        **(ROUTED if case.latent and case.experts else {}),
        **(SINKS if case.sinks else {}),
        num_experts=case.experts or None,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        bias_gelu_fusion=False,
        normalization="RMSNorm",
        position_embedding_type="rope",
        seq_length=case.sequence,
        mtp_num_layers=case.further or None,
        mtp_loss_scaling_factor=0.3,
        max_position_embeddings=case.sequence,
        untie_embeddings_and_output_weights=not case.tied,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        padded_vocab_size=case.vocabulary,
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        bf16=case.bf16,
        params_dtype=case.dtype,
    )


def train_and_save(case: Case, folder: Path) -> None:
    with a_job(case) as job:
        for step in range(case.steps):
            job.step(step)
        save(job, folder / ITERATION, args=arguments(case), iteration=case.steps, checkpoint_version=3.0)


def run_theirs(case: Case, folder: Path, tokens: torch.Tensor, into: Path) -> list:
    """Load a checkpoint of any layout into megatron-core's model on this rank, and run it in fp64. Return its logits,
    and write the gradients of the loss on the next tokens to ``into`` as if they were its weights."""
    from megatron.core import dist_checkpointing

    with megatron_ranks(case):
        (model,) = build_chunks(case, model_config(case))
        model.load_state_dict(
            dist_checkpointing.load({"m": model.sharded_state_dict()}, str(folder / ITERATION))["m"]
        )
        mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1]).triu(1).bool()
        with in_fp64():
            (exact,) = build_chunks(case, model_config(case))
            exact.double().load_state_dict(model.state_dict())
            logits = exact(tokens, torch.arange(tokens.shape[1])[None], mask)
            F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten(), reduction="sum").backward()
        with torch.no_grad():
            for parameter, of in zip(model.parameters(), exact.parameters(), strict=True):
                parameter.copy_(of.grad)
        said = {"args": arguments(case), "iteration": case.steps, "checkpoint_version": 3.0}
        write({"model0": model.sharded_state_dict(), **said}, into / ITERATION)
        return logits.tolist()


def imported(folder: Path, into: Path) -> Decoder:
    assert main(["from-megatron", str(folder / ITERATION), str(into)]) == 0
    path = into / "iter_0000000"
    decoder = Decoder(Source(path).model, dtype=torch.float64)
    load_hf_state_dict(decoder, store.load_full(path))
    return decoder


@pytest.mark.first(1)
@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_those_of_megatron_core(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    if case.sinks:
        pytest.importorskip("megatron.core", "0.15")  # which has them
    run_ranks(case.world, train_and_save, case, tmp_path / "m", timeout=120)
    tokens = torch.arange(32).view(2, 16) * 7 % case.vocabulary
    one, theirs = replace(of_one_rank(case), bf16=False), tmp_path / "gradients"
    (wanted,) = run_ranks(1, run_theirs, one, tmp_path / "m", tokens, theirs, timeout=120)
    decoder, gradients = imported(tmp_path / "m", tmp_path / "ck"), imported(theirs, tmp_path / "cg")
    decoder(tokens, tokens.roll(-1, 1)).sum().backward()
    logits = apart(decoder.full_logits(tokens), torch.tensor(wanted, dtype=torch.float64))
    far = {
        name: apart(own.grad, its)
        for (name, own), its in zip(decoder.named_parameters(), gradients.parameters(), strict=True)
    }
    assert logits < 1e-12 and max(far.values()) < 1e-7, (logits, far)  # gradients come in fp32


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.slow
def test_a_run_begins_with_the_weights_on_any_layout(tmp_path: Path) -> None:
    """-m slow"""
    run_ranks(4, train_and_save, CASES["llama"], tmp_path / "m", timeout=120)
    assert main(["from-megatron", str(tmp_path / "m" / ITERATION), str(tmp_path / "ck")]) == 0
    values = {**RUN, "load": str(tmp_path / "ck"), "log_dir": str(tmp_path / "logs")}
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    (alone, *_), *_ = run_ranks(1, begin, {**values, "save": str(tmp_path / "one")}, timeout=120)
    for loss, *_ in run_ranks(4, begin, {**values, **layout, "save": str(tmp_path / "four")}, timeout=120):
        assert loss == pytest.approx(alone, rel=1e-6)


PROGRAM = shlex.split(
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 64 "
    "--num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 "
    "--train-iters 3 --lr 1e-3 --eval-iters 0 --eval-interval 100 --save-interval 3 --no-rope-fusion "
    "--tokenizer-type NullTokenizer"
)
MODELS = {
    "gpt": "",
    "llama": "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --bf16 "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 --ffn-hidden-size 96",
    "virtual stages": "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--add-qkv-bias --qk-layernorm --num-layers-per-virtual-pipeline-stage 1",
}


@pytest.mark.slow
@pytest.mark.skipif(FOLDER not in os.environ, reason=f"{FOLDER} names no folder of Megatron-LM")
@pytest.mark.parametrize("name", MODELS)
def test_the_programs_own_conversion_is_read(name: str, tmp_path: Path) -> None:
    """pretrain_gpt.py saves mp_rank folders, which are refused, and converts them to torch_dist itself. -m slow"""
    flags = [*PROGRAM, *shlex.split(MODELS[name]), *ALWAYS]
    program = [*TORCHRUN, str(FOLDER_PATH / "pretrain_gpt.py"), *flags, "--ckpt-format", "torch"]
    finish([*program, "--save", str(tmp_path / "a")], FOLDER_PATH, CUDA_DEVICE_MAX_CONNECTIONS="1")
    convert = ["--ckpt-convert-format", "torch_dist", "--ckpt-convert-save", str(tmp_path / "b")]
    with suppress(AssertionError):  # after it has saved, it ends with an error on CPUs
        finish(
            [*program, "--load", str(tmp_path / "a"), *convert], FOLDER_PATH, CUDA_DEVICE_MAX_CONNECTIONS="1"
        )
    with pytest.raises(ValueError, match="--ckpt-convert-format torch_dist"):
        MegatronWeights.open(tmp_path / "a")
    converted = tmp_path / "b" / "torch_dist"
    assert MegatronWeights.open(converted).model.vocab_size == 128
    assert main(["from-megatron", str(converted), str(tmp_path / "ck")]) == 0
