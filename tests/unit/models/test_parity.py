"""The decoder equals transformers' models of every family on the same weights, and config.json goes both ways."""

from __future__ import annotations

import pytest
import torch

from megazero.models import Decoder, architecture_of, from_hf_config, make_model
from megazero.models.hf_weights import load_hf_state_dict
from megazero.models.placements import stored_tensors
from tests.family_models import LLAMA, VARIANTS, in_checkpoints, in_files, make, perturb, stored
from tests.hugging_face import to_hf_state_dict
from tests.oracle import in_fp64

transformers = pytest.importorskip("transformers")


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
    state = in_files(model, model.state_dict())
    load_hf_state_dict(decoder, {n: t + norms_from if "norm.weight" in n else t for n, t in state.items()})
    tokens = torch.randint(0, 101, (2, 24), generator=torch.Generator().manual_seed(5))
    labels = tokens.roll(-1, 1)

    theirs = model(tokens, use_cache=False).logits
    torch.nn.functional.cross_entropy(theirs.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    decoder(tokens, labels).sum().backward()
    differences = {"logits": relative(decoder.full_logits(tokens), theirs)}

    gradients = Decoder(decoder.config, dtype=dtype)
    with torch.no_grad():
        for mine, its in zip(gradients.parameters(), decoder.parameters(), strict=True):
            mine.copy_(its.grad)
    ours = to_hf_state_dict(gradients)
    wanted = in_files(model, {name: p.grad for name, p in model.named_parameters()})
    wanted = in_checkpoints(decoder.config, wanted)
    floor = 1e-6 * torch.stack([grad.norm() for grad in wanted.values()]).norm()
    for name, grad in wanted.items():
        differences[name] = ((ours[name] - grad).norm() / grad.norm().clamp(floor)).item()
    return differences


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_transformers_fp64(variant):
    with in_fp64():
        differences = compare(make(variant), torch.double)
    assert max(differences.values()) < 1e-10, differences


def test_equals_transformers_where_time_steps_are_too_short():
    """Not among the variants: tokens that it generates are of the steps as they are."""
    with in_fp64():
        differences = compare(make("nemotron_h", time_step_min=1.2), torch.double)
    assert max(differences.values()) < 1e-10, differences


IN_FP32 = ("llama", "qwen3-biases-tied", "gemma3", "falcon-40b", "gpt2", "granitemoe", "glm4_moe")


@pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=[] if v in IN_FP32 else pytest.mark.slow) for v in VARIANTS]
)
def test_equals_transformers_fp32(variant):
    differences = compare(make(variant), torch.float32)
    assert differences["logits"] < 5e-6 and max(differences.values()) < 2e-5, differences


def test_bf16_is_as_close_to_fp32_as_transformers_is():
    torch.manual_seed(0)
    reference = make("llama")
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


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_and_config_go_both_ways(variant):
    model = make(variant)
    state = in_files(model, model.state_dict())
    decoder = Decoder(from_hf_config(model.config.to_dict()))
    load_hf_state_dict(decoder, state)
    back = to_hf_state_dict(decoder)
    named = in_checkpoints(decoder.config, in_files(model, stored(model)))
    assert back.keys() == named.keys()
    assert {name: tuple(t.shape) for name, t in back.items()} == stored_tensors(decoder.config)
    assert all(torch.equal(back[name], p) for name, p in named.items())
    bare = {name.removeprefix(f"{model.base_model_prefix}."): value for name, value in state.items()}
    again = Decoder(decoder.config)
    load_hf_state_dict(again, bare)
    assert all(torch.equal(a, b) for a, b in zip(decoder.parameters(), again.parameters(), strict=True))

    written = architecture_of(decoder.config).hugging_face.config(decoder.config)
    assert written["architectures"] == [type(model).__name__] and from_hf_config(written) == decoder.config
    read = type(model.config)(**written).to_dict()  # as transformers understands what was written
    assert from_hf_config(read) == decoder.config


def test_foreign_weights_are_refused_and_nothing_is_written():
    model = make("llama")
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
