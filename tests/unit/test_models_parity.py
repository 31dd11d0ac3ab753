"""The decoder equals transformers' Llama, Qwen2, GPT-2 and BLOOM on the same weights."""

from __future__ import annotations

import pytest
import torch

from megazero.models import Decoder, from_hf_config, make_model
from megazero.models.hf_weights import load_hf_state_dict, to_hf_state_dict
from tests.oracle import in_fp64

transformers = pytest.importorskip("transformers")

LLAMA = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}


def llama(**changes):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA, **changes}))


def qwen2(**changes):
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**{**LLAMA, **changes}))


def gpt2():
    sizes = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 101}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(**sizes, **drops, attn_implementation="eager")
    return transformers.GPT2LMHeadModel(config)


def bloom(heads=4):
    config = transformers.BloomConfig(vocab_size=101, hidden_size=48, n_layer=2, n_head=heads)
    return transformers.BloomForCausalLM(config)


MODELS = {
    "llama": llama,
    "llama-tied": lambda: llama(tie_word_embeddings=True),
    "llama-mha": lambda: llama(num_key_value_heads=4, head_dim=16),
    "llama-biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "llama-rope-linear": lambda: llama(rope_parameters=LINEAR_ROPE),
    "llama-rope-llama3": lambda: llama(rope_parameters=LLAMA3_ROPE),
    "qwen2": qwen2,
    "qwen2-tied-linear": lambda: qwen2(tie_word_embeddings=True, rope_parameters=LINEAR_ROPE),
    "gpt2": gpt2,
    "bloom": bloom,
    "bloom-6-heads": lambda: bloom(6),
}


