"""Training of decoders of 1B and 3B parameters, and of a mixture of experts, on one card: tokens per second, share of
the peak, peak memory.

megazero's engine as a run has it (--optimizer-impl auto: the update in one pass), with torch's AdamW, and with
--compile; the same decoder in a plain torch loop, with its modules compiled and without; under FSDP2 as torchtitan
has it (blocks compiled, then sharded); and transformers' LlamaForCausalLM, or MixtralForCausalLM with its grouped
products, of the same sizes in the plain loop. All compute in bf16 with an fp32 master, AdamW, clipping, one
micro-batch a step; the mixture, whose update is some 30% of such a step, also with four. FLOPs are
megazero/config/model/spec.py's for all: recompute is not counted. A row has figures only if its loss falls over three
steps and its first gradients have the others' norm.

The plain contestant and megazero compile the head with its loss, and each layer with its recompute inside. FSDP2
compiles layers alone.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.gpu_report.record import Record, Skip
from benchmarks.gpu_report.setting import TINY, Setting, elapsed, free, peak_tflops
from benchmarks.harness import Learned, learned, require_training, step_seconds
from benchmarks.steps import ADAMW, AdamW, Shape, Step, compile_backend, engine_step, llama, torch_step
from megazero.config.model.spec import training_flops
from megazero.mesh.mesh import create_mesh
from megazero.models import Decoder
from megazero.zero.elementwise import best_adamw

LARGE = Shape(sequence=4096, vocabulary=32000, dtype=torch.bfloat16)
ONE = replace(LARGE, layers=18, hidden=2048, ffn=5632, heads=16, micro_batch=4)
THREE = replace(LARGE, layers=26, hidden=3072, ffn=8192, heads=24, micro_batch=1)
MIXTURE = replace(ONE, layers=6, ffn=1024, micro_batch=2, experts=64, topk=8)
SMALL = replace(TINY, experts=4)
SEED = 1  # of initial values: all draw them in one order, so their losses and norms are the same
# What a run's --optimizer-impl auto takes: on CUDA the update in one pass, which prepares refreshes, too.
AS_A_RUN = partial(best_adamw, lr=1e-4, weight_decay=0.1)
Build = Callable[[Shape, torch.device, str], Step]  # the last: recompute


def value(parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an fp32 initial value, drawn on the device: on a host, values that do not depend on the layout
    (megazero.models) take too long for billions of parameters."""
    if parameter.ndim == 1:
        return torch.ones(parameter.shape, device=device)
    return torch.empty(parameter.shape, device=device).normal_(std=0.02)


def fill(model: torch.nn.Module, device: torch.device) -> None:
    torch.manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(value(parameter, device))


def megazero(shape: Shape, device: torch.device, recompute: str = "none", **options: Any) -> Step:
    """Return a step of the engine on one rank. options: of ``engine_step``."""

    def init(model: Decoder) -> Callable[[str], torch.Tensor]:
        shapes = dict(model.named_parameters())
        torch.manual_seed(SEED)
        return lambda name: value(shapes[name], device)

    options = {"optimizer": AS_A_RUN, "init": init, **options}
    return engine_step(shape, create_mesh(device=device), recompute=recompute, **options)[0]


def decoder(shape: Shape, device: torch.device, recompute: str = "none") -> Decoder:
    model = Decoder(llama(shape), recompute=recompute, device=device, dtype=shape.dtype)
    fill(model, device)
    return model


def looped(shape: Shape, model: torch.nn.Module, device: torch.device, loss: Any = None) -> Step:
    """Return a step of plain torch. loss: tokens and labels -> losses, by default the model's."""
    parameters = list(model.parameters())
    return torch_step(loss or model, AdamW(parameters, parameters[0].dtype != torch.float32), shape, device)


def plain(shape: Shape, device: torch.device, recompute: str, compiled: bool = False) -> Step:
    model = decoder(shape, device, recompute)
    if compiled:
        assert model.embedding is not None and model.head is not None
        for module in (model.embedding, *model.layers.values(), model.head):
            module.compile(backend=compile_backend(device))
    return looped(shape, model, device)


def fsdp2(shape: Shape, device: torch.device, recompute: str) -> Step:
    """Return a step of FSDP2 on this one rank: each block is compiled whole, then sharded; fp32 parameters are cast
    to bf16 for the gather."""
    model = decoder(replace(shape, dtype=torch.float32), device, recompute)
    for name, layer in list(model.layers.items()):
        model.layers[name] = torch.compile(layer, backend=compile_backend(device), fullgraph=True)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (1,))
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh, mp_policy=precision)
    return looped(shape, model, device)


