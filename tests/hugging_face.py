"""Small folders as Hugging Face publishes models, made by transformers, and what is compared of them."""

from __future__ import annotations

import hashlib
import io
import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.models import Decoder

SIZES = {
    "vocab_size": 51,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
}


def save_model(folder: Path, kind: str = "llama", dtype: torch.dtype = torch.float32, **options) -> Path:
    """A random model of transformers in ``folder``. Every weight is perturbed, norms and biases too."""
    import transformers

    more = {"intermediate_size": 48, "num_key_value_heads": 4, "max_position_embeddings": 64}
    made = {
        "llama": lambda: transformers.LlamaConfig(**{**SIZES, **more, **options}),
        "gpt2": lambda: transformers.GPT2Config(
            **{"vocab_size": 51, "n_embd": 32, "n_head": 8, "n_layer": 2, "n_positions": 64, **options}
        ),
    }
    torch.manual_seed(zlib.crc32(kind.encode()))
    model = transformers.AutoModelForCausalLM.from_config(made[kind]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    transformers.utils.logging.disable_progress_bar()
    model.to(dtype).save_pretrained(folder, max_shard_size="30KB")
    return folder


def train_sentencepiece(
    path: Path, model_type: str = "bpe", vocab_size: int = 300, sentences: Iterable[str] = (), **options
) -> Path:
    """A SentencePiece model of a little text, or of ``sentences``. options: of its trainer, over the project's."""
    import sentencepiece

    from megazero.data.tokenizer_training import LOSSLESS

    words = [
        f"{a}{b} {b}{a}s  {a}" for a in ("low", "new", "wide", "fast", "naïve") for b in ("er", "est", "ly")
    ]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*sentences] or words * 20),
        model_writer=model,
        vocab_size=vocab_size,
        model_type=model_type,
        num_threads=1,
        minloglevel=2,
        **{**LOSSLESS, "hard_vocab_limit": False, **options},
    )
    path.write_bytes(model.getvalue())
    return path


def train_byte_level(sentences: Iterable[str] = ("low lower lowest",), vocab_size: int = 280) -> Any:
    """A byte-level BPE of the tokenizers library, which has every byte and <|endoftext|>, token 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": vocab_size, "initial_alphabet": alphabet, "show_progress": False}
    made.train_from_iterator(sentences, trainers.BpeTrainer(special_tokens=["<|endoftext|>"], **options))
    return made


def publish_tokenizer(folder: Path, made: Any, **beside: object) -> Path:
    """``made`` as tokenizer.json in ``folder``. beside: the data of other files, by name."""
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    for name, data in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(data))
    return folder


def weights_digest(folder: Path) -> dict[str, str]:
    """sha256 of what says the model: config.json, the index and the files of weights."""
    files = [*folder.glob("*.safetensors"), *folder.glob("*.index.json"), folder / "config.json"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files)}


@torch.no_grad()
def to_hf_state_dict(decoder: Decoder, into: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint of the family, in the dtypes of the decoder's, on the CPU.

    This rank's slices are written over ``into`` (missing tensors start as zeros). So it is filled by passing the same
    dict with the decoder of each tp rank in turn. On one rank the result is complete. Tied weights appear once, under
    the embedding's name.
    """
    tensors = {} if into is None else into
    placements = decoder.placements()
    for name, tensor in decoder.stored():
        for placement, local in placements[name].held(tensor.detach()):
            if placement.name not in tensors:
                tensors[placement.name] = torch.zeros(placement.shape, dtype=tensor.dtype, device="cpu")
            for ours, theirs in placement.boxes(local, tensors[placement.name]):
                theirs.copy_(ours)
    return tensors
