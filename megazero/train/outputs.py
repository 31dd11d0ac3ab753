"""Where results go: the console, LOG_DIR with metrics.jsonl and the resolved configuration, and outside loggers."""

from __future__ import annotations

import platform
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import yaml

import megazero
from megazero.config import RunConfig, World
from megazero.config.options.sections import LoggingConfig
from megazero.config.secrets import redact
from megazero.config.summary import decoder_line, describe, layout_lines, note_lines
from megazero.files import replacing
from megazero.log.console import TrainConsole
from megazero.log.history import EVENTS_FILE, RESOLVED_FILE, RUN_FILE, Start, event_line, identify
from megazero.log.line_file import NO_ROOM, LineFile
from megazero.log.loggers import Logger, Loggers, TensorBoardLogger, WandbLogger, opened
from megazero.log.metrics import IterationMetrics, MetricsWriter
from megazero.log.units import plural
from megazero.mesh.launch import Launch
from megazero.mesh.mesh import Mesh
from megazero.mesh.objects import gather_objects
from megazero.models import Decoder, architecture_of
from megazero.models.attention import attention_note
from megazero.models.dtypes import DTYPES
from megazero.ops.live_page import LivePage
from megazero.train.callbacks.callback import Callback
from megazero.train.state.progress import Progress

START_LINES = 12  # of the console at a start; the file has all


@dataclass(eq=False)
class Outputs(Callback):
    """The places where a rank writes. On ranks other than the first the console and the loggers are silent.

    start_of: this start of the run. metrics, events: the writers of metrics.jsonl and of events.jsonl; None on ranks
    other than the first. peak: of the device, in TFLOP/s, where it is known. page: that of --report.
    """

    start_of: Start
    console: TrainConsole
    loggers: Loggers
    metrics: MetricsWriter | None
    events: LineFile | None = None
    peak: float | None = None
    page: LivePage | None = None

    def logged(self, metrics: IterationMetrics) -> None:
        if self.peak:
            extra = {**metrics.extra, "mfu": metrics.tflops_per_rank / self.peak}
            metrics = replace(metrics, extra=extra)
        self.console.iteration(metrics)
        if self.metrics is not None:
            self.metrics.iteration(metrics)
            self.loggers.log(metrics.iteration, metrics.as_dict())
        if self.page is not None:
            self.page.tick()

    def evaluated(self, at: Progress, name: str, loss: float) -> None:
        """Report an evaluation. loss: nats per token."""
        self.console.evaluation(at.iteration, loss, *([name] if name else []))
        if self.metrics is None:
            return
        extra = {"eval_data": name} if name else {}
        line = self.metrics.evaluation(at.iteration, at.consumed_samples, loss, **extra)
        if name:  # a curve of its own in TensorBoard and wandb: eval_lm_loss/NAME
            line = {key: {name: value} if key.startswith("eval_") else value for key, value in line.items()}
        self.loggers.log(at.iteration, line)

    def results(self, at: Progress, results: Mapping[str, float]) -> None:
        """Report what the user's callbacks evaluated, by name."""
        said = ", ".join(f"{name} {value:.6g}" for name, value in results.items())
        self.console.note(f"evaluation at {at.iteration:,}: {said}")
        if self.metrics is not None:
            self.loggers.log(at.iteration, self.metrics.results(at.iteration, at.consumed_samples, results))

    def saved(self, iteration: int, path: Path, seconds: float) -> None:
        """Report a checkpoint. Loggers are flushed: a resume does not repeat the iterations before it."""
        self.console.note(f"saved {path} in {seconds:.1f} s")
        if self.events is not None:
            with suppress(OSError):  # the checkpoint has the id from here on, so the file may stay
                (path.parent / RUN_FILE).unlink()
        self.loggers.flush()
        self.event("save", iteration=iteration, path=str(path), seconds=round(seconds, 3))

    def close_lines(self) -> None:
        """Write the lines that still wait for room on the log disk, or warn how many are lost. No more follow."""
        for file in (self.metrics, self.events):
            if file is not None:
                file.close()

    def event(self, event: str, **values: Any) -> None:
        """Write a line of events.jsonl, on the first rank."""
        if self.events is not None:
            self.events.append(event_line(event, values))


def agree_on_start(config: RunConfig, launch: Launch, progress: Progress) -> Start:
    """Return which run this is a start of, and on which hosts, the same on all ranks. Collective."""
    own: Start | None = None
    if launch.rank == 0:
        own = identify(config.checkpoint.save, config.logging.log_dir, progress.run_id, launch)
    starts, hosts = zip(*gather_objects((own, socket.gethostname()), Start), strict=True)
    return replace(starts[0], hosts=hosts, iteration=progress.iteration)


