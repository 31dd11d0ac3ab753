"""The status of a run: its state, whether that needs a person, how far it is, how fast, why it was restarted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from enum import Enum
from statistics import median
from typing import NamedTuple

from megazero.log.exit_status import ExitStatus
from megazero.log.units import duration
from megazero.ops.lease import SAVING, SILENT_S
from megazero.ops.vitals import GONE, Line, SlurmJob, Vitals, mean, when

# A run without a lease (its log disk was full, or its version is older) counts as silent after so long, and many
# iterations, without a line.
LINE_S = 600.0
START_S = 1800.0  # that a start may take: its ranks' limit is 5 minutes, but a cluster's files may be slow
STILL_S = 120.0  # an iteration hangs if it takes longer than this and than ITERATIONS usual ones
ITERATIONS = 10
SAVE_S = 600.0  # a save is long if it takes longer than this and than SAVES times the longest so far
SAVES = 3
SLOW = 0.5  # of the usual pace, for RECENT iterations
RECENT = 10
SKEW_S = 30.0  # between clocks, from which on it is reported
ACT_S = 300.0  # that a batch script, or SLURM after the loss of a node, has to act
# States of a job in SLURM's words.
_WAITS = {"PENDING", "REQUEUED", "REQUEUE_FED"}
_HELD = {"REQUEUE_HOLD", "SPECIAL_EXIT"}
_RUNS = {"RUNNING", "CONFIGURING", "COMPLETING", "STAGE_OUT", "SIGNALING", "RESIZING"}
_PAUSED = {"SUSPENDED", "STOPPED"}
_NEVER = ("Held", "held", "DependencyNeverSatisfied", "BadConstraints", "Invalid", "PartitionNodeLimit")


class State(Enum):
    """The state of a run: its name, and whether it needs a person."""

    QUEUED = "queued", False
    REQUEUED = "requeued", False
    PAUSED = "paused", False
    STARTING = "starting", False
    UNDER_WAY = "under way", False
    SAVING = "saving", False
    STOPPING = "stopping", False
    LOST = "lost", False
    STOPPED = "stopped", False
    FINISHED = "finished", False
    HELD = "held", True
    SLOW = "slow", True
    SAVING_LONG = "saving for long", True
    HANGING = "hanging", True
    SILENT = "silent", True
    KILLED = "killed", True
    GAVE_UP = "gave up", True
    FAILED = "failed", True
    SUPERSEDED = "superseded", True

    def __init__(self, words: str, alarming: bool) -> None:
        self.words, self.alarming = words, alarming


_PROGRESSES = {State.UNDER_WAY, State.SAVING, State.SAVING_LONG, State.SLOW}


class Judgement(NamedTuple):
    """A state, and the sentence about it."""

    state: State
    why: str

    @property
    def words(self) -> str:
        return f"{self.state.words}: {self.why}"


def judge(run: Vitals) -> Judgement:
    """Return the state of a run. If its job waits, SLURM's word counts most; if it runs, the beat of its lease."""
    lease, job = run.lease, run.job
    if run.asked and lease and lease.job != run.asked and lives(run):
        return Judgement(State.SUPERSEDED, f"{lease.words}, holds {run.folder}, not job {run.asked}")
    if job and job.state in _PAUSED:  # first: its last beat is recent for a while
        return Judgement(State.PAUSED, f"job {job.number} is {job.state}, and goes on when SLURM lets it")
    if lives(run):
        return _starting(run) if not run.starts or run.begins else _training(run)
    if job and job.state in _WAITS | _HELD:
        return _waiting(run)
    before = lease.restarts if lease else run.starts[-1]["restarts"] if run.starts else -1
    if job and job.state in _RUNS and job.restarts > before:
        return _loading(job)
    return _silent(run) if run.ended is None else _ended(run, run.ended)


def lives(run: Vitals) -> bool:
    """Tell whether the first rank is alive, and the start has not ended."""
    if run.ended is not None or run.heard_s is None:
        return False
    if run.lease is not None:
        return not run.lease.released and run.heard_s <= SILENT_S
    return run.heard_s <= max(LINE_S, 20 * (run.seconds_per_iteration or 0.0))


