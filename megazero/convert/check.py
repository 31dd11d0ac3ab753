"""Checks that a checkpoint and a Hugging Face folder are one model: every bit, the logits, token ids of texts."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint.reading import pieces
from megazero.checkpoint.records import SliceRecord
from megazero.config.model.published import find_tokenizer
from megazero.config.model.section import ModelConfig
from megazero.convert.importing import ImportedWeights, Published
from megazero.convert.source import Source
from megazero.convert.their_tokenizer import Theirs, their_tokenizer
from megazero.convert.tokenizer import (
    RunTokenizer,
    compare_encodings,
    of_checkpoint,
    sample_texts,
    unknown_id,
)
from megazero.data.tokenizer import Tokenizer, load_tokenizer
from megazero.families.layer_kinds import layer_kinds, some_layers
from megazero.models import Decoder

LIMIT = 1e-5  # relative difference of logits in fp32
WHOLE_NUMEL = 1 << 28  # 2 GiB of fp32 on both sides: of larger models the first layers' logits are compared
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_BATCH, _LENGTH = 2, 64


@dataclass(frozen=True)
class Line:
    """One line of the outcome. good: None if it was not judged; ``figure`` says why."""

    what: str
    figure: str
    good: bool | None = None


def compare(
    source: Source,
    published: Published,
    tokenizer: Path | None = None,
    say: Callable[[str], None] = lambda what: None,
) -> Iterator[Line]:
    """Yield the outcome of every check. tokenizer: the training's, where the checkpoint does not hold it.

    Raises ValueError if the folder or the checkpoint is damaged or not of that model.
    """
    folder = published.folder.path
    say("comparing tensors")
    yield from compare_tensors(source, published)
    say("comparing logits")
    yield from compare_logits(source, published)
    say("comparing tokens")
    yield from compare_tokens(source, folder, tokenizer)


def compare_tensors(source: Source, weights: ImportedWeights) -> Iterator[Line]:
    """Compare every tensor bit for bit, in pieces, after the conversion to the weights' dtype."""
    ours, theirs = {tensor.name: tensor.shape for tensor in source.tensors}, weights.shapes
    strange = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if strange:
        name = strange[0]
        found = (
            f"'{name}' is {theirs.get(name, 'absent')} there and {ours.get(name, 'absent')} in the checkpoint"
        )
        yield Line("tensors", f"{found} ({len(strange)} such tensors)", False)
        return
    wrong = {name: count for name in ours if (count := _different(source, weights, name))}
    for name, count in list(wrong.items())[:5]:
        yield Line(f"  {name}", f"{count} of {prod(ours[name])} elements differ", False)
    dtypes = sorted({str(weights.dtype_of(name)).removeprefix("torch.") for name in ours})
    same = f"{len(ours) - len(wrong)} of {len(ours)} the same bits, {', '.join(dtypes)}"
    yield Line("tensors", same, not wrong)


def _different(source: Source, weights: ImportedWeights, name: str) -> int:
    there, count = weights.tensor(name), 0
    for first, rows in pieces(there.shape):
        theirs = there[first : first + rows] if there.ndim else there
        ours, bits = source.stored.read(name, first, rows).to(there.dtype), _BITS[there.dtype.itemsize]
        if not torch.equal(ours.view(bits), theirs.view(bits)):
            count += int((ours.view(bits) != theirs.view(bits)).sum())
    return count


def compare_logits(source: Source, published: Published) -> Iterator[Line]:
    """Compare the logits of random tokens in fp32 with those of transformers' model of the folder."""
    if find_spec("transformers") is None:
        yield Line("logits", "not compared: transformers is not installed (pip install transformers)")
        return
    layers = _layers(source)
    model = _first(source.model, layers)
    length = min(_LENGTH, model.max_position_embeddings)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.vocabulary, (_BATCH, length), generator=draw)
    ours = _our_logits(source, published, layers, tokens)
    theirs, note = _their_logits(published.folder.path, layers, tokens)
    if note:
        yield Line("  transformers", note)
    whole = source.model.num_layers
    part = "" if layers == whole else f", of the first {layers} of {whole} layers: the model is too large"
    yield from _figures(ours.double(), theirs.double(), f"{_BATCH} x {length} random tokens in fp32{part}")