def perturb(model):
    """Random biases and norms too, so that none is checked at its trivial value only."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.1)


def nemotron():
    """Squared ReLU, rotary positions on half of each head, LayerNorms whose weights are stored less 1."""
    sizes = {name: LLAMA[name] for name in LLAMA if name != "tie_word_embeddings"}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return transformers.NemotronForCausalLM(transformers.NemotronConfig(**sizes, rope_parameters=rope))


NEMOTRON = {
    "model_family": "llama",
    "num_layers": 2,
    "hidden_size": 48,
    "ffn_hidden_size": 80,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "normalization": "LayerNorm",
    "squared_relu": True,
    "rotary_percent": 0.5,
    "pad_vocab_size_to": 110,
}


def test_equals_transformers_nemotron():
    with in_fp64():
        differences = compare(nemotron(), torch.double, make_model(**NEMOTRON), norms_from=1)
    assert max(differences.values()) < 1e-10, differences
    differences = compare(nemotron(), torch.float32, make_model(**NEMOTRON), norms_from=1)
    assert max(differences.values()) < 2e-5, differences


def compare(model, dtype, config=None, norms_from=0):
    """Relative differences of logits and of each parameter's gradient.

    config: instead of what its config.json says. norms_from: added to the stored weights of norms.
    """
    model = model.to(dtype).eval()
    perturb(model)
    decoder = Decoder(config or from_hf_config(model.config.to_dict()), dtype=dtype)
    state = model.state_dict()
    load_hf_state_dict(decoder, {n: t + norms_from if "norm.weight" in n else t for n, t in state.items()})
    tokens = torch.randint(0, 101, (2, 24), generator=torch.Generator().manual_seed(5))
    labels = tokens.roll(-1, 1)

    theirs = model(tokens).logits
    torch.nn.functional.cross_entropy(theirs.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    decoder(tokens, labels).sum().backward()
    differences = {"logits": relative(decoder.full_logits(tokens), theirs)}

    gradients = Decoder(decoder.config, dtype=dtype)
    with torch.no_grad():
        for mine, its in zip(gradients.parameters(), decoder.parameters(), strict=True):
            mine.copy_(its.grad)
    ours = to_hf_state_dict(gradients)
    floor = 1e-6 * torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    for name, parameter in model.named_parameters():
        differences[name] = ((ours[name] - parameter.grad).norm() / parameter.grad.norm().clamp(floor)).item()
    return differences


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("name", MODELS)
def test_equals_transformers_fp64(name):
    with in_fp64():
        differences = compare(MODELS[name](), torch.double)
    assert max(differences.values()) < 1e-10, differences


@pytest.mark.parametrize("name", MODELS)
def test_equals_transformers_fp32(name):
    differences = compare(MODELS[name](), torch.float32)
    assert max(differences.values()) < 2e-5, differences


def test_bf16_is_as_close_to_fp32_as_transformers_is():
    torch.manual_seed(0)
    reference = llama()
    exact = Decoder(from_hf_config(reference.config.to_dict()))
    load_hf_state_dict(exact, reference.state_dict())
    coarse = Decoder(exact.config, dtype=torch.bfloat16)
    load_hf_state_dict(coarse, reference.state_dict())
    tokens = torch.randint(0, 101, (2, 24))
    with torch.no_grad():
        truth = exact.full_logits(tokens)
        ours = relative(coarse.full_logits(tokens).float(), truth)
        theirs = relative(reference.bfloat16()(tokens).logits.float(), truth)
    assert ours < 1.3 * theirs


@pytest.mark.parametrize("make", [llama, qwen2, gpt2, bloom])
def test_state_dict_round_trip(make):
    model = make()
    state = model.state_dict()
    decoder = Decoder(from_hf_config(model.config.to_dict()))
    load_hf_state_dict(decoder, state)
    back = to_hf_state_dict(decoder)
    assert back.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(back[name], state[name]) for name in back)
    bare = {name.removeprefix("transformer.").removeprefix("model."): value for name, value in state.items()}
    again = Decoder(decoder.config)
    load_hf_state_dict(again, bare)
    assert all(torch.equal(a, b) for a, b in zip(decoder.parameters(), again.parameters(), strict=True))


def test_foreign_weights_are_refused_and_nothing_is_written():
    model = llama()
    decoder = Decoder(from_hf_config(model.config.to_dict()))
    decoder.initialize(0)
    before = [p.clone() for p in decoder.parameters()]
    state = model.state_dict()
    state["model.layers.2.mlp.up_proj.weight"] = state.pop("model.layers.1.mlp.up_proj.weight")
    state["model.norm.weight"] = torch.ones(47)
    with pytest.raises(ValueError) as error:
        load_hf_state_dict(decoder, state)
    text = str(error.value)
    assert "layers.1.mlp.up_proj.weight is missing" in text
    assert "layers.2.mlp.up_proj.weight belongs to no parameter" in text
    assert "model.norm.weight has shape (47,), not (48,)" in text
    assert all(torch.equal(a, b) for a, b in zip(before, decoder.parameters(), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type = 'mamba'"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type = 'yarn'"),
        ({"mlp_bias": True}, "attention_bias and mlp_bias"),
    ],
)
def test_unsupported_hf_configs_are_refused(change, message):
    config = {**transformers.LlamaConfig(**LLAMA).to_dict(), **change}
    with pytest.raises(ValueError, match=message):
        from_hf_config(config)


def test_what_an_absent_field_means_and_which_may_not_be():
    config = transformers.LlamaConfig(**LLAMA).to_dict()
    few = {name: config[name] for name in ("model_type", *LLAMA) if name in config}
    del few["num_key_value_heads"]
    model = from_hf_config(few, hidden_dropout=0.1)
    assert (model.num_query_groups, model.kv_channels, model.norm_epsilon) == (4, 12, 1e-6)
    assert model.hidden_dropout == 0.1 and model.untie_embeddings_and_output_weights
    with pytest.raises(ValueError, match="hidden_size is missing; intermediate_size is missing"):
        from_hf_config({n: v for n, v in few.items() if n not in ("hidden_size", "intermediate_size")})
    old = {"model_type": "bloom", "n_embed": 48, "n_layer": 2, "num_attention_heads": 4, "vocab_size": 9}
    bloom = from_hf_config(old)
    assert (bloom.hidden_size, bloom.num_attention_heads, bloom.ffn_hidden_size) == (48, 4, 192)
    assert bloom.max_position_embeddings == 2048 and not bloom.untie_embeddings_and_output_weights
    with pytest.raises(ValueError, match="use_sliding_window = True"):
        from_hf_config({**transformers.Qwen2Config(**LLAMA).to_dict(), "use_sliding_window": True})
