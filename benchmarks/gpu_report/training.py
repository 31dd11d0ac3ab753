"""Training of decoders of 1B and 3B parameters, and of a mixture of experts, on one card: tokens per second, share of
the peak, peak memory.

megazero's engine as a run has it (--optimizer-impl auto: the update in one pass), with torch's AdamW, and with
--compile; the same decoder in a plain torch loop, with its modules compiled and without; under FSDP2 as torchtitan
has it (blocks compiled, then sharded); and transformers' LlamaForCausalLM, or MixtralForCausalLM with its grouped
products, of the same sizes in the plain loop. All compute in bf16 with an fp32 master, AdamW, clipping, one
micro-batch a step. FLOPs are megazero/config/model/spec.py's for all: recompute is not counted. A row has figures
only if its loss falls over three steps and its first gradients have the others' norm.

The plain contestant compiles the head with its loss, and each layer with its recompute inside. megazero and FSDP2
compile layers alone. In megazero full recompute is around the compiled layer, which then runs whole once more.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.gpu_report import loops
from benchmarks.gpu_report.loops import Size, Step
from benchmarks.gpu_report.record import Record, Skip
from benchmarks.gpu_report.setting import Setting, elapsed, free, peak_tflops
from benchmarks.harness import Learned, learned, require_training, step_seconds
from benchmarks.steps import ADAMW
from megazero.config.model.spec import parameter_count, training_flops

ONE = Size("1B", layers=18, hidden=2048, ffn=5632, heads=16, batch=4)
THREE = Size("3B", layers=26, hidden=3072, ffn=8192, heads=24)
MIXTURE = Size("2.7B of 64 experts", layers=6, hidden=2048, ffn=1024, heads=16, batch=2, experts=64, topk=8)
TINY_MIXTURE = replace(loops.TINY, experts=4)
RECOMPUTE = ("none", "selective", "full")
LEAST_LAYERS = 4
AS_A_RUN, TORCHS = "megazero, as a run has it", "megazero, torch's AdamW"
BYTES = 2 + 4 + 12  # per parameter, of one rank: 2N/P + 4N/G + 12N/OS with P = G = OS = 1


Contestants = Callable[[Size], Iterator[tuple[str, str, Callable[[torch.device], Step]]]]


def run(real: Size, tiny: Size, contestants: Contestants, setting: Setting, record: Record) -> None:
    if not setting.rehearsal:
        _measure_products(setting, record)
    size = fitting(setting.pick(real, tiny), setting, record)
    known: dict[str, Learned] = {}
    for name, recompute, build in contestants(size):
        with record.attempt(size=size.name, layers=size.layers, contestant=name, recompute=recompute) as row:
            setting.need(setting.pick(10, 0))
            row |= measure(
                lambda build=build: build(setting.device), size, setting, f"{name}, {recompute}", known
            )
        free(setting.device)
        torch.compiler.reset()


def contestants(size: Size) -> Iterator[tuple[str, str, Callable[[torch.device], Step]]]:
    """Yield name, recompute, and what builds the step. Those compared follow each other."""
    for recompute in RECOMPUTE:
        yield AS_A_RUN, recompute, lambda device, r=recompute: loops.ours(size, device, r)[0]
        if recompute == "none":
            yield TORCHS, recompute, lambda device: loops.ours(size, device, optimizer=ADAMW)[0]
        yield "plain torch", recompute, lambda device, r=recompute: _plain(size, device, r)
        if recompute != "selective":
            yield "transformers", recompute, lambda device, r=recompute: _transformers(size, device, r)


def mixture_contestants(size: Size) -> Iterator[tuple[str, str, Callable[[torch.device], Step]]]:
    """Yield as ``contestants`` does. Neither compiles experts."""
    for recompute in ("none", "full"):
        yield AS_A_RUN, recompute, lambda device, r=recompute: loops.ours(size, device, r)[0]
        yield "plain torch", recompute, lambda device, r=recompute: _plain(size, device, r)
        yield "transformers", recompute, lambda device, r=recompute: _transformers(size, device, r)


def compiled_contestants(size: Size) -> Iterator[tuple[str, str, Callable[[torch.device], Step]]]:
    """Yield as ``contestants`` does: --compile off and on, the plain loop compiled, FSDP2 as torchtitan compiles
    it."""
    for recompute in ("none", "full"):
        yield AS_A_RUN, recompute, lambda device, r=recompute: loops.ours(size, device, r)[0]
        yield (
            "megazero, compiled",
            recompute,
            lambda device, r=recompute: loops.ours(size, device, r, compiled=True)[0],
        )
        yield (
            "plain torch, compiled",
            recompute,
            lambda device, r=recompute: _plain(size, device, r, compiled=True),
        )
    for recompute in ("none", "full"):  # last: it leaves a process group
        yield "FSDP2, compiled", recompute, lambda device, r=recompute: _fsdp2(size, device, r)


run_one = partial(run, ONE, loops.TINY, contestants)
run_one_compiled = partial(run, ONE, loops.TINY, compiled_contestants)
run_mixture = partial(run, MIXTURE, TINY_MIXTURE, mixture_contestants)
run_three = partial(run, THREE, replace(loops.TINY, layers=3), contestants)
run_three_compiled = partial(run, THREE, replace(loops.TINY, layers=3), compiled_contestants)


def _plain(size: Size, device: torch.device, recompute: str, compiled: bool = False) -> Step:
    model = loops.decoder(size, device, recompute)
    if compiled:
        assert model.embedding is not None and model.head is not None
        for module in (model.embedding, *model.layers.values(), model.head):
            module.compile(backend=loops.compile_backend(device))
    return loops.plain(size, device, model, lambda tokens: model(tokens, tokens).sum())


def _fsdp2(size: Size, device: torch.device, recompute: str) -> Step:
    """Return a step of FSDP2 on this one rank: each block is compiled whole, then sharded; fp32 parameters are cast
    to bf16 for the gather."""
    model = loops.decoder(size, device, recompute, dtype=torch.float32)
    for name, layer in list(model.layers.items()):
        model.layers[name] = torch.compile(layer, backend=loops.compile_backend(device), fullgraph=True)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (1,))
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh, mp_policy=precision)
    return loops.plain(size, device, model, lambda tokens: model(tokens, tokens).sum())


def _transformers(size: Size, device: torch.device, recompute: str) -> Step:
    if importlib.util.find_spec("transformers") is None:
        raise Skip("transformers is not installed (pip install transformers)")
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    made: Any = MixtralConfig if size.experts else LlamaConfig
    experts = {"num_local_experts": size.experts, "num_experts_per_tok": size.topk, "head_dim": None}
    config = made(
        **(experts if size.experts else {}),
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=size.sequence,
        tie_word_embeddings=not size.config.untie_embeddings_and_output_weights,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model: Any = (MixtralForCausalLM if size.experts else LlamaForCausalLM)(config).to(torch.bfloat16)
    model = model.to_empty(device=device)
    torch.manual_seed(loops.SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(loops.value(parameter, device))
        with device:  # its frequencies are a buffer, which to_empty left without values
            model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    if size.experts:
        model.set_experts_implementation("grouped_mm")
    if recompute == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        logits = model(tokens, use_cache=False).logits
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), tokens.flatten(), reduction="sum"
        )

    return loops.plain(size, device, model, loss)


def measure(
    build: Callable[[], Step], size: Size, setting: Setting, name: str, known: dict[str, Learned]
) -> dict[str, Any]:
    """Return the figures of one contestant. known: what those before it learned; it is added to them."""
    device, cuda = setting.device, setting.device.type == "cuda"
    step = build()
    own = learned([step() for _ in range(3)])
    require_training({**known, name: own})
    known[name] = own
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(step_seconds(step, device) for _ in range(setting.pick(8, 1)))
    flops = training_flops(size.config, [size.sequence] * size.batch) / seconds
    found: dict[str, Any] = {"tokens/s": size.tokens / seconds, "TFLOP/s": flops / 1e12}
    found["loss"], found["norm"] = f"{own.first / size.tokens:.3f} to {own.last / size.tokens:.3f}", own.norm
    if cuda:
        peak = peak_tflops(torch.cuda.get_device_name())
        found["MFU"] = flops / 1e12 / peak if peak else None
        found["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
        if name.startswith("megazero"):
            found |= _against_formula(size, torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated())
    return found


def _against_formula(size: Size, peak: int, resident: int) -> dict[str, float]:
    """resident: between steps, when there are neither gradients nor activations."""
    formula = BYTES * parameter_count(size.config)
    return {
        "18N GB": formula / 1e9,
        "beyond 18N GB": (peak - formula) / 1e9,
        "between steps GB": resident / 1e9,
    }


def fitting(size: Size, setting: Setting, record: Record) -> Size:
    """Return the size, with fewer layers if even full recompute does not fit this card."""
    if setting.device.type == "cpu":
        return size
    card = torch.cuda.get_device_properties(0).total_memory
    layers = size.layers
    while layers > LEAST_LAYERS and needed(replace(size, layers=layers)) > 0.92 * card:
        layers -= 1
    if layers < size.layers:
        record.note(f"{size.name} was cut from {size.layers} to {layers} layers, which fit this card")
    return replace(size, layers=layers)


def needed(size: Size) -> float:
    """Return the bytes of the largest contestant with full recompute: the plain loop's 20 per parameter (two kinds of
    gradients), one layer's activations, inputs of all, and the logits in bf16 and three times in fp32."""
    layer = size.tokens * (22 * size.hidden + 8 * size.ffn)
    if size.experts:
        layer += size.tokens * size.topk * (8 * size.hidden + 8 * size.ffn)
    inputs = 2 * size.tokens * size.hidden * size.layers
    return 20 * parameter_count(size.config) + layer + inputs + 14 * size.tokens * size.vocabulary


def _measure_products(setting: Setting, record: Record) -> None:
    """Note what a large product reaches here, beside the data sheet's peak."""
    a, b = (torch.randn(8192, 8192, device=setting.device, dtype=torch.bfloat16) for _ in range(2))
    seconds = min(elapsed(lambda: a @ b, setting.device, 10) for _ in range(3))
    rate = 2 * 8192**3 / seconds / 1e12
    peak = peak_tflops(torch.cuda.get_device_name())
    told = (
        f"MFU is of {peak:g}, the data sheet's" if peak else "MFU is not told: the device's peak is not known"
    )
    record.note(f"A bf16 product of 8192 x 8192 matrices runs at {rate:.0f} TFLOP/s here; {told}")
