"""Runs a shrunk configuration on local ranks, compares it with one rank, and certifies it."""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

import megazero
from megazero.config import ConfigError, RunConfig, World, make_config
from megazero.config.options.data_sources import NO_DATA
from megazero.config.options.fields import KEPT
from megazero.config.run import all_options
from megazero.config.summary import describe
from megazero.mesh.local_ranks import LocalRanks
from megazero.verify import checks
from megazero.verify.certificate import Certificate, Section
from megazero.verify.checks import Evidence
from megazero.verify.expected_bytes import ExpectedBytes
from megazero.verify.full_tensors import Assembler
from megazero.verify.options import VerifyRequest
from megazero.verify.shrink import Shrunk, shrink
from megazero.verify.training_run import Around, RankRecord, TrainingRun, nothing_around, run_all, slice_block

TIMEOUT_S = 900.0  # of all runs on the configured layout; a rank that hangs would otherwise hold everything


def verify(request: VerifyRequest, ranks: LocalRanks, around: Around = nothing_around) -> Certificate:
    """Do the whole verification on as many ``ranks`` as the shrunk world has.

    around: the same as TrainingRun's, for all runs on the layout. Raises ValueError for a configuration that cannot
    be run, and RanksFailed when a rank raises, dies or hangs.
    """
    began, options = time.monotonic(), request.options
    small = shrink(request.config, request.world, options.verify_ranks, options.verify_steps)
    steps = small.config.training.train_iters or 0
    with tempfile.TemporaryDirectory(prefix="megazero-certificate-") as folder:
        runs = _Runs(small, steps, around, folder, ranks)
        sections = runs.run()
    made = {
        "megazero": megazero.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": "cpu, gloo",
        "seed": small.config.training.seed,
        "steps": steps,
        "wall time": f"{time.monotonic() - began:.0f} s",
    }
    asked, run = _described(request.config, request.world), _described(small.config, small.layout.world)
    layout = next(i for i, line in enumerate(run) if line.startswith("layout"))
    return Certificate(
        asked=tuple(asked),
        run=tuple(line.strip() for line in run[layout:]),
        changes=small.changes,
        notes=small.notes,
        sections=tuple(sections),
        facts=made,
        configuration=small.config.to_dict(),
    )


def _described(config: RunConfig, world: World) -> list[str]:
    return [line for line in describe(config, world) if not line.startswith("note")]


class _Runs:
    """The runs of one verification, and what they show."""

    def __init__(self, small: Shrunk, steps: int, around: Around, folder: str, ranks: LocalRanks) -> None:
        self.steps, self.around, self.folder, self.ranks = steps, around, folder, ranks
        self.world, self.config = small.layout.world, small.config
        self.exact_config, self.block = _exactly(small.config), slice_block(self.config, self.world)
        self.saved = steps // 2 - 1  # the step after which both runs save

    def run(self) -> list[Section]:
        exact, configured, resumed, weights = self._run_layout()
        d = self.config.data_parallel_size(self.world)
        seen = checks.gather_evidence(Assembler(self.exact_config), exact, d)
        second = self._configured_section(seen, configured)
        third = self._checkpoint_section(seen.losses[self.saved + 1], configured, resumed, weights)
        return [self._exact_section(seen, exact), second, third]

    def _run_layout(self) -> tuple[list[RankRecord], list[RankRecord], list[RankRecord], str]:
        """Return the records of every rank from three runs, and where the exact run saved.

        The runs are the exact one, the configured one, and the configured one's resumption.
        """
        weights, state = (tempfile.mkdtemp(dir=self.folder) for _ in range(2))
        at = self.saved + 1
        runs = [
            TrainingRun(
                self.exact_config, True, 0, self.steps, save=(self.saved, weights), around=self.around
            ),
            TrainingRun(self.config, False, 0, self.steps, save=(self.saved, state), around=self.around),
            TrainingRun(self.config, False, at, self.steps, load=state, around=self.around),
        ]
        size = self.world.world_size
        every = self.ranks.call(run_all, runs, self.world, world=size, timeout=TIMEOUT_S)
        exact, configured, resumed = map(list, zip(*every, strict=True))
        return exact, configured, resumed, weights

    def _exact_section(self, seen: Evidence, exact: Sequence[RankRecord]) -> Section:
        block = slice_block(self.exact_config, self.world)
        expected = ExpectedBytes(self.exact_config, self.world, True, block)
        found = [*seen.checks, checks.bytes_check("bytes sent", expected, exact, self.saved)]
        dtype = self.exact_config.precision.params_dtype
        title = (
            f"{dtype}, every message exact, {self.steps} steps, against one rank of plain torch in fp64. Gradients: "
            "worst ||difference|| / max(||g||, 1e-6 of the global norm) of a parameter. "
            "If it is above the limit, twice what one fp32 rank has of the parameter is allowed"
        )
        return Section("Pass 1, exact", title, tuple(found))

    def _configured_section(self, seen: Evidence, configured: Sequence[RankRecord]) -> Section:
        assembler = Assembler(self.config)
        wire, keys = self.config.wire(self.world), self.config.gathered_keys(self.world)
        found = checks.configured_checks(assembler, configured, seen.losses, wire, keys)
        expected = ExpectedBytes(self.config, self.world, False, self.block)
        found.append(checks.bytes_check("bytes sent", expected, configured, self.saved))
        quantised = wire.codings or keys
        what = "messages quantised as configured" if quantised else "no hop is quantised on this layout"
        dtype = self.config.precision.params_dtype
        return Section("Pass 2, as configured", f"{dtype}, {what}, {self.steps} steps", tuple(found))

    def _checkpoint_section(
        self, stayed: float, straight: Sequence[RankRecord], resumed: Sequence[RankRecord], weights: str
    ) -> Section:
        at = self.saved + 1
        found = [checks.resume_check("resume, same layout", straight, resumed, at)]
        data_parallel = self.config.data_parallel_size(self.world)
        for name, config, world in other_layouts(self.exact_config, self.world, data_parallel):
            run = TrainingRun(config, True, at, at + 1, load=weights)
            if world.world_size == 1:
                records = [run_all([run], world)]
            else:
                records = self.ranks.call(run_all, [run], world, world=world.world_size, timeout=TIMEOUT_S)
            loss = checks.step_loss([each[0] for each in records], 0)
            found.append(checks.reshard_check(f"reshard, {name}", config, loss, stayed))
        title = f"saved after step {at} of {self.steps}; loaded on the same layout (as configured) and others (exact)"
        return Section("Checkpoints", title, tuple(found))


