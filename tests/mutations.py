"""Seeded faults: mistakes that are easily made, and of each a test of ``make test`` that finds it.

    python -m tests.mutations                      all of them, one at a time in a copy of the tree
    python -m tests.mutations zero comm/lane.py    those of modules whose path has one of these words

Every room has one. ``tests/unit/house/test_mutations.py`` tells when the table falls behind the code.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests import ROOT

LIMIT_S = 300.0  # of a test
ALWAYS = "not slow and not gpu"
PASSED, FAILED = 0, 1  # pytest's exit statuses

# By module: what stands there once (-), what it becomes (+), what that breaks, and the test that finds it (>).
TABLE = r"""
kernels/hadamard.py
- .sign().to(dtype)
+ .neg().sign().to(dtype)
  what a GPU sends a CPU reads with other signs
> tests/unit/kernels/test_hadamard.py::test_signs_are_what_kernels_have

megazero/zero/optimizer.py
- return self.replicated and not self.rounded
+ return self.replicated
  experts that every tensor-parallel rank holds are sent exactly
> tests/dist/quantised/test_bytes_across.py::test_what_crosses_nodes_is_what_arithmetic_says

megazero/mesh/dealing.py
- message = sorted(held, key=lambda i: (pieces[i].owner[axis], i))
+ message = sorted(held, key=lambda i: pieces[i].owner[axis])
  ranks send pieces in another order than the one in which their owners take them
> tests/unit/mesh/test_dealing.py::test_every_piece_arrives_at_its_owner

megazero/mesh/grid.py
- self.expert_shards, self.dp_stride * together)
+ self.expert_shards, self.dp_stride)
  experts are reduced over ranks that hold others
> tests/unit/mesh/test_experts.py::test_experts_lie_on_the_ranks_that_hold_the_same_and_keep_the_share_of_every_state

megazero/mesh/mesh.py
- for axis in reversed(self.row_axes)
+ for axis in self.row_axes[-1:]
  experts are balanced by the tokens of a node
> tests/dist/train/test_expert_balance.py::test_a_layout_balances_as_one_rank

megazero/comm/rooms/point.py
- return 2 * len(here) > len(last) - (min(last, default="") in here) if last else True
+ return 2 * len(here) >= len(last)
  both of two sites go on when the link between them is cut
> tests/unit/comm/test_rooms.py::test_of_two_parts_one_goes_on

megazero/comm/rooms/point.py
- seen.stray = made.line != state.line
+ seen.stray = False
  a launch that was frozen goes on from the anchor of a meeting that was void
> tests/unit/comm/test_rooms.py::test_a_verdict_is_void_if_all_that_had_the_bytes_died

megazero/comm/rooms/shelf.py
- read = [each for each in self._shown.values() if each.owned]
+ read = []
  who fetches an anchor during a meeting gets halves of two
> tests/unit/comm/test_rooms.py::test_an_anchor_may_change_while_others_fetch_it

megazero/checkpoint/directory.py
- (manifest.serial, manifest.step, path)
+ (manifest.step, manifest.serial, path)
  after going back the abandoned checkpoint is the newest
> tests/unit/checkpoint/test_store.py::test_a_manifest_is_read_once_while_it_stays_the_same

megazero/checkpoint/store.py
- ours.keys() | there.keys()
+ ours.keys() & there.keys()
  tensors that a model lacks are passed over
> tests/unit/checkpoint/test_store.py::test_another_model_is_named_tensor_by_tensor

megazero/comm/codec.py
- out[:, low:high].zero_()
+ pass
  messages have bytes of other tensors
> tests/unit/comm/test_codec.py::test_zero_scales_have_zero_payload_and_tiny_values_round_to_it

megazero/comm/hops.py
- own = () if whole or out is None else rows.kept
+ own = ()
  this rank's own row is not in the sum
> tests/unit/comm/test_hops.py::test_a_reduction_sums_every_ranks_row

megazero/comm/lane.py
- ticket.plan[ticket.issued].axis in reserved
+ ticket.plan[ticket.issued].axis in older
  ranks use an axis in different orders
