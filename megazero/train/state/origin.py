"""The origin of a run: random weights or a checkpoint. The run's length, data and model depend on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from megazero.checkpoint import store
from megazero.checkpoint.directory import Look, complete, in_the_way, restore, supersede
from megazero.checkpoint.errors import agree, agree_local, error_number
from megazero.checkpoint.manifest import open_manifest
from megazero.config import RunConfig
from megazero.config.model.published import CONFIG_FILE, is_published, published_folder
from megazero.config.options.fields import Resume
from megazero.config.options.sections import CheckpointConfig
from megazero.config.read.beginning import Chosen, checkpoint_to_load
from megazero.config.run import all_options
from megazero.convert.importing import Published
from megazero.data.tokenizer_settings import OF_MODEL
from megazero.mesh.mesh import Mesh, world_group
from megazero.train.state.progress import Progress, impossible_numbers

Answer = TypeVar("Answer")
Damaged = dict[Path, str]  # checkpoints whose bytes have changed, and what is wrong with each
# Files by which other trainers find their newest checkpoint, and what to do with that.
TRACKERS = {
    "latest_checkpointed_iteration.txt": "Megatron's: megazero convert from-megatron makes a checkpoint of it",
    "latest": "DeepSpeed's, whose checkpoints are not read here",
}


class SavedCheckpoint(NamedTuple):
    """A checkpoint with its description of itself."""

    path: Path
    manifest: store.Manifest
    state: Mapping[str, Any]

    @property
    def progress(self) -> Progress:
        seq_length = int(self.manifest.configuration.get("model", {}).get("seq_length") or 0)
        return Progress.of_state(self.state, str(self.path), seq_length)

    @property
    def name(self) -> str:
        """What a run that begins from its weights calls them."""
        run, base = self.state["run_id"], self.state.get("base", "")
        own = f"iteration {self.manifest.step} of run {run}" if run else ""
        return ", which began from ".join(filter(None, (own, base)))


@dataclass(frozen=True)
class Origin:
    """What a run begins from: a checkpoint (``saved``), a folder of Hugging Face (``published``), or random weights.

    own: this command has saved the checkpoint itself, so all of it is loaded: --finetune and --no-load-* are about
    the checkpoint that it began from.
    """

    progress: Progress = Progress()
    saved: SavedCheckpoint | None = None
    published: Published | None = None
    own: bool = False

    @property
    def of_model(self) -> dict[str, bytes]:
        """The files of ``OF_MODEL`` by name: those of the folder that the weights are from, if they are from one."""
        if self.published is not None:
            return self.published.of_model
        held = self.saved.manifest.files if self.saved else ()
        return {
            name: store.read_file(self.saved.path, name) for name in OF_MODEL if self.saved and name in held
        }


def find_origin(config: RunConfig, mesh: Mesh) -> Origin:
    """Find the checkpoint that --load means, or begin from random weights (``_start_fresh``). Collective.

    The run begins from random weights if --load is not given, or where ``_start_fresh`` permits it. Raises the same
    CheckpointError on every rank if a checkpoint is wanted and there is none, if it cannot be read, or if --save
    holds checkpoints of another run.
    """
    origin = _find(config, mesh)
    _refuse_another_runs_folder(config, mesh, origin.progress.run_id)
    return origin


def _find(config: RunConfig, mesh: Mesh) -> Origin:
    options = config.checkpoint
    if options.load is None:
        return Origin()
    if options.save is not None:  # all that follows keeps the checkpoint's path
        _of_first_rank(mesh, partial(restore, Path(options.save)))
    values = config.values()
    chosen, damaged = _sound(mesh, lambda look: checkpoint_to_load(values, look))
    if chosen.path is None and not damaged and is_published(options.load):
        folder = published_folder(options.load)
        opened = agree_local(
            world_group(), f"'{folder}' not loaded", lambda: Published.open(folder, options.accept_field)
        )
        return Origin(Progress(base=opened.base, license=opened.license), published=opened)
    if chosen.path is None:
        return _start_fresh(options, options.load, mesh, damaged)
    saved = _opened(chosen.path)
    if options.finetune and not chosen.again:
        license = saved.progress.license
        return Origin(Progress(notes=tuple(_passed_over(damaged)), base=saved.name, license=license), saved)
    root, step = chosen.path.parent, saved.manifest.step
    notes = (
        *_gone_on(options, chosen),
        *_passed_over(damaged),
        *_of_first_rank(mesh, lambda: [] if chosen.named else list(_incomplete(root, step))),
        *_replicas(bool(config.outer.outer_meet), saved),
        *_changed_order(config, saved.manifest.configuration),
    )
    return Origin(replace(saved.progress, notes=notes), saved, own=chosen.again)


def _sound(mesh: Mesh, find: Callable[[Look], Chosen]) -> tuple[Chosen, Damaged]:
    """Return the checkpoint that ``find`` chooses among those whose bytes are as they were written. Collective.

    Also return the damaged ones that were passed over. A checkpoint that was named is never passed over, nor one that
    the storage cannot read now: these are errors, on every rank.
    """
    damaged: Damaged = {}
    while True:
        chosen = _of_first_rank(mesh, lambda: find(lambda path: None if path in damaged else complete(path)))
        if chosen.path is None:
            return chosen, damaged
        try:
            manifest = store.shared_manifest(chosen.path, world_group())
            store.check_bytes(chosen.path, manifest, world_group())
            return chosen, damaged
        except store.CheckpointError as error:
            if chosen.named or error_number(error) is not None:
                raise
            damaged[chosen.path] = f"{error}"


def leave_behind(config: RunConfig, origin: Origin, mesh: Mesh, last: int) -> tuple[str, ...]:
    """Rename checkpoints in --save that are newer than the one the run continues from. Returns a note. Collective.

    Raises CheckpointError if something else has the name of a checkpoint that the run may save, up to the ``last``
    iteration.
    """
    save, path = config.checkpoint.save, origin.saved and origin.saved.path
    if save is None:
        return ()
    renamed = list[Path]()
    if path is not None and origin.progress.checkpoint:
        renamed = _of_first_rank(mesh, partial(supersede, Path(save), path))
    others = _of_first_rank(mesh, lambda: in_the_way(Path(save), origin.progress.iteration, last))
    if others:
        raise store.CheckpointError(
            f"--save {save}: {', '.join(each.name for each in others)} has the name of a checkpoint that this run "
            "may save, and is none; move it away, or save to another folder"
        )
    names = ", ".join(each.name for each in renamed)
    return (
        (f"the run goes on from {path and path.name}; what was newer is never loaded or deleted: {names}",)
        if names
        else ()
    )


def _gone_on(options: CheckpointConfig, chosen: Chosen) -> Iterator[str]:
    """Yield a note if a restart does not begin at --load, because it has saved since."""
    elsewhere = os.path.realpath(options.load or "") != os.path.realpath(options.save or "")
    if chosen.again and (elsewhere or options.ckpt_step is not None or options.finetune):
        step = "" if options.ckpt_step is None else f" --ckpt-step {options.ckpt_step}"
        yield (
            f"--load {options.load}{step}: this command began there before, and goes on from {chosen.path}, which it "
            "has saved since; move that away to begin there again"
        )


def _opened(path: Path) -> SavedCheckpoint:
    """Return a checkpoint with its manifest and state. Collective.

    Raises CheckpointError on every rank if a number in the state is impossible.
    """
    everyone = world_group()
    saved = SavedCheckpoint(path, store.shared_manifest(path, everyone), store.shared_state(path, everyone))
    if faults := list(impossible_numbers(saved.state, saved.manifest.step)):
        raise store.CheckpointError(
            f"checkpoint '{path}' not loaded: in its state {'; '.join(faults)}: load an older checkpoint"
        )
    return saved


def _start_fresh(options: CheckpointConfig, load: str, mesh: Mesh, damaged: Damaged) -> Origin:
    """Return random weights, with a note: for the first job of a chain (--load is --save) or --allow-fresh-start.

    Raises CheckpointError otherwise, and whenever the folder has something that may be the wanted checkpoint: then
    random weights are no cure.
    """
    found = list(_passed_over(damaged)) + _of_first_rank(
        mesh,
        lambda: [*_incomplete(Path(load)), *_elsewhere(Path(load)), *_foreign(Path(load))],
    )
    if found:
        raise store.CheckpointError(f"--load {load} holds no complete checkpoint; {'; '.join(found)}")
    own = options.save is not None and os.path.realpath(options.save) == os.path.realpath(load)
    chain = own and not options.finetune  # which would save among the checkpoints of the run that it loads
    if (chain or options.allow_fresh_start) and not options.exit_on_missing_checkpoint:
        note = f"--load {load} holds no checkpoint: the run starts from random weights"
        return Origin(Progress(notes=(note,)))
    cure = "leave --load out, or add --allow-fresh-start,"
    if options.exit_on_missing_checkpoint:
        cure = "leave --exit-on-missing-checkpoint out"
    raise store.CheckpointError(
        f"--load {load} holds no complete checkpoint. Name a folder that does; or {cure} to start from random weights"
    )


def _refuse_another_runs_folder(config: RunConfig, mesh: Mesh, run_id: str) -> None:
    """Refuse to save in a folder with checkpoints of another run, which this one would overwrite and prune."""
    save = config.checkpoint.save
    if save is None:
        return

    def held() -> tuple[Path, str] | None:
        for path in reversed(store.checkpoints(save)):
            with suppress(store.CheckpointError):  # damaged: the one before tells
                return path, store.read_state(path)["run_id"]
        return None

    found = _of_first_rank(mesh, held)
    if found is None or run_id and found[1] == run_id:
        return
    raise store.CheckpointError(
        f"--save {save} holds checkpoints of another run, up to '{found[0].name}': continue that run with --load "
        f"{save}, or save to another folder"
    )


def _of_first_rank(mesh: Mesh, look: Callable[[], Answer]) -> Answer:
    """Return the first rank's answer: over a network, a folder may look different to others. Collective.

    Its error is raised on every rank.
    """
    found: list[Any] = agree(
        world_group(), "the first rank looked", lambda: look() if mesh.rank == 0 else None, Chosen
    )
    return found[0]


def _replicas(meets: bool, saved: SavedCheckpoint) -> Iterator[str]:
    """Yield a note if the run leaves the other replicas, or comes to some. meets: it has others.

    Raises CheckpointError for a checkpoint that holds several replicas, as they were written before 0.4.0.
    """
    if several := len(saved.state.get("replicas", ())):
        raise store.CheckpointError(
            f"'{saved.path}' holds {several} outer replicas of one launch; each is a launch of its own now, and the "
            "order of their samples another: --finetune starts a new run from the weights that they share"
        )
    if meets and not saved.progress.meeting:
        yield "the checkpoint is of a run without other replicas: this one begins from its weights and moments"
    if saved.progress.meeting and not meets:
        yield "the run goes on without other replicas, from the weights of their last meeting, behind their samples"


def _changed_order(config: RunConfig, before: Mapping[str, Any]) -> Iterator[str]:
    """Yield options that have changed so that the same count of consumed samples now means other samples."""
    now = config.to_dict()
    for opt in (each for each in all_options().values() if Resume.ORDER in each.resume):
        old, new = before.get(opt.section, {}).get(opt.name), now[opt.section][opt.name]
        if (old or None) != (new or None):  # a checkpoint may be older than the option
            yield (
                f"{opt.flag} was {old} when the checkpoint was written and is {new} now: samples "
                "come in another order from here on, so some repeat and some are left out"
            )


def _incomplete(root: Path, after: int = -1) -> Iterator[str]:
    """Yield what is wrong with each incomplete checkpoint under ``root`` whose step is above ``after``."""
    for path in sorted(root.glob("iter_*")):
        step = path.name.removeprefix("iter_")
        if step.isdecimal() and int(step) > after:
            try:
                open_manifest(path)
            except (store.CheckpointError, OSError) as error:
                yield f"{path.name} was left out: {error}"


def _elsewhere(root: Path) -> Iterator[str]:
    """Yield where near ``root`` other checkpoints lie."""
    # A hidden folder is the trial of a start that was killed.
    for path in sorted([*root.glob("iter_*.superseded*"), *root.glob("[!.]*/iter_*")]):
        if complete(path) is not None:
            near = path if path.parent == root else path.parent
            yield f"a checkpoint lies at {path}: name {near} to load it"
            return


def _passed_over(damaged: Damaged) -> Iterator[str]:
    """Yield what is wrong with each checkpoint that was passed over as damaged."""
    for path, why in damaged.items():
        yield f"{path.name} was left out: {why}"


def _foreign(root: Path) -> Iterator[str]:
    """Yield what other programs have saved under ``root``: whoever loads that does not want random weights."""
    for name, whose in TRACKERS.items():
        if (root / name).is_file():
            yield f"'{name}' there is {whose}"
    if (root / CONFIG_FILE).is_file():
        yield f"'{CONFIG_FILE}' there is Hugging Face's: --load hf:{root} starts from its weights"
