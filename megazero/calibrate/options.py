"""The flags of ``megazero calibrate`` beside those of training. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megazero.config import ConfigError, make_config
from megazero.config.options.fields import option, section_options
from megazero.config.read.flags import options_help, read_section
from megazero.config.run import all_options
from megazero.plan.options import read_values, with_stand_ins

USAGE = """usage: torchrun --nnodes 2 --nproc-per-node 8 ... -m megazero calibrate TRAINING FLAGS [flags below]
       megazero calibrate --nproc-per-node 8 TRAINING FLAGS [flags below]

Measures a cluster for `megazero plan` on the ranks of a launcher, or on ranks that it starts on this machine, and
writes the cluster file. It measures every collective of the engine, by ranks x nodes and size, with all such groups
at once; the optimizer's update; and the modules of the model that the flags of training describe, by micro-batch and
tensor-parallel size, with all ranks of a node at work. Exit status 0: the file is written; 1: with --pays, nothing
fits; 2: a flag is wrong.
"""


# Options that the calibration chooses itself.
OWN = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "sequence_parallel",
    "micro_batch_size",
    "global_batch_size",
    "recompute_granularity",
)


@dataclass(frozen=True)
class CalibrationConfig:
    """The calibration itself."""

    cluster_output: str = option("cluster.yaml", "the cluster file")
    cluster_name: str = option("measured", "name of the cluster in that file")
    calibrate_rounds: int = option(5, "repetitions of each measurement, whose median counts", low=3, high=100)
    calibrate_micro_batches: tuple[int, ...] = option(
        (1, 2, 4), "micro-batch sizes at which modules are measured", low=1
    )
    calibrate_largest_bytes: int = option(
        64 << 20, "bytes of the largest message; slow ones end the series earlier", low=4096
    )
    pays: bool = option(
        False,
        "measure the widest groups and one micro-batch alone, in about a minute, and print whether quantised "
        "messages pay on these nodes, as megazero plan --pays does for --global-batch-size",
    )

    @property
    def output(self) -> Path:
        return Path(self.cluster_output)


@dataclass(frozen=True)
class CalibrationRequest:
    """The request of the command line.

    values: the training's options by name. plan: those of --pays. notes: what the user should know.
    """

    values: dict[str, Any]
    options: CalibrationConfig
    plan: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def help_text() -> str:
    """Return what ``megazero calibrate --help`` prints."""
    return "\n".join([USAGE, *options_help(section_options("calibrate", CalibrationConfig))])


def read_request(argv: Sequence[str]) -> CalibrationRequest:
    """Read the command line after ``calibrate``. Raises ConfigError with every fault at once."""
    options, rest, errors = read_section(CalibrationConfig, argv)
    given, faults = read_values(rest)
    errors += faults
    if given.get("vocab_size") is None:
        errors.append(
            "--vocab-size is required: a calibration reads no tokenizer; --load takes it from what it names"
        )
    if options.pays and given.get("global_batch_size") is None:
        errors.append("--pays compares steps of a batch: give --global-batch-size")
    asked = {name: given.pop(name) for name in OWN if options.pays and name in given}
    values = with_stand_ins(given)
    own = [all_options()[name].flag for name in OWN if values.pop(name, None) is not None]
    try:
        make_config({**values, "micro_batch_size": 1, "global_batch_size": None})
    except ConfigError as error:
        errors += error.errors
    if errors:
        raise ConfigError(list(dict.fromkeys(errors)))
    note = f"without effect: {', '.join(own)}. The calibration measures several values of these options"
    return CalibrationRequest(values, options, {**given, **asked}, (note,) if own else ())