> tests/unit/comm/test_lane.py::test_axes_are_used_in_the_order_of_the_chains_whatever_ends_first

megazero/zero/agreement.py
- crc32(text.encode(), self.value)
+ crc32(text.encode())
  the hash tells the last collective alone
> tests/unit/zero/test_program.py::test_every_collective_and_its_place_count

megazero/zero/axes.py
- mesh.expert_axes, mesh.grid.expert_shards
+ mesh.expert_axes, (1, 1, 1)
  states of experts that ranks share are cut by no factor
> tests/unit/zero/test_axes.py::test_states_of_experts_that_ranks_share_are_cut_by_what_is_left_of_the_factors

megazero/zero/grad_norm.py
- run.unit.axes.counts and (is_first_end or not run.unit.tied)
+ run.unit.axes.counts
  both ends' tied gradients are in the norm
> tests/unit/zero/test_engine_alone.py::test_tied_parameters_count_at_one_end

megazero/zero/layout.py
- at += filled(slots[-1].numel, block)
+ at += slots[-1].numel
  a block has two parameters' elements
> tests/unit/zero/test_layout.py::test_any_sizes

megazero/zero/matrix_updates.py
- shape = (matrix.cut.rows, matrix.cut.columns)
+ shape = matrix.slot.shape
  a matrix that tensor-parallel ranks cut is scaled as its part
> tests/dist/engine/test_muon.py::test_few_layouts_equal_one_rank

megazero/zero/outer.py
- row.div_(sum(weights))
+ pass
  the outer gradient is a sum, not a mean
> tests/dist/outer/test_outer.py::test_ranks_take_the_steps_of_diloco
- torch.sub(row, gone, out=out).mul_(self.outer.feedback)
+ out.zero_()
  what rounding has lost is not sent later
> tests/dist/outer/test_outer.py::test_what_rounding_loses_is_sent_later_and_bytes_are_those_of_the_formula

megazero/zero/reduce.py
- staging, sums, context, accumulate=accumulate)
+ staging, sums, context, accumulate=True)
  the last step's gradients are added, G > 1
> tests/unit/zero/test_engine_alone.py::test_a_step_that_is_not_finite_leaves_nothing_for_the_next

megazero/tp/chunked_loss.py
- (grad,) = torch.autograd.grad(loss, logits, weights[part].to(loss.dtype) * scale)
+ (grad,) = torch.autograd.grad(loss, logits, weights[part].to(loss.dtype))
  gradients of a chunk leave fp16's range before the loss scale
> tests/unit/tp/test_chunked_loss.py::test_the_gradient_that_the_backward_starts_from_scales

megazero/cp/exchange.py
- for peers in (cp.heads, *cp.keys):
+ for peers in (cp.heads,):
  tokens of groups that gather keys are not counted
> tests/unit/cp/test_exchange.py::test_counts_are_added_up_over_all_ranks_that_share_samples

megazero/models/mixers/latent.py
- weight.chunk(peers.size)[peers.rank], replace(tp, deferred=None)
+ weight.chunk(peers.size)[0], replace(tp, deferred=None)
  every rank that swaps heads makes the first one's keys and values
> tests/dist/models/test_latent.py::test_small_cover

megazero/comm/peers.py
- dtype=torch.promote_types(rows.dtype, torch.float32))
+ dtype=rows.dtype)
  gradients of gathered keys are rounded with every addition
> tests/unit/cp/test_exchange.py::test_gradients_of_gathered_keys_are_rounded_once

megazero/pp/links.py
- self.after[expected[0]] <= self.issued
+ self.after[expected[0]] < self.issued
  a receive is posted an action late
> tests/unit/pp/test_links.py::test_each_direction_has_its_own_communicator

megazero/pp/schedules.py
- range(max(0, micro_batches - delay), micro_batches)
+ range(micro_batches - delay, micro_batches)
  weights' gradients of micro-batches below 0
> tests/unit/pp/test_timeline.py::test_bubbles_are_the_closed_forms

megazero/moe/balance.py
- .square().sum() / (length * samples)
+ .square().mean()
  the z loss is the mean of a rank's own tokens
