"""The training loop: it takes data, runs forwards and backwards, steps, logs, evaluates and saves."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megazero.checkpoint.errors import CheckpointError
from megazero.comm.lane import Lane
from megazero.comm.timing import Waits
from megazero.config.layout.sequence_lengths import SequenceLengths
from megazero.config.model.spec import training_flops
from megazero.config.options.skipping import due, iteration_ranges
from megazero.data.build import Dataset
from megazero.data.sampler import Batches
from megazero.log.exit_status import ExitStatus
from megazero.log.metrics import IterationMetrics
from megazero.log.time_bill import TimeBill
from megazero.mesh.objects import gather_objects
from megazero.models import Decoder
from megazero.models.compilation import CompileTime
from megazero.ops.exit_conditions import ExitConditions
from megazero.ops.failures import LocalStep, NonFiniteGuard, NonFiniteLoss
from megazero.ops.memory import peak_memory
from megazero.ops.stragglers import RankSeconds, Stragglers
from megazero.pp.executor import Pipeline
from megazero.train.codec_costs import CodecCosts
from megazero.train.data.datasets import RunData
from megazero.train.data.feeding import Batch, Feeding, mean_loss
from megazero.train.forecast import Forecast
from megazero.train.outputs import Outputs
from megazero.train.parallelize import MicroBatch, dropout_key
from megazero.train.profiling import Profiler
from megazero.train.schedule.learning_rate import DECOUPLED, UNDECAYED, LearningRate, WeightDecay
from megazero.train.schedule.run_length import RunLength
from megazero.train.state.checkpointing import Checkpointing
from megazero.train.state.progress import Progress, just_before, leave_out, next_to_leave_out, without_effect
from megazero.train.state.rollback import go_back
from megazero.train.state.saver import Saver
from megazero.zero import Engine, StepInfo

STEP_TIMES = 1000  # of the latest iterations, for the comparison with what was predicted


class TrainedModel(NamedTuple):
    """What is trained: the decoder, the engine that shards it, and the pipeline that runs its stages."""

    decoder: Decoder
    engine: Engine
    pipeline: Pipeline


class RunInputs(NamedTuple):
    """What the run reads: its data, how far it goes, at which learning rates and weight decay, and where it begins.

    learning_rates: under True that of the embedding and the head, which --decoupled-lr sets apart.
    """

    data: RunData
    length: RunLength
    learning_rates: Mapping[bool, LearningRate]
    weight_decay: WeightDecay
    progress: Progress


class Observers(NamedTuple):
    """What watches the run: where it reports to, what may stop it, what measures it.

    forecast: the planner's prediction, to be compared with what was measured; None if there is none.
    """

    outputs: Outputs
    exits: ExitConditions
    bill: TimeBill
    stragglers: Stragglers
    profiler: Profiler
    forecast: Forecast | None = None


class RankScalars(NamedTuple):
    """What a rank sends to all others with the norm of a step, as fp64.

    loss: summed over its tokens of the step; 0 on ranks that compute none. stops: 1 if it has a reason to stop.
    save_part_ended: 1 if its part of a save has ended. The rest are its RankSeconds of the iteration before.
    """

    loss: torch.Tensor | float
    stops: float
    save_part_ended: float
    compute: float
    data: float
    link: float

    @property
    def seconds(self) -> RankSeconds:
        return RankSeconds(self.compute, self.data, self.link)

    def write(self, out: torch.Tensor) -> torch.Tensor:
        """Write the scalars to ``out``, fp64 [6] on any device, without waiting for the device."""
        for slot, value in zip(out, self, strict=True):
            slot.copy_(value) if isinstance(value, torch.Tensor) else slot.fill_(value)
        return out


class StepBatches(NamedTuple):
    """A rank's micro-batches of one step.

    ids: the samples of each. host: the batches before the copy to the device; they are kept until the norm has been
    read, when the copies are done. tokens: those of the global batch that count, of each outer replica. samples: of
    the global batch. length: of each, in tokens.
    """

    ids: Sequence[Sequence[int]]
    host: Sequence[Batch]
    device: Sequence[Batch]
    tokens: Sequence[float]
    samples: int
    length: int


class Trainer:
    """Trains from ``inputs.progress`` to the last iteration. Its parts come ready-made (see setup.py)."""

    def __init__(
        self, model: TrainedModel, inputs: RunInputs, checkpointing: Checkpointing, observers: Observers
    ) -> None:
        self.decoder, self.engine, self.pipeline = model
        self.data, self.length, self.learning_rates, self.weight_decay, self.progress = inputs
        self.outputs, self.exits, self.bill, self.stragglers, self.profiler, self.forecast = observers
        self.checkpointing, self.config, self.mesh = checkpointing, checkpointing.config, self.engine.mesh
        self.scaling, self.spikes, self.guard = checkpointing.scaling, checkpointing.spikes, NonFiniteGuard()
        self.ranges = iteration_ranges(self.config.skipping.skip_train_iteration_range)
        self.lengths = SequenceLengths.of(self.config.model.seq_length, self.config.batch)
        masked = self.config.data.eod_mask_loss
        self.feeding = Feeding(self.mesh, self.config.batch.micro_batch_size, self.pipeline.loss_rank, masked)
        limit_s = self.config.training.distributed_timeout_minutes * 60
        self.saver = Saver(checkpointing, self.outputs.console, self._saved, limit_s)
        # Sent with the norm of each step.
        self.scalars = torch.zeros(len(RankScalars._fields), dtype=torch.float64, device=self.mesh.device)
        self.step_seconds: deque[float] = deque(maxlen=STEP_TIMES)
        waits = (self.engine.waits, self.decoder.tp.waits)
        self.timed: Sequence[Lane | Waits] = (*self.engine.lanes, *waits)
        self.compile_time = CompileTime() if self.config.training.compile else None
        self.codec_costs = CodecCosts(self.engine)
        self.exit_reason: str | None = None  # why to save and stop after the iteration
        self.phase = "start"

    # -- the loop --------------------------------------------------------------------------------

    def run(self) -> ExitStatus:
        """Train, and return FINISHED or STOPPED. Raises NonFiniteLoss, CheckpointError or CommunicationError."""
        began = saved_at = self.progress.iteration
        evaluation_was_pending = self.progress.evaluation_pending
        for line in without_effect(self.ranges, self.progress, self.length.last_iteration):
            self.outputs.console.note(line)
        self.saver.copy(self.progress.checkpoint)  # the last start may have ended before it did
        with self.feeding.batches(self.data.train, consumed=self.progress.consumed_samples) as batches:
            self._evaluate_if(self.config.training.eval_at_start and began == 0)
            reason, save_due = self.exit_reason, False
            while not reason and self.progress.iteration < self.length.last_iteration:
                since = self.progress.iteration
                if not self._leave_out(batches) and self._iterate_or_go_back(batches):
                    since, save_due = self.progress.left_out[-1].first - 1, True
                iteration = self.progress.iteration
                self._evaluate_if(due(self.config.training.eval_interval, since, iteration))
                reason = self.exit_reason or self.exits.planned(since, iteration)
                save_due |= due(self.config.checkpoint.save_interval, since, iteration)
                if reason or save_due and not self.spikes.beyond:  # else it may be in a spike
                    saved_at, save_due = self._save(saved_at), False
        self.exit_reason = reason
        if reason:
            self.outputs.console.note(f"stopping after iteration {self.progress.iteration}: {reason}")
        self.profiler.finish()
        self.engine.settle()
        self._compare()
        made_up = evaluation_was_pending and not self.progress.evaluation_pending
        self._save(-1 if made_up and self.progress.iteration == began else saved_at)
        self._wait_for_save()
        if self.progress.iteration < self.length.last_iteration or self.progress.evaluation_pending:
            return ExitStatus.STOPPED
        if began < self.progress.iteration or evaluation_was_pending:
            # Not to be interrupted: no restart would make up for it.
            self._evaluate(
                {f"test/{name}" if name else "test": data for name, data in self.data.test.items()},
                stoppable=False,
            )
        self._export()
        self.phase = "writing --save-copy"
        self.saver.copy(self.progress.checkpoint, last=True)
        return ExitStatus.FINISHED

    def _leave_out(self, batches: Batches) -> bool:
        """Skip the iterations that --skip-train-iteration-range names from here on. Returns whether there are any."""
        last = next_to_leave_out(self.ranges, self.progress, self.length.last_iteration)
        if last is not None:
            self.progress = leave_out(self.progress, last, self.length.batch_sizes)
            batches.seek(self.progress.consumed_samples)
            self.outputs.console.note(f"left out: {self.progress.left_out[-1]}: --skip-train-iteration-range")
        return last is not None

    def _iterate_or_go_back(self, batches: Batches) -> bool:
        """Train one iteration. If it makes a spike and --rollback-on-spike is given, go back to before the spike.

        Returns whether it went back: then a save is due, so that a resume continues after what is left out. Raises
        LossSpike if there is no way back (any more).
        """
        reached, watching = self.progress.iteration + 1, self.config.skipping.rollback_on_spike
        self.profiler.before(reached)
        try:
            info = self._iterate(batches)
            norm, loss = info.updated_norm, self.progress.losses["lm_loss"]
            why = self.spikes.observe(reached, loss, norm) if watching and norm is not None else None
        except NonFiniteLoss as error:
            if not watching:
                self._end_save(f"{error}")
                raise
            why = f"{error}"
        if why is None:
            return False
        self.phase = f"going back from iteration {reached}"
        self.saver.wait()
        begin = self.spikes.began or reached  # the steps that the guard skipped made no update
        before = go_back(self.checkpointing, self.progress, begin, f"iteration {reached}: {why}")
        self.progress = leave_out(before, reached, self.length.batch_sizes, rollback=True)
        batches.seek(self.progress.consumed_samples)
        self.guard = NonFiniteGuard()
        self.engine.traffic.take()  # of no iteration
        self.outputs.went_back(why, self.progress.left_out[-1])
        return True

    def _end_save(self, why: str) -> None:
        """Wait for a save under way, before an error on every rank ends the run, whose status stays. Collective."""
        if self.saver.under_way:
            self.outputs.console.warning(
                f"{why}. The run ends when the save under way is complete, or has failed"
            )
            try:
                self._wait_for_save()
            except CheckpointError as error:
                self.outputs.console.warning(f"{error}")

    def _wait_for_save(self) -> None:
        if self.saver.under_way:
            self.phase = f"saving up to iteration {self.progress.iteration}"
            self.saver.wait()

    def _compare(self) -> None:
        """Print the prediction beside the measurements."""
        if self.forecast and (line := self.forecast.beside(self.mesh, self.step_seconds)):
            self.outputs.console.note(line)

    def _iterate(self, batches: Batches) -> StepInfo:
        """Train one iteration and log it. Raises NonFiniteLoss."""
        self._take_stalls()  # of an evaluation
        self.bill.reset()
        began = time.perf_counter()
        iteration = self.progress.iteration + 1
        self.phase = f"iteration {iteration}"
        rates = self._set_rates()
        self._set_rounding(iteration)
        with self.bill.span("data"):
            step = self._load(batches)
        with self.bill.span("compute"):
            info, ranks = self._step(step)
            sums = self._sums_of_replicas(ranks)
            loss = reduce(add, sums) / reduce(add, step.tokens)
            self._check_finite(iteration, step, info, ranks, loss)
            # All outer replicas have one scale and one learning rate, so what one overflows at concerns all.
            self.scaling.update(info.skips > 0, step.samples, unmoved=info.updated_norm is None)
            self._take_stalls()
        losses = {**self.progress.losses, "lm_loss": loss}
        self.progress = replace(
            self.progress,
            iteration=iteration,
            consumed_samples=batches.consumed,
            losses=losses,
            tokens=self.progress.tokens + step.samples * step.length,
        )
        seconds = time.perf_counter() - began
        replicas = [each / tokens for each, tokens in zip(sums, step.tokens, strict=True)]
        self._log(loss, info, ranks, rates, seconds, step, replicas)
        self._tell_compiled()
        self.step_seconds.append(seconds)
        if all(rank.save_part_ended for rank in ranks):
            self.saver.go_on()
        return info

    def _tell_compiled(self) -> None:
        """Print the graphs compiled since the last call: all in the first step, unless lengths of samples change."""
        if self.compile_time and (line := self.compile_time.news()):
            self.outputs.console.note(f"{line} (iteration {self.progress.iteration})")

    def _load(self, batches: Batches) -> StepBatches:
        """Read the micro-batches of the next step, and start their copies to the device."""
        consumed = self.progress.consumed_samples
        count = self.length.batch_sizes.micro_batches(consumed)
        ids = batches.sample_ids(count)
        length, host = self.lengths.at(self.progress.iteration + 1), batches.next_step(count)
        device = [self.feeding.cut(self.feeding.to_device(batch), length) for batch in host]
        with self.bill.span(self.engine.exchange_hop) if self.feeding.masked else nullcontext():
            tokens = self.feeding.valid_tokens([self.feeding.cut(batch, length) for batch in host])
        return StepBatches(ids, host, device, tokens, batches.consumed - consumed, length)

    def _step(self, step: StepBatches) -> tuple[StepInfo, list[RankScalars]]:
        """Run forwards, backwards and the update, and find out whether to stop. Returns every rank's scalars."""
        count = len(step.device)
        factor, divisor = self.scaling.factors(step.tokens[self.mesh.replica], self.mesh.dp_size)
        self.engine.begin_step(count, divisor, self.pipeline.program(count))
        loss = self._forward_backward(step.device, step.ids, factor)
        own_reason = self.exits.own_reason()
        own = RankScalars(loss, own_reason is not None, self.saver.part_ended, *self.stragglers.own)
        info = self.engine.step(own.write(self.scalars))
        ranks = [RankScalars(*row) for row in info.scalars]
        self.exit_reason = self.exits.agreed_reason(own_reason, any(rank.stops for rank in ranks))
        return info, ranks

    def _sums_of_replicas(self, ranks: Sequence[RankScalars]) -> list[float]:
        """Return the summed token losses of each outer replica, in nats, from the ranks that compute them."""
        losses = [float(ranks[r].loss) for r in self.mesh.stage_ranks(self.pipeline.loss_rank)]
        d = self.mesh.dp_size
        return [reduce(add, losses[begin : begin + d]) for begin in range(0, len(losses), d)]

    def _check_finite(
        self, iteration: int, step: StepBatches, info: StepInfo, ranks: Sequence[RankScalars], loss: float
    ) -> None:
        samples = tuple(int(sample) for row in step.ids for sample in row)
        own = LocalStep(self.mesh.rank, float(ranks[self.mesh.rank].loss), samples)
        if not self.scaling.dynamic:  # else it overflows the gradients: a step to skip, as in Megatron
            self.guard.check_loss(iteration, loss, own, _gathered)
        self.guard.check_norm(iteration, info.mean_norm, own, _gathered, self.scaling.can_fall)

    def _take_stalls(self) -> None:
        """Add the waits of the compute stream to the bill, on CUDA."""
        for each in self.timed:
            for name, seconds in each.stalls.take().items():
                self.bill.add(name, seconds)

    def _forward_backward(
        self, step: Sequence[Batch], ids: Sequence[Sequence[int]], loss_factor: float
    ) -> torch.Tensor:
        """Sum this rank's token losses over the step: an fp64 scalar, 0 on ranks without the last stage."""
        self.decoder.train()
        keys = [dropout_key(self.config, self.progress.iteration, row[0]) for row in ids]
        return self.pipeline.step(
            [MicroBatch(**batch, dropout_key=key) for batch, key in zip(step, keys, strict=True)], loss_factor
        )

    def _set_rounding(self, iteration: int) -> None:
        """Send gradients exactly once --zero-quantized-gradients-until is over."""
        end, codecs = self.config.quantized_gradients_end, self.engine.policy.codecs
        exact = end is not None and self.length.position(self.progress) >= end
        if exact and not self.engine.exact_gradients and (codecs.gradients_intra or codecs.gradients_inter):
            self.outputs.console.note(f"gradients are sent exactly from iteration {iteration} on")
        self.engine.exact_gradients = exact

    def _set_rates(self) -> dict[str, float]:
        """Give every group of the optimizer its learning rate and weight decay. Returns the metrics of these."""
        position = self.length.scheduled(self.progress) - self.scaling.skipped(self.length.by_samples)
        at = self.progress.tokens / self.lengths.full if self.config.batch.lr_by_tokens else position
        rates = {decoupled: rate(at) for decoupled, rate in self.learning_rates.items()}
        decay, names = self.weight_decay(position), {"learning_rate": rates[False]}
        for group in self.engine.param_groups:
            group["lr"] = rates[group.get(DECOUPLED, False)]
            group["weight_decay"] = 0.0 if group.get(UNDECAYED) else decay
        if self.config.optimizer.decoupled_lr is not None:
            names["decoupled_learning_rate"] = rates[True]
        return names if self.weight_decay.style == "constant" else {**names, "weight_decay": decay}

    # -- evaluation, saving ----------------------------------------------------------------------

    def _evaluate_if(self, due: bool) -> None:
        """Evaluate if it is due, now or from before a restart, unless the run is about to stop.

        An evaluation that is omitted or interrupted for that stays pending: a resume begins with it.
        """
        due = due or self.progress.evaluation_pending
        if due and not self.exit_reason:
            self._evaluate(self.data.valid)
        self.progress = replace(self.progress, evaluation_pending=bool(due and self.exit_reason))

    def _evaluate(self, data_sets: Mapping[str, Dataset], stoppable: bool = True) -> None:
        """Report the mean loss of each data set by its name. If stoppable, it ends when the run is to stop."""
        self.phase = f"evaluation at iteration {self.progress.iteration}"
        for name, data_set in data_sets.items():
            loss = self._mean_loss(data_set, stoppable)
            if loss is None:
                break
            self.outputs.evaluation(self.progress, loss, name)
            self._tell_compiled()
            key = f"eval_lm_loss/{name}" if name else "eval_lm_loss"
            self.progress = replace(self.progress, losses={**self.progress.losses, key: loss})

    def _mean_loss(self, data_set: Dataset, stoppable: bool) -> float | None:
        """Return the loss over eval_iters global batches, or None if the run is to stop between two of them."""
        sizes = self.length.batch_sizes
        self.decoder.eval()
        return mean_loss(
            self.engine,
            self.pipeline,
            self.feeding,
            data_set,
            steps=self.config.training.eval_iters,
            micro_batches=sizes.target // sizes.quantum,
            interrupted=lambda: stoppable and self._asked_to_stop(),
            replica=self.config.outer.outer_evaluation == "replica" and self.mesh.outer is not None,
        )

    def _asked_to_stop(self) -> bool:
        """Exchange whether ranks have a reason to stop, outside of steps, which do it themselves. Collective."""
        if self.exits.can_stop_at_once:
            own = self.exits.own_reason()
            flag = torch.tensor([float(own is not None)], device=self.mesh.device)
            self.exit_reason = self.exits.agreed_reason(own, bool(self.mesh.gather_rows(flag).any()))
        return self.exit_reason is not None

    def _save(self, saved_at: int) -> int:
        iteration = self.progress.iteration
        if self.config.checkpoint.save is None or iteration == saved_at:
            return saved_at
        self.phase = f"saving iteration {iteration}"
        self.saver.save(self.progress)
        return iteration

    def _saved(self, iteration: int, path: Path, seconds: float) -> None:
        self.outputs.saved(iteration, path, seconds)
        self.progress = replace(self.progress, checkpoint=str(path))

    def _export(self) -> None:
        """Write the folder of --save-hf when the training is over, not when it stops before that."""
        folder = self.config.checkpoint.save_hf
        if folder is None or self.progress.iteration < self.length.last_iteration:
            return
        self.phase = "writing --save-hf"
        self.saver.export(self.progress.iteration, folder)

    # -- small parts -----------------------------------------------------------------------------

    def _log(
        self,
        loss: float,
        info: StepInfo,
        ranks: Sequence[RankScalars],
        rates: dict[str, float],
        seconds: float,
        step: StepBatches,
        replicas: Sequence[float],
    ) -> None:
        traffic, bill = self.engine.traffic.take(), self.bill.close(seconds)
        rank_times, warnings = self.stragglers.take([rank.seconds for rank in ranks], bill, seconds)
        samples, length = step.samples, step.length
        flops = training_flops(self.decoder.config, [length], self.mesh.tp.size) * samples
        metrics = IterationMetrics(
            iteration=self.progress.iteration,
            consumed_samples=self.progress.consumed_samples,
            lm_loss=loss,
            grad_norm=info.mean_norm,
            learning_rate=rates.pop("learning_rate"),
            iteration_time_s=seconds,
            tokens_per_s=samples * length / seconds,
            tflops_per_rank=flops / seconds / self.mesh.world_size / 1e12,
            intra_node_bytes=traffic.pop("intra_node_bytes"),
            inter_node_bytes=traffic.pop("inter_node_bytes"),
            memory_bytes=peak_memory(self.mesh.device),
            time_bill=bill,
            extra={
                "batch_size": samples,
                **({"seq_length": length} if self.lengths.settled > 1 else {}),
                **rates,
                **just_before(self.progress, self.progress.iteration),
                **_of_step(info),
                **_of_replicas(replicas, info.replica_norms),
                **self.scaling.metrics(),
                "bytes": traffic,
                **rank_times,
            },
        )
        for line in (*info.fallbacks, *warnings, *self.codec_costs.take(traffic)):
            self.outputs.console.warning(line)
        self.outputs.console.iteration(metrics)
        if self.outputs.metrics is not None:
            self.outputs.metrics.iteration(metrics)
            self.outputs.loggers.log(metrics.iteration, metrics.as_dict())


def _of_step(info: StepInfo) -> dict[str, Any]:
    """Return the extra metrics of a step: whether it was skipped, the outer step before it, rounding errors, and what
    is sent exactly from now on."""
    out: dict[str, Any] = {"skipped": info.skips} if info.skips else {}
    if info.outer_norm is not None:
        out["outer"] = {"norm": info.outer_norm, "drift": info.outer_drift}
    if info.errors:
        out["quantization_unit"] = info.sampled
        out |= {f"quantization_error_{kind}": error for kind, error in info.errors.items()}
    return out | ({"fallbacks": list(info.fallbacks)} if info.fallbacks else {})


def _of_replicas(losses: Sequence[float], norms: Sequence[float]) -> dict[str, Any]:
    """Return the metrics of each outer replica by its number, where there are several."""
    each = zip(losses, norms, strict=True)
    every = {f"{number}": {"lm_loss": loss, "grad_norm": norm} for number, (loss, norm) in enumerate(each)}
    return {"replicas": every} if len(every) > 1 else {}


def _gathered(own: LocalStep) -> list[LocalStep]:
    return gather_objects(own, LocalStep)
