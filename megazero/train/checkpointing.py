"""Between the trainer and the checkpoint store: what a run saves and how it continues.

state.json holds iteration, consumed samples (the data position), scalar optimizer state, the engine's counters, the
tokenizer's fingerprint and the logger's run id; tensors are the engine's slices; each rank keeps its generators and,
under error feedback, its own residuals.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megazero.checkpoint import store
from megazero.checkpoint.errors import agree
from megazero.checkpoint.manifest import check_sizes
from megazero.checkpoint.placement import Placement
from megazero.config import RunConfig
from megazero.mesh.mesh import Mesh
from megazero.zero import Engine
from megazero.zero.state import (
    NOT_OPTIMIZER,
    RESIDUAL,
    load_kinds,
    load_rank_tensors,
    load_records,
    optimizer_kinds,
    rank_tensors,
    save_records,
)

# What the order of samples depends on, besides the files' contents.
SAMPLE_ORDER = (
    ("training", "seed"),
    ("model", "seq_length"),
    ("data", "data_path"),
    ("data", "split"),
    ("data", "mock_data"),
)


@dataclass(frozen=True)
class Progress:
    """Where training is. run_id: of an outside logger, kept over restarts. notes: what a load has to tell."""

    iteration: int = 0
    consumed_samples: int = 0
    run_id: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checkpointing:
    """Saves and loads one run. fingerprint: of the tokenizer that its data was made with."""

    config: RunConfig
    mesh: Mesh
    engine: Engine
    placements: Mapping[str, Placement]
    fingerprint: str

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD if dist.is_initialized() else None

    @property
    def _layout(self) -> dict[str, Any]:
        """All that a rank's own tensors depend on: equal layouts take them over as they are."""
        grid, policy = self.mesh.grid, self.engine.policy
        return {
            "world_size": grid.world_size,
            "tp": grid.tp,
            "pp": grid.pp,
            "dp": grid.dp,
            "dp_outermost": grid.dp_outermost,
            "stages": [[stage.rank, stage.layers.start, stage.layers.stop] for stage in self.config.stages()],
            "shards": list(grid.shards),
            "ranks_per_node": grid.ranks_per_node,
            "block": policy.block,
            "exact_numel": policy.exact_numel,
            "chunk_numel": policy.chunk_numel,
        }

    def save(self, progress: Progress) -> Path:
        """Write SAVE/iter_<iteration>, all ranks together; older ones stay until it is complete."""
        options = self.config.checkpoint
        assert options.save is not None
        if self.engine.policy.codecs.delta:
            self.engine.refresh()  # what receivers hold, and what is saved as the weights, belongs to this master
        state = {
            "iteration": progress.iteration,
            "consumed_samples": progress.consumed_samples,
            "run_id": progress.run_id,
            "optimizer": self.engine.optimizer.scalars(),
            "engine": self.engine.state(),
            "tokenizer": self.fingerprint,
        }
        snapshot = store.Snapshot(
            step=progress.iteration,
            records=save_records(self.engine, self.placements),
            state=state,
            rank_tensors={**_generator_states(self.mesh.device), **rank_tensors(self.engine)},
            layout=self._layout,
            configuration=self.config.to_dict(),
        )
        retention = store.Retention(options.save_keep_last, options.save_retain_interval)
        # A run that resumed from an older checkpoint writes its iterations again.
        return store.save(options.save, snapshot, group=self._group, retention=retention, overwrite=True)

    def load(self) -> Progress:
        """Continue from the newest complete checkpoint under --load; a fresh start only where asked for."""
        progress = self._load()
        self._refuse_another_runs_folder(progress.run_id)
        return progress

    def _load(self) -> Progress:
        options = self.config.checkpoint
        if options.load is None:
            return Progress()
        path = self._agreed_latest(options.load)
        if path is None:
            broken = "".join(f"; {line}" for line in _incomplete(options.load))
            if options.allow_fresh_start and not broken:
                return Progress()
            raise store.CheckpointError(
                f"--load {options.load} holds no complete checkpoint{broken}. Name a folder that does; or leave "
                "--load out, or add --allow-fresh-start, to start from random weights"
            )
        manifest = store.read_manifest(path)
        with_optimizer = options.load_optim and not options.finetune
        moments = self._moments(manifest.kinds, path) if with_optimizer else []
        residual = with_optimizer and RESIDUAL in manifest.kinds
        loaded = store.load(
            path,
            records=load_records(self.engine, self.placements, with_optimizer, residual),
            group=self._group,
            kinds=load_kinds(self.engine, list(manifest.kinds), moments, residual),
            layout=self._layout,
            convert=True,  # every destination is the master or a moment, at least as precise as what is stored
        )
        self.engine.invalidate()
        if options.finetune:
            return Progress()
        state = loaded.state
        self._check_state(state, path)
        if with_optimizer:
            self.engine.optimizer.load_scalars(state["optimizer"])
            load_rank_tensors(self.engine, loaded.rank_tensors or {})
        if "engine" in state:  # not in checkpoints of before quantised messages
            self.engine.load_state(state["engine"])
        if options.load_rng and loaded.rank_tensors:
            _restore_generators(loaded.rank_tensors, self.mesh.device)
        notes = (*_incomplete(options.load, manifest.step), *self._changed_order(manifest.configuration))
        return Progress(state["iteration"], state["consumed_samples"], state["run_id"], notes)

    def _refuse_another_runs_folder(self, run_id: str) -> None:
        """A run that is not the one of the checkpoints under --save would overwrite and prune them."""
        options = self.config.checkpoint
        held = self._agreed_latest(options.save) if options.save else None
        if held is None or run_id and store.read_state(held)["run_id"] == run_id:
            return
        raise store.CheckpointError(
            f"--save {options.save} holds checkpoints of another run, up to '{held.name}': continue that run with "
            f"--load {options.save}, or save to another folder"
        )

    def _agreed_latest(self, root: str) -> Path | None:
        """The first rank's answer: a folder seen over a network may look different elsewhere."""
        found: list[Any] = [store.latest(root) if self.mesh.rank == 0 else None]
        if self._group is not None:
            dist.broadcast_object_list(found, src=0)
        return found[0]

    def _moments(self, stored: Mapping[str, Any], path: Path) -> list[str]:
        # From every rank: one that holds no slice has no state of its own, and must decide as the others do.
        held = agree(self._group, f"'{path}' not loaded", partial(optimizer_kinds, self.engine))
        ours = sorted({kind for kinds in held for kind in kinds})
        theirs = sorted(kind for kind in stored if kind not in NOT_OPTIMIZER)
        if ours and ours != theirs:
            raise store.CheckpointError(
                f"'{path}' holds optimizer state {theirs or 'none'}, --optimizer {self.config.optimizer.optimizer} "
                f"needs {ours}: use the optimizer it was written with, or --no-load-optim to start its state anew"
            )
        return theirs

    def _check_state(self, state: Mapping[str, Any], path: Path) -> None:
        if state["tokenizer"] != self.fingerprint:
            raise store.CheckpointError(
                f"'{path}' was trained with another tokenizer (sha256 {state['tokenizer'][:12]}, this run's is "
                f"{self.fingerprint[:12]}): name that one with --tokenizer-model, or use --finetune to start a "
                "new run from its weights"
            )

    def _changed_order(self, before: Mapping[str, Any]) -> Iterator[str]:
        """What was changed since that makes the same count of consumed samples mean other samples."""
        now = self.config.to_dict()
        for section, name in SAMPLE_ORDER:
            old, new = before.get(section, {}).get(name), now[section][name]
            if old != new:
                yield (
                    f"--{name.replace('_', '-')} was {old} when the checkpoint was written and is {new} now: samples "
                    "come in another order from here on, so some repeat and some are left out"
                )


def _incomplete(root: str, after: int = -1) -> Iterator[str]:
    """What is wrong with the checkpoints under ``root`` of steps after ``after`` that are not complete."""
    for path in sorted(Path(root).glob("iter_*")):
        step = path.name.removeprefix("iter_")
        if step.isdecimal() and int(step) > after:
            try:
                check_sizes(path, store.read_manifest(path))
            except (store.CheckpointError, OSError) as error:
                yield f"{path.name} was left out: {error}"


def _generator_states(device: torch.device) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _restore_generators(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