def _figures(ours: torch.Tensor, theirs: torch.Tensor, of: str) -> Iterator[Line]:
    difference = ours - theirs
    relative = float(difference.norm() / theirs.norm())
    kl = (theirs.softmax(-1) * (theirs.log_softmax(-1) - ours.log_softmax(-1))).sum(-1).mean()
    agree = (ours.argmax(-1) == theirs.argmax(-1)).double().mean()
    yield Line("logits, relative difference", f"{relative:.2e} (limit {LIMIT:.0e}; {of})", relative <= LIMIT)
    yield Line("logits, largest difference", f"{float(difference.abs().max()):.2e}")
    yield Line("logits, KL divergence", f"{float(kl):.2e} nats per token")
    yield Line("logits, likeliest token", f"the same at {float(agree):.2%} of positions")


def _layers(source: Source) -> int:
    """Return how many layers are compared: all, or the first ones that include every kind of layer."""
    count = source.model.num_layers
    if sum(prod(tensor.shape) for tensor in source.tensors) <= WHOLE_NUMEL:
        return count
    kinds = layer_kinds(source.model)
    return min(count, max([2, *(kinds.index(kind) + 1 for kind in set(kinds))]))


def _first(model: ModelConfig, layers: int) -> ModelConfig:
    return dataclasses.replace(model, **some_layers(model, range(layers)), mtp_num_layers=0)


@torch.no_grad()
def _our_logits(source: Source, published: Published, layers: int, tokens: torch.Tensor) -> torch.Tensor:
    """The decoder's logits, from the checkpoint's weights as the folder's dtype holds them."""
    decoder = Decoder(_first(source.model, layers), dtype=torch.float32)
    placements = decoder.placements()
    for name, tensor in decoder.stored():
        for placement, local in placements[name].held(tensor):
            flat = local.view(-1)
            source.stored.fill([SliceRecord(placement, 0, flat.numel(), {source.stored.kind: flat})])
            local.copy_(local.to(published.tensor(placement.name).dtype))
    return decoder.eval().full_logits(tokens)


@torch.no_grad()
def _their_logits(folder: Path, layers: int, tokens: torch.Tensor) -> tuple[torch.Tensor, str]:
    """The logits of transformers' own class, which reads the folder as any user of it does.

    Also a note if that class refuses by its default what it computes expert by expert: its grouped products do so
    where a width is no multiple of 16 bytes (5.24, torch 2.13).
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config.num_hidden_layers = layers
    for name in ("layer_types", "no_rope_layers"):
        if getattr(config, name, None):
            setattr(config, name, getattr(config, name)[:layers])
    options: dict[str, Any] = {_dtype_key(transformers.__version__): torch.float32}
    if getattr(config, "attn_logit_softcapping", None):
        options["attn_implementation"] = "eager"  # the default of transformers 4.57 leaves the cap out
    with _quiet(transformers):
        read: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, output_loading_info=True, trust_remote_code=False, **options
        )
    model, told = read
    absent = [*told["missing_keys"], *told["mismatched_keys"]]
    if absent:
        raise ValueError(
            f"transformers does not find {absent[0]!r} in '{folder}' ({len(absent)} such tensors)"
        )
    model, note = model.eval(), ""
    try:
        made = model(input_ids=tokens, use_cache=False)
    except RuntimeError as error:
        if not hasattr(model, "set_experts_implementation"):
            raise
        model.set_experts_implementation("eager")
        made = model(input_ids=tokens, use_cache=False)
        note = f'{transformers.__version__} needs experts_implementation="eager" for this model: {error}'
    return made.logits.float(), note


def _dtype_key(version: str) -> str:
    """Return the name of from_pretrained's argument, which changed in transformers 4.56."""
    major, minor = (int(word) for word in version.split(".")[:2])
    return "dtype" if (major, minor) >= (4, 56) else "torch_dtype"


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keep transformers from writing of layers that are left out, and of its progress."""
    log = transformers.utils.logging
    level = log.get_verbosity()
    log.set_verbosity(logging.ERROR)
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        log.enable_progress_bar()


def compare_tokens(source: Source, folder: Path, named: Path | None = None) -> Iterator[Line]:
    """Compare what transformers makes of sample texts, and of their ids, with the training's tokenizer."""
    run = of_checkpoint(source.path, source.values, named)
    if run.kind == "NullTokenizer":
        yield Line("tokenizer", "not compared: the checkpoint was trained on token ids, without a tokenizer")
        return
    yield from compare_ids(run, folder, sample_texts(run.tokenizer))


