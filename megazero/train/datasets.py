"""The run's data: its tokenizer and vocabulary, how many samples the run takes, and their order after a resume."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from megazero.config import RunConfig
from megazero.data import build_datasets, load_tokenizer
from megazero.data.build import Dataset
from megazero.data.tokenizer import NullTokenizer, Tokenizer, TokenizerInfo
from megazero.train.batch_size import RunLength
from megazero.train.origin import Progress

Datasets = tuple[Dataset | None, Dataset | None]


def tokenizer_info(config: RunConfig) -> TokenizerInfo:
    """Describe the run's tokenizer. Where none is named, it is a null one of --vocab-size."""
    data = config.data
    if data.tokenizer_type is None:
        assert config.model.vocab_size, "the configuration refuses an unknown vocabulary"
        return NullTokenizer(config.model.vocab_size - 1).info
    return load_tokenizer(data.tokenizer_type, data.tokenizer_model, config.model.vocab_size).info


def load_run_tokenizer(config: RunConfig, model: str | os.PathLike[str] | None = None) -> Tokenizer:
    """Load the tokenizer of a saved configuration, whose vocabulary is known. model: read it there instead."""
    data, size = config.data, config.model.vocab_size
    if data.tokenizer_type in (None, "NullTokenizer"):
        assert size, "a saved configuration has its vocabulary"
        return load_tokenizer("NullTokenizer", vocab_size=size - 1)
    assert data.tokenizer_type
    return load_tokenizer(data.tokenizer_type, Path(model or data.tokenizer_model or ""))


def with_vocabulary(config: RunConfig, tokenizer: TokenizerInfo) -> RunConfig:
    """The configuration with the tokenizer's vocabulary. A larger --vocab-size stays; a smaller is a ValueError."""
    wanted = config.model.vocab_size
    if wanted is not None and wanted < tokenizer.vocab_size and config.data.tokenizer_type != "NullTokenizer":
        raise ValueError(
            f"--vocab-size {wanted} is below the tokenizer's {tokenizer.vocab_size}; leave it out, or give at "
            f"least {tokenizer.vocab_size}"
        )
    size = max(wanted or 0, tokenizer.vocab_size)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=size))


def make_datasets(
    config: RunConfig, tokenizer: TokenizerInfo, length: RunLength, begin: Progress
) -> tuple[Datasets, Progress]:
    """Open the training and the validation data; None stands for data that is not used.

    Also returns ``begin`` with the numbers that fix the order of samples, and with notes where the order has changed.
    Raises ValueError if the data is too short for the run.
    """
    data, seq_length = config.data, config.model.seq_length
    assert seq_length
    assert config.batch.global_batch_size
    evaluated = config.training.eval_iters * config.batch.global_batch_size
    wanted = {"train": length.samples, "valid": evaluated}  # samples from the first one on
    train, valid, _ = build_datasets(
        data_path=None if data.mock_data else data.data_path,
        split=data.split,
        seq_length=seq_length,
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
                f"{_most(name, len(data_set), config, length, begin)}, add data, or give the blend weights "
                "(they repeat data)"
            )
    return (train, valid), _keep_order(begin, made, wanted)


def _most(name: str, samples: int, config: RunConfig, length: RunLength, begin: Progress) -> str:
    """The flag that decides how many samples are taken, and its largest value that ``samples`` suffice for."""
    if name == "valid":
        return f"--eval-iters to at most {samples // (config.batch.global_batch_size or 1)}"
    if config.training.train_samples is not None:
        return f"--train-samples to at most {samples}"
    more = length.batch_sizes.iterations_within(samples, begin.consumed_samples)
    return f"--train-iters to at most {begin.iteration + more}"


def _keep_order(begin: Progress, made: Mapping[str, Dataset | None], wanted: Mapping[str, int]) -> Progress:
    """``begin`` with the numbers to save, and a note for each data set whose order could not be kept."""
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
