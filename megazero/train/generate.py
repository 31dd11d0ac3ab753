"""Continues a text with a checkpoint's model, in one process, whatever layout wrote the checkpoint.

There is no cache of keys and values: a token costs a forward of its whole context. That is cheap for models that fit
one process, and there is no second forward to keep equal to the one of training.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megazero.checkpoint import store
from megazero.config.model.attention import PLAIN, wants_of
from megazero.config.model.published import held_tokenizer
from megazero.config.model.section import ModelConfig
from megazero.config.options.fields import section_of
from megazero.config.run import stored_values
from megazero.data.chat_template import ChatTemplate
from megazero.data.tokenizer import Tokenizer
from megazero.data.tokenizer_files import load_run_tokenizer
from megazero.models import Decoder
from megazero.models.dtypes import DTYPES
from megazero.models.hf_weights import load_stored

FilePath = str | Path


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    temperature: logits are divided by it; 0 takes the likeliest token. top_k: only this many of the likeliest tokens
    may be drawn; 0 allows all. seed: the same seed, weights and prompt give the same text.
    """

    temperature: float = 0.8
    top_k: int = 50
    seed: int = 1234

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"--temperature {self.temperature} must be at least 0 (0: the likeliest token)")
        if self.top_k < 0:
            raise ValueError(f"--top-k {self.top_k} must be at least 0 (0: all tokens)")


@dataclass(frozen=True)
class TextModel:
    """A decoder in evaluation mode with the tokenizer of its training data."""

    decoder: Decoder
    tokenizer: Tokenizer


def load_text_model(
    folder: str | os.PathLike[str],
    step: int | None = None,
    *,
    device: torch.device | str = "cpu",
    tokenizer_model: FilePath | None = None,
    vocab_file: FilePath | None = None,
    merge_file: FilePath | None = None,
) -> TextModel:
    """Load a checkpoint's model and its tokenizer, and check them against each other.

    folder: that of the checkpoint, or one whose newest is taken, or that of iteration ``step``.
    tokenizer_model, vocab_file, merge_file: a tokenizer to use instead of the checkpoint's own (checkpoints of before
    they held one need it where it is not where it was in training). On CUDA the parameters have the trained dtype; on
    a CPU bf16 and fp16 become fp32, which every CPU is good at. Raises CheckpointError or ValueError for a checkpoint
    or tokenizer that is absent, is damaged or belongs to another.
    """
    path = store.find_checkpoint(folder, step)
    manifest = store.read_manifest(path)
    values = stored_values(manifest.configuration)
    held = held_tokenizer(values["tokenizer_type"], path, manifest.files)
    given = {"tokenizer_model": tokenizer_model, "vocab_file": vocab_file, "merge_file": merge_file}
    tokenizer = load_run_tokenizer(values, held, given)
    trained_with = store.read_state(path)["tokenizer"]
    if tokenizer.info.fingerprint != trained_with:
        raise store.CheckpointError(
            f"'{path}' was trained with another tokenizer (sha256 {trained_with[:12]}, this one's is "
            f"{tokenizer.info.fingerprint[:12]}); name that one with --tokenizer-model (or --vocab-file and "
            "--merge-file)"
        )
    dtype = DTYPES[values["params_dtype"]]
    if torch.device(device).type == "cpu" and dtype.itemsize < 4:
        dtype = torch.float32
    config = section_of(ModelConfig, values)
    # Samples grow by a token at a time, and flex attention would be compiled for each length.
    backend = "auto" if wants_of(config, documents=False) <= PLAIN else "math"
    decoder = Decoder(config, attention_backend=backend, device=device, dtype=dtype)
    load_stored(decoder, store.load_full(path))
    return TextModel(decoder.eval(), tokenizer)


def next_token(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw a token from softmax(logits / temperature) over the top_k likeliest tokens.

    logits: a floating-point tensor [vocabulary] on the CPU. Raises ValueError if one is not finite.
    """
    if not logits.isfinite().all():
        what = "NaN" if logits.isnan().any() else "infinite"
        raise ValueError(
            f"the model's logits are {what}: its weights are, or its products overflow; take an earlier checkpoint"
        )
    if sampling.temperature == 0:
        return int(logits.argmax())
    count = min(sampling.top_k or logits.numel(), logits.numel())
    values, indices = logits.double().topk(count)
    weights = torch.softmax(values / sampling.temperature, dim=-1)
    return int(indices[torch.multinomial(weights, 1, generator=generator)])


def sample_tokens(
    model: TextModel, prompt: Sequence[int], count: int, sampling: Sampling, stops: Collection[int] = ()
) -> Iterator[int]:
    """Yield up to ``count`` tokens of the tokenizer after ``prompt``. It ends before one of ``stops`` (default: the
    end-of-document token).

    An empty prompt begins a document. If the text is longer than the model's context, only its end counts.
    """
    if count < 0:
        raise ValueError(f"--tokens {count} must be at least 0")
    decoder, eod = model.decoder, model.tokenizer.info.eod
    device = next(decoder.parameters()).device
    generator = torch.Generator().manual_seed(sampling.seed)
    context = list(prompt) or [eod]
    for _ in range(count):
        window = context[-decoder.config.max_position_embeddings :]
        logits = decoder.full_logits(torch.tensor([window], device=device))[0, -1]
        token = next_token(logits[: model.tokenizer.info.vocab_size].cpu(), sampling, generator)
        if token in (stops or (eod,)):
            return
        context.append(token)
        yield token


def generate(model: TextModel, prompt: str, count: int, sampling: Sampling | None = None) -> str:
    """Return ``prompt`` and up to ``count`` more tokens as text."""
    ids = model.tokenizer.encode(prompt)
    return model.tokenizer.decode([*ids, *sample_tokens(model, ids, count, sampling or Sampling())])


def answer(model: TextModel, question: str, count: int, sampling: Sampling | None = None) -> str:
    """Return the answer, of up to ``count`` tokens, to a user's message, by the tokenizer's chat template."""
    chat = ChatTemplate(model.tokenizer)
    asked, stops = chat.question(question), chat.stops()
    return model.tokenizer.decode([*sample_tokens(model, asked, count, sampling or Sampling(), stops)])
