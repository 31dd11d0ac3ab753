"""One rank's part of a Case: megatron-core's own classes in the order in which its pretrain() uses them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megazero.comm.lane import Lane
from tests.megatron.case import Case, Run
from tests.megatron.devices import megatron_on_card, megatron_on_cpu, unshimmed
from tests.megatron.model import build_chunks, model_config, named

Formats = Mapping[str, Any]  # what megatron_core_patch.enable takes


def train(case: Case, formats: Formats | None = None) -> Run:
    """Train a case from its start. To be called on every rank of a world of ``case.world``.

    formats: with them under megatron_core_patch; None is megatron-core as it is.
    """
    with a_job(case, formats) as job:
        for step in range(case.steps):
            job.step(step)
        return dataclasses.replace(job.run(), sent=sent(formats))


@contextmanager
def a_job(case: Case, formats: Formats | None = None) -> Iterator[Job]:
    """A Job inside ``megatron_ranks``; nothing of it stays."""
    with megatron_ranks(case, formats):
        job = Job(case)
        try:
            yield job
        finally:
            for chunk in job.chunks:  # autograd's nodes hold its hooks for ever, and those the process groups
                vars(chunk).clear()


@contextmanager
def megatron_ranks(case: Case, formats: Formats | None = None) -> Iterator[None]:
    """Shims, parallel_state and patch of a case, undone after it: a rank serves many cases."""
    with megatron_on_cpu() if case.device == "cpu" else megatron_on_card(), patched(case, formats):
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import random

        # Groups of the same ranks are one group: each has threads of gloo that poll, and Megatron makes 17 a rank.
        with mock.patch.object(parallel_state, "create_group", cache_by_ranks(parallel_state.create_group)):
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=case.tp,
                pipeline_model_parallel_size=case.pp,
                virtual_pipeline_model_parallel_size=case.vpp if case.vpp > 1 else None,
                expert_model_parallel_size=case.ep,
                expert_tensor_parallel_size=1,  # more needs gathers of unequal parts, which gloo lacks
            )
        random.initialize_rng_tracker(force_reset=True)
        random.model_parallel_cuda_manual_seed(case.seed)
        try:
            yield
        finally:
            forget_groups(parallel_state)


def cache_by_ranks(create: Callable[..., Any]) -> Callable[..., Any]:
    """Each group has the default one's backends, so it serves where Megatron asks for gloo, too."""
    made: dict[tuple[int, ...], Any] = {}

    def create_group(ranks: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        if tuple(ranks) not in made:
            made[tuple(ranks)] = create(ranks, *args, **{**kwargs, "backend": None})
        return made[tuple(ranks)]

    return create_group


def forget_groups(parallel_state: Any) -> None:
    """Drop Megatron's process groups, of which its own function keeps some."""
    parallel_state.destroy_model_parallel()
    for name, value in vars(parallel_state).items():
        if isinstance(value, dist.ProcessGroup) or (isinstance(value, list) and name.startswith("_")):
            setattr(parallel_state, name, None)


@contextmanager
def patched(case: Case, formats: Formats | None) -> Iterator[None]:
    if formats is None:
        yield
        return
    import megatron_core_patch

    megatron_core_patch.enable(**formats, ranks_per_node=case.ranks_per_node)
    try:
        with mock.patch.object(Lane, "_advance", unshimmed(Lane._advance)):
            yield
    finally:
        megatron_core_patch.disable()


class Job:
    """A model with its optimizer, and the steps that train it, as megatron's training.py takes them."""

    def __init__(self, case: Case) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.case = case
        self.config = model_config(case)
        chunks = build_chunks(case, self.config)
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=case.overlap_grad_reduce,
            overlap_param_gather=case.overlap_param_gather,
            average_in_collective=case.average_in_collective,
            bucket_size=case.bucket_size,
        )
        self.chunks = [
            DistributedDataParallel(self.config, ddp, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(chunks)
        ]
        options = {"overlap_param_gather": case.overlap_param_gather}  # a field of newer versions
        known = {field.name for field in dataclasses.fields(OptimizerConfig)}
        adam = OptimizerConfig(
            optimizer="adam",
            lr=case.lr,
            weight_decay=0.01,
            clip_grad=case.clip,
            bf16=case.bf16,
            params_dtype=case.dtype,
            use_distributed_optimizer=True,
            **{name: value for name, value in options.items() if name in known},
        )
        self.optimizer = get_megatron_optimizer(adam, self.chunks)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        if case.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self.chunks]
            self.config.no_sync_func = no_sync[0] if len(no_sync) == 1 else no_sync
        self.losses: list[list[tuple[float, int]]] = []
        self.norms: list[float] = []
        self.hooks = case.overlap_param_gather
        if self.hooks:  # as megatron's train(): the first forwards take what every rank has itself
            self._hooks(False)

    def step(self, number: int) -> None:
        """Take one step on the samples of step ``number``."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.losses.append([])
        data = [self._data(number) for _ in self.chunks]
        get_forward_backward_func()(
            forward_step_func=partial(forward_step, self.losses[-1]),
            data_iterator=data if len(data) > 1 else data[0],
            model=self.chunks if len(data) > 1 else self.chunks[0],
            num_microbatches=self.case.micro_batches,
            seq_length=self.case.sequence,
            micro_batch_size=1,
            forward_only=False,
        )
        updated, norm, _ = self.optimizer.step()
        self.norms.append(float(norm))
        if self.case.overlap_param_gather and not self.hooks:
            self._hooks(True)

    def run(self) -> Run:
        """Return what this rank has to say, with all parameters gathered."""
        from megatron.core import parallel_state

        self.sync()
        first = parallel_state.get_tensor_model_parallel_rank() == 0
        counts = first and parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        digests = {}
        for name, parameter in named(self.chunks):
            digests[name] = hashlib.sha256(parameter.detach().view(torch.uint8).cpu().numpy()).hexdigest()[
                :16
            ]
        buckets = [
            (
                bucket.grad_data.numel(),
                tuple(dist.get_process_group_ranks(buffer.data_parallel_group)),
                tuple(
                    (begin - bucket.offset, end - bucket.offset)
                    for begin, end, number in buffer.param_index_map.values()
                    if number == bucket.bucket_id
                ),
            )
            for buffer in self.buffers()
            for bucket in buffer.buckets
        ]
        return Run(self.losses if counts else [], self.norms, digests, buckets=buckets)

    def buffers(self) -> list[Any]:
        """Return the buffers of all chunks: the dense ones, then the experts'."""
        return [
            buffer for chunk in self.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]

    def sync(self) -> None:
        """Gather all parameters, as megatron does before it saves."""
        if self.case.overlap_param_gather:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def _hooks(self, on: bool) -> None:
        for chunk in self.chunks:
            if on:
                chunk.enable_forward_pre_hook()
            else:
                chunk.disable_forward_pre_hook(param_sync=False)
        self.hooks = on

    def _data(self, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        from megatron.core import parallel_state

        dp, index = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        first = step * self.case.micro_batches * dp
        return (sample(self.case, first + m * dp + index) for m in range(self.case.micro_batches))


def sent(formats: Formats | None) -> dict[tuple[str, str], int]:
    """Return the patch's counters so far; none without it."""
    if formats is None:
        return {}
    import megatron_core_patch

    return dict(megatron_core_patch.counters().bytes)


def sample(case: Case, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens [1, sequence + 1] and the loss mask [1, sequence] of a sample of the data set.

    Each token is, but for some noise, a function of the last one, so that there is something to learn. The last
    tokens of a sample, another number in each, do not count.
    """
    generator = torch.Generator().manual_seed(case.seed * 1_000_003 + number)
    noise = torch.randint(0, 3, (case.sequence + 1,), generator=generator).tolist()
    tokens = torch.randint(0, case.vocabulary, (1,), generator=generator).tolist()
    for added in noise[1:]:
        tokens.append((tokens[-1] * 5 + 1 + added) % case.vocabulary)
    mask = torch.ones(case.sequence)
    mask[case.sequence - number % 5 :] = 0 if number % 5 else 1
    return torch.tensor(tokens)[None], mask[None]


def forward_step(losses: list[tuple[float, int]], data: Iterator, model: torch.nn.Module) -> tuple[Any, Any]:
    """Run the model on the next micro-batch; the second result takes the loss of the last stage's output."""
    device = next(model.parameters()).device
    tokens, mask = (x.to(device) for x in next(data))
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(inputs.shape[1], device=device)[None]
    causal = torch.ones(1, 1, inputs.shape[1], inputs.shape[1], device=device).triu(1).bool()
    output = model(inputs, positions, causal, labels=labels)
    return output, partial(_loss, losses, mask, model)


def _loss(losses: list[tuple[float, int]], mask: torch.Tensor, model: Any, output: torch.Tensor) -> tuple:
    from megatron.core.utils import get_model_config

    total, tokens = (output.float() * mask).sum(), mask.sum().to(torch.int)
    losses.append((float(total.detach()), int(tokens)))
    if get_model_config(model).calculate_per_token_loss:
        return total, tokens, {}
    return total / tokens, {}
