"""Rules between the options of pipelines. They hold whatever the size of the world."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megazero.config.layout.pipeline import (
    layout_letters,
    partition_method,
    schedule_name,
    virtual_stages,
)
from megazero.config.nearest import around, common_divisors, did_you_mean
from megazero.config.options.sections import ParallelConfig
from megazero.config.run import RunConfig
from megazero.pp.partition import METHODS, partition_problems
from megazero.pp.schedules import SCHEDULES, schedule_problem


def virtual(config: RunConfig) -> Iterator[str]:
    """Report virtual stages that are given in two ways, and layers per virtual stage that do not divide."""
    parallel, num_layers = config.parallel, config.model.num_layers
    pp, layers = parallel.pipeline_model_parallel_size, parallel.num_layers_per_virtual_pipeline_stage
    if pp == 1 or not layers or layers < 1:
        return
    if parallel.num_virtual_stages_per_pipeline_rank:
        yield (
            f"--num-layers-per-virtual-pipeline-stage {layers} and --num-virtual-stages-per-pipeline-rank "
            f"{parallel.num_virtual_stages_per_pipeline_rank} exclude each other; leave one out"
        )
    if num_layers % (pp * layers):
        nearest = f"{around(common_divisors(num_layers // pp), layers)}"
        if num_layers % pp:
            nearest = "--num-virtual-stages-per-pipeline-rank, which takes uneven stages"
        yield (
            f"--num-layers {num_layers} do not divide by --pipeline-model-parallel-size {pp} x "
            f"--num-layers-per-virtual-pipeline-stage {layers} = {pp * layers}; nearest: {nearest}"
        )


def schedule(config: RunConfig) -> Iterator[str]:
    """Report a schedule that does not take this many stages per rank."""
    parallel, num_layers = config.parallel, config.model.num_layers
    pp, stages = parallel.pipeline_model_parallel_size, virtual_stages(parallel, num_layers)
    name = schedule_name(parallel, stages)
    if pp == 1 or name not in SCHEDULES:
        return
    if problem := schedule_problem(name, pp, stages, micro_batches=pp):
        yield f"--pipeline-schedule {name}: {problem}"


def layers_per_stage(config: RunConfig) -> Iterator[str]:
    """Report a partition that does not fit the layers and stages."""
    parallel, num_layers = config.parallel, config.model.num_layers
    pp, layers = parallel.pipeline_model_parallel_size, parallel.num_layers_per_virtual_pipeline_stage
    if pp == 1 or (layers is not None and (layers < 1 or num_layers % (pp * layers))):  # reported elsewhere
        return
    stages = virtual_stages(parallel, num_layers)
    if clash := _clash(parallel, stages):
        yield clash
        return
    method = partition_method(parallel, pp * stages)
    if isinstance(method, str) and method not in METHODS:
        yield (
            f"--pipeline-partition {method} is not one of {', '.join(METHODS)} or layers per stage such as 5,6,6,5 "
            "or Et*5|(t*6|)*2t*5L, in which m stands before L alone"
            f"{did_you_mean(method, METHODS) or '; nearest: balanced'}"
        )
        return
    said, further = parallel.pipeline_partition or "", config.model.mtp_num_layers
    letters = layout_letters(said)
    if letters is not None and letters.count("m") != further:
        nearest = f"{re.sub(r'(m[m*0-9,]*)?L$', '', said)}{'m' * further}L"
        yield (
            f"--pipeline-partition {said} has {letters.count('m')} m, which stand for --mtp-num-layers {further}; "
            f"nearest: {nearest}"
        )
    outer = (parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers)
    first, last = (count if count and count > 0 else None for count in outer)  # others are reported
    yield from (
        f"--pipeline-model-parallel-size {pp}: {problem}"
        for problem in partition_problems(num_layers, pp, stages, method, first, last)
    )


def _clash(parallel: ParallelConfig, stages: int) -> str:
    """Return an error line for options that both set a stage's layers, or ''. ``stages`` counts those of a rank."""
    layers = parallel.num_layers_per_virtual_pipeline_stage
    outer = {
        "--decoder-first-pipeline-num-layers": parallel.decoder_first_pipeline_num_layers,
        "--decoder-last-pipeline-num-layers": parallel.decoder_last_pipeline_num_layers,
    }
    said = {flag: value for flag, value in outer.items() if value is not None}
    if layers and (said or parallel.pipeline_partition is not None):
        flags = " and ".join([*["--pipeline-partition"] * (parallel.pipeline_partition is not None), *said])
        return (
            f"--num-layers-per-virtual-pipeline-stage {layers} gives every stage {layers} layers, which excludes "
            f"{flags}; nearest: --num-virtual-stages-per-pipeline-rank {stages} instead"
        )
    if stages > 1 and said:
        flags = " and ".join(f"{flag} {value}" for flag, value in said.items())
        every = parallel.pipeline_model_parallel_size * stages
        return (
            f"{flags}: not with {stages} stages per rank; nearest: --pipeline-partition with the layers of all "
            f"{every} stages"
        )
    return ""
