"""What the planner says that a layer keeps for its backward, against what autograd saves of one on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megazero.config import RunConfig, World, make_config
from megazero.config.model.spec import EMBEDDING, HEAD, LAYER, model_spec
from megazero.models import Decoder
from megazero.models.attention import attend, make_tables
from megazero.models.compilation import compile_decoder
from megazero.models.masking import Masking
from megazero.plan.activations import (
    LayerActivations,
    MicroBatchActivations,
    _piece,
    layer_activations,
    mask_elements,
)
from megazero.pp.partition import Costs, partition
from megazero.products import RECIPES, make_product
from megazero.tp import TensorParallel
from megazero.train.parallelize import DTYPES
from tests.unit.plan.test_plan import MODEL

SIZES = {**MODEL, "num_layers": 1, "global_batch_size": 2, "micro_batch_size": 2}


def kept_bytes(values: dict[str, object]) -> float:
    """Return the bytes that are there after a layer's forward and were not before: what it keeps, and its output. The
    output of a layer is the input of the next: each keeps one of the two."""
    config = make_config({**SIZES, **values}, World(1, 1))
    dtype = DTYPES[config.precision.params_dtype]
    product = make_product(config.precision.product, **config.precision.product_options)
    recompute = config.training.recompute_granularity
    decoder = Decoder(config.model, TensorParallel(product=product), recompute=recompute, dtype=dtype)
    for parameter in decoder.layers["0"].parameters():
        torch.nn.init.zeros_(parameter)
    x = torch.zeros(64, 2, config.model.hidden_size, dtype=dtype, requires_grad=True)
    key = 1 if config.model.hidden_dropout else None
    decoder.run_layers([0], x, key)  # makes the tables
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        y = decoder.run_layers([0], x, key)
    assert y.requires_grad  # and with y what was saved lives until here
    return float(sum(allocations(found)))


def kind_activations(config: RunConfig, width: int, on_host: bool) -> LayerActivations:
    (layer,) = model_spec(config.model).layers
    return layer_activations(config, layer, width, on_host)


FAMILIES = ["llama", "gpt", "gemma2", "gemma3", "qwen3", "olmo2"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_layer_keeps(family: str, dtype: str) -> None:
    values = {"model_family": family, "params_dtype": dtype, "recompute_granularity": "none"}
    config = make_config({**SIZES, **values}, World(1, 1))
    width = torch.finfo(DTYPES[dtype]).bits // 8
    kept = kind_activations(config, width, on_host=True).kept
    least = 0.9 if config.model.attention_dropout else 0.99  # of the math kernel's scores, an estimate
    assert least < kept / kept_bytes(values) < 1.1


EXPERTS = {"model_family": "llama", "num_experts": 8, "moe_ffn_hidden_size": 64}
SHARED = {"moe_shared_expert_intermediate_size": 96, "moe_shared_expert_gate": True}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "more",
    [{}, {"moe_router_topk": 4}, SHARED, {"model_family": "gpt_oss"}],
    ids=["two", "four", "shared", "gpt_oss"],
)
def test_what_a_layer_with_experts_keeps(more: dict[str, object], dtype: str) -> None:
    values = {**EXPERTS, "params_dtype": dtype, "recompute_granularity": "none", **more}
    config = make_config({**SIZES, **values}, World(1, 1))
    kept = kind_activations(config, torch.finfo(DTYPES[dtype]).bits // 8, on_host=True).kept
    assert 0.95 < kept / kept_bytes(values) < 1.1


LATENT = {
    **{"model_family": "llama", "multi_latent_attention": True, "kv_lora_rank": 48, "qk_head_dim": 16},
    **{"qk_pos_emb_head_dim": 8, "v_head_dim": 12, "ffn_hidden_size": 64},
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize(
    "more",
    [{}, {"q_lora_rank": 40, "qk_norm": "head"}, {"v_head_dim": 24}],
    ids=["bare", "normed", "one width"],
)
def test_what_a_layer_with_latents_keeps(more: dict[str, object], recompute: str, dtype: str) -> None:
    values = {**LATENT, "params_dtype": dtype, "recompute_granularity": recompute, **more}
    config = make_config({**SIZES, **values}, World(1, 1))
    kept = kind_activations(config, torch.finfo(DTYPES[dtype]).bits // 8, on_host=True).kept
    assert 0.97 < kept / kept_bytes(values) < 1.05


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_a_layer_keeps_in_fp8(recipe: str) -> None:
    """Inputs of linears, a byte an element and scales, but for rowwise ones, which are kept as they are."""
    plain = {"model_family": "llama", "params_dtype": "bf16", "recompute_granularity": "none"}
    values = {**plain, "fp8_format": "e4m3", "fp8_recipe": recipe, "fp8_min_size": 16}
    saved, without = kept_bytes(values), kept_bytes(plain)
    kept = kind_activations(make_config({**SIZES, **values}, World(1, 1)), 2, on_host=True).kept
    assert 0.99 < kept / saved < 1.1
    assert (saved < 0.95 * without) == (recipe != "rowwise")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("softmax", [None, (1,)], ids=["delta-net", "gated-attention"])
def test_what_a_layer_of_qwen3_next_keeps(softmax: tuple[int, ...] | None, dtype: str) -> None:
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 16}
    values = {"model_family": "qwen3_next", "params_dtype": dtype, "recompute_granularity": "none", **heads}
    values |= {"linear_value_head_dim": 32, "linear_attention_freq": softmax}
    config = make_config({**SIZES, **values}, World(1, 1))
    kept = kind_activations(config, torch.finfo(DTYPES[dtype]).bits // 8, on_host=True).kept
    assert 0.95 < kept / kept_bytes(values) < 1.1


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_what_a_layer_of_mamba_keeps(recompute: str, dtype: str) -> None:
    values = {"model_family": "nemotron_h", "params_dtype": dtype, "recompute_granularity": recompute}
    values |= {"hybrid_layer_pattern": "M", "mamba_num_groups": 4, "mamba_num_heads": 8}
    values |= {"mamba_head_dim": 16, "mamba_state_dim": 32}
    config = make_config({**SIZES, **values}, World(1, 1))
    kept = kind_activations(config, torch.finfo(DTYPES[dtype]).bits // 8, on_host=True).kept
    assert 0.95 < kept / kept_bytes(values) < 1.05


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "model",
    [*({"model_family": name} for name in FAMILIES), {"model_family": "gpt_neox"}, EXPERTS, EXPERTS | SHARED],
)
def test_what_a_recompute_of_the_mlp_does_not_keep(model: dict[str, object], dtype: str) -> None:
    def less(kept: Callable[[dict[str, object]], float]) -> float:
        none, mlp = (
            kept({**model, "params_dtype": dtype, "recompute_granularity": r}) for r in ("none", "mlp")
        )
        return none - mlp

    def planned(values: dict[str, object]) -> float:
        config = make_config({**SIZES, **values}, World(1, 1))
        return kind_activations(config, torch.finfo(DTYPES[dtype]).bits // 8, on_host=True).kept

    assert less(planned) == pytest.approx(less(kept_bytes), rel=0.03)


def test_attention_with_dropout_keeps_its_scores_on_processors() -> None:
    values = {"params_dtype": "fp32", "attention_dropout": 0.1}
    with_scores, without = (
        kept_bytes({**values, "attention_dropout": p, "hidden_dropout": 0.1}) for p in (0.1, 0.0)
    )
    config = make_config({**SIZES, **values}, World(1, 1))
    kept = [kind_activations(config, 4, on_host).kept for on_host in (True, False)]
    assert kept[0] - kept[1] == pytest.approx(with_scores - without, rel=0.2)


def test_masks_are_counted_once_for_each_kind_that_a_stage_holds() -> None:
    def masks(stages: int = 1, **values: object) -> float:
        sizes = {**SIZES, "num_layers": 4, "position_embedding_type": "rope", **values}
        config = make_config(sizes, World(1, 1))
        held = partition(4, 2, costs=Costs(1, 1, 1))[:stages] if stages < 2 else config.stages()
        return mask_elements(config, [i for s in held for i in s.layers]) / config.model.seq_length**2

    window = {"sliding_window": 8, "window_attn_skip_freq": (2,)}
    assert [masks(2, **each) for each in ({}, {"sliding_window": 4096}, window)] == [0, 0, 1]
    assert masks(2, **window, reset_attention_mask=True) == 2 * 2  # with documents, those of each sample
    assert masks(1, sliding_window=8, window_attn_skip_freq=(0, 0, 1, 1)) == 0


def test_activations_go_as_the_backward_proceeds() -> None:
    config = make_config({**SIZES, "num_layers": 4}, World(1, 1))
    (stage,) = config.stages()
    sizes = {
        kind: sum(items.values())
        for kind, items in MicroBatchActivations(config, 4).moments([stage], 1).items()
    }
    assert set(sizes) == {EMBEDDING, LAYER, HEAD} and sizes[EMBEDDING] < min(sizes[LAYER], sizes[HEAD])


def test_at_the_embedding_only_other_micro_batches_hold_layers() -> None:
    def at(moment: str, layers: int, peak: int) -> float:
        config = make_config({**SIZES, "num_layers": layers}, World(1, 1))
        return sum(MicroBatchActivations(config, 4).moments(config.stages(), peak)[moment].values())

    assert at(EMBEDDING, 4, 1) == at(EMBEDDING, 1, 1), "the last micro-batch's have gone"
    assert at(EMBEDDING, 4, 3) - at(EMBEDDING, 4, 1) == at(LAYER, 4, 3) - at(LAYER, 4, 1) > 0


def test_each_micro_batch_under_way_holds_the_masks_of_its_documents() -> None:
    def more(**values: object) -> float:
        """Return what the second and third micro-batch add, in masks of one sample."""
        sizes = {**SIZES, "position_embedding_type": "rope", "attention_backend": "efficient", **values}
        config = make_config(sizes, World(1, 1))
        one, three = (
            sum(MicroBatchActivations(config, 4).moments(config.stages(), peak)[LAYER].values())
            for peak in (1, 3)
        )
        return (three - one) / (4 * config.model.seq_length**2)

    assert more(reset_attention_mask=True) - more() == 2 * SIZES["micro_batch_size"]
    assert more(sliding_window=8) == more(), "a mask of positions alone is shared by all"
    assert more(reset_attention_mask=True, attention_backend="auto") == more(), "only that backend has masks"


@pytest.mark.parametrize("on_host", [True, False])
def test_bands_of_queries_hold_the_matrices_of_one(on_host: bool) -> None:
    def working(length: int, backend: str) -> float:
        sizes = {**SIZES, "seq_length": length, "max_position_embeddings": length, "params_dtype": "fp32"}
        sizes |= {"attention_backend": backend, "attention_dropout": 0.0}
        return kind_activations(make_config(sizes, World(1, 1)), 4, on_host).working

    heads = make_config(SIZES, World(1, 1)).model.num_attention_heads
    more = [working(length, "math") - working(length, "auto") for length in (128, 1024, 2048)]
    pieces = [(128, 128), (256, 1024), (256, 2048)]
    assert more == [rows * length * (4 * heads * 4 + 4 + 1) for rows, length in pieces]


@pytest.mark.parametrize("window", [None, 600])
def test_nothing_of_a_piece_is_larger_than_its_bias(window: int | None) -> None:
    """Of the pieces of two chunks of queries, as ranks have that gather keys."""
    length = 4096
    masking = Masking(0.25, window=window, queries=(range(512), range(length - 512, length)))
    q = torch.zeros(1024, 1, 2, 16, requires_grad=True)
    k, v = (torch.zeros(length, 1, 1, 16, requires_grad=True) for _ in range(2))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        attend(q, k, v, make_tables(masking, "flash", length, q)).sum().backward()
    sizes = {"seq_length": length, "max_position_embeddings": length, "params_dtype": "fp32"}
    sizes |= {"context_parallel_size": 2, "cp_comm_type": ("all_gather",), "sliding_window": window}
    config = make_config({**SIZES, **sizes, "position_embedding_type": "rope"}, World(2, 2))
    (layer,) = model_spec(config.model).layers
    bias = _piece(config, layer, 4, 4, False, True) * 4 / 5  # beside which keys are hidden
    keys = length if window is None else window + 256
    assert max(allocations(found)) <= bias == 256 * keys * 4


def allocations(found: profile) -> list[int]:
    """Return the bytes that memory grew by, negative where it shrank, in order."""
    assert found.profiler is not None and found.profiler.kineto_results is not None
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    return [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]


def head_peaks(family: str, dtype: str, chunk: int | None, compiled: bool = False) -> tuple[float, int]:
    """Return what the planner says that the head has at its peak, and what it had."""
    values: dict[str, Any] = {"model_family": family, "params_dtype": dtype, "recompute_granularity": "none"}
    values |= {"vocab_size": 8192, "hidden_size": 128, "seq_length": 256, "compile": compiled}
    config = make_config({**SIZES, **values}, World(1, 1))
    width, tokens = torch.finfo(DTYPES[dtype]).bits // 8, torch.zeros(2, 256, dtype=torch.int64)
    decoder = Decoder(config.model, loss_chunk=chunk, dtype=DTYPES[dtype])
    if compiled:
        compile_decoder(decoder, "inductor")
    head = decoder.head
    torch.nn.init.zeros_(head.weight)
    x = torch.zeros(256, 2, 128, dtype=DTYPES[dtype], requires_grad=True)
    for _ in range(1 + compiled):
        head.zero_grad()
        x.grad = None
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            head(x, tokens, torch.ones(2, 256)).backward()
    measured = max(itertools.accumulate(allocations(found)))
    moments = MicroBatchActivations(config, width, True).moments(config.stages(), 1, chunk)
    return moments[HEAD]["head"], measured


@pytest.mark.parametrize("chunk", [None, 200, 256, 1024])
@pytest.mark.parametrize("family, dtype", [("llama", "fp32"), ("llama", "bf16"), ("gemma2", "fp32")])
def test_what_the_head_has_at_its_peak(family: str, dtype: str, chunk: int | None) -> None:
    predicted, measured = head_peaks(family, dtype, chunk)
    assert predicted == pytest.approx(measured, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, dtype, chunk", [("llama", "bf16", None), ("llama", "bf16", 256), ("gemma2", "fp32", None)]
)
def test_what_a_compiled_head_has_at_its_peak(family: str, dtype: str, chunk: int | None) -> None:
    predicted, measured = head_peaks(family, dtype, chunk, compiled=True)
    assert predicted == pytest.approx(measured, rel=0.03)


def test_smaller_chunks_of_the_loss_take_less() -> None:
    config = make_config({**SIZES, "seq_length": 4096, "max_position_embeddings": 4096}, World(1, 1))
    chunks = (None, 8192, 4096, 2048, 1024)  # of 2 samples of 4096
    activations = MicroBatchActivations(config, 2)
    heads = [activations.moments(config.stages(), 1, chunk)[HEAD]["head"] for chunk in chunks]
    assert heads[0] == heads[1] and heads == sorted(heads, reverse=True) and heads[3] > heads[4]
