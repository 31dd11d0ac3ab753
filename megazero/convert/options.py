"""The command line of ``megazero convert``. It needs no torch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
_WEIGHTS = "the weights that forwards used, or the optimizer's fp32 master weights"


def size(text: str) -> int:
    """Return the bytes of a size such as 5GB, 500MB or 2GiB."""
    found = re.fullmatch(r"([\d.]+)\s*([KMG]?I?)B?", text.strip().upper())
    try:
        bytes_ = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    except (KeyError, ValueError):
        bytes_ = 0
    if bytes_ < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 5GB, 500MB or 2GiB")
    return bytes_


def read_options(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line. Leaves through SystemExit: 0 after --help, 2 for a mistake."""
    parser = argparse.ArgumentParser(
        prog="megazero convert",
        description="Checkpoints to Hugging Face and back, and from Megatron, in bounded memory, without a GPU.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _to_hf(
        commands.add_parser("to-hf", help="write a checkpoint as a Hugging Face folder", allow_abbrev=False)
    )
    _from_hf(
        commands.add_parser("from-hf", help="write a Hugging Face folder as a checkpoint", allow_abbrev=False)
    )
    _from_megatron(
        commands.add_parser(
            "from-megatron",
            help="write a checkpoint of Megatron as a checkpoint",
            epilog="FLAGS of Megatron or megazero, behind the folders, replace the arguments that DIR holds.",
            allow_abbrev=False,
        )
    )
    _check(
        commands.add_parser(
            "check", help="compare a checkpoint with a Hugging Face folder", allow_abbrev=False
        )
    )
    _flags(
        commands.add_parser(
            "flags", help="print the flags of a run with a folder's model", allow_abbrev=False
        )
    )
    options, flags = parser.parse_known_args(argv)
    if flags and options.command != "from-megatron":
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    options.flags = flags
    return options


def _to_hf(parser: argparse.ArgumentParser) -> None:
    _checkpoint(parser)
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder to write; it must not exist")
    _source(parser)
    parser.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32"), help="dtype of the weights (default: as they are stored)"
    )
    parser.add_argument(
        "--shard-size", type=size, default=size("5GB"), help="the most bytes of a file (default: 5GB)"
    )
    parser.add_argument(
        "--no-check", action="store_true", help="do not compare the folder with the checkpoint"
    )


def _from_hf(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="folder with config.json and safetensors files"
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="folder to write iter_0000000 in")
    _accept(parser)
    parser.add_argument(
        "--no-check", action="store_true", help="do not compare the checkpoint with the folder"
    )


def _from_megatron(parser: argparse.ArgumentParser) -> None:
    text = "folder given to Megatron's --save, of which the newest iteration counts, or one of its iter_* folders"
    parser.add_argument("folder", type=Path, metavar="DIR", help=text)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="folder to write iter_0000000 in")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to take (default: the newest)")
    _accept(parser)
    parser.add_argument("--no-check", action="store_true", help="do not read back what is written")


def _check(parser: argparse.ArgumentParser) -> None:
    _checkpoint(parser)
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="folder with config.json and safetensors files"
    )
    _source(parser)
    _accept(parser)


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="folder with config.json; weights are not needed"
    )
    parser.add_argument("--yaml", action="store_true", help="print a run.yaml for --config instead of flags")
    _accept(parser)


def _checkpoint(parser: argparse.ArgumentParser) -> None:
    text = "folder given to --save in training, of which the newest checkpoint counts, or one of its iter_* folders"
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help=text)
    parser.add_argument(
        "--ckpt-step", type=int, metavar="N", help="iteration of the checkpoint to take (default: the newest)"
    )


def _source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", choices=("trained", "master"), help=f"{_WEIGHTS} (default: trained)")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="P",
        help="tokenizer of the training, where the checkpoint does not hold it",
    )


def _accept(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--accept-field",
        action="append",
        default=[],
        metavar="NAME",
        help="set a field of config.json (an argument of Megatron's) aside that is not known here, and that you know "
        "to change nothing",
    )
