"""The sizes of what tests train and configure, by option; ``words`` makes a command line of them. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RUN = {"lr": 1e-3, "train_iters": 100, "mock_data": True}

# -- models that are trained or compared: the least that four tensor-parallel ranks share -------------------

LLAMA = {
    **{"model_family": "llama", "attention_dropout": 0.0, "hidden_dropout": 0.0},
    **{"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48},
    **{"num_attention_heads": 8, "num_query_groups": 4},
}
# A vocabulary that no number of ranks divides, and no padding.
DECODER = {**LLAMA, "vocab_size": 101, "max_position_embeddings": 16, "make_vocab_size_divisible_by": 1}
TINY = {
    **LLAMA,
    # odd: padded to 52 on up to 2 tensor-parallel ranks, to 56 on 4
    **{"seq_length": 12, "vocab_size": 51, "make_vocab_size_divisible_by": 2},
    **{"micro_batch_size": 1, "global_batch_size": 8},
    **{"lr": 1e-2, "lr_decay_style": "cosine", "lr_warmup_iters": 2, "train_iters": 6},
    **{"mock_data": True, "eval_iters": 0, "device": "cpu"},
}

# A config.json of Hugging Face.
CONFIG_JSON = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "vocab_size": 500, "rms_norm_eps": 1e-5, "max_position_embeddings": 128},
}

# -- models that are configured, planned or refused ----------------------------------------------------------

SMALL = {
    **{
        "model_family": "llama",
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 32,
    },
    **{"vocab_size": 101, "micro_batch_size": 2, **RUN},
}
PLANNED = {
    **{
        "model_family": "llama",
        "num_layers": 6,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "seq_length": 64,
    },
    **{"vocab_size": 1000, "micro_batch_size": 1, "global_batch_size": 32, **RUN, "train_iters": 5},
}

# -- command lines --------------------------------------------------------------------------------------------

LEAST = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 50 --mock-data "
    "--lr 1e-3"
)
# In place of the sizes of published scripts.
PUBLISHED = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --global-batch-size 8 --eval-iters 1"
)


def words(values: Mapping[str, Any]) -> list[str]:
    """The flags of these options. None and False are left out."""
    said: list[str] = []
    for name, value in values.items():
        if value is not None and value is not False:
            said += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return said