def _loading(job: SlurmJob) -> Judgement:
    """A job runs, and no rank of this start has written anything."""
    why = f"job {job.number} is {job.state} for {duration(job.used_s)}, no rank has begun"
    return Judgement(State.HANGING if job.used_s > START_S else State.STARTING, why)


def _starting(run: Vitals) -> Judgement:
    lease = run.lease
    if lease is None:
        return Judgement(State.STARTING, "no iteration yet")
    began = when({"time": lease.started})
    seconds = (run.now - began).total_seconds() if began else 0.0
    if seconds > START_S:
        return Judgement(State.HANGING, f"{lease.words}, has been in {lease.phase or 'its start'} since then")
    return Judgement(State.STARTING, f"for {duration(seconds)}, in {lease.phase or 'the start'}")


def _training(run: Vitals) -> Judgement:
    lease, heard = run.lease, duration(max(0.0, run.heard_s or 0.0))
    usual = median([line["iteration_time_s"] for line in run.latest] or [0.0])
    limit = max(STILL_S, ITERATIONS * usual) if usual else LINE_S
    if lease is not None and lease.phase.startswith(SAVING):
        longest = max((e["seconds"] for e in run.events if e.get("event") == "save"), default=0.0)
        long = lease.phase_s > max(SAVE_S, SAVES * longest)
        than = f"; the longest save so far took {duration(longest)}" if longest else ""
        state = State.SAVING_LONG if long else State.SAVING
        return Judgement(state, f"{lease.phase}, for {duration(lease.phase_s)}{than}")
    if lease is not None:
        iteration = lease.phase_s if lease.phase.startswith("iteration") else 0.0
        if max(lease.still_s, iteration) > limit:
            moves = f"not moved for {duration(lease.still_s)}" if lease.still_s > limit else "not got on"
            than = f"; an iteration takes {duration(usual)}" if usual else ""
            why = f"{lease.phase} has lasted {duration(lease.phase_s)} and has {moves}{than}"
            return Judgement(State.HANGING, why)
    pace = [line["tokens_per_s"] for line in run.latest]
    if len(pace) >= 3 * RECENT:
        now, before = median(pace[-RECENT:]), median(pace[:-RECENT])
        if now < SLOW * before:
            return Judgement(
                State.SLOW, f"{now:,.0f} tokens/s in the last {RECENT} iterations, {before:,.0f} before"
            )
    return Judgement(State.UNDER_WAY, f"last heard of {heard} ago")


def _waiting(run: Vitals) -> Judgement:
    job = run.job
    assert job is not None
    last = run.ended["why"] if run.ended else "its ranks said nothing" if run.starts or run.begins else ""
    why = f"job {job.number} waits ({job.reason})" + (f"; the last start ended: {last}" if last else "")
    if job.state in _HELD or any(word in job.reason for word in _NEVER):
        return Judgement(State.HELD, f"{why}; SLURM will not start it by itself")
    return Judgement(State.REQUEUED if last else State.QUEUED, why)


def _silent(run: Vitals) -> Judgement:
    """No rank shows life, and none has recorded how it ended."""
    job, lease = run.job, run.lease
    of = f"job {job.number} is {job.state}" if job else ""
    where = f" on {lease.host}" if lease else ""
    if run.heard_s is None and not run.events:
        if job and job.state in _RUNS:
            return _loading(job)
        by_hand = job is not None and job.state == "CANCELLED"
        return Judgement(State.STOPPED if by_hand else State.FAILED, f"{of}, and left nothing")
    silence = f"nothing heard{where} for {duration(run.heard_s or 0.0)}"
    if lease is not None and lease.released:
        return Judgement(State.STOPPED, f"released by {lease.words}, without a word of why")
    if job and job.state == "CANCELLED":
        return Judgement(State.STOPPED, f"{of}; killed before it could save")
    if job and job.state in _RUNS:
        state = State.SILENT if (run.heard_s or 0.0) > ACT_S else State.LOST
        return Judgement(state, f"{silence}: killed, or its node or the link to it was lost; {of}")
    over = f"; {of if job.state != GONE else f'SLURM does not know job {job.number} any more'}" if job else ""
    return Judgement(State.KILLED, f"{silence}: its ranks were killed, or its node lost{over}")


