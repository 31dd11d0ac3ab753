"""Checkpoints of Megatron become checkpoints: every spelling and cut of the same weights gives the same bits.

The Megatron side is written here by hand, from its layout. tests/megatron/test_import.py has Megatron's own.
"""

from __future__ import annotations

import argparse
import enum
import io
import json
import os
import pickle
import weakref

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megazero.checkpoint import store
from megazero.checkpoint.errors import CheckpointError
from megazero.config import ConfigError, parse
from megazero.config.model.section import make_model
from megazero.convert.command import main
from megazero.convert.importing import write_checkpoint
from megazero.convert.megatron.arguments import read_arguments
from megazero.convert.megatron.weights import MegatronWeights
from megazero.models import Decoder
from megazero.models.hf_weights import load_stored
from tests.hugging_face import to_hf_state_dict
from tests.messages import refused

LAYERS, ROWS, WORDS = 4, 64, 51  # of the embedding with its padding, and of the vocabulary
COMMON = {
    "num_layers": LAYERS,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "kv_channels": 8,
    "ffn_hidden_size": 48,
    "seq_length": 16,
    "max_position_embeddings": 16,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
MODELS = {
    "llama": {
        "num_query_groups": 2,
        "position_embedding_type": "rope",
        "rotary_base": 500.0,
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
    },
    "gpt": {"position_embedding_type": "learned_absolute", "normalization": "LayerNorm"},
    "qwen": {
        "num_query_groups": 2,
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "normalization": "RMSNorm",
        "squared_relu": True,
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "qk_norm": "head",
    },
}

_SPARSE = {**MODELS["llama"], "num_experts": 4, "moe_ffn_hidden_size": 24, "moe_router_topk": 2}
MIXTURES = {
    "softmax": _SPARSE,
    "softmax, gate": {
        **_SPARSE,
        **{"moe_router_pre_softmax": True, "moe_shared_expert_gate": True},
        "moe_shared_expert_intermediate_size": 40,
    },
    "sigmoid, dense first": {
        **_SPARSE,
        **{"moe_layer_freq": (0, 1, 1, 1), "moe_router_score_function": "sigmoid"},
        **{"moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 2.5},
        "moe_shared_expert_intermediate_size": 40,
    },
}
MIXTURES["sinks, biases"] = {
    **{**_SPARSE, "swiglu": False, "quick_geglu": True, "add_bias_linear": True, "softmax_type": "learnable"},
    **{"activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0},
}
# What Megatron keeps of mixtures besides, at its defaults or as scripts set it.
OF_EXPERTS = {"moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall", "moe_router_dtype": "fp32"}
OF_EXPERTS |= {"moe_token_drop_policy": "probs", "moe_aux_loss_coeff": 0.0, "moe_upcycling_granularity": 1}
OF_EXPERTS |= {"moe_expert_capacity_factor": None, "moe_deepep_num_sms": 20, "expert_tensor_parallel_size": 1}


OF_LATENTS = {
    "multi_latent_attention": True,
    "kv_lora_rank": 16,
    "kv_channels": 8,
    "rotary_interleaved": False,
}
# And of every run.
ITS_OWN = {
    **{"train_iters": 5, "train_samples": None, "lr_warmup_samples": 0, "lr": 0.01, "iterations_to_skip": []},
    **{"micro_batch_size": 1, "global_batch_size": 2, "mock_data": True, "save": "/somewhere"},
    **{"bf16": False, "fp16": False, "params_dtype": torch.float32, "initial_loss_scale": 2**32},
    **{"data_parallel_sharding_strategy": "no_shard", "mtp_num_layers": None},
    **{"rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0},
    **{"weight_decay_incr_style": "constant", "start_weight_decay": 0.01, "end_weight_decay": 0.01},
}


class ModelType(enum.Enum):
    """As megatron.core.enums.ModelType: a class that the reader does not know."""

    encoder_or_decoder = 1


def original(kind):
    choices = {**MODELS, **MIXTURES}[kind]
    decoder = Decoder(make_model(vocab_size=WORDS, norm_epsilon=1e-6, **COMMON, **choices))
    decoder.initialize(7)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, tensor in decoder.stored():
            tensor += 0.1 * torch.randn(tensor.shape, generator=draw)
    return decoder


def arguments(kind, **more):
    """What Megatron keeps of the command line, completed as Megatron completes it."""
    args = {**COMMON, **{**MODELS, **MIXTURES}[kind], "norm_epsilon": None, "layernorm_epsilon": 1e-6}
    args |= OF_EXPERTS
    args |= {"group_query_attention": "num_query_groups" in args, "bias_gelu_fusion": kind == "gpt"}
    args = {
        "num_query_groups": 1,
        "softmax_type": "vanilla",
        "glu_linear_offset": 0.0,
        "quick_geglu": False,
        **args,
    }
    args = {"swiglu": False, "squared_relu": False, "openai_gelu": False, **args}
    args |= {"qk_layernorm": args.pop("qk_norm", "none") == "head", "model_type": ModelType(1)}
    args |= {"tokenizer_type": "NullTokenizer", "vocab_size": WORDS - 1, "padded_vocab_size": ROWS, "rank": 0}
    args |= ITS_OWN
    return argparse.Namespace(**{**args, **more})


def megatron(decoder):
    """The tensors, as megatron-core's own layers name them."""
    c, p = decoder.config, {name: value.detach() for name, value in decoder.stored()}
    padded = {
        name: torch.full((ROWS, c.hidden_size), 9.0) for name in ("embedding.tokens.weight", "head.weight")
    }
    for name in padded.keys() & p.keys():
        padded[name][:WORDS] = p[name][:WORDS]
    out = {"embedding.word_embeddings.weight": padded["embedding.tokens.weight"]}
    if "embedding.positions" in p:
        out["embedding.position_embeddings.weight"] = p["embedding.positions"]
    if "head.weight" in p and c.untie_embeddings_and_output_weights:
        out["output_layer.weight"] = padded["head.weight"]
    for kind in ("weight", "bias"):
        if f"head.norm.{kind}" in p:
            out[f"decoder.final_layernorm.{kind}"] = p[f"head.norm.{kind}"]
    for index in range(LAYERS):
        here, there = f"layers.{index}.", f"decoder.layers.{index}."
        groups, d = c.num_query_groups, c.kv_channels
        for kind in ("weight", "bias"):
            mine = {
                n.removeprefix(here).removesuffix(f".{kind}"): v for n, v in p.items() if n.startswith(here)
            }
            mine = {n: v for n, v in mine.items() if f"{here}{n}.{kind}" in p}
            for norm, name in (
                ("input_norm", "input_layernorm"),
                ("mlp_norm", "pre_mlp_layernorm"),
                ("attention.q_norm", "self_attention.q_layernorm"),
                ("attention.k_norm", "self_attention.k_layernorm"),
            ):
                if norm in mine:
                    out[f"{there}{name}.{kind}"] = mine[norm]
            if "attention.q_proj" in mine:
                q, k, v = (mine[f"attention.{n}_proj"].unflatten(0, (groups, -1)) for n in "qkv")
                fused = torch.cat([q, k, v], 1).flatten(0, 1)
                out[f"{there}self_attention.linear_qkv.{kind}"] = fused
                assert fused.shape[0] == (c.num_attention_heads + 2 * groups) * d
            if "mlp.up_proj" in mine:
                parts = [mine[n] for n in ("mlp.gate_proj", "mlp.up_proj") if n in mine]
                out[f"{there}mlp.linear_fc1.{kind}"] = torch.cat(parts)
            if f"{here}attention.sinks" in p:
                out[f"{there}self_attention.core_attention.softmax_offset"] = p[f"{here}attention.sinks"]
            for n, name in (
                ("attention.o_proj", "self_attention.linear_proj"),
                ("mlp.down_proj", "mlp.linear_fc2"),
            ):
                if n in mine:
                    out[f"{there}{name}.{kind}"] = mine[n]
        out |= {f"{there}mlp.{name}": value for name, value in mixture(p, f"{here}mlp.")}
    return {name: value.clone() for name, value in out.items()}


def mixture(p, here):
    """A layer's experts, in one tensor each, its router and its shared experts."""
    names = {"router.weight": "router.weight", "router.e_score_correction_bias": "router.expert_bias"}
    names["router.bias"] = "router.bias"
    names |= {"shared_gate.weight": "shared_experts.gate_weight"}
    for one, module in (("experts", "experts.experts"), ("shared_expert", "shared_experts")):
        for kind, along in (("weight", -2), ("bias", -1)):
            names[f"{one}.down_proj.{kind}"] = f"{module}.linear_fc2.{kind}"
            if f"{here}{one}.up_proj.{kind}" in p:
                halves = [p[f"{here}{one}.{half}_proj.{kind}"] for half in ("gate", "up")]
                yield f"{module}.linear_fc1.{kind}", torch.cat(halves, along)
    yield from ((there, p[here + name]) for name, there in names.items() if here + name in p)


def fused_names(tensors):
    """TransformerEngine's spelling, which torch_dist has."""
    for old, new in (
        (".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"),
        (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"),
    ):
        tensors = {name.replace(old, new): value for name, value in tensors.items()}
    return tensors


def torch_dist(root, tensors, args, stacked=True):
    """An iteration as megatron-core saves it: layers in one tensor per kind and the arguments in common.pt, or layers
    in one each and the arguments among the tensors, as from 0.19 on."""
    path, held = root / "iter_0000007", dict(fused_names(tensors))
    if stacked:
        first = [name for name in held if name.startswith("decoder.layers.0.")]
        for name in first:
            layers = [held.pop(name.replace(".0.", f".{i}.", 1)) for i in range(LAYERS)]
            held[name.replace(".0.", ".", 1)] = torch.stack(layers)
    held["optimizer.state.exp_avg.output_layer.weight"] = torch.zeros(3)
    held["decoder.layers.self_attention.linear_qkv._extra_state/shard_0_4"] = io.BytesIO(b"scales")
    saved = {"args": args, "checkpoint_version": 3.0, "iteration": 7}
    if not stacked:
        held["common_state/shard_0_1"] = [saved]
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(held, storage_writer=dcp.FileSystemWriter(path), planner=planner, no_dist=True)
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "common_backend": "torch"}')
    if stacked:
        torch.save(saved, path / "common.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    return root


LAYOUTS = {
    "torch_dist": lambda root, d, args: torch_dist(root, megatron(d), args),
    "torch_dist, layers apart": lambda root, d, args: torch_dist(root, megatron(d), args, stacked=False),
}


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_cut_and_spelling_gives_the_same_bits(kind, layout, tmp_path):
    decoder = original(kind)
    weights = MegatronWeights.open(LAYOUTS[layout](tmp_path / "m", decoder, arguments(kind)))
    assert weights.model == decoder.config
    loaded = store.load_full(write_checkpoint(weights, tmp_path / "ck"))
    wanted = to_hf_state_dict(decoder)
    assert loaded.keys() == wanted.keys() == weights.shapes.keys()
    assert all(torch.equal(loaded[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("apart", [False, True], ids=["one tensor", "each"])
@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixture_has_the_same_bits(kind, apart, tmp_path):
    """Layers and experts lie in one tensor per kind, [layers, experts, ...], or in one each."""
    decoder, args = original(kind), arguments(kind)
    tensors = megatron(decoder)
    if apart:
        stacks = [name for name in tensors if ".experts.experts." in name]
        for name, expert in ((name, i) for name in stacks for i in range(4)):
            tensors[name.replace(".experts.experts.", f".experts.experts.{expert}.")] = tensors[name][expert]
        tensors = {name: tensor.clone() for name, tensor in tensors.items() if name not in stacks}
    alike = decoder.config.moe_layer_freq == (1,)
    weights = MegatronWeights.open(torch_dist(tmp_path / "m", tensors, args, stacked=alike and not apart))
    assert weights.model == decoder.config
    loaded, wanted = store.load_full(write_checkpoint(weights, tmp_path / "ck")), to_hf_state_dict(decoder)
    assert loaded.keys() == wanted.keys() and all(torch.equal(loaded[n], wanted[n]) for n in wanted)


@pytest.mark.parametrize(
    "more, said",
    [
        ({"moe_expert_capacity_factor": 1.5}, "--moe-expert-capacity-factor 1.5"),
        ({"moe_latent_size": 16}, "--moe-latent-size 16"),
        ({"moe_apply_probs_on_input": True}, "--moe-apply-probs-on-input"),
    ],
)
def test_what_would_make_a_mixture_another_model_is_refused(more, said, tmp_path):
    args = arguments("softmax", **more)
    with pytest.raises(ConfigError, match=said):
        MegatronWeights.open(torch_dist(tmp_path, megatron(original("softmax")), args))
    dense = torch_dist(tmp_path / "dense", megatron(original("llama")), arguments("llama", **more))
    assert MegatronWeights.open(dense).model.num_experts is None


def test_the_command_writes_weights_and_flags(tmp_path, capsys):
    """--vocab-size on the command line replaces the argument; the flags and run.yaml are those of the run."""
    torch_dist(tmp_path / "m", megatron(original("llama")), arguments("llama", mid_level_dataset_surplus=0.5))
    words = [str(tmp_path / "m"), str(tmp_path / "ck"), "--vocab-size", "40"]
    assert main(["from-megatron", *words]) == 0
    said = capsys.readouterr()
    path = tmp_path / "ck" / "iter_0000000"
    assert "the same bits, float32  holds" in said.out and str(path) in said.out
    assert "not taken over: --mid-level-dataset-surplus 0.5: another share" in said.err
    flags = [line.removesuffix(" \\") for line in said.out.splitlines() if line.startswith("--")]
    typed = parse([word for line in flags for word in line.split()])
    filed = parse(["--config", str(path / "run.yaml")])
    assert typed.to_dict() == filed.to_dict()
    assert (typed.optimizer.lr, typed.training.train_iters, typed.model.num_query_groups) == (0.01, 5, 2)
    assert store.load_full(path)["model.embed_tokens.weight"].shape == (41, 32)
    assert (
        json.loads((path / "state.json").read_bytes())["imported"] == "Megatron's checkpoint of iteration 7"
    )
    assert main(["from-megatron", *words]) == 2, "what is there stays"


@pytest.mark.parametrize("said", ["apply_layernorm_1p", "layernorm_zero_centered_gamma"])
def test_centred_norms_stay_what_they_are(said, tmp_path):
    decoder = original("llama")
    tensors = {n: v.bfloat16() - int("norm" in n) for n, v in megatron(decoder).items()}
    weights = MegatronWeights.open(torch_dist(tmp_path, tensors, arguments("llama", **{said: True})))
    centred = Decoder(weights.model)
    load_stored(centred, {name: weights.tensor(name) for name in weights.shapes})
    tokens = torch.arange(16)[None]
    for mine, theirs in zip(centred.parameters(), decoder.parameters(), strict=True):
        theirs.data = mine.data + int(mine.ndim == 1)  # this shape has no vectors but norms
    assert torch.allclose(centred.full_logits(tokens), decoder.full_logits(tokens), atol=1e-5)
    assert weights.dtype_of(next(n for n in weights.shapes if "norm" in n)) == torch.bfloat16


@pytest.mark.parametrize(
    "said, options",
    [
        ({"window_size": (7, 0), "window_attn_skip_freq": 2}, {"sliding_window": 8}),
        (
            {"mscale": 1.0, "rotary_scaling_factor": 40.0},
            {"yarn_mscale": None, "rotary_scaling_factor": None},
        ),
        (
            {"position_embedding_type": "yarn", "mscale": 1.5, "rotary_scaling_factor": 4.0},
            {"rotary_scaling": "yarn", "yarn_mscale": 1.5, "rotary_scaling_factor": 4.0},
        ),
        (  # Megatron's latents have yarn's positions by default, whose factor is 1
            {**OF_LATENTS, "rope_type": None, "rotary_scaling_factor": 40.0, "mscale_all_dim": 0.7},
            {"kv_lora_rank": 16, "kv_channels": None, "rotary_interleaved": None, "yarn_mscale_all_dim": 0.7},
        ),
        (
            {**OF_LATENTS, "rope_type": "rope", "rotary_scaling_factor": 40.0},
            {"rotary_scaling": "none", "rotary_scaling_factor": None},
        ),
        (
            {**OF_LATENTS, "multi_latent_attention": False, "rope_type": "rope"},
            {"kv_lora_rank": None, "rotary_scaling": None},
        ),
        ({"use_checkpoint_opt_param_scheduler": True}, {"use_checkpoint_opt_param_scheduler": None}),
    ],
)
def test_what_megatron_completes_is_read_in_its_meaning(said, options):
    read = read_arguments(vars(arguments("llama", **said)), (), ()).options
    assert {name: read.get(name) for name in options} == options


def test_one_tensor_is_held_at_a_time(tmp_path, monkeypatch):
    weights = MegatronWeights.open(
        torch_dist(tmp_path / "m", megatron(original("llama")), arguments("llama"))
    )
    made, make = [], MegatronWeights.tensor

    def tensor(self, name):
        assert not [each for each in made if each() is not None], "the last one is still held"
        out = make(self, name)
        made.append(weakref.ref(out))
        return out

    monkeypatch.setattr(MegatronWeights, "tensor", tensor)
    write_checkpoint(weights, tmp_path / "ck")
    assert len(made) == len(weights.shapes)


def test_without_arguments_flags_say_the_model(tmp_path):
    root = torch_dist(tmp_path, megatron(original("gpt")), None)
    with refused("--num-layers is required", by=ConfigError):
        MegatronWeights.open(root)
    words = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --seq-length 16"
    model = MegatronWeights.open(root, words=words.split()).model
    assert (model.vocab_size, model.position_embedding_type) == (ROWS, "learned_absolute")


@pytest.mark.parametrize(
    "said, part",
    [
        (
            {"multi_head_latent_attention": True},
            "--multi-head-latent-attention .*of other kinds nothing is built",
        ),
        ({"mtp_num_layers": 1}, "mtp.layers.0.enorm.weight is missing"),
        ({"mtp_num_layers": 2, "mtp_use_repeated_layer": True}, "--mtp-use-repeated-layer"),
        ({"apply_residual_connection_post_layernorm": True}, "--apply-residual-connection-post-layernorm"),
        ({"scale_depth": 1.4}, "--scale-depth 1.4 of the checkpoint's arguments: "),
        ({"position_embedding_type": "alibi"}, "--position-embedding-type alibi .* since 2023; use rope or"),
        ({"embed_layernorm": True}, "--embed-layernorm"),
        ({"forks_own_scale": 0.5}, "forks_own_scale 0.5 .* not known here; --accept-field forks_own_scale"),
        ({"vocab_size": 80}, "--vocab-size 81 is above the embedding's 64 rows"),
        ({"num_layers": 5}, "layers.4.* is missing"),
        ({"num_layers": 3}, "decoder.layers.3.* belongs to no decoder here"),
        ({"hidden_size": 64}, r"final_layernorm.weight is \(32,\), and \(64,\) by the arguments"),
        ({"untie_embeddings_and_output_weights": False}, "has an output_layer.weight of its own"),
    ],
)
def test_what_is_not_built_is_named(said, part, tmp_path):
    root = torch_dist(tmp_path, megatron(original("llama")), arguments("llama", **said))
    with pytest.raises(ValueError, match=part):
        MegatronWeights.open(root)
    name = next(iter(said))
    if name == "forks_own_scale":
        assert MegatronWeights.open(root, accept=(name,)).model


def test_what_cannot_be_set_aside_is_said():
    with pytest.raises(ConfigError) as caught:
        read_arguments(vars(arguments("llama", mystery=1)), [], ("mystery", "mistery", "hidden_size"))
    nothing, known = caught.value.errors
    assert nothing.endswith("have no mistery to accept") and known.startswith("hidden_size of ")


def test_two_spellings_of_one_tensor_are_refused(tmp_path):
    tensors = megatron(original("llama"))
    twin = {"module.decoder.layers.1.input_layernorm.weight": torch.zeros(32)}
    with refused("layers.1.input_layernorm.weight twice", by=CheckpointError):
        MegatronWeights.open(torch_dist(tmp_path, {**tensors, **twin}, arguments("llama"), stacked=False))


def test_folders_that_are_not_read_say_why(tmp_path):
    decoder = original("gpt")
    root = torch_dist(tmp_path / "m", megatron(decoder), arguments("gpt"))
    with refused("iter_0000009", "iter_0000007", by=CheckpointError):
        MegatronWeights.open(root, step=9)
    tensors = megatron(decoder)
    tensors["decoder.final_layernorm.bias"] = torch.zeros(32).to(torch.float8_e4m3fn)
    with refused("torch.float8_e4m3fn", "--fp8-param-gather", by=CheckpointError):
        MegatronWeights.open(torch_dist(tmp_path / "fp8", tensors, arguments("gpt")))
    (tmp_path / "old" / "mp_rank_00").mkdir(parents=True)
    with refused("--ckpt-convert-format", "torch_dist", "--ckpt-convert-save", by=CheckpointError):
        MegatronWeights.open(tmp_path / "old")
    path = torch_dist(tmp_path / "other", megatron(decoder), arguments("gpt")) / "iter_0000007"
    (path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(CheckpointError, match="stored as zarr"):
        MegatronWeights.open(path)
    (path / "metadata.json").unlink()
    with refused("torch_dcp", "fsdp_dtensor", by=CheckpointError):
        MegatronWeights.open(path)


class Malice:
    def __init__(self, target):
        self.target = str(target)

    def __reduce__(self):
        return os.mkdir, (self.target,)


@pytest.mark.parametrize("file", ["common.pt", ".metadata"])
def test_nothing_that_a_file_asks_for_runs(file, tmp_path):
    target, decoder, args = tmp_path / "owned", original("gpt"), arguments("gpt")
    extra = {"plan": Malice(target)} if file == "common.pt" else {}
    root = torch_dist(tmp_path / "m", megatron(decoder), argparse.Namespace(**vars(args), **extra))
    if file == ".metadata":
        described = root / "iter_0000007" / file
        metadata = pickle.loads(described.read_bytes())
        metadata.all_local_plans = [Malice(target), ModelType(1)]  # as megatron-core 0.16 keeps its plans
        described.write_bytes(pickle.dumps(metadata))
    try:
        write_checkpoint(MegatronWeights.open(tmp_path / "m"), tmp_path / "ck")
    except ValueError:
        assert file != ".metadata"
    assert not target.exists()
