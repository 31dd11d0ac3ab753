"""--profile writes a Chrome trace of a few iterations, in which communication and compute are labelled.

The labels are 'gather_inter layers.3' (a hop of a unit: its encoding, sending and decoding; refresh and reduce are
named in the same way), 'forward layers.3' (a unit's forward), 'compute B(stage 0, micro-batch 1)' (an action of the
schedule), and the items of the time bill ('exposed_reduce_inter', 'optimizer', 'data', ...). Nothing is labelled
while no trace is recorded.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, record_function
from torch.utils.hooks import RemovableHandle

from megazero.comm.lane import Lane
from megazero.comm.timing import no_label
from megazero.config import RunConfig
from megazero.log.line_file import NO_ROOM
from megazero.log.time_bill import TimeBill
from megazero.models import Decoder
from megazero.pp.executor import Pipeline
from megazero.train.callbacks.callback import Callback
from megazero.zero import Engine


class Profiler(Callback):
    """Records the iterations after --profile-step-start up to --profile-step-end on the ranks of --profile-ranks.

    A run that resumes between the two records the rest.
    """

    def __init__(
        self, config: RunConfig, decoder: Decoder, engine: Engine, pipeline: Pipeline, bill: TimeBill
    ) -> None:
        self.options, self.rank, self.device = config.profiling, engine.mesh.rank, engine.mesh.device
        self.folder = Path(config.logging.log_dir) / "profile"
        self.labelled: Sequence[Lane | Pipeline | TimeBill] = (*engine.lanes, pipeline, bill)
        names = {module: name for name, module in decoder.named_modules()}
        self.units = [(names[module], module) for unit in decoder.units() for module in unit]
        self.recorder: torch.profiler.profile | None = None
        self.hooks: list[RemovableHandle] = []
        self.first = self.last = 0  # iteration of the running trace; 0 if none is
        self.written = False

    def before_step(self, iteration: int) -> None:
        """Begin or end the trace if that is due before ``iteration`` is trained."""
        options = self.options
        if not options.profile:
            return
        if options.profile_step_start < iteration <= options.profile_step_end:
            if not self.first:
                self.first = iteration
                if self.rank in options.profile_ranks:
                    self._start()
            self.last = iteration
        elif self.first:
            self._write()

    def closing(self) -> None:
        """End the trace with the run. Print a note if there was nothing to trace."""
        options = self.options
        if self.first:
            self._write()
        elif options.profile and not self.written:
            self.run.note(
                f"no trace was written: this run has none of the iterations {options.profile_step_start + 1} to "
                f"{options.profile_step_end} (--profile-step-start, --profile-step-end)"
            )

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self.recorder = torch.profiler.profile(activities=activities)
        self.recorder.start()
        for part in self.labelled:
            part.label = label
        self.hooks = [hook for name, module in self.units for hook in _label_forward(name, module)]

    def _write(self) -> None:
        """End the trace, and write it if this rank records."""
        ranks, first = ", ".join(map(str, self.options.profile_ranks)), self.first
        self.first, self.written = 0, True
        if self.recorder is not None:
            for hook in self.hooks:
                hook.remove()
            for part in self.labelled:
                part.label = no_label
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # kernels that still run belong to the trace
            self.recorder.stop()
            recorder, self.recorder = self.recorder, None
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                recorder.export_chrome_trace(str(self.folder / f"rank_{self.rank}.json.gz"))
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                warnings.warn(f"{self.folder}: {error.strerror}; there is no whole trace", stacklevel=2)
                return
        self.run.note(f"iterations {first} to {self.last} of rank {ranks} are traced in {self.folder}")


def label(what: str, of: str) -> record_function:
    """Return a context in which what runs has this name in the trace: 'gather_inter layers.3'."""
    return record_function(f"{what} {of}".rstrip())


def _label_forward(name: str, module: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
    """Label every forward of ``module``.

    It is registered after the engine's hooks, so it is inside of their gather.
    """
    running: list[record_function] = []

    def begin(*_: Any) -> None:
        running.append(label("forward", name))
        running[-1].__enter__()

    def end(*_: Any) -> None:
        running.pop().__exit__(None, None, None)

    # always_call: a recomputation may leave a forward by an exception.
    return module.register_forward_pre_hook(begin), module.register_forward_hook(end, always_call=True)
