"""The run's data: how much of it the schedules take, and in which order after a resume."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from megazero.config import RunConfig
from megazero.data import build_datasets
from megazero.data.build import Dataset
from megazero.data.tokenizer import TokenizerInfo
from megazero.train.origin import Progress
from megazero.train.trainer import Schedules

Datasets = tuple[Dataset | None, Dataset | None]


def wanted_samples(config: RunConfig, schedules: Schedules, begin: Progress) -> dict[str, int]:
    """Samples that training (from its first on) and one evaluation take, counted from where the run begins."""
    assert config.batch.global_batch_size
    left = max(0, schedules.last_iteration - begin.iteration)
    return {
        "train": schedules.batch.consumed_after(left, begin.consumed_samples),
        "valid": config.training.eval_iters * config.batch.global_batch_size,
    }


def make_datasets(
    config: RunConfig, tokenizer: TokenizerInfo, schedules: Schedules, begin: Progress
) -> tuple[Datasets, Progress]:
    """Train and validation data, None where not used, and ``begin`` with what it has to tell of their order.

    Raises ValueError for data too short for the run.
    """
    data, length = config.data, config.model.seq_length
    assert length
    wanted = wanted_samples(config, schedules, begin)
    train, valid, _ = build_datasets(
        data_path=None if data.mock_data else data.data_path,
        split=data.split,
        seq_length=length,
        seed=config.training.seed,
        samples=(wanted["train"], wanted["valid"], 0),
        ordered_for=(begin.ordered_for.get("train", 0), begin.ordered_for.get("valid", 0), 0),
        tokenizer=tokenizer,
        cache_dir=data.data_cache_path,
        eod_mask_loss=data.eod_mask_loss,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
    )
    made = {"train": train, "valid": valid}
    for name, data_set in made.items():
        if data_set is not None and len(data_set) < wanted[name]:
            raise ValueError(
                f"the {name} data has {len(data_set)} samples and the run takes {wanted[name]}: lower "
                f"{_most(name, len(data_set), config, schedules, begin)}, add data, or give the blend weights "
                "(they repeat data)"
            )
    return (train, valid), _keep_order(begin, made, wanted)


def _most(name: str, samples: int, config: RunConfig, schedules: Schedules, begin: Progress) -> str:
    """The flag that decides how many samples are taken, and the most that it may be with so many."""
    if name == "valid":
        return f"--eval-iters to at most {samples // (config.batch.global_batch_size or 1)}"
    if config.training.train_samples is not None:
        return f"--train-samples to at most {samples}"
    more = schedules.batch.iterations_within(samples, begin.consumed_samples)
    return f"--train-iters to at most {begin.iteration + more}"


def _keep_order(begin: Progress, made: Mapping[str, Dataset | None], wanted: Mapping[str, int]) -> Progress:
    """``begin`` with the numbers to save, and a note for each that was not enough to keep the order."""
    numbers, notes = dict(begin.ordered_for), list(begin.notes)
    for name, data_set in made.items():
        if data_set is None:  # not used now: it stays as it was
            continue
        before, numbers[name] = numbers.get(name, 0), data_set.ordered_for
        if before and data_set.ordered_for != before:
            notes.append(
                f"the order of the {name} data was made for {before} samples, which take fewer passes over the data "
                f"than the {wanted[name]} that are wanted now: {_consequence(name, begin)}"
            )
    return dataclasses.replace(begin, notes=tuple(notes), ordered_for=numbers)


def _consequence(name: str, begin: Progress) -> str:
    if name == "valid":
        return (
            "evaluations take other samples from here on, so their losses do not compare with earlier ones. "
            "Keep --eval-iters and --global-batch-size to keep them"
        )
    return (
        f"from sample {begin.consumed_samples} on samples come in another order, so some repeat and some are left "
        "out. Keep --train-iters (or --train-samples) and the batch size to keep the order"
    )
