"""The page of one or more runs (``megazero report``), of what their files in LOG_DIR say. This needs no torch.

Whatever a file holds, there is a page: a part that its lines do not give says so instead.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from megazero.bounded import read_yaml
from megazero.charts import COLOURS, Mark, Series, boxes, chart, page, table, text
from megazero.config.options.fields import show
from megazero.config.run import RunConfig, World, stored_values
from megazero.config.summary import chosen, layout_lines
from megazero.log.curves import Points, read_curves
from megazero.log.exit_status import ExitStatus
from megazero.log.history import RESOLVED_FILE
from megazero.log.metrics import now
from megazero.log.units import human_bytes, plural
from megazero.mesh.levels import across, links_of, short
from megazero.ops.status import RunFiles, facts, read_run, restarts, state
from megazero.plan.base_layout import grid_of

REFRESH_S = 60  # after which a page of a run that lives is loaded again
LATEST = 1000  # iterations of which bytes are the median
MOST_RANKS = 128  # drawn
WRONG = (
    LookupError,
    TypeError,
    ValueError,
    ArithmeticError,
    AttributeError,
    OSError,
)  # of files by other hands
LINES = ("line", "dashed", "dotted")  # of a run's curves beside those of others
WELL = (ExitStatus.FINISHED, ExitStatus.STOPPED, ExitStatus.SWITCHED_OFF, ExitStatus.INTERRUPTED)

ERROR = "quantization_error_"
# Charts of all runs: title, unit, whether the y axis is logarithmic (else it begins at 0), and words for each curve.
PANELS: Sequence[tuple[str, str, bool, Mapping[str, str]]] = (
    ("Loss", "nats per token", True, {"lm_loss": "training", "eval_lm_loss": "evaluation"}),
    ("Speed", "tokens per second", False, {"tokens_per_s": "tokens"}),
    ("Norm of the gradients", "before clipping", True, {"grad_norm": "norm"}),
    ("Learning rate", "", False, {"learning_rate": "learning rate"}),
    ("Memory of the first rank", "bytes at the peak", False, {"memory_bytes": "measured"}),
    ("Rounding error of messages", "share of what is sent", False,
     {f"{ERROR}weights": "weights", f"{ERROR}gradients": "gradients", "quantization_zeroed_gradients": "zeroed"}),
    ("Balance of experts", "fullest over mean", False, {"experts/load": "load"}),
)  # fmt: skip


@dataclass(frozen=True)
class DrawnRun:
    """What is drawn of a run. name: among the runs of the page; '' of a single one."""

    name: str
    files: RunFiles
    curves: Mapping[str, Points]

    @property
    def start(self) -> Mapping[str, Any]:
        """The event of the last start."""
        return self.files.starts[-1] if self.files.starts else {}

    @property
    def predicted(self) -> Mapping[str, Any]:
        return self.start.get("predicted") or {"memory": {}, "bytes": {}}

    @property
    def memory(self) -> float:
        """The predicted bytes at the peak of the first rank, with what was in use before; 0 if they are not known."""
        return sum(self.predicted["memory"].values()) + self.predicted.get("in_use_before", 0)

    def config(self) -> RunConfig:
        """Return the configuration of the last start. Raises ValueError or OSError."""
        stored, _ = read_yaml(self.files.folder / RESOLVED_FILE)
        return RunConfig.of(stored_values(stored))


def report(log_dirs: Sequence[str | os.PathLike[str]]) -> tuple[str, list[str]]:
    """Return the page of the runs, and a line for each folder that is no run's. Raises ValueError if all are such."""
    found, wrong = list[RunFiles](), list[str]()
    for folder in log_dirs:
        try:
            found.append(read_run(folder))
        except (ValueError, OSError) as error:
            wrong.append(f"{error}")
    if not found:
        raise ValueError("; ".join(wrong) or "no runs are named: give their --log-dir")
    folders = [files.folder.absolute() for files in found]
    root = os.path.commonpath(folders)
    names = [os.path.relpath(folder, root) if len(found) > 1 else "" for folder in folders]
    runs = [
        DrawnRun(name, files, read_curves(files.folder)) for name, files in zip(names, found, strict=True)
    ]
    return _page(runs, ", ".join(map(str, folders))), wrong


def _page(runs: Sequence[DrawnRun], title: str) -> str:
    own = {
        "Where the time of an iteration goes": _bill,
        "Bytes of the first rank": _bytes,
        "Events": _events,
        "Layout": _layout,
    }
    parts = [_part(_states, runs), f'<h2>Curves</h2><div class="charts">{"".join(_panels(runs))}</div>']
    for head, make in own.items():
        made = [(run, _part(make, run)) for run in runs]
        each = [f"<h3>{text(run.name)}</h3>{part}" if run.name else part for run, part in made if part]
        parts += [f"<h2>{head}</h2>", *each] if each else []
    parts += ["<h2>Flags that differ from their defaults</h2>", _flags(runs)]
    lives = any(run.files.lives and not run.files.ends for run in runs)
    body = f"<h1>{text(title)}</h1><small>written {now()[:16].replace('T', ' ')} UTC</small>{''.join(parts)}"
    return page(title, body, refresh=REFRESH_S if lives else 0)


