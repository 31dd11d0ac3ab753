"""Runs torchtitan's trainer on CPU ranks: what it asks of a GPU is answered, and its debug model is small.

torchrun ... titan_on_cpu.py RUNS: a JSON list of [SCRIPT, FOLDER, OPTIONS], one training after the other. A script is
torchtitan's own, or the page's that patches it.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from string import ascii_lowercase
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.optim.optimizer import register_optimizer_step_pre_hook

import fsdp2_patch
from fsdp2_patch.torch_parts import param_groups


def answer_for_a_gpu() -> None:
    """Stand for the accelerator that torchtitan looks for when it is imported."""
    answers = {
        "current_device": 0,
        "device_count": 1,
        "set_device": None,
        "get_device_name": "CPU",
        "get_device_properties": SimpleNamespace(total_memory=2**36),
        "memory_stats": {},
        "reset_peak_memory_stats": None,
        "empty_cache": None,
        "synchronize": None,
        "memory_allocated": 0,
    }
    module = SimpleNamespace(
        **{name: lambda *_, answer=answer, **__: answer for name, answer in answers.items()},
        Stream=torch.Stream,
    )
    if not hasattr(torch.distributed, "set_timeout"):  # of a newer torch than 2.13
        torch.distributed.set_timeout = lambda *_, **__: None
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda _: module
    os.environ["LOCAL_RANK"] = "0"


def divide_on_gloo() -> None:
    """Let FSDP2 divide by itself: gloo lacks the reduction that multiplies first."""
    from torchtitan.distributed import fsdp

    original = fsdp.disable_fsdp_gradient_division

    def disable(model: Any) -> None:
        original(model)
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    fsdp.disable_fsdp_gradient_division = disable


def attend_on_a_cpu() -> None:
    """Attention by torch's own definition, not compiled for a GPU: in numbers, causal within a document's length."""
    from torch.nn.functional import scaled_dot_product_attention
    from torchtitan.models.common import attention

    def attend(q: Any, k: Any, v: Any, *, scale: float | None, enable_gqa: bool, **_: Any) -> Any:
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
        return out, SimpleNamespace(lse=None)

    attention.FlexAttention._compiled_flex_attn = staticmethod(attend)
    attention._compiled_create_block_mask = attention.create_block_mask


def compute_experts_on_a_cpu() -> None:
    """Each expert's products apart, in the weights' dtype: bf16's grouped product is for a GPU."""
    from torch.nn.functional import silu
    from torchtitan.models.common.moe import GroupedExperts

    def forward(self: Any, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        weights = [getattr(self, name).to_local() for name in ("w1_EFD", "w2_EDF", "w3_EFD")]
        tokens = x.split([*counts.tolist(), len(x) - int(counts.sum())])  # the rest belongs to nobody
        every = zip(tokens, *weights, strict=False)
        return torch.cat([*((silu(t @ w1.T) * (t @ w3.T)) @ w2.T for t, w1, w2, w3 in every), tokens[-1] * 0])

    GroupedExperts.forward = forward


def defer_replicas(trainer: Any) -> None:
    """Let a trainer's micro-batches but the last leave out the all-reduce over replicas, as torchtitan #4505 does."""
    step = trainer.forward_backward_step

    def deferring(self: Any, **given: Any) -> Any:
        self.begun = getattr(self, "begun", 0) + 1
        for part in self.model_parts:
            part.set_requires_all_reduce(self.begun % self.gradient_accumulation_steps == 0)
        return step(self, **given)

    trainer.forward_backward_step = deferring


class SumsByNode(ReduceScatter):
    """A reduce-scatter that sums in the patch's order: inside nodes of 2, over micro-batches, then over nodes.

    Everybody gets whole rows of everybody. group: torch's parameter group, whose sums wait for the last micro-batch.
    """

    def __init__(self, group: Any) -> None:
        self.group, self.waiting = group, None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, *_: Any, **__: Any
    ) -> None:
        rows = torch.empty_like(input_tensor).view(group.size(), -1)
        dist.all_to_all_single(rows, input_tensor.view_as(rows), group=group)
        nodes: dict[int, torch.Tensor] = {}
        for rank, row in zip(dist.get_process_group_ranks(group), rows, strict=True):
            nodes[rank // 2] = nodes[rank // 2] + row if rank // 2 in nodes else row
        sums = torch.stack(list(nodes.values()))
        if self.waiting is not None:
            sums = self.waiting + sums
        last = self.group.all_reduce_grads
        self.waiting = None if last else sums
        output_tensor.copy_(sum(sums[1:], sums[0]) if last else torch.zeros_like(output_tensor))


def behind_the_build(trainer: Any, act: Callable[[Any], None]) -> None:
    """Let a trainer do this to itself when it is built."""
    build = trainer.__init__

    def building(self: Any, config: Any) -> None:
        build(self, config)
        act(self)

    trainer.__init__ = building


def sum_by_node(trainer: Any) -> None:
    """Let torch's own FSDP2 sum the gradients of a built trainer in the patch's order, with none of its code."""
    for part in trainer.model_parts:
        for _, groups in param_groups(part):
            for group in groups:
                group._reduce_scatter_comm = SumsByNode(group)


def note_first_gradients(file: Path, trainer: Any) -> None:
    """Write the gradients of a built trainer's first step, of this rank's shards by name."""

    noted: list[Path] = []

    def note(*_: Any) -> None:
        if noted:
            return
        noted.append(file)
        named = (each for part in trainer.model_parts for each in part.named_parameters())
        torch.save({name: p.grad.to_local().clone() for name, p in named if p.grad is not None}, file)

    register_optimizer_step_pre_hook(note)


def write_assets(folder: Path) -> None:
    """Write the tokenizer and the texts that a checkout of torchtitan has."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: i for i, word in enumerate(["<s>", "</s>", "<unk>", *ascii_lowercase])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    text = " ".join(chr(97 + (i * i + i) % 26) for i in range(4000))
    lines = [json.dumps({"text": text[i:] + text[:i]}) for i in range(0, 400, 10)]
    data = folder / "c4_test"
    data.mkdir(exist_ok=True)
    (data / "data.json").write_text("\n".join(lines))


def small_debug_model(assets: Path, folder: Path, options: dict[str, Any]) -> Any:
    """One of torchtitan's debug models with short sequences and 2 micro-batches a step.

    Models of experts keep their first two layers, whose experts two ranks share.
    """
    family, name = options.get("model", "llama3.llama3_debugmodel").split(".")
    registry = importlib.import_module(f"torchtitan.models.{family}.config_registry")
    config = getattr(registry, name)()
    if family != "llama3":
        del config.model_spec.model.layers[2:]
        config.parallelism.expert_parallel_degree = 2
    config.hf_assets_path, config.dump_folder = str(assets), str(folder)
    config.dataloader.dataset_path = str(assets / "c4_test")
    training = config.training
    training.local_batch_size, training.global_batch_size, training.seq_len = 2, 16, 64
    training.disable_cuda_graphs, training.mixed_precision_param = True, options.get("dtype", "float32")
    training.steps = options["steps"]
    config.parallelism.data_parallel_replicate_degree = options.get("replicas", 1)
    config.parallelism.data_parallel_shard_degree = -1
    config.parallelism.spmd_backend = "partial_dtensor"  # the default needs a newer torch than 2.13
    config.lr_scheduler.warmup_steps = 0
    config.validator.enable = False
    config.debug.seed, config.debug.enable_structured_logging = options.get("seed", 1), False
    config.checkpoint.enable = "save_every" in options
    config.checkpoint.interval = options.get("save_every", 10)
    config.checkpoint.folder = options.get("checkpoint", "checkpoint")
    return config


def train(script: str, folder: str, options: dict[str, Any]) -> None:
    """Train as the options say, by the script. Losses, first gradients and what was sent lie in the folder then."""
    from torchtitan.config import ConfigManager
    from torchtitan.trainer import Trainer

    divide_on_gloo()
    attend_on_a_cpu()
    compute_experts_on_a_cpu()
    assets, rank = Path(folder) / f"assets{os.environ['RANK']}", os.environ["RANK"]
    write_assets(assets)
    ConfigManager.parse_args = lambda *_: small_debug_model(assets, Path(folder), options)
    if options.get("defers_replicas"):
        defer_replicas(Trainer)
    if options.get("sums_by_node"):
        behind_the_build(Trainer, sum_by_node)
    behind_the_build(Trainer, partial(note_first_gradients, Path(folder, f"gradients{rank}.pt")))
    losses: list[float] = []
    step, run = Trainer.forward_backward_step, Trainer.train

    def noting(self: Any, **given: Any) -> Any:
        loss = step(self, **given)
        losses.append(float(loss))
        return loss

    def counting(self: Any) -> None:
        """Train, and note what was sent, and the elements of this rank's shards."""
        run(self)
        if fsdp2_patch._patch is not None:
            shards = sum(p.to_local().numel() for part in self.model_parts for p in part.parameters())
            sent = {**fsdp2_patch.counters().take(), "shards": shards}
            Path(folder, f"sent{rank}.json").write_text(json.dumps(sent))

    Trainer.forward_backward_step, Trainer.train = noting, counting
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")
    Path(folder, f"losses{rank}.json").write_text(json.dumps(losses))


def import_titan() -> None:
    """Import what a training does, which takes longer than a short one."""
    answer_for_a_gpu()
    for name in ("torchtitan.train", "datasets", "fsdp2_patch.patch"):
        importlib.import_module(name)


def forked(number: int, act: Callable[[], None]) -> None:
    """Call a function in a process that is forked from this one, as every rank does. Raises RuntimeError if it fails.

    number: of the call, which no other of this launch has: under it ranks meet in the launcher's store.
    """
    pid = os.fork()
    if not pid:
        code = 1
        try:
            rendezvous = importlib.import_module("torch.distributed.rendezvous")
            meet = rendezvous._create_c10d_store
            rendezvous._create_c10d_store = lambda *args, **kwargs: dist.PrefixStore(
                f"run {number}", meet(*args, **kwargs)
            )
            act()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError(f"run {number} failed: its own lines have the reason")


def main(runs: list[tuple[str, str, dict[str, Any]]]) -> None:
    import_titan()
    for number, run in enumerate(runs):
        forked(number, partial(train, *run))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