> tests/dist/models/test_experts.py::test_experts_train_on_a_layout_as_on_one_rank

megazero/moe/dispatch.py
- return self._placed(rows).sum(1)
+ return sum(self._placed(rows).unbind(1))
  a token's rows are rounded with every addition
> tests/unit/moe/test_moe.py::test_a_tokens_rows_are_added_before_they_are_rounded

megazero/moe/routing.py
-     if decision.experts is None:
+     if True:
  a recompute chooses anew
> tests/unit/moe/test_moe.py::test_a_decision_is_taken_once_and_scores_are_in_fp32

megazero/config/rules.py
- if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
+ if False:
  every tensor-parallel rank computes the experts of all tokens
> tests/unit/config/test_validate.py::test_what_cannot_be_is_refused_with_what_can

megazero/families/layer_kinds.py
- return (index + marked.last) % frequency[0] == 0
+ return index % frequency[0] == 0
  every N-th layer is the first of N
> tests/unit/models/test_decoder.py::test_layers_of_a_kind_share_a_mask_and_tables

megazero/models/experts.py
- length = x.shape[0] * (self.tp.size if self.tp.sharded_sequence else 1) * self.cp.size
+ length = x.shape[0] * (self.tp.size if self.tp.sharded_sequence else 1)
  a sample has the tokens of one context-parallel rank
> tests/dist/models/test_experts.py::test_experts_train_on_a_layout_as_on_one_rank
- x.shape[0] * (self.tp.size if self.tp.sharded_sequence else 1) * self.cp.size
+ x.shape[0] * self.cp.size
  a sample has the tokens of one tensor-parallel rank
> tests/dist/models/test_experts.py::test_experts_train_on_a_layout_as_on_one_rank
- counts = self.tp.start_sum(counts).wait()
+ pass
  tokens of one tensor-parallel rank are counted
> tests/dist/models/test_experts.py::test_experts_train_on_a_layout_as_on_one_rank
- return summed(counts, self.cp)
+ return counts
  tokens of one context-parallel rank are counted
> tests/dist/models/test_experts.py::test_experts_train_on_a_layout_as_on_one_rank

megazero/models/masking.py
- of_key <= at - self.window
+ of_key < at - self.window
  a window has a token more
> tests/unit/models/test_attention_backends.py::test_pieces_equal_a_dense_mask

megazero/data/sampler.py
- self._ready.clear()
-         self.state = self
+ self.state = self
  after a skip come the batches prepared before it
> tests/unit/data/test_sampler.py::test_skipped_samples_are_consumed_unread

megazero/plan/communication.py
- again + sent * there + back + received * values
+ again + sent * there + back
  gradients of probabilities take no bytes
> tests/unit/moe/test_two_levels.py::test_bytes_are_those_of_rows_that_leave

megazero/plan/memory.py
- return held + (following if copied else 0.0)
+ return held
  what gloo gathers into takes no memory
> tests/unit/plan/test_pool.py::test_processors_hold_what_is_gathered_ahead_twice

megazero/log/exit_status.py
- return recorded is None or (recorded == ExitStatus.RANK_LOST and status not in _SEEN_FROM_OUTSIDE)
+ return True
  what follows from a rank's end takes the place of its status
> tests/unit/log/test_history.py::test_the_first_end_counts_but_a_loss_gives_way_to_a_ranks_own_account

megazero/ops/failures.py
- self.skipped_in_a_row += 1
+ self.skipped_in_a_row = 1
  a run of skipped steps never ends
> tests/unit/ops/test_guards.py::test_norms_stop_the_run_after_a_row

megazero/convert/folder.py
- counts[entry.dtype] += prod(entry.shape)
+ counts[entry.dtype] += 1
  a folder has the dtype of most tensors, which may be norms
> tests/unit/convert/test_convert.py::test_a_folder_has_the_dtype_of_most_elements_not_of_most_tensors

megazero/train/data/feeding.py
- self.mesh.stage_rows(rows, self.loss_rank).sum()
+ rows.sum()
  every stage's tokens count in the mean
> tests/unit/data/test_sampler.py::test_tokens_count_once_whatever_stages_read_them