def _exactly(config: RunConfig) -> RunConfig:
    """Return the configuration in fp32 (fp64 stays), moments included, and without dropout.

    Where tensor parallelism cuts activations, the masks of dropout depend on the layout.
    """
    dtype = "fp64" if config.precision.params_dtype == "fp64" else "fp32"
    model = replace(config.model, attention_dropout=0.0, hidden_dropout=0.0)
    optimizer = replace(config.optimizer, exp_avg_dtype="fp32", exp_avg_sq_dtype="fp32")
    precision = replace(config.precision, params_dtype=dtype)
    way = config.parallel.moe_dispatch_across_nodes
    parallel = replace(
        config.parallel, cp_gather_bits=None, moe_dispatch_across_nodes="exact" if way == "int8" else way
    )
    return replace(config, model=model, parallel=parallel, optimizer=optimizer, precision=precision)


def other_layouts(config: RunConfig, world: World, data_parallel: int) -> list[tuple[str, RunConfig, World]]:
    """Return other layouts as (name, configuration, world).

    They are one rank, and the first legal layout of other tensor and pipeline sizes on no more ranks.
    """
    parallel = config.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    found = [("one rank", _on(config, 1, 1, 1, data_parallel), World(1, 1))]
    for t, p in ((pp, tp), (1, pp), (tp, 1), (1, 2), (2, 1), (1, 1)):
        size = t * p * (2 if data_parallel % 2 == 0 and t * p * 2 <= world.world_size else 1)
        if (t, p) == (tp, pp) or not 1 < size <= world.world_size:
            continue
        try:
            other = _on(config, t, p, size // (t * p), data_parallel)
        except ConfigError:
            continue
        name = f"tensor {t} x pipeline {p} x data {size // (t * p)}, zero2"
        return [*found, (name, other, World(size, size))]
    return found


def _on(config: RunConfig, tp: int, pp: int, d: int, data_parallel: int) -> RunConfig:
    """Return the same training on another layout, with the same global batches. Raises ConfigError."""
    values = {
        name: value
        for section in (config.model, config.batch, config.optimizer)
        for name, value in vars(section).items()
    }
    documents = [o.name for o in all_options().values() if o.section == "data" and o.small == KEPT]
    micro, training = config.batch.micro_batch_size, config.training
    larger = pp == 1 and data_parallel % d == 0 and not training.sinkhorn
    losses = ("z_loss_strength", "moe_router_load_balancing_type", "moe_aux_loss_coeff")
    values |= {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "micro_batch_size": micro * (data_parallel // d if larger else 1),
        "zero_preset": "zero2",
        "train_iters": training.train_iters,
        "eval_iters": 0,
        "seed": training.seed,
        **{name: config.get(name) for name in (*documents, *losses)},
        **NO_DATA,
        "device": "cpu",
    }
    # As the exact pass has it, which no options say: products in fp8 with parameters in fp32.
    return replace(make_config(values, World(tp * pp * d, tp * pp * d)), precision=config.precision)
