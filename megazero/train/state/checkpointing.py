"""What a run saves in a checkpoint, and how it continues from one.

state.json holds the iteration, the consumed samples (the position in the data), the numbers of samples that the
data's order was made for, the optimizer's scalars, the engine's counters, the loss scale, the state of callbacks,
the tokenizer's fingerprint and the logger's run id. The tensors are the engine's slices. Each rank also keeps its
random generators.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint import store
from megazero.checkpoint.directory import TRIAL
from megazero.checkpoint.errors import agree
from megazero.checkpoint.placement import Placement, Places
from megazero.checkpoint.records import SliceRecord
from megazero.config import RunConfig
from megazero.convert.importing import Published, fill
from megazero.data.tokenizer_files import held_flags
from megazero.mesh.mesh import Mesh, world_group
from megazero.models.dtypes import DTYPES
from megazero.train.callbacks.chain import Callbacks
from megazero.train.schedule.loss_scaling import LossScaling
from megazero.train.state.origin import Origin
from megazero.train.state.progress import Progress
from megazero.zero import Engine
from megazero.zero.records import (
    MASTER,
    NOT_OPTIMIZER,
    OWN,
    WEIGHTS,
    kinds_to_load,
    load_rank_tensors,
    load_records,
    load_replica_records,
    optimizer_kinds,
    rank_tensors,
    save_records,
    save_replica_records,
)


@dataclass(frozen=True)
class SavedTokenizer:
    """The tokenizer of the run's data. fingerprint: its sha256. files: its files by name, on the first rank."""

    fingerprint: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpointing:
    """Saves and loads one run: the engine's state, the tokenizer, the loss scale, and callbacks.

    guard: called on the first rank with a folder before that is changed; it does not return if another run has it.
    """

    config: RunConfig
    engine: Engine
    placements: Mapping[str, Places]
    tokenizer: SavedTokenizer = SavedTokenizer()
    scaling: LossScaling = field(default_factory=LossScaling)
    callbacks: Callbacks = field(default_factory=Callbacks)
    guard: Callable[[str], None] = lambda folder: None

    @property
    def mesh(self) -> Mesh:
        return self.engine.mesh

    @property
    def _layout(self) -> dict[str, Any]:
        """All that a rank's own tensors depend on: only a run with an equal layout loads them."""
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
            **({"unit_layers": joined} if (joined := self.config.zero.zero_unit_layers) > 1 else {}),
            # In a unit, matrices that are stepped alike lie together.
            **({"matrices": "distributed"} if self.engine.by_matrix else {}),
            # Units of experts, and what they leave in their layers'.
            **({"ep": grid.ep} if grid.ep > 1 else {}),
        }

    def save(self, progress: Progress) -> Path:
        """Do what ``saving`` does, at once, and return the path. Collective."""
        return store.completed(self.saving(progress, None, store.Retry()), world_group())

    def saving(
        self, progress: Progress, staging: store.Staging | None, retry: store.Retry
    ) -> Generator[store.Part, None, Path]:
        """Write SAVE/iter_<iteration>, yielding the parts that are this rank's own work. Collective.

        staging: where a copy is taken, which is then written. retry: how to try again if the storage refuses. Older
        checkpoints stay until this one is complete.
        """
        options = self.config.checkpoint
        retention = store.Retention(options.save_keep_last, options.save_retain_interval)
        # A run that resumed from an older checkpoint writes its iterations again.
        return store.saving(
            self.root,
            self._snapshot(progress),
            group=world_group(),
            retention=retention,
            overwrite=True,
            staging=staging,
            guard=partial(self.guard, self.root),
            retry=retry,
        )

    def try_saving(self) -> None:
        """Write a small checkpoint from every rank, in the way this run saves, and remove it. Collective.

        Raises CheckpointError on every rank if that fails.
        """
        root, rank = Path(self.root) / TRIAL, self.mesh.rank
        count, dtype = 8, DTYPES[self.config.precision.params_dtype]
        values = {WEIGHTS: torch.zeros(count, dtype=dtype, device=self.mesh.device)}
        record = SliceRecord(Placement.plain(f"rank {rank}", (count,)), 0, count, values)
        configuration = self.config.to_dict()
        small = store.Snapshot(
            0, [record], {}, _generator_states(self.mesh.device), self._layout, configuration
        )
        staging = store.Staging() if self.config.checkpoint.async_save else None
        try:
            if rank == 0:
                shutil.rmtree(root, ignore_errors=True)  # of a start that was killed
            limit_s = self.config.training.distributed_timeout_minutes * 60
            store.save(root, small, group=world_group(), staging=staging, limit_s=limit_s)
        except store.CheckpointError as error:
            raise store.CheckpointError(
                f"--save {self.root}: this run could not save, so it does not begin; of a small checkpoint: {error}"
            ) from error
        finally:
            if staging is not None:
                staging.release()
            if rank == 0:
                shutil.rmtree(root, ignore_errors=True)

    def _snapshot(self, progress: Progress) -> store.Snapshot:
        """Return what a checkpoint would hold now. Its tensors are the engine's own. Collective."""
        if self.engine.policy.codecs.delta:
            self.engine.refresh()  # the saved weights are those that receivers hold, and belong to this master
        state = {
            **progress.state(),
            "optimizer": self.engine.optimizer.scalars(),
            "engine": self.engine.state(),
            "loss_scaling": self.scaling.state(),
            "callbacks": self.callbacks.state(),
            "tokenizer": self.tokenizer.fingerprint,
        }
        save = save_records if self.engine.outer is None else save_replica_records
        return store.Snapshot(
            step=progress.iteration,
            records=save(self.engine, self.placements),
            state=state,
            rank_tensors={**_generator_states(self.mesh.device), **rank_tensors(self.engine)},
            layout=self._layout,
            configuration=self.config.to_dict(),
            files=self.tokenizer.files,
        )

    @property
    def root(self) -> str:
        """The folder of --save, without which nothing is saved."""
        assert self.config.checkpoint.save is not None
        return self.config.checkpoint.save

    def load(self, origin: Origin) -> None:
        """Load the weights from the checkpoint of ``origin`` and, unless --finetune is given, the rest. Collective.

        Raises CheckpointError if the checkpoint does not fit this run.
        """
        if origin.published is not None:
            self._load_published(origin.published)
            return
        if origin.saved is None:
            return
        path, manifest, state = origin.saved
        options = self.config.checkpoint
        if origin.own:
            options = replace(options, finetune=False, load_optim=True, load_rng=True)
        with_optimizer = options.load_optim and not options.finetune
        moments = self._moments(manifest.kinds, path) if with_optimizer else []
        anchored = self.engine.outer is not None and OWN in manifest.kinds and not options.finetune
        places = load_replica_records if anchored else load_records
        loaded = store.load(
            path,
            records=places(self.engine, self.placements, with_optimizer),
            group=world_group(),
            kinds=kinds_to_load(self.engine, list(manifest.kinds), moments),
            layout=self._layout,
            checked=True,  # train/state/origin.py has, before anything was allocated
        )
        self.engine.invalidate(anchored)
        if options.finetune:
            return
        self._check_tokenizer(state, path)
        if with_optimizer:
            self.engine.optimizer.load_scalars(state["optimizer"])
        self._load_rest(state, loaded, with_optimizer, options.load_rng)

    def _load_rest(
        self, state: Mapping[str, Any], loaded: store.LoadedState, with_optimizer: bool, with_rng: bool
    ) -> None:
        """Load what is neither weights nor moments."""
        if with_optimizer:
            load_rank_tensors(self.engine, loaded.rank_tensors or {})
        if "engine" in state:  # not in checkpoints of before quantised messages
            self.engine.load_state(state["engine"])
        self.scaling.load_state(state.get("loss_scaling", {}))  # not in checkpoints of before fp16
        self.callbacks.load_state(state.get("callbacks", {}))
        if with_rng and loaded.rank_tensors:
            _restore_generators(loaded.rank_tensors, self.mesh.device)

    def _load_published(self, published: Published) -> None:
        """Fill this rank's slices of the weights from a folder of Hugging Face. Collective."""
        records = load_records(self.engine, self.placements, optimizer=False)
        doing = f"'{published.folder.path}' not loaded"
        agree(world_group(), doing, lambda: fill(published, records, (MASTER, WEIGHTS)))
        self.engine.invalidate()

    def _moments(self, stored: Collection[str], path: Path) -> list[str]:
        # From every rank: one that holds no slice has no state of its own, and must decide as the others do.
        held = agree(world_group(), f"'{path}' not loaded", partial(optimizer_kinds, self.engine))
        ours = sorted({kind for kinds in held for kind in kinds})
        theirs = sorted(kind for kind in stored if kind not in NOT_OPTIMIZER)
        if ours and ours != theirs:
            raise store.CheckpointError(
                f"'{path}' holds optimizer state {theirs or 'none'}, --optimizer {self.config.optimizer.optimizer} "
                f"needs {ours}: use the optimizer it was written with, or --no-load-optim to start its state anew"
            )
        return theirs

    def _check_tokenizer(self, state: Mapping[str, Any], path: Path) -> None:
        if state["tokenizer"] != self.tokenizer.fingerprint:
            held = held_flags(path) or "--tokenizer-model (or --vocab-file and --merge-file)"
            raise store.CheckpointError(
                f"'{path}' was trained with another tokenizer (sha256 {state['tokenizer'][:12]}, this run's is "
                f"{self.tokenizer.fingerprint[:12]}): name that one with {held}, or use --finetune to start a new "
                "run from its weights"
            )


def _generator_states(device: torch.device) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _restore_generators(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