def _ended(run: Vitals, end: Line) -> Judgement:
    """The last start or its batch script has recorded how it ended."""
    job, then, status = run.job, run.then or {}, end["status"]
    why = "; ".join(dict.fromkeys([end["why"], *([then["why"]] if then else [])]))
    again = status in (ExitStatus.STOPPED, ExitStatus.RANK_LOST)
    names = {each.value: f", {each.name.lower().replace('_', ' ')}" for each in ExitStatus}
    why = f"{why} (status {status}{names.get(status, '')})"
    if status == ExitStatus.FINISHED:
        return Judgement(State.FINISHED, end["why"])
    if status == ExitStatus.IN_USE:
        return Judgement(State.SUPERSEDED, why)
    if status in (ExitStatus.SWITCHED_OFF, ExitStatus.INTERRUPTED):
        return Judgement(State.STOPPED, why)
    if not again:
        return Judgement(State.FAILED, why)
    if then.get("then") == "chain":
        return Judgement(State.REQUEUED, why)
    if job and job.state == "CANCELLED":
        return Judgement(State.STOPPED, f"{why}; job {job.number} is CANCELLED")
    if then.get("then") == "end" and "cancelled" in then["why"]:
        return Judgement(State.STOPPED, why)
    if then.get("then") == "end":
        return Judgement(State.GAVE_UP, why)
    if job and job.state in _RUNS:
        late = (run.heard_s or 0.0) > ACT_S
        return Judgement(State.GAVE_UP if late else State.STOPPING, f"{why}; job {job.number} is {job.state}")
    if job and then:
        after = f"its new start said nothing, and job {job.number} is {job.state}"
        return Judgement(State.KILLED, f"{after}; the one before: {why}")
    if job:
        return Judgement(
            State.GAVE_UP, f"{why}; job {job.number} is {job.state}, and nothing starts it again"
        )
    if then:
        return Judgement(State.REQUEUED, why)
    return Judgement(State.STOPPED if status == ExitStatus.STOPPED else State.GAVE_UP, why)


# -- in words --------------------------------------------------------------------------------------------------------


def facts(run: Vitals) -> dict[str, str]:
    """Return what an operator wants to know of a run, as text by name."""
    judgement = judge(run)
    out = {"run": f"{run.folder}", "state": judgement.words, "position": _position(run)}
    if abs(run.ahead_s) > SKEW_S:
        host = f" of {run.lease.host}" if run.lease else ""
        way = "ahead of" if run.ahead_s > 0 else "behind"
        out["clock"] = f"that{host} is {duration(abs(run.ahead_s))} {way} the file system's; its times follow"
    latest = run.latest
    if latest:
        seconds = mean(line["iteration_time_s"] for line in latest) or 0.0
        # Rates are totals over total time, as the console's.
        tokens, rate = (
            (mean(line[name] * line["iteration_time_s"] for line in latest) or 0.0) / seconds
            if seconds
            else 0.0
            for name in ("tokens_per_s", "tflops_per_rank")
        )
        out["speed"] = f"{seconds:.3g} s per iteration, {tokens:,.0f} tokens/s, {rate:.3g} TFLOP/s per rank"
        out["loss"] = ", ".join([f"{run.last['lm_loss']:.4f}", *_evaluated(run)])
    if run.seconds_left and judgement.state in _PROGRESSES:
        done = (run.now + timedelta(seconds=run.seconds_left)).astimezone()
        out["done"] = f"in {duration(run.seconds_left)}, {done:%F %H:%M %Z}"
    out |= {"checkpoint": _checkpoint(run), "slowest rank": _slowest(run)}
    if run.starts:
        out["restarts"] = f"{run.starts[-1]['restarts']}"
        hosts = run.starts[-1]["hosts"]
        job = f"job {run.starts[-1]['job_id']} on " if run.starts[-1]["job_id"] else ""
        out["runs as"] = (
            f"{job}{', '.join(hosts[:8])}{f' and {len(hosts) - 8} more' if len(hosts) > 8 else ''}"
        )
    return {name: words for name, words in out.items() if words}