def surroundings(mesh: Mesh) -> dict[str, Any]:
    """Return on what a start runs, for its event."""
    cuda = mesh.device.type == "cuda"
    return {
        "ranks": mesh.world_size,
        "ranks_per_node": mesh.grid.ranks_per_node,
        "device": torch.cuda.get_device_name(mesh.device) if cuda else f"{mesh.device}",
        "versions": {
            "megazero": megazero.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def open_outputs(
    config: RunConfig,
    progress: Progress,
    start: Start,
    last_iteration: int,
    stack: ExitStack,
    guard: Callable[[], None] = lambda: None,
    *,
    first: bool,
    peak: float | None = None,
    about: Mapping[str, Any] = MappingProxyType({}),
) -> Outputs:
    """Open what this rank writes to; ``stack`` closes it. first: this is the first rank, the only one that writes.
    guard: called before lines are written. peak: of the device, in TFLOP/s, where it is known. about: what else the
    event of the start tells.

    Raises ValueError if a logger that was asked for cannot run.
    """
    log = config.logging
    console = TrainConsole(
        total=last_iteration, begin=progress.iteration, log_interval=log.log_interval, enabled=first
    )
    if not first:
        return Outputs(start, console, Loggers(), None)
    metrics = MetricsWriter(log.log_dir, iteration=progress.iteration, start=start.facts(), guard=guard)
    stack.callback(metrics.close)
    events = LineFile(Path(log.log_dir) / EVENTS_FILE, guard=guard)
    stack.callback(events.close)
    resolved = redact(config.to_dict())
    loggers = Loggers(opened(_asked_for(log, start.run_id, progress.iteration, resolved)))
    stack.callback(loggers.close)
    page = LivePage(log.log_dir, console.warning) if log.report else None
    outputs = Outputs(start, console, loggers, metrics, events, peak, page)
    outputs.event(
        "start",
        run_id=start.run_id,
        iteration=progress.iteration,
        consumed_samples=progress.consumed_samples,
        last_iteration=last_iteration,
        lease=start.lease,
        **start.facts(),
        **about,
    )
    return outputs


def _write_config(head: Sequence[str], config: RunConfig, file: Path, console: TrainConsole) -> None:
    """Write every option below the lines of ``head``, as a legal --config file. A full disk does not stop the run."""
    comment = "".join(f"# {line}\n" for text in head for line in text.splitlines())
    try:
        with replacing(file) as handle:
            handle.write(redact(comment).encode())
            handle.write(yaml.safe_dump(config.to_dict(), sort_keys=False).encode())
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        console.warning(f"{file} is not written: {error.strerror}")


def _asked_for(
    log: LoggingConfig, run_id: str, iteration: int, resolved: Mapping[str, Any]
) -> Iterator[Callable[[], Logger]]:
    if log.tensorboard_dir:
        yield partial(TensorBoardLogger, log.tensorboard_dir, iteration=iteration)
    if log.wandb_project:
        yield partial(
            WandbLogger,
            redact(log.wandb_project),
            run_id=run_id,
            entity=redact(log.wandb_entity),
            name=redact(log.wandb_exp_name),
            directory=log.wandb_save_dir,
            config=resolved,
        )


def report_start(
    config: RunConfig,
    mesh: Mesh,
    decoder: Decoder,
    progress: Progress,
    outputs: Outputs,
    predicted: Sequence[str] = (),
) -> None:
    """Print what is about to run in START_LINES lines: where it starts, notes, the decoder, memory and the layout.

    LOG_DIR/config.yaml has all of it, what differs from the defaults and every option. predicted: lines with the
    planner's prediction.
    """
    start = outputs.start_of
    world = World(mesh.grid.world_size, mesh.grid.ranks_per_node)
    file = Path(config.logging.log_dir) / RESOLVED_FILE
    facts: dict[str, object] = {
        **start.header(),
        "device": str(mesh.device),
        "starts after": f"iteration {progress.iteration}, {progress.consumed_samples:,} samples consumed",
    }
    outputs.console.header(f"megazero on {plural(world.world_size, 'rank')}", {**facts, "all options": file})
    dtype, packed = DTYPES[config.precision.params_dtype], config.data.reset_attention_mask
    choice = config.training.attention_backend
    of_attention = dtype, choice, packed, mesh.grid.cp_keys > 1
    attention = attention_note(decoder.config, decoder.tp, mesh.device, *of_attention)
    remarks = [f"note: {text}" for text in (attention, export_note(config)) if text]
    told = [*start.notes, *progress.notes]
    shown = [
        *told,
        *remarks,
        decoder_line(config),
        *note_lines(config),
        *predicted,
        *layout_lines(config, world),
    ]
    for line in shortened(shown, START_LINES - 2, file):  # below the two of the header
        outputs.console.note(line)
    if outputs.metrics is not None:
        lines = [*told, *describe(config, world), *remarks, *predicted]
        _write_config(
            [f"{name}: {fact}" for name, fact in facts.items()] + lines, config, file, outputs.console
        )


def shortened(lines: Sequence[str], most: int, file: Path) -> Sequence[str]:
    """Return at most ``most`` lines, whose last one says where the others are."""
    if len(lines) <= most:
        return lines
    return [*lines[: most - 1], f"and {len(lines) - most + 1} lines more: {file}"]


def export_note(config: RunConfig) -> str | None:
    """Return a note if the model cannot be exported to Hugging Face, else None."""
    try:
        architecture_of(config.model)
    except ValueError as error:
        return f"checkpoints of this run cannot be exported: {error}"
    return None
