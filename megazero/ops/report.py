"""The page of one or more runs (``megazero report``), of what their files in LOG_DIR say. This needs no torch.

Whatever a file holds, there is a page: a part that its lines do not give says so instead.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from megazero.bounded import read_yaml
from megazero.charts import COLOURS, Bar, Mark, Series, bars, boxes, chart, page, table, text
from megazero.config.options.fields import show
from megazero.config.run import RunConfig, World, stored_values
from megazero.config.secrets import redact
from megazero.config.summary import chosen, layout_lines
from megazero.log.curves import Curve, read_curves
from megazero.log.exit_status import ExitStatus
from megazero.log.history import RESOLVED_FILE
from megazero.log.metrics import now
from megazero.log.units import human_bytes, plural
from megazero.mesh.levels import across, links_of, short
from megazero.ops.status import RunFiles, facts, read_run, state
from megazero.plan.base_layout import grid_of

REFRESH_S = 60  # after which a page of a run that lives is loaded again
LATEST = 1000  # iterations of which bytes are the median
MOST_EVENTS, MOST_RANKS, MOST_BANDS = 200, 128, COLOURS
WRONG = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError)  # of lines by other hands
WELL = (ExitStatus.FINISHED, ExitStatus.STOPPED, ExitStatus.SWITCHED_OFF, ExitStatus.INTERRUPTED)


@dataclass(frozen=True)
class Run:
    """What is drawn of a run. name: among the runs of the page; '' of a single one."""

    name: str
    files: RunFiles
    curves: Mapping[str, Curve]

    @property
    def start(self) -> Mapping[str, Any]:
        """The event of the last start."""
        return self.files.starts[-1] if self.files.starts else {}

    @property
    def predicted(self) -> Mapping[str, Any]:
        return self.start.get("predicted") or {}

    def config(self) -> RunConfig:
        """Return the configuration of the last start. Raises ValueError or OSError."""
        stored, _ = read_yaml(self.files.folder / RESOLVED_FILE)
        return RunConfig.of(stored_values(redact(stored)))

    def world(self) -> World:
        return World(int(self.start["ranks"]), int(self.start["ranks_per_node"]))


class Panel(NamedTuple):
    """A chart of all runs. curves: their names in metrics.jsonl, and words for the legend."""

    title: str
    unit: str
    curves: Mapping[str, str]
    log: bool = False
    zero: bool = False


ERROR = "quantization_error_"
PANELS = (
    Panel("Loss", "nats per token", {"lm_loss": "training", "eval_lm_loss": "evaluation"}, log=True),
    Panel("Speed", "tokens per second", {"tokens_per_s": "tokens"}, zero=True),
    Panel("Norm of the gradients", "before clipping", {"grad_norm": "norm"}, log=True),
    Panel("Learning rate", "", {"learning_rate": "learning rate"}, zero=True),
    Panel("Memory of the first rank", "bytes at the peak", {"memory_bytes": "measured"}, zero=True),
    Panel(
        "Rounding error of messages",
        "share of what is sent",
        {
            f"{ERROR}weights": "weights",
            f"{ERROR}gradients": "gradients",
            "quantization_zeroed_gradients": "zeroed",
        },
        zero=True,
    ),
    Panel("Balance of experts", "fullest over mean", {"experts/load": "load"}),
    Panel("Largest score of attention", "before any cap", {"max_attention_logit": "score"}),
)


def write_page(log_dirs: Sequence[str | os.PathLike[str]]) -> tuple[str, list[str]]:
    """Return the page of the runs, and a line for each folder that is no run's. Raises ValueError if all are such."""
    found, wrong = list[RunFiles](), list[str]()
    for folder in log_dirs:
        try:
            found.append(read_run(folder))
        except (ValueError, OSError) as error:
            wrong.append(f"{error}")
    if not found:
        raise ValueError("; ".join(wrong) or "no runs are named: give their --log-dir")
    several = len(found) > 1
    root = os.path.commonpath([files.folder.absolute() for files in found])
    names = [os.path.relpath(files.folder.absolute(), root) if several else "" for files in found]
    runs = [Run(name, files, read_curves(files.folder)) for name, files in zip(names, found, strict=True)]
    return _page(runs), wrong


def _page(runs: Sequence[Run]) -> str:
    title = ", ".join(f"{run.files.folder}" for run in runs)
    shared: dict[str, Callable[[], str]] = {
        "": lambda: _states(runs),
        "Curves": lambda: f'<div class="charts">{"".join(_panels(runs))}</div>',
        "Flags that differ from their defaults": lambda: _flags(runs),
    }
    own: dict[str, Callable[[Run], str]] = {
        "Where the time of an iteration goes": _bill,
        "Bytes that the first rank sends in an iteration": _bytes,
        "Memory": _memory,
        "Events": _events,
        "Layout": _layout,
        "Environment": _environment,
    }
    parts = [_part(name, make) for name, make in shared.items()]
    parts[2:2] = [_part(name, lambda make=make: _each(runs, make)) for name, make in own.items()]  # type: ignore[misc]
    lives = any(run.files.lives and not run.files.ends for run in runs)
    body = f"<h1>{text(title)}</h1><small>written {text(now())}</small>{''.join(parts)}"
    return page(title, body, refresh=REFRESH_S if lives else 0)


