"""The way back to before a spike (--rollback-on-spike), in the running process.

PaLM's crew (Chowdhery et al. 2022, section 5.1) went back to a checkpoint from before the spike and left out the
batches that were seen before and during it; OPT's and BLOOM's did so by hand, too. Here the newest checkpoint from
before the spike is loaded, and the iterations from there to the last one that was trained are left out
(train/state/progress.py), as if --skip-train-iteration-range had named them. The trainer saves at once, so that a
resume goes on behind them.
"""

from __future__ import annotations

from dataclasses import replace

from megazero.checkpoint.errors import CheckpointError, error_number
from megazero.log.exit_status import ExitStatus
from megazero.train.state.checkpointing import Checkpointing
from megazero.train.state.origin import origin_before
from megazero.train.state.progress import Progress


class LossSpike(RuntimeError):
    """A spike that going back does not cure, or no longer."""

    exit_status = ExitStatus.NON_FINITE


def go_back(checkpointing: Checkpointing, progress: Progress, begin: int, why: str) -> Progress:
    """Load the newest checkpoint from before iteration ``begin``, whose update is the first to undo. Collective.

    Skipped steps need no undoing: a checkpoint from among them holds the weights from before them.

    Returns the progress of then, with the count of rollbacks of now: the checkpoint may be older than the last one.
    Raises LossSpike on every rank if there is no such checkpoint, or after --max-rollbacks.
    """
    config = checkpointing.config
    done = progress.rollbacks
    if done >= config.skipping.max_rollbacks:
        raise LossSpike(
            f"{why}. The run has gone back {done} times (--max-rollbacks): look at the samples that were left out, "
            "and resume with a lower --lr, a smaller --clip-grad or other data"
        )
    try:
        origin = origin_before(checkpointing.root, begin, checkpointing.mesh)
        checkpointing.load(origin)
    except CheckpointError as error:
        if error_number(error) is not None:  # of the storage, which a later start may reach
            raise
        raise LossSpike(f"{why}. {error}") from error
    checkpointing.spikes.forget()
    before = origin.progress
    done = max(before.rollbacks, done) + 1
    return replace(
        before,
        run_id=progress.run_id,
        ordered_for=progress.ordered_for,
        starts=progress.starts,
        rollbacks=done,
    )
