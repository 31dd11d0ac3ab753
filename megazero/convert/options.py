"""The command lines of ``megazero convert``. They need no torch."""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass

from megazero.config.options.fields import option, option_of

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def size(text: str) -> int:
    """Return the bytes of a size such as 5GB, 500MB or 2GiB. Raises ValueError."""
    found = re.fullmatch(r"([\d.]+)\s*([KMG]?I?)B?", text.strip().upper())
    try:
        bytes_ = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    except (KeyError, ValueError):
        bytes_ = 0
    if bytes_ < 1:
        raise ValueError(f"--shard-size {text} is no size; write 5GB, 500MB or 2GiB")
    return bytes_


@dataclass(frozen=True)
class ToHf:
    """Write a checkpoint as a Hugging Face folder."""

    checkpoint: str = option(
        MISSING, "--save folder (its newest checkpoint), or one of its iter_* folders", place="CHECKPOINT"
    )
    folder: str = option(MISSING, "folder to write; it must not exist", place="DIR")
    ckpt_step: int | None = option(None, "iteration of the checkpoint to read (default: the newest)", low=0)
    weights: str | None = option(
        None,
        "weights to read: those that forwards used, or the optimizer's fp32 master weights (default: trained)",
        choices=("trained", "master"),
    )
    tokenizer: str | None = option(None, "tokenizer of the training, if the checkpoint has none")
    dtype: str | None = option(
        None, "dtype of the weights to write (default: as stored)", choices=("bf16", "fp16", "fp32")
    )
    shard_size: str = option("5GB", "maximum size of a file")
    check: bool = option(True, "compare the folder with the checkpoint")

    def __post_init__(self) -> None:
        size(self.shard_size)


@dataclass(frozen=True)
class FromHf:
    """Write a Hugging Face folder as a checkpoint."""

    folder: str = option(MISSING, "folder with config.json and safetensors files", place="DIR")
    checkpoint: str = option(MISSING, "folder to write iter_0000000 in", place="CHECKPOINT")
    accept_field: tuple[str, ...] = option(
        (), "unknown field of config.json to ignore, because it changes nothing; may stand several times"
    )
    check: bool = option(True, "compare the checkpoint with the folder")


@dataclass(frozen=True)
class FromMegatron:
    """Write a Megatron checkpoint as a megazero checkpoint."""

    folder: str = option(
        MISSING, "Megatron's --save folder (its newest iteration), or one of its iter_* folders", place="DIR"
    )
    checkpoint: str = option_of(FromHf, "checkpoint")
    flags: tuple[str, ...] = option(
        (), "flags of Megatron or megazero that replace arguments in DIR", place="FLAGS"
    )
    ckpt_step: int | None = option(None, "iteration to read (default: the newest)", low=0)
    accept_field: tuple[str, ...] = option_of(
        FromHf,
        "accept_field",
        help="unknown argument of Megatron to ignore, because it changes nothing; may stand several times",
    )
    check: bool = option(True, "read back the checkpoint and compare it")


@dataclass(frozen=True)
class CheckHf:
    """Compare a checkpoint with a Hugging Face folder."""

    checkpoint: str = option_of(ToHf, "checkpoint")
    folder: str = option_of(FromHf, "folder")
    ckpt_step: int | None = option_of(ToHf, "ckpt_step")
    weights: str | None = option_of(ToHf, "weights")
    tokenizer: str | None = option_of(ToHf, "tokenizer")
    accept_field: tuple[str, ...] = option_of(FromHf, "accept_field")


@dataclass(frozen=True)
class ModelFlags:
    """Print the flags of a run with a folder's model."""

    folder: str = option(MISSING, "folder with config.json; weights are not needed", place="DIR")
    yaml: bool = option(False, "print run.yaml for --config instead of flags")
    accept_field: tuple[str, ...] = option_of(FromHf, "accept_field")


SECTIONS: dict[str, type] = {
    "to-hf": ToHf,
    "from-hf": FromHf,
    "from-megatron": FromMegatron,
    "check": CheckHf,
    "flags": ModelFlags,
}