def _part(title: str, make: Callable[[], str]) -> str:
    """Return a part of the page, left out if it is empty. Lines that do not give it are no end of the page."""
    try:
        made = make()
    except (*WRONG, OSError) as error:
        made = f'<p class="note">not drawn: the files of the run do not give it ({text(redact(f"{error!r}"))})</p>'
    head = f"<h2>{text(title)}</h2>" if title else ""
    return f"<section>{head}{made}</section>" if made else ""


def _each(runs: Sequence[Run], make: Callable[[Run], str]) -> str:
    """Return a part of every run, below its name if there are several."""
    made = [(run, _part("", lambda run=run: make(run))) for run in runs]  # type: ignore[misc]
    return "".join(f"<h3>{text(run.name)}</h3>{part}" if run.name else part for run, part in made if part)


# -- all runs --------------------------------------------------------------------------------------------------------


def _states(runs: Sequence[Run]) -> str:
    every = [redact(facts(run.files)) for run in runs]
    names = dict.fromkeys(name for each in every for name in each)
    alarm = "".join(
        f'<p class="alarm">{text(run.name or "this run")} needs a person: {text(redact(state(run.files).words))}</p>'
        for run in runs
        if state(run.files).alarming
    )
    heads = ["", *(run.name for run in runs)] if len(runs) > 1 else []
    return alarm + table(heads, [[name, *(each.get(name, "") for each in every)] for name in names])


def _panels(runs: Sequence[Run]) -> Iterator[str]:
    marks = list(_marks(runs[0])) if len(runs) == 1 else []
    for panel in PANELS:
        series = [
            each for number, run in enumerate(runs) for each in _series(panel, run, number, len(runs) > 1)
        ]
        if series:
            yield chart(panel.title, series, y=panel.unit, marks=marks, log_y=panel.log, zero=panel.zero)


def _series(panel: Panel, run: Run, number: int, several: bool) -> Iterator[Series]:
    """Yield the curves of a run. Those of other data begin with the name of the curve. A run alone has a colour for each."""
    found = [
        (f"{words}{name.removeprefix(begin)}", name)
        for begin, words in panel.curves.items()
        for name in run.curves
        if (name == begin or name.startswith(f"{begin} ")) and run.curves[name].x
    ]
    for place, (words, name) in enumerate(found):
        colour, kind = number if several else place, "dots" if name.startswith("eval_") else "line"
        yield Series(f"{run.name} {words}".strip(), *run.curves[name], colour, kind)
    needed = _needed(run) if "memory_bytes" in panel.curves and found else 0.0
    if needed:
        x = run.curves["memory_bytes"].x
        name = f"{run.name} predicted".strip()
        yield Series(name, [x[0], x[-1]], [needed] * 2, number if several else len(found), "dashed")


def _marks(run: Run) -> Iterator[Mark]:
    for event in run.files.events:
        kind, at = event.get("event"), event.get("iteration")
        if not isinstance(at, int):
            continue
        if kind == "start":
            yield Mark(at, f"start after iteration {at:,}", "start")
        elif kind == "save":
            yield Mark(at, f"saved {event.get('path')}", "save")
        elif kind == "end" and event.get("status") not in WELL:
            yield Mark(at, f"{event.get('why')}", "alarm")
    for at, skips in zip(*run.curves.get("skipped", Curve.empty()), strict=True):
        if skips:
            yield Mark(at, f"iteration {at:,.0f} was skipped: its norm was not finite", "alarm")


def _flags(runs: Sequence[Run]) -> str:
    """Return the options that differ from their defaults in some run. Those that runs differ in come first."""
    every = [{o.key: (show(value), show(usual)) for o, value, usual in chosen(run.config())} for run in runs]
    keys = dict.fromkeys(key for each in every for key in each)
    default = {key: usual for each in every for key, (_, usual) in each.items()}
    rows = [
        (f"--{key}", *(each.get(key, (default[key],))[0] for each in every), default[key]) for key in keys
    ]
    rows.sort(key=lambda row: len(set(row[1:-1])) == 1)
    return table(["flag", *(run.name or "value" for run in runs), "default"], rows)


# -- one run ---------------------------------------------------------------------------------------------------------


def _bill(run: Run) -> str:
    times, bill = run.curves.get("iteration_time_s"), "time_bill/"
    if not times:
        return ""
    x, rows = times.x, list[tuple[str, Sequence[float]]]()
    for name, curve in run.curves.items():
        if name.startswith(bill) and any(curve.y):
            at = dict(zip(*curve, strict=True)) if curve.x != x else None
            values = curve.y if at is None else [at.get(i, 0.0) for i in x]
            rows.append((_wait(name.removeprefix(bill)), values))
    rows.sort(key=lambda row: -sum(v for v in row[1] if math.isfinite(v)))
    if len(rows) > MOST_BANDS:
        rest = [sum(values) for values in zip(*(values for _, values in rows[MOST_BANDS - 1 :]), strict=True)]
        rows[MOST_BANDS - 1 :] = [("everything else", rest)]
    series = [Series(name, x, values, i, "band") for i, (name, values) in enumerate(rows)]
    seconds = run.predicted.get("seconds")
    if seconds and x:
        series.append(Series("predicted", [x[0], x[-1]], [float(seconds)] * 2, len(rows), "dashed"))
    return chart("Seconds of an iteration", series, y="seconds of the first rank", marks=list(_marks(run)))