def compare_ids(run: RunTokenizer, folder: Path, texts: Sequence[str]) -> Iterator[Line]:
    """Compare the ids of ``texts``.

    transformers' classes may build another tokenizer than the folder's file says. Then the file is followed, as in
    training, and a line names the class and what it changes.
    """
    found: dict[str, Any] = find_tokenizer(folder)
    if not found:
        raise ValueError(f"'{folder}' has no tokenizer, and the checkpoint has a {run.kind}")
    kind = found.pop("tokenizer_type")
    ours, theirs = load_tokenizer(kind, **found), their_tokenizer(folder)
    outcome = compare_encodings(run, theirs or ours.encode, texts)
    files = "the folder's files"
    by = f"transformers {theirs.version}" if theirs else files
    if theirs and outcome.wrong and (rebuilt := theirs.rebuilt(ours)):
        what, encode = rebuilt
        others, outcome, by = outcome, compare_encodings(run, encode, texts), files
        told = f"gives others to {len(others.wrong)} of {others.count}: {what}. Training follows the files"
        yield Line(f"  {theirs.name}", f"of transformers {theirs.version} {told}")
    for text in outcome.wrong[:3]:
        yield Line(f"  {text[:40]!r}", "has other ids", False)
    out = len(outcome.left_out)
    rest = f"; {out} that spell special tokens left out, which are tokens there" if out else ""
    same = f"{outcome.count - len(outcome.wrong)} of {outcome.count} texts the same ids, by {by}{rest}"
    yield Line("tokenizer", same, not outcome.wrong)
    if not outcome.wrong:
        yield from _compare_decoded(run, ours, theirs, texts)


def _compare_decoded(
    run: RunTokenizer, ours: Tokenizer, theirs: Theirs | None, texts: Sequence[str]
) -> Iterator[Line]:
    """Compare the texts that ids become. Those with the id of what is unknown are left out: each has its mark.

    Where transformers' class decodes otherwise than the folder's files, which ``ours`` reads, a line names it.
    """
    unknown = unknown_id(run)
    every = [ids for ids in map(run.tokenizer.encode, texts) if unknown not in ids]
    meant = [run.tokenizer.decode(ids) for ids in every]
    if theirs:
        pairs = zip(meant, map(theirs.decode, every), strict=True)
        if others := [(text, made) for text, made in pairs if text != made]:
            text, made = max(others, key=lambda pair: pair[0].strip() != pair[1])  # by more than spaces
            told = f"decodes the ids of {len(others)} of {len(meant)} texts otherwise: {text[:40]!r} as {made[:40]!r}"
            yield Line(f"  {theirs.name}", f"of transformers {theirs.version} {told}")
    good = sum(ours.decode(ids) == text for ids, text in zip(every, meant, strict=True))
    yield Line("decoded", f"{good} of {len(meant)} texts the same, by the folder's files", good == len(meant))