def compared(runs: Sequence[Vitals]) -> list[str]:
    """Return a table with a line for each run: state, position, losses, speed, restarts."""
    rows = [("run", "state", "iteration", "loss", "eval loss", "s/iter", "tokens/s", "TFLOP/s", "restarts")]
    for run in runs:
        seconds = sum(line["iteration_time_s"] for line in run.latest)

        def rate(name: str, run: Vitals = run, seconds: float = seconds) -> float:
            return sum(line[name] * line["iteration_time_s"] for line in run.latest) / seconds

        speed = ("", "", "")
        if seconds:
            tokens, flops = f"{rate('tokens_per_s'):,.0f}", f"{rate('tflops_per_rank'):.3g}"
            speed = (f"{seconds / len(run.latest):.3g}", tokens, flops)
        last = run.evaluations[-1]["eval_lm_loss"] if run.evaluations else None
        of = f"/{run.last_iteration:,}" if run.last_iteration else ""
        rows.append(
            (
                f"{run.folder}",
                judge(run).state.words,
                f"{run.iteration:,}{of}",
                f"{run.last['lm_loss']:.4f}" if run.last else "",
                "" if last is None else f"{last:.4f}",
                *speed,
                f"{run.starts[-1]['restarts']}" if run.starts else "",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = ((f"{word:<{width}}" for word, width in zip(row, widths, strict=True)) for row in rows)
    return ["  ".join(row).rstrip() for row in aligned]


def restarts(run: Vitals) -> list[str]:
    """Return a line for every start but the first, with why the one before ended."""
    out, why = list[str](), ""
    for event in run.events:
        at = when(event)
        clock = f"{at.astimezone():%F %T}" if at else "?"
        kind = event.get("event")
        if kind == "end" or (kind == "job" and not why):
            why = f"status {event['status']}: {event['why']}"
        elif kind == "start":
            if event is not run.starts[0]:
                reason = why or "it said nothing: killed, or its node lost"
                out.append(f"{clock}  after iteration {event['iteration']}  ({reason})")
            why = ""
    return out


def _position(run: Vitals) -> str:
    if not run.iterations:
        return "no iteration yet"
    total = run.last_iteration
    of = f" of {total:,} ({run.iteration / total:.1%})" if total else ""
    return f"iteration {run.iteration:,}{of}, {run.last['consumed_samples']:,} samples"


def _evaluated(run: Vitals) -> list[str]:
    if not run.evaluations:
        return []
    last = run.evaluations[-1]
    name = f" on {last['eval_data']}" if "eval_data" in last else ""
    return [f"evaluation{name} {last['eval_lm_loss']:.4f} at iteration {last['iteration']:,}"]


def _checkpoint(run: Vitals) -> str:
    saves = list[Line]()
    for event in run.events:
        if event.get("event") == "start":  # it may go on from an older one than the last
            saves = [save for save in saves if save["iteration"] <= event["iteration"]]
        saves += [event] if event.get("event") == "save" else []
    if not saves:
        return "none" if run.starts else ""
    at = when(saves[-1])
    age = f", {duration((run.now - at).total_seconds())} ago" if at else ""
    return f"{saves[-1]['path']}{age}, written in {duration(saves[-1]['seconds'])}"


def _slowest(run: Vitals) -> str:
    rows = [line["rank_times"] for line in run.latest if "slowest_rank" in line.get("rank_times", {})]
    if not rows:
        return ""
    slowest = Counter((row["slowest_rank"], row.get("slowest_host")) for row in rows)
    (((rank, host), count),) = slowest.most_common(1)
    most, least = mean(row["most_s"] for row in rows), mean(row["least_s"] for row in rows)
    where = f" on {host}" if host else ""
    works = f"the slowest works {most:.3g} s of an iteration, the fastest {least:.3g} s"
    return f"{rank}{where}, in {count} of the last {len(rows)} iterations; {works}"
