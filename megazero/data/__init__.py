"""Data: Megatron-compatible files, sample order, blends and tokenizers. Only ``sampler`` imports torch."""

from megazero.data.build import build_dataset
from megazero.data.indexed import IndexedDataset, IndexedWriter, token_dtype
from megazero.data.source import Dataset
from megazero.data.tokenizer import Tokenizer, TokenizerInfo, load_tokenizer

__all__ = [
    "Dataset",
    "IndexedDataset",
    "IndexedWriter",
    "Tokenizer",
    "TokenizerInfo",
    "build_dataset",
    "load_tokenizer",
    "token_dtype",
]