megazero/train/expert_balance.py
- def aborted(self) -> None:
-         for balance in self.own.values():
+ def aborted(self) -> None:
+         for balance in ():
  tokens of an aborted step count in the next
> tests/unit/moe/test_balance.py::test_a_skipped_or_aborted_step_moves_no_bias_and_its_tokens_are_forgotten
- values /= self.engine.micro_batches * self.mesh.batch_ranks
+ values /= self.engine.micro_batches
  losses of experts are told as sums over ranks
> tests/dist/train/test_expert_balance.py::test_a_layout_balances_as_one_rank

megazero/data/shares.py
- left = (cut(share, used.get(name, 0))[1] for name, share in self.shares.items())
+ left = (cut(share, used.get(name, 0))[1] for name, share in self.shares.items() if name in used)
  samples of a lost replica are left out
> tests/dist/outer/test_replicas.py::test_one_dies_another_comes_late_and_a_slow_one_is_called

megazero/patches/two_hops.py
- return cuts[max(common)][1]
+ pass
  every enable() makes new communicators
> tests/unit/patches/test_megatron.py::test_the_next_enable_takes_the_communicators_of_the_last

fsdp2_patch/patch.py
- group.updates += group.reduced
+ group.updates += 1
  two optimizers of a group make two steps
> tests/fsdp2/test_patch.py::test_optimizers_that_share_a_group_make_one_step
"""


@dataclass(frozen=True)
class Mutation:
    """``old`` stands once in the module ``path``, and becomes ``new``. why: what that breaks. test: finds it."""

    path: str
    old: str
    new: str
    why: str
    test: str

    def apply(self, text: str) -> str:
        """Return the module's text with the mistake. Raises ValueError unless ``old`` stands in it once."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.path} has {self.old!r} {text.count(self.old)} times, not once")
        return text.replace(self.old, self.new)


def mutations(words: Sequence[str] = ()) -> list[Mutation]:
    """Return those of modules whose path has one of the words, or all."""
    out = []
    for section in TABLE.strip().split("\n\n"):
        path, *lines = section.split("\n")
        while lines:
            assert lines[0].startswith("- "), (path, lines[0])
            parts = [[line[2:] for line in _taken(lines, sign)] for sign in "-+ >"]
            out.append(Mutation(path, *map("\n".join, parts)))
    return [each for each in out if not words or any(word in each.path for word in words)]


def _taken(lines: list[str], sign: str) -> Iterator[str]:
    """Take off the lines in front that begin so."""
    while lines and lines[0].startswith(sign):
        yield lines.pop(0)


def run_test(tree: Path, test: str, limit_s: float = LIMIT_S) -> int | None:
    """Run what ``make test`` runs of a test in ``tree``. Return pytest's exit status, or None if it took too long:
    then everything that it started is killed.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", ALWAYS, test]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    process = subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):  # ranks outlive a pytest that was killed
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the tree's files, those that git ignores left out, as they are now."""
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        for name in names:
            if (ROOT / name).is_file() or (ROOT / name).is_symlink():
                (target := Path(folder, name)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target, follow_symlinks=False)
        # By content: a mutation may leave a file's length and second of change as they were.
        by_content = ("compileall", "-q", "--invalidation-mode", "checked-hash", "megazero", "kernels")
        subprocess.run((sys.executable, "-m", *by_content), cwd=folder, check=True)
        yield Path(folder)


def main(words: Sequence[str]) -> int:
    """Print which tests find their mutations. Return 1 unless all do, and all pass without."""
    chosen, missed = mutations(words), 0
    with copied() as tree:
        fails = {test for test in {each.test for each in chosen} if run_test(tree, test) != PASSED}
        for each in chosen:
            file = tree / each.path
            text = file.read_text()
            file.write_text(each.apply(text))
            found = run_test(tree, each.test) == FAILED and each.test not in fails
            file.write_text(text)
            missed += not found
            print(f"{'found' if found else 'MISSED'}  {each.path}: {each.why}\n    {each.test}", flush=True)
    print(f"{len(chosen)} mutations, {missed} missed; tests that fail without: {', '.join(fails) or 'none'}")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
