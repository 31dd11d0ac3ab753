"""The origin of a run: random weights or a checkpoint. The run's length, data and model depend on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from megazero.checkpoint import store
from megazero.checkpoint.directory import complete, supersede
from megazero.checkpoint.errors import agree, agree_local
from megazero.checkpoint.manifest import check_sizes
from megazero.config import RunConfig
from megazero.config.model.loaded import Chosen, checkpoint_to_load
from megazero.config.model.published import CONFIG_FILE, is_published, published_folder
from megazero.config.options.sections import CheckpointConfig
from megazero.config.secrets import redact
from megazero.convert.importing import Published
from megazero.mesh.mesh import Mesh
from megazero.train.state.progress import LeftOut, Progress

Answer = TypeVar("Answer")
# Files by which other trainers find their newest checkpoint, and what to do with that.
TRACKERS = {
    "latest_checkpointed_iteration.txt": "Megatron's: megazero convert from-megatron makes a checkpoint of it",
    "latest": "DeepSpeed's, whose checkpoints are not read here",
}
# What the order of samples depends on, besides the files' contents and the number of samples it was made for.
SAMPLE_ORDER = (
    ("training", "seed"),
    ("model", "seq_length"),
    ("data", "data_path"),
    ("data", "split"),
    ("data", "train_data_path"),
    ("data", "train_weighted_split_paths"),
    ("data", "mock_data"),
)
# What that number was computed from, for checkpoints that do not have it.
RUN_LENGTH = (
    ("training", "train_iters"),
    ("training", "train_samples"),
    ("batch", "global_batch_size"),
    ("batch", "rampup_batch_size"),
)


@dataclass(frozen=True)
class Origin:
    """What a run begins from.

    path: the checkpoint, or None for random weights. manifest, state: the checkpoint's description of itself.
    published: a folder of Hugging Face, instead of a checkpoint. own: this command saved the checkpoint itself, so
    all of it is loaded, whatever its flags omit from the checkpoint it began with.
    """

    progress: Progress = Progress()
    path: Path | None = None
    manifest: store.Manifest | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    published: Published | None = None
    own: bool = False


def find_origin(config: RunConfig, mesh: Mesh) -> Origin:
    """Find the checkpoint that --load means, or begin from random weights (``_start_fresh``). Collective.

    The run begins from random weights if --load is not given, or where ``_start_fresh`` permits it. Raises the same
    CheckpointError on every rank if a checkpoint is wanted and there is none, if it cannot be read, or if --save
    holds checkpoints of another run.
    """
    origin = _find(config, mesh)
    _refuse_another_runs_folder(config, mesh, origin.progress.run_id)
    return origin


def world_group() -> dist.ProcessGroup | None:
    """The group of all ranks, or None in a run of one process without torch.distributed."""
    return dist.group.WORLD if dist.is_initialized() else None


def _find(config: RunConfig, mesh: Mesh) -> Origin:
    options = config.checkpoint
    if options.load is None:
        return Origin()
    values = config.values()
    chosen = _of_first_rank(mesh, lambda: checkpoint_to_load(values, complete))
    if chosen.path is None and is_published(options.load):
        folder = published_folder(options.load)
        opened = agree_local(
            world_group(),
            f"'{folder}' not loaded",
            lambda: Published.open(folder, options.accept_field),
        )
        return Origin(published=opened)
    if chosen.path is None:
        return _start_fresh(options, options.load, mesh)
    origin = replace(_opened(chosen.path), own=chosen.again)
    assert origin.manifest is not None
    if options.finetune and not origin.own:
        return replace(origin, progress=Progress())
    notes = (
        *_gone_on(options, chosen),
        *(() if chosen.named else _incomplete(chosen.path.parent, origin.manifest.step)),
        *_changed_order(config, origin.manifest.configuration, "ordered_for" in origin.state),
    )
    return replace(origin, progress=replace(origin.progress, notes=notes))


def origin_before(save: str, iteration: int, mesh: Mesh) -> Origin:
    """Return the newest checkpoint under ``save`` from before an iteration. Collective.

    Raises CheckpointError on every rank if there is none.
    """

    path = _of_first_rank(mesh, lambda: store.latest(save, iteration))
    if path is None:
        raise store.CheckpointError(
            f"--save {save} holds no checkpoint from before iteration {iteration}; lower --save-interval"
        )
    return replace(_opened(path), own=True)


def leave_behind(config: RunConfig, origin: Origin, mesh: Mesh) -> tuple[str, ...]:
    """Rename checkpoints in --save that are newer than the one the run continues from. Returns a note. Collective."""
    save, path = config.checkpoint.save, origin.path
    if save is None or path is None or not origin.progress.checkpoint:
        return ()
    renamed = _of_first_rank(mesh, lambda: supersede(Path(save), path))
    names = ", ".join(each.name for each in renamed)
    return (
        (f"the run goes on from {path.name}; what was newer is never loaded or deleted: {names}",)
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


def _opened(path: Path) -> Origin:
    """Return the checkpoint to continue from, with its manifest and state. Collective."""
    manifest, state = agree_local(
        world_group(),
        f"checkpoint '{path}' not loaded",
        lambda: (store.read_manifest(path), store.read_state(path)),
    )
    left_out = tuple(LeftOut(**each) for each in state.get("left_out", ()))
    progress = Progress(
        state["iteration"],
        state["consumed_samples"],
        state["run_id"],
        (),
        state.get("ordered_for", {}),
        state.get("owes_evaluation", False),
        state.get("losses", {}),
        left_out,
        str(path),
        state.get("rollbacks", sum(each.rollback for each in left_out)),
        state.get("tokens", state["consumed_samples"] * _seq_length(manifest)),
    )
    return Origin(progress, path, manifest, state)


def _seq_length(manifest: store.Manifest) -> int:
    """Return the tokens of a sample in the run that saved, for checkpoints that do not count tokens."""
    return int(manifest.configuration.get("model", {}).get("seq_length") or 0)


def _start_fresh(options: CheckpointConfig, load: str, mesh: Mesh) -> Origin:
    """Return random weights, with a note: for the first job of a chain (--load is --save) or --allow-fresh-start.

    Raises CheckpointError otherwise, and whenever the folder has something that may be the wanted checkpoint: then
    random weights are no cure.
    """
    found = _of_first_rank(
        mesh, lambda: [*_incomplete(Path(load)), *_elsewhere(Path(load)), *_foreign(Path(load))]
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
    """Refuse a --save folder with checkpoints of another run, which this one would overwrite and prune."""
    save = config.checkpoint.save
    held = _of_first_rank(mesh, lambda: store.latest(save)) if save else None
    if held is None or run_id and store.read_state(held)["run_id"] == run_id:
        return
    raise store.CheckpointError(
        f"--save {save} holds checkpoints of another run, up to '{held.name}': continue that run with "
        f"--load {save}, or save to another folder"
    )


def _of_first_rank(mesh: Mesh, look: Callable[[], Answer]) -> Answer:
    """The first rank's answer: a folder seen over a network may look different elsewhere. Collective.

    An error of it is raised on every rank.
    """
    found: list[Any] = agree(
        world_group(), "the first rank looked", lambda: look() if mesh.rank == 0 else None
    )
    return found[0]


def _changed_order(config: RunConfig, before: Mapping[str, Any], knows_number: bool) -> Iterator[str]:
    """Yield options that have changed so that the same count of consumed samples now means other samples.

    knows_number: the checkpoint has the number of samples that its order was made for.
    """
    now = redact(config.to_dict())  # as the checkpoint has it
    for section, name in (*SAMPLE_ORDER, *(() if knows_number else RUN_LENGTH)):
        old, new = before.get(section, {}).get(name), now[section][name]
        if (old or None) != (new or None):  # a checkpoint may be older than the option
            sure = "" if (section, name) in SAMPLE_ORDER else "may "
            yield (
                f"--{name.replace('_', '-')} was {old} when the checkpoint was written and is {new} now: samples "
                f"{sure}come in another order from here on, so some repeat and some are left out"
            )


def _incomplete(root: Path, after: int = -1) -> Iterator[str]:
    """Yield what is wrong with each incomplete checkpoint under ``root`` whose step is above ``after``."""
    for path in sorted(root.glob("iter_*")):
        step = path.name.removeprefix("iter_")
        if step.isdecimal() and int(step) > after:
            try:
                check_sizes(path, store.read_manifest(path))
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


def _foreign(root: Path) -> Iterator[str]:
    """Yield what other programs have saved under ``root``: whoever loads that does not want random weights."""
    for name, whose in TRACKERS.items():
        if (root / name).is_file():
            yield f"'{name}' there is {whose}"
    if (root / CONFIG_FILE).is_file():
        yield f"'{CONFIG_FILE}' there is Hugging Face's: --load hf:{root} starts from its weights"