def _part(make: Callable[..., str], *args: Any) -> str:
    """Return a part of the page. Lines that do not give it are no end of the page."""
    try:
        return make(*args)
    except WRONG as error:
        return _not_drawn(error)


def _not_drawn(error: Exception, name: str = "") -> str:
    said = f"{name} not drawn, for what the run's files hold: {type(error).__name__}: {error}"
    return f'<p class="note">{text(said)}</p>'


# -- all runs --------------------------------------------------------------------------------------------------------


def _states(runs: Sequence[DrawnRun]) -> str:
    every = [facts(run.files) | _surroundings(run.start) for run in runs]
    alarms = [(run.name or "this run", each["state"]) for run, each in zip(runs, every, strict=True)
              if state(run.files).alarming]  # fmt: skip
    names = dict.fromkeys(name for each in every for name in each if name != "run")
    heads = ["", *(run.name for run in runs)] if len(runs) > 1 else []
    cries = "".join(f'<p class="alarm">{text(name)} needs a person: {text(why)}</p>' for name, why in alarms)
    return cries + table(heads, [[name, *(each.get(name, "") for each in every)] for name in names])


def _surroundings(start: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{start[name]}" for name in ("device", "software", "run_id") if name in start}


def _panels(runs: Sequence[DrawnRun]) -> Iterator[str]:
    marks = [*_marks(runs[0])] if len(runs) == 1 else []
    for panel in PANELS:
        if any(panel[-1].keys() & run.curves.keys() for run in runs):
            yield f"<div>{_part(_panel, runs, marks, *panel)}</div>"


def _panel(
    runs: Sequence[DrawnRun],
    marks: Sequence[Mark],
    title: str,
    unit: str,
    log: bool,
    curves: Mapping[str, str],
) -> str:
    series = [each for number, run in enumerate(runs) for each in _series(curves, run, number)]
    return chart(title, series, y=unit, marks=marks, log=log, zero=not log)


def _series(curves: Mapping[str, str], run: DrawnRun, number: int) -> Iterator[Series]:
    """Yield curves of a run. Of other data the name goes on. A run alone has a colour for each curve."""
    found = {
        f"{run.name} {words}{name.removeprefix(begin)}".strip(): name
        for begin, words in curves.items()
        for name in run.curves
        if name == begin or name.startswith(f"{begin} ")
    }
    for place, (words, name) in enumerate(found.items()):
        line = LINES[place % len(LINES)] if run.name else "line"
        kind = "dots" if name.startswith("eval_") else line
        yield Series(words, *run.curves[name], number if run.name else place, kind)
    if "memory_bytes" in curves and run.memory:
        x, name = run.curves["memory_bytes"].x, f"{run.name} predicted".strip()
        yield Series(name, [x[0], x[-1]], [run.memory] * 2, number if run.name else 1, "dashed")


def _marks(run: DrawnRun) -> Iterator[Mark]:
    for event in run.files.events:
        kind, at = event.get("event"), event.get("iteration")
        if not isinstance(at, int) or not 0 <= at < 2**53:
            continue
        if kind == "start":
            yield Mark(at, f"start after iteration {at:,}", "start")
        elif kind == "save":
            yield Mark(at, f"saved {event.get('path')}", "save")
        elif kind == "end" and event.get("status") not in WELL:
            yield Mark(at, f"{event.get('why')}", "alarm")
    for at, skips in zip(*run.curves.get("skipped", Points.empty()), strict=True):
        if skips:
            yield Mark(at, f"iteration {at:,.0f} was skipped: its norm was not finite", "alarm")


def _flags(runs: Sequence[DrawnRun]) -> str:
    """Return the options that differ from their defaults in some run. Those that runs differ in come first."""
    every, default, missing = dict[str, dict[str, str]](), dict[str, str](), ""
    for run in runs:
        try:
            found = [(option.key, show(value), show(usual)) for option, value, usual in chosen(run.config())]
        except WRONG as error:
            missing += _not_drawn(error, run.name)
            continue
        every[run.name] = {key: value for key, value, _ in found}
        default |= {key: usual for key, _, usual in found}
    rows = [
        (f"--{key}", *(own.get(key, usual) for own in every.values()), usual)
        for key, usual in default.items()
    ]
    rows.sort(key=lambda row: len({*row[1:-1]}) == 1)
    return (
        missing + table(["flag", *(name or "value" for name in every), "default"], rows) if rows else missing
    )


# -- one run ---------------------------------------------------------------------------------------------------------


def _bill(run: DrawnRun) -> str:
    """Chart the items of the time bill; of many the smallest are one."""
    if not (times := run.curves.get("iteration_time_s")):
        return ""
    x, rows = times.x, list[tuple[str, Sequence[float]]]()
    for name, curve in run.curves.items():
        if name.startswith("time_bill/") and any(curve.y):
            at = {} if curve.x == x else dict(zip(*curve, strict=True))
            rows.append(
                (_words(name.removeprefix("time_bill/")), [at.get(i, 0.0) for i in x] if at else curve.y)
            )
    rows.sort(key=lambda row: -sum(v for v in row[1] if math.isfinite(v)))
    rest = [sum(values) for values in zip(*(values for _, values in rows[COLOURS - 1 :]), strict=True)]
    rows[COLOURS - 1 :] = [("everything else", rest)] if rest else []
    series = [Series(name, x, values, i, "band") for i, (name, values) in enumerate(rows)]
    if seconds := run.predicted.get("seconds"):
        series.append(Series("predicted", [x[0], x[-1]], [seconds] * 2, len(rows), "dashed"))
    return chart("Seconds of an iteration", series, y="seconds of the first rank", marks=[*_marks(run)])


def _words(item: str) -> str:
    """Return an item of the time bill, or a hop, in words: 'wait for gather across nodes'."""
    kind, _, link = item.removeprefix("exposed_").partition("_")
    where = {short(link): across(link) for link in links_of(2)}.get(link.removesuffix("_node"), link)
    return f"{'wait for ' * item.startswith('exposed_')}{kind} {where}".strip()


def _bytes(run: DrawnRun) -> str:
    """Return what the first rank sends, by hop and link, and its memory, each beside the planner's count."""
    sent = {name.removeprefix("bytes/"): median(curve.y[-LATEST:]) for name, curve in run.curves.items()
            if name.startswith("bytes/")}  # fmt: skip
    formula, peak = run.predicted["bytes"], run.curves.get("memory_bytes", Points.empty()).y
    rows = [
        (_words(key.removesuffix("_bytes")), sent.get(key, 0.0), formula.get(key, 0.0))
        for key in {**sent, **formula}
    ]
    rows += [("memory at the peak", max(peak, default=0.0), run.memory)]
    before = {"before the model": run.predicted.get("in_use_before", 0.0)}
    rows += [
        (f"of it {name}", 0.0, size) for name, size in {**before, **run.predicted["memory"]}.items() if size
    ]
    lines = [
        (name, *(human_bytes(size) if size else "" for size in (got, counted)),
         f"{got / counted - 1:+.1%}" if got and counted else "")
        for name, got, counted in rows
    ]  # fmt: skip
    said = (
        "Sent in an iteration: medians of the latest ones. The planner counts a full global batch, without numbers "
        "of callbacks, which are in scalar."
    )
    return table(["", "measured", "planner", "off"], lines) + f'<p class="note">{said}</p>'


def _events(run: DrawnRun) -> str:
    """Return why each start but the first was needed, and where more is written."""
    saves = sum(event.get("event") == "save" for event in run.files.events)
    lines = [*restarts(run.files), plural(saves, "save")]
    if (hang := run.files.folder / "hang").is_dir():
        lines.append(f"{hang} has the stacks of ranks that hung")
    return "".join(f"<p>{text(line)}</p>" for line in lines) if run.files.events else ""


def _layout(run: DrawnRun) -> str:
    """Draw nodes with their ranks: where each lies on the axes of more than one rank, coloured by its stage."""
    if "ranks" not in run.start:
        return ""
    config, world = run.config(), World(int(run.start["ranks"]), int(run.start["ranks_per_node"]))
    grid, hosts = grid_of(config, world, config.shards(world).factors), run.start["hosts"]
    nodes = dict[str, list[tuple[str, int]]]()
    for rank in range(min(world.world_size, MOST_RANKS)):
        node = rank // grid.ranks_per_node
        host = f" ({hosts[node]})" if node < len(hosts) else ""
        places = "".join(f"\n{axis.name} {axis.index(rank)}" for axis in grid.axes if axis.size > 1)
        cell = f"rank {rank}{places}", grid.axis("pp").index(rank)
        nodes.setdefault(f"node {node}{host}", []).append(cell)
    more = [f"and {world.world_size - MOST_RANKS:,} ranks more"] * (world.world_size > MOST_RANKS)
    lines = [*more, *(line.removeprefix("layout").strip() for line in layout_lines(config, world))]
    return boxes(nodes) + "".join(f"<p>{text(line)}</p>" for line in lines)