def _wait(item: str) -> str:
    """Return an item of the bill in words: 'wait for gather across nodes'."""
    if not item.startswith("exposed_"):
        return item
    kind, _, link = item.removeprefix("exposed_").partition("_")
    return f"wait for {kind} {_link(link)}".strip()


def _link(name: str) -> str:
    return {short(link): across(link) for link in links_of(2)}.get(name.removesuffix("_node"), name)


def _bytes(run: Run) -> str:
    """Return bars by hop and link, beside the planner's count of the full global batch."""
    formula, rows = run.predicted.get("bytes") or {}, list[Bar]()
    measured = {
        name.removeprefix("bytes/"): median(curve.y[-LATEST:])
        for name, curve in run.curves.items()
        if name.startswith("bytes/")
    }
    for key in dict.fromkeys((*measured, *formula)):
        kind, _, link = key.removesuffix("_bytes").partition("_")
        sent, counted = measured.get(key, 0.0), formula.get(key)
        off = "" if not counted else f", {sent / counted - 1:+.2%} of the formula's {human_bytes(counted)}"
        rows.append(Bar(f"{kind} {_link(link)}", sent, counted, human_bytes(sent) + off))
    said = "Medians of the latest iterations. The tick is the planner's count for a full global batch."
    return f'{bars(rows)}<p class="note">{said}</p>' if rows else ""


def _needed(run: Run) -> float:
    """Return the predicted memory with what was in use before the model, in bytes; 0 if it is not known."""
    items = run.predicted.get("memory") or {}
    return sum(items.values()) + run.predicted.get("in_use_before", 0) if items else 0.0


def _memory(run: Run) -> str:
    items, peak = run.predicted.get("memory") or {}, run.curves.get("memory_bytes")
    rows = [("measured at the peak", max(peak.y))] if peak else []
    rows += (
        [("predicted", _needed(run)), ("of it in use before the model", run.predicted["in_use_before"])]
        if items
        else []
    )
    rows += [(f"of it {name}", float(size)) for name, size in items.items() if size]
    return bars([Bar(name, size, None, human_bytes(size)) for name, size in rows])


def _events(run: Run) -> str:
    saves = sum(event.get("event") == "save" for event in run.files.events)
    rows = [
        (event.get("time", ""), event.get("event"), event.get("iteration", ""), _words(event))
        for event in run.files.events
        if event.get("event") != "save"
    ]
    if (run.files.folder / "hang").is_dir():
        rows.append(("", "hang", "", f"{run.files.folder / 'hang'} has the stacks of the ranks"))
    said = f"{plural(saves, 'save')}; metrics.jsonl has every skipped iteration"
    return (
        table(["time", "event", "iteration", ""], rows[-MOST_EVENTS:]) + f'<p class="note">{said}</p>'
        if rows
        else ""
    )


def _words(event: Mapping[str, Any]) -> str:
    if event.get("event") == "start":
        return f"{plural(len(event.get('hosts', ())), 'host')}, after {plural(event.get('restarts', 0), 'restart')}"
    return f"{event.get('why', '')} (status {event['status']})" if "status" in event else ""


def _layout(run: Run) -> str:
    """Draw nodes with their ranks: where each lies on the axes of more than one rank, coloured by its stage."""
    config, world = run.config(), run.world()
    grid, hosts = grid_of(config, world, config.shards(world).factors), run.start.get("hosts", ())
    axes = [axis for axis in grid.axes if axis.size > 1]
    nodes = dict[str, list[tuple[str, int]]]()
    for rank in range(min(world.world_size, MOST_RANKS)):
        node = rank // grid.ranks_per_node
        host = f" ({hosts[node]})" if node < len(hosts) else ""
        places = "".join(f"\n{axis.name} {axis.index(rank)}" for axis in axes)
        nodes.setdefault(f"node {node}{host}", []).append(
            (f"rank {rank}{places}", grid.axis("pp").index(rank))
        )
    lines = "".join(f"<p>{text(line.strip())}</p>" for line in layout_lines(config, world))
    more = world.world_size - MOST_RANKS
    return boxes(nodes) + (f'<p class="note">and {plural(more, "rank")} more</p>' if more > 0 else "") + lines


def _environment(run: Run) -> str:
    start = run.start
    rows = [("folder", f"{run.files.folder.absolute()}"), ("run", start.get("run_id", ""))]
    rows += [(name, start.get(name, "")) for name in ("device", "ranks", "ranks_per_node", "job_id")]
    rows += [("hosts", ", ".join(map(str, start.get("hosts", ()))))]
    rows += [(name, version) for name, version in (start.get("versions") or {}).items()]
    return table([], [(name, f"{value}") for name, value in rows if value != ""])
