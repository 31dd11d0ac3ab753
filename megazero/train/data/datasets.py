"""The run's data: tokenizer and vocabulary, sources of samples, their number, and their order after a resume."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pkgutil import resolve_name

from megazero.config import RunConfig
from megazero.config.options.data_sources import data_kind
from megazero.config.options.data_stages import DataStage
from megazero.config.options.sections import DataConfig
from megazero.data.blend import BlendedDataset
from megazero.data.chats import ChatDataset
from megazero.data.fim import FillInTheMiddle
from megazero.data.gpt import SampleSpec
from megazero.data.shares import Dealt, Share
from megazero.data.source import DatasetSource, OpenPart, SampleSource, StagedSource
from megazero.data.tokenizer import NullTokenizer, Tokenizer, TokenizerInfo, load_tokenizer
from megazero.data.tokenizer_files import tokenizer_options
from megazero.train.schedule.run_length import RunLength
from megazero.train.state.progress import Progress


def tokenizer_info(config: RunConfig) -> TokenizerInfo:
    """Describe the run's tokenizer: without --tokenizer-type a null one of --vocab-size."""
    return run_tokenizer(config).info


def run_tokenizer(config: RunConfig) -> Tokenizer:
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
    stages = _stages(config)
    counts = {
        name: min(stage.end or length.samples, length.samples) - stage.begin for name, stage in stages.items()
    }
    counts |= {"valid": evaluated, "test": evaluated}
    made: dict[str, SampleSource] = {}
    for split, source in _opened(config, tokenizer, counts, begin.ordered_for):
        made[split] = source
        if source.samples < counts[split]:
            raise ValueError(
                f"the {split} data has {source.samples} samples and the run takes {counts[split]}: "
                f"lower {_most(split, int(source.samples), config, length, begin)}, add data, or give the blend "
                "weights (they repeat data)"
            )
    begin = _keep_order(begin, made, counts)
    if len(stages) > 1:
        made["train"] = StagedSource({stage.begin: made.pop(name) for name, stage in stages.items()})
    made["train"] = _at(made["train"], begin, shared=config.outer.outer_meet is not None)
    return made, begin


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
    """Open each part of the data, at its beginning, of which samples are wanted: ``counts`` of each.

    The parts are those of SPLITS, and "train 2", "train 3", ...: later stages of training. Each has its own seed, so
    what it repeats of the data before comes in another order. ordered_for: that of the run's progress, whose order is
    kept.
    """
    data = config.data
    masks = data.eod_mask_loss, data.reset_position_ids, data.reset_attention_mask, data.goldfish
    change = FillInTheMiddle.of(data, run_tokenizer(config)) if data.fim_data else None
    spec = SampleSpec(config.model.seq_length, config.training.seed, tokenizer, *masks, change, data.chats)
    of_run = _parts(data)
    parts = {split: (part, spec) for split, part in of_run.items()}
    for number, (name, stage) in enumerate(_stages(config).items()):
        of_stage = dataclasses.replace(data, mock_data=False, data_path=(), train_data_path=stage.data_path)
        found = _parts(of_stage) if stage.data_path else of_run
        own = dataclasses.replace(spec, seq_length=stage.seq_length, seed=spec.seed + number)
        parts[name] = found["train"], own
    for name, (open_part, own) in parts.items():
        if (count := counts.get(name, 0)) > 0:
            yield name, open_part(own, count, ordered_for.get(name, 0))


def _parts(data: DataConfig) -> Mapping[str, OpenPart]:
    found: Mapping[str, OpenPart] = resolve_name(data_kind(data).parts)(data)
    return found


def _stages(config: RunConfig) -> dict[str, DataStage]:
    """Return the stages of training by the names of their data, those in a row that have one source as one."""
    found = list[DataStage]()
    for stage in config.training_stages:
        if found and (found[-1].data_path, found[-1].seq_length) == (stage.data_path, stage.seq_length):
            found[-1] = dataclasses.replace(found[-1], end=stage.end)
        else:
            found.append(stage)
    return {"train" if i == 1 else f"train {i}": stage for i, stage in enumerate(found, 1)}


def cut_short(source: SampleSource) -> Iterator[str]:
    """Yield a note for each set of conversations of which some are longer than a sample."""
    source = source.source if isinstance(source, Share) else source
    for own in source.sources.values() if isinstance(source, StagedSource) else ():
        yield from cut_short(own)
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
    if not split.startswith("train"):
        batch = config.batch.evaluated_per_step(length.batch_sizes.data_parallel)
        return f"--eval-iters to at most {samples // batch}"
    samples += (stage := _stages(config)[split]).begin
    if stage.end is not None and stage.end <= length.samples:
        return f"until {stage.end} of --data-stages to at most {samples}"
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
    if not split.startswith("train"):
        return (
            "evaluations take other samples from here on, so their losses do not compare with earlier ones. "
            "Keep --eval-iters and --global-batch-size to keep them"
        )
    return (
        f"from sample {begin.consumed_samples} on samples come in another order, so some repeat and some are left "
        "out. Keep --train-iters (or --train-samples) and the batch size to keep the order"
    )