def transformers(shape: Shape, device: torch.device, recompute: str) -> Step:
    if importlib.util.find_spec("transformers") is None:
        raise Skip("transformers is not installed (pip install transformers)")
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    made: Any = MixtralConfig if shape.experts else LlamaConfig
    experts = {"num_local_experts": shape.experts, "num_experts_per_tok": shape.topk, "head_dim": None}
    config = made(
        **(experts if shape.experts else {}),
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.sequence,
        tie_word_embeddings=not llama(shape).untie_embeddings_and_output_weights,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model: Any = (MixtralForCausalLM if shape.experts else LlamaForCausalLM)(config).to(shape.dtype)
    model = model.to_empty(device=device)
    fill(model, device)
    with device:  # its frequencies are a buffer, which to_empty left without values
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    if shape.experts:
        model.set_experts_implementation("grouped_mm")
    if recompute == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()

    def loss(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = model(tokens, use_cache=False).logits.flatten(0, 1).float()
        return torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")

    return looped(shape, model, device, loss)


# -- who is compared -------------------------------------------------------------------------------------

BUILDS: dict[str, Build] = {
    "megazero, as a run has it": megazero,
    "megazero, torch's AdamW": partial(megazero, optimizer=ADAMW),
    "plain torch": plain,
    "transformers": transformers,
    "megazero, compiled": partial(megazero, compiled=True),
    "plain torch, compiled": partial(plain, compiled=True),
    "FSDP2, compiled": fsdp2,
}
ENDS = ("none", "full")
EAGER = {
    "megazero, as a run has it": ("none", "selective", "full"), "megazero, torch's AdamW": ("none",),
    "plain torch": ("none", "selective", "full"), "transformers": ENDS,
}  # fmt: skip
EXPERTS = dict.fromkeys(("megazero, as a run has it", "plain torch", "transformers"), ENDS)
EXPERTS_ALONE = dict.fromkeys(EXPERTS, ("none",))
COMPILED = dict.fromkeys(("megazero, as a run has it", "megazero, compiled", "plain torch, compiled"), ENDS)
LAST = {"FSDP2, compiled": ENDS}  # it leaves a process group


def run(
    real: Shape, tiny: Shape, groups: Iterable[Mapping[str, Iterable[str]]], setting: Setting, record: Record
) -> None:
    """Measure each group of contestants after the other. A group: name -> the recomputes that it runs with."""
    if not setting.rehearsal:
        _note_peak(setting, record)
    shape, known = setting.pick(real, tiny), dict[str, Learned]()
    for group in groups:
        for recompute in ("none", "selective", "full"):
            for name in (name for name, own in group.items() if recompute in own):
                with record.attempt(layers=shape.layers, contestant=name, recompute=recompute) as row:
                    setting.need(setting.pick(10, 0))
                    row |= _measured(BUILDS[name], shape, setting, recompute, f"{name}, {recompute}", known)
                free(setting.device)
                torch.compiler.reset()


def _measured(
    build: Build, shape: Shape, setting: Setting, recompute: str, name: str, known: dict[str, Learned]
) -> dict[str, Any]:
    """Return the figures of one contestant. known: what those before it learned; it is added to them."""
    device, cuda = setting.device, setting.device.type == "cuda"
    step = build(shape, device, recompute)
    own = learned([step() for _ in range(3)])
    require_training({**known, name: own})
    known[name] = own
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(step_seconds(step, device) for _ in range(setting.pick(8, 1)))
    samples = shape.micro_batch * shape.micro_batches
    rate = training_flops(llama(shape), [shape.sequence] * samples) / seconds / 1e12
    found = {"tokens/s": shape.tokens / seconds, "TFLOP/s": rate}
    found |= {"loss": f"{own.first:.3f} to {own.last:.3f}", "norm": own.norm}
    if cuda:
        peak = peak_tflops(torch.cuda.get_device_name())
        found["MFU"] = rate / peak if peak else None
        found["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
    return found


def _note_peak(setting: Setting, record: Record) -> None:
    """Note what a large product reaches here, beside the data sheet's peak."""
    a, b = (torch.randn(8192, 8192, device=setting.device, dtype=torch.bfloat16) for _ in range(2))
    seconds = min(elapsed(lambda: a @ b, setting.device, 10) for _ in range(3))
    peak = peak_tflops(torch.cuda.get_device_name())
    told = (
        f"MFU is of {peak:g}, the data sheet's" if peak else "there is no MFU: the device's peak is not known"
    )
    rate = 2 * 8192**3 / seconds / 1e12
    record.note(f"A bf16 product of 8192 x 8192 matrices runs at {rate:.0f} TFLOP/s here; {told}")


run_one = partial(run, ONE, TINY, (EAGER,))
run_one_compiled = partial(run, ONE, TINY, (COMPILED, LAST))
run_mixture = partial(run, MIXTURE, SMALL, (EXPERTS,))
run_mixture_four = partial(
    run, replace(MIXTURE, micro_batches=4), replace(SMALL, micro_batches=4), (EXPERTS_ALONE,)
)
run_three = partial(run, THREE, TINY, (EAGER,))
run_three_compiled = partial(run, THREE, TINY, (COMPILED, LAST))
