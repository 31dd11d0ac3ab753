"""--compile's options, and what it says where it cannot be."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._dynamo.utils import counters

from megazero.config import ConfigError, World, make_config
from megazero.families.layer_kinds import layer_kinds
from megazero.models import Decoder
from megazero.models.compilation import compile_decoder
from megazero.zero.build import plain_name
from tests.messages import refused
from tests.sizes import TINY
from tests.unit.models.test_decoder import DROPOUT, batch, make


def step(decoder: Decoder, key: int, length: int = 16) -> list[torch.Tensor]:
    """Return the gradients and the losses of a training step and of evaluations, where ``key`` scales the loss."""
    decoder.zero_grad()
    weights = torch.rand(2, length, generator=torch.Generator().manual_seed(key))
    loss = decoder(*batch(length), key, loss_weights=weights, loss_scale=float(key))
    (loss * key).backward()
    found = [loss.detach(), *(p.grad.clone() for p in decoder.parameters() if p.grad is not None)]
    with torch.no_grad():
        return [*found, decoder.eval()(*batch(length)), decoder.train()(*batch(length), key)]


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.first(1)
@pytest.mark.long
@pytest.mark.parametrize(
    ("recompute", "family", "heads", "options"),
    [
        ("full", "llama", (3,), {"z_loss": 1e-2}),
        ("full", "llama", (3, 6), {}),
        ("none", "llama", (3, 6), {}),
        ("selective", "llama", (3, 6), {}),
        ("mlp", "llama", (3, 6), {}),
        ("full", "gemma2", (3, 6), {}),
        # Of 32 tokens in chunks of 24 and 8, sums and gradients; of evaluations sums of all. Then 48 tokens.
        ("none", "gpt", (5, 6), {"loss_chunk": 24}),
    ],
)
def test_whole_graphs_serve_all_steps_and_layers(recompute, family, heads, options):
    """Training, evaluation, and what is not usual: masks without gradient. Masks, loss scales and weights are new in
    every step, and no step compiles more than the first of its length."""
    torch._dynamo.reset()
    counters.clear()
    choices = {**DROPOUT, "attention_dropout": 0.0, "num_layers": 4}
    plain, decoder = (Decoder(make(family, **choices), recompute=recompute, **options) for _ in range(2))
    plain.initialize(7), decoder.initialize(7)
    compile_decoder(decoder, "aot_eager")
    kinds = len(set(layer_kinds(decoder.config)))
    for key, length, lengths in ((3, 16, 1), (4, 16, 1), (5, 24, 2), (6, 16, 2))[: 2 * len(heads)]:
        assert all(map(torch.equal, step(decoder, key, length), step(plain, key, length)))
        assert graphs() == lengths * 3 * kinds + heads[lengths - 1]
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["mlp", "none", "full"])
def test_layers_with_experts_are_compiled_but_for_router_and_experts(recompute):
    torch._dynamo.reset()
    counters.clear()
    choices = {**DROPOUT, "attention_dropout": 0.0, "num_experts": 4, "moe_router_topk": 2}
    choices |= {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": True}
    plain, decoder = (Decoder(make("llama", **choices), recompute=recompute) for _ in range(2))
    plain.initialize(7), decoder.initialize(7)
    compile_decoder(decoder, "aot_eager")
    made = list[int]()
    for key in (3, 4, 5):
        assert all(map(torch.equal, step(decoder, key), step(plain, key)))
        made.append(graphs())
    # The head's 3; before, beside and behind the router at least one each, in training and in evaluation.
    assert made[0] == made[-1] >= 3 + 2 * 3


COMPILED = {
    "head": lambda decoder: [decoder.head],
    "modules": lambda decoder: [decoder.embedding, *decoder.layers.values(), decoder.head],
    "embedding": lambda decoder: [decoder.embedding],
    "layers": lambda decoder: decoder.layers.values(),
    "norm": lambda decoder: [decoder.head.norm],
    "decoder": lambda decoder: [decoder],
}
DTYPES = {"llama": torch.bfloat16, "gemma2": torch.float32, "gpt": torch.float32, "mixtral": torch.bfloat16}
LOSSES = {"each": ({}, False), "weighted": ({"z_loss": 1e-2}, True), "chunks": ({"loss_chunk": 5}, True)}


def trained(family: str, losses: str, compiled: str | None = None, backend: str = "") -> list[torch.Tensor]:
    options, weighted = LOSSES[losses]
    decoder = Decoder(make(family), dtype=DTYPES[family], **options)
    decoder.initialize(7)
    for module in COMPILED[compiled](decoder) if compiled else ():
        module.compile(backend=backend)
    tokens, labels = batch()
    labels[0, 3] = -100
    weights = torch.rand(labels.shape, generator=torch.Generator().manual_seed(2)) if weighted else None
    loss = decoder(tokens, labels, loss_weights=weights)
    loss.sum().backward()
    return [loss.detach(), *(p.grad for p in decoder.parameters())]


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("backend", "compiled", "losses", "family"),
    itertools.product(("eager", "aot_eager"), COMPILED, LOSSES, DTYPES),
)
def test_what_is_compiled_has_the_losses_and_gradients_of_what_is_not(backend, compiled, losses, family):
    """In an own loop, each module and all. Under torch 2.11 the head's gradients were zero, its losses right."""
    torch._dynamo.reset()
    assert all(map(torch.equal, trained(family, losses, compiled, backend), trained(family, losses)))


def test_what_compiling_needs_is_said(monkeypatch, tmp_path):
    decoder = Decoder(make("llama"), device="meta")
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    with refused("--compile", "C++", "no-such", "g++"):
        compile_decoder(decoder, "inductor")
    monkeypatch.delenv("CXX")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(ValueError, match="python3-dev"):
        compile_decoder(decoder, "inductor")
    compile_decoder(decoder, "aot_eager")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"compile": True, "attention_dropout": 0.1}, "--compile does not take --attention-dropout 0.1"),
        ({"compile_backend": "aot_eager"}, "--compile-backend aot_eager has no effect without --compile"),
        ({"compile": True, "compile_backend": "tvm"}, "inductor"),
    ],
)
def test_choices_that_do_not_go_together_are_refused(values, said):
    with pytest.raises(ConfigError) as error:
        make_config({**TINY, **values}, World(1, 1))
    assert said in str(error.value)


@pytest.mark.parametrize(
    "name", ["_orig_mod.layers.0.weight", "layers.0._orig_mod.weight", "layers.0.weight._orig_mod"]
)
def test_what_was_compiled_has_the_names_of_what_was_not(name: str) -> None:
    """The last one stands for a unit that is the module inside of the wrapper: its noise goes by its name."""
    assert plain_name(name) == "layers.0.weight" and plain_name("_orig_mod") == ""
