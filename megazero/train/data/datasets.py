"""The run's data: tokenizer and vocabulary, sources of samples, their number, and their order after a resume."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pkgutil import resolve_name

from megazero.config import RunConfig
from megazero.config.options.data_sources import data_kind
from megazero.data.blend import BlendedDataset
from megazero.data.chats import ChatDataset
from megazero.data.fim import FillInTheMiddle
from megazero.data.gpt import SampleSpec
from megazero.data.shares import Dealt, Share
from megazero.data.source import DatasetSource, OpenPart, SampleSource
from megazero.data.tokenizer import NullTokenizer, Tokenizer, TokenizerInfo, load_tokenizer
from megazero.data.tokenizer_files import tokenizer_options
from megazero.train.schedule.run_length import RunLength
from megazero.train.state.progress import Progress


def tokenizer_info(config: RunConfig) -> TokenizerInfo:
    """Describe the run's tokenizer: without --tokenizer-type a null one of --vocab-size."""
    return _tokenizer(config).info


def _tokenizer(config: RunConfig) -> Tokenizer:
    data = config.data
    if data.tokenizer_type is None:
        return NullTokenizer(config.model.vocabulary - 1)
    size = config.model.vocab_size
    return load_tokenizer(data.tokenizer_type, vocab_size=size, **tokenizer_options(vars(data)))


def with_vocabulary(config: RunConfig, tokenizer: TokenizerInfo) -> RunConfig:
    """The configuration with the tokenizer's vocabulary. A larger --vocab-size stays; a smaller is a ValueError."""
    wanted = config.model.vocab_size
    if wanted is not None and wanted < tokenizer.vocab_size and config.data.tokenizer_type != "NullTokenizer":
        raise ValueError(
            f"--vocab-size {wanted} is below the tokenizer's {tokenizer.vocab_size}; leave it out, or give at "
            f"least {tokenizer.vocab_size}. A model that is loaded needs its own: leave --tokenizer-type out"
        )
    size = max(wanted or 0, tokenizer.vocab_size)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=size))


def make_datasets(
    config: RunConfig, tokenizer: TokenizerInfo, length: RunLength, begin: Progress
) -> tuple[dict[str, SampleSource], Progress]:
    """Open each part of the data: train, where the run begins, and valid and test, as far as they are evaluated.

    Also returns ``begin`` with the numbers that fix the order of samples, and with notes where the order has changed.
    Raises ValueError if the data is too short for the run, or of another kind than what was consumed.
    """
    evaluated = config.training.eval_iters * config.batch.evaluated_per_step(length.batch_sizes.data_parallel)
    counts = {"train": length.samples, "valid": evaluated, "test": evaluated}
    made: dict[str, SampleSource] = {}
    for split, source in _opened(config, tokenizer, counts, begin.ordered_for):
        made[split] = source
        if source.samples < counts[split]:
            raise ValueError(
                f"the {split} data has {source.samples} samples and the run takes {counts[split]}: "
                f"lower {_most(split, int(source.samples), config, length, begin)}, add data, or give the blend "
                "weights (they repeat data)"
            )
    made["train"] = _at(made["train"], begin, shared=config.outer.outer_meet is not None)
    return made, _keep_order(begin, made, counts)


def _at(source: SampleSource, begin: Progress, shared: bool) -> SampleSource:
    """Return the source where a run stands. shared: replicas have shares of it.

    A run without others goes on behind all that they have shared.
    """
    share = Share(source, begin.consumed_samples)
    if begin.meeting is None:
        source.load_state(begin.consumed_samples if begin.source is None else begin.source)
    else:
        share.load_state(begin.source)
        if not shared:
            share.go_to(Dealt.of_state(begin.meeting["dealt"]).top)
    return share if shared else source


def _opened(
    config: RunConfig, tokenizer: TokenizerInfo, counts: Mapping[str, int], ordered_for: Mapping[str, int]
) -> Iterator[tuple[str, SampleSource]]:
    """Open each part of the data, at its beginning, of which samples are wanted: ``counts`` of each of SPLITS.

    ordered_for: that of the run's progress, whose order is kept.
    """
    data = config.data
    masks = data.eod_mask_loss, data.reset_position_ids, data.reset_attention_mask, data.goldfish
    change = FillInTheMiddle.of(data, _tokenizer(config)) if data.fim_data else None
    spec = SampleSpec(config.model.seq_length, config.training.seed, tokenizer, *masks, change, data.chats)
    parts: Mapping[str, OpenPart] = resolve_name(data_kind(data).parts)(data)
    for split, open_part in parts.items():
        if count := counts[split]:
            yield split, open_part(spec, count, ordered_for.get(split, 0))


def cut_short(source: SampleSource) -> Iterator[str]:
    """Yield a note for each set of conversations of which some are longer than a sample."""
    data = source.data_set if isinstance(source, DatasetSource) else None
    for part in data.members if isinstance(data, BlendedDataset) else [data]:
        if isinstance(part, ChatDataset) and part.truncated:
            yield (
                f"{part.truncated} of {len(part.documents)} conversations of {part.source.prefix} are longer than "
                f"--seq-length {part.spec.seq_length} and lose their ends"
            )


def evaluation_sets(
    config: RunConfig, tokenizer: TokenizerInfo, batch: int, ordered_for: Mapping[str, int]
) -> dict[str, SampleSource]:
    """Open the data that a run evaluates on, by part: whole global batches of ``batch`` samples, up to --eval-iters.

    ordered_for: that of the run's progress, whose order is kept. Raises ValueError for data of less than a batch.
    """
    count = config.training.eval_iters * batch
    made = dict(_opened(config, tokenizer, {"train": 0, "valid": count, "test": count}, ordered_for))
    for split, source in made.items():
        if source.samples < batch:
            raise ValueError(
                f"the {split} data has {source.samples} samples of {config.model.seq_length} tokens, and a global "
                f"batch {batch}: lower --eval-global-batch-size, or add data"
            )
    return made


def _most(split: str, samples: int, config: RunConfig, length: RunLength, begin: Progress) -> str:
    """The flag that decides how many samples are taken, and its largest value that ``samples`` suffice for."""
    if split != "train":
        batch = config.batch.evaluated_per_step(length.batch_sizes.data_parallel)
        return f"--eval-iters to at most {samples // batch}"
    if config.training.train_samples is not None:
        return f"--train-samples to at most {samples}"
    more = length.batch_sizes.iterations_within(samples, begin.consumed_samples)
    return f"--train-iters to at most {begin.iteration + more}"


def _keep_order(begin: Progress, made: Mapping[str, SampleSource], wanted: Mapping[str, int]) -> Progress:
    """``begin`` with the numbers to save, and a note for each part of the data whose order could not be kept."""
    numbers, notes = dict(begin.ordered_for), list(begin.notes)  # data that is not used now keeps its number
    for split, source in made.items():
        before, numbers[split] = numbers.get(split, 0), source.ordered_for
        if before and source.ordered_for != before:
            notes.append(
                f"the order of the {split} data was made for {before} samples, which take fewer passes over the data "
                f"than the {wanted[split]} that are wanted now: {_consequence(split, begin)}"
            )
    return dataclasses.replace(begin, notes=tuple(notes), ordered_for=numbers)


def _consequence(split: str, begin: Progress) -> str:
    if split != "train":
        return (
            "evaluations take other samples from here on, so their losses do not compare with earlier ones. "
            "Keep --eval-iters and --global-batch-size to keep them"
        )
    return (
        f"from sample {begin.consumed_samples} on samples come in another order, so some repeat and some are left "
        "out. Keep --train-iters (or --train-samples) and the batch size to keep the order"
    )
