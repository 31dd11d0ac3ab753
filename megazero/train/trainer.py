"""The training loop: it takes data, runs forwards and backwards, steps, logs, evaluates and saves."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import NamedTuple

import torch

from megazero.checkpoint.errors import CheckpointError
from megazero.comm.lane import Lane
from megazero.comm.timing import Waits
from megazero.config.options.skipping import due, iteration_ranges
from megazero.data.sampler import Batches
from megazero.data.source import Dataset, DatasetSource, SampleSource
from megazero.log.exit_status import ExitStatus
from megazero.log.time_bill import TimeBill
from megazero.mesh.objects import gather_objects
from megazero.models import Decoder
from megazero.ops.failures import LocalStep, NonFiniteGuard, NonFiniteLoss
from megazero.pp.executor import Pipeline
from megazero.train.callbacks.callback import Callback, Numbers, TrainedStep
from megazero.train.callbacks.chain import Callbacks, Exchange
from megazero.train.callbacks.exits import Exits
from megazero.train.data.feeding import Batch, Feeding, own_tokens
from megazero.train.evaluation import mean_loss
from megazero.train.expert_balance import memory_explained
from megazero.train.iteration_line import iteration_line
from megazero.train.outputs import Outputs
from megazero.train.parallelize import MicroBatch, dropout_key
from megazero.train.replicas import Membership
from megazero.train.schedule.learning_rate import DECOUPLED, FACTOR, UNDECAYED, LearningRate
from megazero.train.schedule.run_length import RunLength
from megazero.train.state.checkpointing import Checkpointing
from megazero.train.state.progress import Progress, leave_out, next_to_leave_out, without_effect
from megazero.train.state.saver import Saver
from megazero.zero import Engine, StepInfo

# The trainer's numbers in the exchange of a step. loss: the sum over this rank's tokens; 0 on ranks that compute no
# loss. save_part_ended: 1 if this rank's part of a save has ended. called: 1 on the first rank if other replicas
# wait.
OWN_NUMBERS = ("loss", "save_part_ended", "called")


class StepBatches(NamedTuple):
    """A rank's micro-batches of one step.

    ids: the samples of each. host: the batches before the copy to the device; they are kept until the norm has been
    read, when the copies are done. tokens: how many tokens of the global batch count in the loss. samples,
    seq_length: how many samples the global batch has, of how many tokens.
    """

    ids: Sequence[Sequence[int]]
    host: Sequence[Batch]
    device: Sequence[Batch]
    tokens: float
    samples: int
    seq_length: int


@dataclass(eq=False, kw_only=True)
class Trainer:
    """Trains from ``progress`` to the last iteration. Its parts come ready-made (see setup.py).

    pipeline: runs the stages of ``decoder``, which ``engine`` shards. learning_rates: under True that of the
    embedding and the head, which --decoupled-lr sets apart. bill: measures the run. callbacks: all of them, among
    them ``outputs`` and ``exits``. replicas: this one's part among others, if there are some.
    """

    decoder: Decoder
    engine: Engine
    pipeline: Pipeline
    data: Mapping[str, SampleSource]
    length: RunLength
    learning_rates: Mapping[bool, LearningRate]
    progress: Progress
    checkpointing: Checkpointing
    outputs: Outputs
    exits: Exits
    bill: TimeBill
    callbacks: Callbacks
    replicas: Membership | None = None

    def __post_init__(self) -> None:
        checkpointing, self.mesh = self.checkpointing, self.engine.mesh
        self.config, self.guard = checkpointing.config, NonFiniteGuard()
        self.scaling = checkpointing.scaling
        self.ranges = iteration_ranges(self.config.skipping.skip_train_iteration_range)
        masked = self.config.data.masks_loss
        self.feeding = Feeding(self.mesh, self.config.batch.micro_batch_size, self.pipeline.loss_rank, masked)
        limit_s = self.config.training.distributed_timeout_minutes * 60
        self.saver = Saver(checkpointing, self.outputs.console, self._saved, limit_s)
        self.exchange = Exchange(OWN_NUMBERS, self.callbacks.members)
        self.engine.join(self.exchange)
        waits = (self.engine.waits, self.decoder.tp.waits)
        self.timed: Sequence[Lane | Waits] = (*self.engine.lanes, *waits)
        self.phase = "start"
        self.callbacks.watch(self)
        if self.replicas is not None:
            self.replicas.say = partial(setattr, self, "phase")

    # -- what callbacks ask of the run ------------------------------------------------------------

    def note(self, text: str) -> None:
        self.outputs.console.note(text)

    def warn(self, text: str) -> None:
        self.outputs.console.warning(text)

    def stop(self, why: str) -> None:
        self.exits.asked = why

    def asked_to_stop(self) -> bool:
        return self.exits.ask(self.mesh)

    def mean_loss(self, data_set: Dataset, stoppable: bool = True) -> float | None:
        return self._mean_loss(DatasetSource(data_set), stoppable)

    def _mean_loss(self, source: SampleSource, stoppable: bool, name: str = "") -> float | None:
        """Do as ``WatchedRun.mean_loss`` says. name: of the data, in lines that say how far it is."""
        sizes = self.length.batch_sizes
        self.decoder.eval()
        return mean_loss(
            self.engine,
            self.pipeline,
            self.feeding,
            source,
            steps=self.config.training.eval_iters,
            micro_batches=self.config.batch.evaluated_per_step(sizes.data_parallel) // sizes.quantum,
            interrupted=lambda: stoppable and self.asked_to_stop(),
            anchor=self.config.outer.outer_evaluation == "anchor",
            advance=partial(self._evaluating, name or "validation"),
        )

    def _evaluating(self, name: str, done: int, steps: int) -> None:
        """Say how far an evaluation is. The phase shows the watchdog that a waiting replica is alive."""
        self.phase = f"evaluation at iteration {self.progress.iteration}, batch {done + 1} of {steps}"
        self.outputs.console.evaluating(name, done, steps)

    # -- the loop --------------------------------------------------------------------------------

    def run(self) -> ExitStatus:
        """Train, and return FINISHED or STOPPED. Raises NonFiniteLoss, CheckpointError or CommunicationError."""
        began, pending = self.progress.iteration, self.progress.evaluation_pending
        for line in without_effect(self.ranges, self.progress, self.length.last_iteration):
            self.note(line)
        self.callbacks.tell(Callback.start)
        with self.feeding.batches(self.data["train"], consumed=self.progress.consumed_samples) as batches:
            if self.replicas is not None:
                self.replicas.join(batches)
                self._stand(batches)
            self._evaluate_if(self.config.training.eval_at_start and began == 0)
            saved_at = self._train(batches)
        if self.exits.reason:
            self.note(f"stopping after iteration {self.progress.iteration}: {self.exits.reason}")
        if self.replicas is not None:
            self.replicas.close()
        self.callbacks.tell(Callback.closing)
        made_up = pending and not self.progress.evaluation_pending
        self._save(-1 if made_up and self.progress.iteration == began else saved_at)
        self._wait_for_save()
        if not self.trained or self.progress.evaluation_pending:
            return ExitStatus.STOPPED
        if began < self.progress.iteration or pending:
            # Not to be interrupted: no restart would make up for it.
            self._evaluate("test", stoppable=False)
        return ExitStatus.FINISHED

    @property
    def trained(self) -> bool:
        """Whether the run has had all of its iterations or, with other replicas, of their samples."""
        if self.replicas is not None:
            return self.replicas.finished
        return self.progress.iteration >= self.length.last_iteration

    def _stand(self, batches: Batches) -> None:
        """Note how far all are, and where this replica is among them."""
        assert self.replicas is not None
        self.progress = replace(
            self.progress,
            consumed_samples=self.replicas.consumed(batches),
            source=batches.state,
            meeting=self.replicas.stand.state(),
        )

    def _train(self, batches: Batches) -> int:
        """Train, evaluate and save until the last iteration or a reason to stop. Returns the iteration last saved."""
        saved_at = self.progress.iteration
        while not self.exits.reason and not self.trained:
            since = self.progress.iteration
            if not self._leave_out(batches):
                self._iterate_or_end(batches)
            iteration = self.progress.iteration
            self._evaluate_if(due(self.config.training.eval_interval, since, iteration))
            self.exits.reason = self.exits.reason or self.exits.conditions.planned(since, iteration)
            if self.exits.reason or due(self.config.checkpoint.save_interval, since, iteration):
                saved_at = self._save(saved_at)
        return saved_at

    def _leave_out(self, batches: Batches) -> bool:
        """Skip the iterations that --skip-train-iteration-range names from here on. Returns whether there are any."""
        last = next_to_leave_out(self.ranges, self.progress, self.length.last_iteration)
        if last is not None:
            after = leave_out(self.progress, last, self.length.batch_sizes)
            batches.skip(after.consumed_samples - self.progress.consumed_samples)
            self.progress = replace(after, source=batches.state)
            self.note(f"left out: {self.progress.left_out[-1]}: --skip-train-iteration-range")
        return last is not None

    def _iterate_or_end(self, batches: Batches) -> None:
        """Train one iteration. Completes the save under way before NonFiniteLoss ends the run."""
        self.callbacks.tell(Callback.before_step, self.progress.iteration + 1)
        try:
            self._iterate(batches)
        except NonFiniteLoss as error:
            self._end_save(f"{error}")
            raise

    def _end_save(self, why: str) -> None:
        """Finish the running save before an error that all ranks see ends the run. The exit status is the error's.
        Collective.
        """
        if self.saver.under_way:
            self.warn(f"{why}. The run ends when the save under way is complete, or has failed")
            try:
                self._wait_for_save()
            except CheckpointError as error:
                self.warn(f"{error}")

    def _wait_for_save(self) -> None:
        if self.saver.under_way:
            self.phase = f"saving up to iteration {self.progress.iteration}"
            self.saver.wait()

    def _iterate(self, batches: Batches) -> None:
        """Train one iteration and log it. Raises NonFiniteLoss."""
        self._take_stalls()  # of an evaluation
        self.bill.reset()
        iteration = self.progress.iteration + 1
        began = time.perf_counter()
        self.phase = f"iteration {iteration}"
        rates = self._set_rates()
        with self.bill.span("data"):
            batch = self._load(batches)
        with self.bill.span("compute"):
            info = self._step(batch)
            own = self.exchange.received[None]
            computed = (own["loss"][rank] for rank in self.mesh.stage_ranks(self.pipeline.loss_rank))
            loss = reduce(add, computed) / batch.tokens
            self._check_finite(iteration, batch, info, own["loss"], loss)
            self.scaling.update(info.skipped, batch.samples)
            self._take_stalls()
        if self.replicas is not None:
            with self.bill.span("exposed_outer"):
                self.replicas.stepped(batches, batch.samples, any(own["called"]))
        self.progress = replace(
            self.progress,
            iteration=iteration,
            consumed_samples=batches.consumed,
            source=batches.state,
            losses={**self.progress.losses, "lm_loss": loss},
            tokens=self.progress.tokens + batch.samples * batch.seq_length,
        )
        if self.replicas is not None:
            self._stand(batches)
        seconds = time.perf_counter() - began
        step = TrainedStep(
            iteration=iteration,
            loss=loss,
            info=info,
            samples=batch.samples,
            seq_length=batch.seq_length,
            seconds=seconds,
            traffic=self.engine.traffic.take(),
            bill=self.bill.close(seconds),
            meeting=self.replicas.take_told() if self.replicas else {},
        )
        self._log(step, rates)
        if all(own["save_part_ended"]):
            self.saver.go_on()

    def _load(self, batches: Batches) -> StepBatches:
        """Read the micro-batches of the next step, and start their copies to the device."""
        sizes, consumed = self.length.batch_sizes, batches.consumed
        size = self.replicas.step_size() if self.replicas else sizes.batch_size(consumed)
        count = size // sizes.quantum
        ids = batches.sample_ids(count)
        host = batches.next_step(count)
        further = self.config.model.mtp_num_layers
        device = [own_tokens(self.feeding.to_device(batch), self.mesh, further) for batch in host]
        with self.bill.span(self.engine.exchange_hop) if self.feeding.masked else nullcontext():
            tokens = self.feeding.valid_tokens([own_tokens(batch, self.mesh) for batch in host])
        return StepBatches(ids, host, device, tokens, batches.consumed - consumed, host[0]["tokens"].shape[1])

    def _step(self, batch: StepBatches) -> StepInfo:
        """Run forwards, backwards and the update. ``exchange`` has the numbers of every rank then."""
        count = len(batch.device)
        factor, divisor = self.scaling.factors(batch.tokens, self.mesh.dp_size)
        self.engine.begin_step(count, divisor, self.pipeline.program(count))
        with memory_explained(self.engine):
            loss = self._forward_backward(batch.device, batch.ids, factor)
        called = self.replicas is not None and self.replicas.member.called()
        own: Numbers = {"loss": loss, "save_part_ended": self.saver.part_ended, "called": called}
        self.exchange.given = {None: own, **self.callbacks.numbers()}
        return self.engine.step()

    def _check_finite(
        self, iteration: int, batch: StepBatches, info: StepInfo, losses: Sequence[float], loss: float
    ) -> None:
        samples = tuple(int(sample) for row in batch.ids for sample in row)
        own = LocalStep(self.mesh.rank, losses[self.mesh.rank], samples)
        if not self.scaling.dynamic:  # else it overflows the gradients: a step to skip, as in Megatron
            self.guard.check_loss(iteration, loss, own, _gathered)
        self.guard.check_norm(iteration, info.grad_norm, own, _gathered, self.scaling.can_fall)

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

    def _set_rates(self) -> dict[str, float]:
        """Give every group of the optimizer its learning rate and weight decay. Returns the metrics of these."""
        position = self.length.scheduled(self.progress) - self.scaling.skipped(self.length.by_samples)
        rates = {decoupled: rate(position) for decoupled, rate in self.learning_rates.items()}
        for group in self.engine.param_groups:
            rate = self.learning_rates[group.get(DECOUPLED, False)].times(group.get(FACTOR, 1.0))
            group["lr"] = rate(position)
            group["weight_decay"] = 0.0 if group.get(UNDECAYED) else self.config.optimizer.weight_decay
        decoupled = (
            {} if self.config.optimizer.decoupled_lr is None else {"decoupled_learning_rate": rates[True]}
        )
        return {"learning_rate": rates[False], **decoupled}

    # -- evaluation, saving ----------------------------------------------------------------------

    def _evaluate_if(self, due: bool) -> None:
        """Evaluate if it is due, now or from before a restart, unless the run is about to stop.

        An evaluation that is omitted or interrupted for that stays pending: a resume begins with it.
        """
        due = due or self.progress.evaluation_pending
        if due and not self.exits.reason:
            self._evaluate("valid")
        if due and not self.exits.reason and (results := self.callbacks.evaluate()):
            self.outputs.results(self.progress, results)
            self.progress = replace(self.progress, losses={**self.progress.losses, **results})
        self.progress = replace(self.progress, evaluation_pending=bool(due and self.exits.reason))

    def _evaluate(self, part: str, stoppable: bool = True) -> None:
        """Report the mean loss on a part of the data, if there is one. If stoppable, it ends when the run is to."""
        name = "" if part == "valid" else part
        source = self.data.get(part)
        loss = None if source is None else self._mean_loss(source, stoppable, name)
        if loss is not None:
            self.callbacks.tell(Callback.evaluated, self.progress, name, loss)
            key = f"eval_lm_loss/{name}" if name else "eval_lm_loss"
            self.progress = replace(self.progress, losses={**self.progress.losses, key: loss})

    def _save(self, saved_at: int) -> int:
        iteration = self.progress.iteration
        if self.config.checkpoint.save is None or iteration == saved_at:
            return saved_at
        self.phase = f"saving iteration {iteration}"
        whole = self.data["train"].whole_state(self.progress.source)
        self.saver.save(replace(self.progress, source=whole))
        return iteration

    def _saved(self, iteration: int, path: Path, seconds: float) -> None:
        self.progress = replace(self.progress, checkpoint=str(path))
        self.callbacks.tell(Callback.saved, iteration, path, seconds)

    def _log(self, step: TrainedStep, rates: Mapping[str, float]) -> None:
        """Complete the iteration's line with what callbacks add, and hand it to them."""
        scale = self.scaling.metrics()
        left = self.length.tokens_left(self.progress.consumed_samples)
        line = iteration_line(step, self.decoder.config, self.mesh, self.progress, rates, scale, left)
        extra = self.callbacks.after_step(step, self.exchange.received, line.extra)
        self.callbacks.tell(Callback.logged, replace(line, extra=extra))


def _gathered(own: LocalStep) -> list[LocalStep]:
    return gather_objects(own, LocalStep)
