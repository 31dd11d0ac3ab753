"""Seeded faults: mistakes that are easily made, one at a time in a copy of the tree, and which test finds each.

    python -m tests.mutations                      all of them, some 40 minutes on 2 cores
    python -m tests.mutations zero comm/lane.py    those of modules whose path has one of these words

The tests are the nearest ones by imports, for a minute. A mutation that no test finds wants a new one.
``tests/unit/house/test_mutations.py`` tells when the table falls behind the code.

No tool replaces the table: of its 12 mistakes in comm/lane.py and models/rotary.py, the 821 changes that cosmic-ray
8.7 makes there have 2. Most of those are comparisons by ``is``, bit shifts and other indices in messages. Of the
first 33 in lane.py its own tests let 11 through, most of which change nothing, as an assertion or a label.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests import ROOT
from tests.unit.house.test_imports import imports, module_name

LIMIT_S = 60.0  # of tests for each mutation
FILES = 12  # of tests at most: to collect more takes much of the limit
TOPS = ("megazero", "kernels", "megatron_core_patch", "fsdp2_patch", "pretrain", "tools", "tests")
TESTS = ("tests/unit", "tests/dist", "tests/fsdp2")

# By module: what stands there once (-), what it becomes (+, or nothing), and what that breaks.
TABLE = r"""
megazero/zero/axes.py
- return not any(self.indices[self.os : self.all])
+ return not any(self.indices[self.g : self.all])
  of the ranks that hold different slices of the optimizer states one counts
- levels = range(self.g + 1, self.all + 1)
+ levels = range(self.p + 1, self.all + 1)
  errors are fed back at a hop that runs with every micro-batch

megazero/zero/outer.py
- row.add_(owed)
+ pass
  what messages between outer replicas lost is not sent later
- kept[own].sub_(total[own])
+ kept[own].zero_()
  what the sum over outer replicas lost on its way back is forgotten
- mean = sums.buffer.div_(self.axis.size)
+ mean = sums.buffer
  the outer gradient is a sum, not a mean
- gradient.add_(anchor.momentum, alpha=outer.momentum)
+ pass
  the outer optimizer has no Nesterov momentum
- offsets = [(fragment + 1) * interval // fragments for fragment in range(fragments)]
+ offsets = [(fragment + 1) * interval // fragments - 1 for fragment in range(fragments)]
  fragments leave a step early
- clock = min(clock, interval)
+ pass
  under a shorter interval than before replicas do not meet
- if self.flight.left <= 0 or fragment is not None:
+ if fragment is not None:
  a fragment arrives when the next one leaves
- weights.lerp_(anchor, mixing)
+ weights.copy_(anchor)
  a replica's own weights are not mixed in
- anchor.momentum.copy_(here.momentum, non_blocking=True)
+ pass
  the outer momentum in host memory stays what it was
- sums.copy_(arrived, axes.all)
+ pass
  what was on its way is not what arrives
- return [unit for unit in self.fragments[fragment] if unit.trainable]
+ return list(self.fragments[fragment])
  frozen units are sent
- if odd:
+ if False:
  outer replicas may hold different anchors

fsdp2_patch/weights.py
- all_gather_flat(exact, input_tensor.clone(), group=group)
+ exact = output_tensor
  weights are verified against what was sent of them
- one.whole = True
+ pass
  a write in place is not sent

fsdp2_patch/patch.py
- noted = checksums([gather for gather in written if gather.group.codecs.delta])
+ noted = checksums([])
  behind every update differences go whole
- self._settle(state._fsdp_param_groups)
+ pass
  a gather ahead of a forward takes weights of before a load
- group.updates += group.reduced
+ group.updates += 1
  two optimizers of a group make two steps

fsdp2_patch/gradients.py
- self.params, self.last = list(given["fsdp_params"]), given["all_reduce_grads"]
+ self.params, self.last = list(given["fsdp_params"]), True
  sums cross with every micro-batch
- self.sums = self.exact = None
+ self.exact = None
  sums are sent again with the next step's

megatron_core_patch/carrier.py
- groups = [group, *([held[0].alike] if held[0].alike else [])]
+ groups = [group]
  tensor-parallel ranks send what they replicate differently

megatron_core_patch/patch.py
- self.largest = max(self.largest, largest_but(exact, ddp.module))
+ self.largest = largest_but(exact, ddp.module)
  the last model chunk alone says whether anything is quantised

megazero/patches/two_hops.py
- return cuts[max(common)][1]
+ pass
  every enable() makes new communicators

megazero/convert/megatron/legacy.py
- if gated and ".linear_fc1." in name:
+ if not held:
  ranks' gates and projections alternate
-         for key in keys:
-             for pp in range(self._pp):
+         for pp in range(self._pp):
+             for key in keys:
  virtual stages are taken rank by rank

megazero/convert/megatron/weights.py
- names_of(self.model.gated_mlp, self.arguments.gate_last)
+ names_of(self.model.gated_mlp, False)
  the gate of BLOOM's fork is taken for what it gates

megazero/convert/megatron/arguments.py
- if not value or name in accept or _known(name, value):
+ if not value or name in accept or _mentioned(key):
  what decides the model is passed over

megazero/zero/layout.py
- Piece(o.compact + p.start - o.start,
+ Piece(p.start - o.start,
  the exact region lies on the coded one
- at += -(-slots[-1].numel // block) * block
+ at += slots[-1].numel
  a block has two parameters' elements

megazero/zero/gather.py
- elif weights.stale and not weights.pinned:
+ elif False:
  with P = 1 parameters stay as a block wrote them, unrounded
- self.ahead.difference(following))
+ self.ahead)
  the next module's bytes count as those beyond it
-             self.lane.follow()
-             weights.drop_full()
+             weights.drop_full()
  freed memory is written while it is read (CUDA)
- difference.copy_(rounded), held
+ difference.copy_(source[0]), held
  differences have what bf16 cannot hold
- if unit.delta and isinstance(weights.refresh_codec, Blockwise):
+ if isinstance(weights.refresh_codec, Blockwise):
  whole weights are added to the last ones, P = 1
- own = weights.copy if hop.level == unit.axes.p else
+ own = weights.copy if hop.level == 1 else
  with P over two axes the first hop sends nothing

megazero/mesh/grid.py
- return max(1, p // together), max(1, g // together), max(1, o // together)
+ return shards
  experts that ranks share are cut as other parameters are
- self.expert_shards, self.dp_stride * together)
+ self.expert_shards, self.dp_stride)
  experts are reduced over ranks that hold others

megazero/mesh/dealing.py
- message = sorted(held, key=lambda i: (pieces[i].owner[axis], i))
+ message = sorted(held, key=lambda i: pieces[i].owner[axis])
  ranks send pieces in another order than the one in which their owners take them

megazero/zero/matrix_updates.py
- shape = (matrix.cut.rows, matrix.cut.columns)
+ shape = matrix.slot.shape
  a matrix that tensor-parallel ranks cut is scaled as its part
- if self.traits.split == 1:
+ if self.traits.split == 0:
  the parts of a matrix are put together along its rows, and taken apart along its columns

megazero/zero/by_matrix.py
- state["step"] += 1
+ pass
  a rank that holds nothing but matrices saves no number of steps

megazero/zero/reduce.py
- accumulate=self.micro_batch > 0)
+ accumulate=True)
  the last step's gradients are added, G > 1
- unsummed = number == 1 and (unit.axes.g > 0 or self.last and self.micro_batch == 0)
+ unsummed = number == 1
  sums of micro-batches are sent in bf16, G = 1
- for number in range(axes.all, axes.os, -1):
+ for number in range(axes.os + 1, axes.all + 1):
  sums go back to replicas in the order of the way there
- f"return {number}", start)
+ f"return {number} {rounding.rank}", start)
  replicas draw other noise and drift apart
- if ticket.label == unit.name:
+ if ticket.label != unit.name:
  the tied sum begins before its own end's
- , release=frame.close))
+ ))
  staging never comes free
- len(self.pending) > self.context.policy.pending_reductions
+ len(self.pending) > 1 + self.context.policy.pending_reductions
  one unit's staging more than allowed

megazero/zero/weights.py
-         if not self.pinned:
-             self.hide()
+         pass
  with P = 1 parameters read as before an update
- torch.where(values == own.to(self.form.dtype), own, values.to(own.dtype))
+ values.to(own.dtype)
  a write rounds the masters that it did not change
- was skipped.
-         self.version = 0
+ was skipped.
  after a fallback in a skipped step the rounded copy stays
- self.prepared = 0
-             if self.ticket
+ if self.ticket
  a refresh encodes gradients where differences were
- or form.dtype == form.sum_dtype or form.lifetime == "step":
+ or form.dtype == form.sum_dtype:
  a copy that was dropped counts as written

megazero/zero/gradients.py
-             self.slice.clear_padding()
+             pass
  padding that was not finite stays so, G = 1
- self.staging.clear_padding()
+ pass
  padding of the gradients is what the buffer held
-         self.touched.clear()
  the last step's gradients are added, G = 1

megazero/zero/grad_norm.py
- run.unit.axes.counts and (is_first_end or not run.unit.tied)
+ run.unit.axes.counts
  both ends' tied gradients are in the norm
- min(1.0, limit / (norm + 1e-6))
+ limit / (norm + 1e-6)
  small gradients are scaled up to the limit

megazero/zero/optimizer.py
- span = (self.span or size) if self.replicated else 1
+ span = size if self.replicated else 1
  of key/value heads that few ranks hold, one alone counts
- return self.replicated and not self.partial
+ return self.replicated
  experts that every tensor-parallel rank holds are sent exactly
- return runs if sum(run.stop - run.start for run in runs) == end else []
+ return runs
  where parameters are frozen, what is left of their gradients is sent

megazero/zero/rounding.py
- Noise.named(self.seed, self.updates
+ Noise.named(self.seed, 0
  every step draws the same noise

megazero/zero/feedback.py
- rows.add_(extra, alpha=divisor)
+ rows.add_(extra)
  a carried residual is added divided
- new[others].div_(divisor)
+ new[others]
  residuals are kept in units of the sum
-     residual.clear_padding()  # as a checkpoint has it
  what a transform leaves in padding is lost by a resume

megazero/zero/reduce.py
- f"end {ends.index}"
+ f"end {context.rounding.rank}"
  replicas of an end send other bits

megazero/zero/agreement.py
- crc32(text.encode(), self.value)
+ crc32(text.encode())
  the hash tells the last collective alone

megazero/zero/guard.py
- self.rounding.updates += int(made)
+ self.rounding.updates += 1
  a skipped step changes the noise after it

megazero/zero/engine.py
-                 unit.weights.refreshed()
+                 pass
  a load advances R once more

megazero/zero/records.py
- owed = both[0] + both[1]
+ owed = both[0]
  what the last stage owes of a tied parameter is lost
- base = min(axes.os, axes.crossing)
+ base = axes.crossing
  with replicas in a node, part of what is owed is lost
- if u.feedback.residual is not None and u.feedback.carry is None]
+ if u.feedback.residual is not None]
  a sum that is carried is lost by a save before it is paid

megazero/comm/lane.py
- self.overdue(True)
+ pass
  a failed collective does not tell that ranks differ
- if self.streams or not self.tickets:
+ if not self.tickets:
  nothing waits for gathers that ran ahead and were not used (CUDA)
- ticket.plan[ticket.issued].axis in reserved
+ ticket.plan[ticket.issued].axis in older
  ranks use an axis in different orders
- if ticket.issued and ticket.label in older:
+ if ticket.issued and ticket.label in reserved:
  a unit's later sum comes first
- ticket.plan[ticket.issued :])
+ ticket.plan[ticket.issued + 1 :])
  a younger chain takes the axis that is next for an older one
-         self.latest[ticket.label] = ticket.event
  a unit's chains run beside each other (CUDA)

kernels/dequantize_sum_quantize.py
- if form.transform == next_form.transform:
+ if form.transform and next_form.transform:
  sums under one transform's signs are sent as another's

kernels/hadamard.py
- .sign().to(dtype)
+ .neg().sign().to(dtype)
  what a GPU sends a CPU reads with other signs

kernels/moments.py
- roots.clamp_(min=1.0)
+ pass
  a small second moment beside large ones is zero, and its next update is huge

kernels/adamw.py
- drawn = None if draws is None else
+ drawn = None if True else
  moments are rounded to nearest, and a slow decay is lost

kernels/format.py
- return 0xFFFF if self.least is None else 0x7FFFFF
+ return 0xFFFF
  decoded moments are encoded to other ones

megazero/config/run.py
- max(wire.least_block, self.optimizer.moment_block)
+ wire.least_block
  slices cut blocks of moments, so layouts round otherwise than one rank

megazero/zero/optimizer.py
- origin = region, piece.start + inside - layout.regions[region][0]
+ origin = region, inside
  ranks draw the same noise for their slices, and layouts differ
- moments.encode(values, self.torch.state[leaf][name], self._coded[name])
+ pass
  a load leaves moments in 8 bits as they were

kernels/dequantize_accumulate.py
- if mixing is not None and accumulate:
+ if False:
  what was there is transformed with the messages

megazero/comm/codec.py
- accumulate = accumulate or bool(own)
+ accumulate = accumulate
  the own row is overwritten by the others' sum
- frame.take(exact, at_least_fp32(self.exact_dtype))
+ frame.take(exact, torch.float32)
  fp64 sums pass through fp32 between two hops
- out[:, low:high].zero_()
+ pass
  messages have bytes of other tensors

megazero/comm/hops.py
- axis.reduce_group if kind in ("reduce", "update") else axis.gather_group
+ axis.gather_group
  both lanes share a communicator: their order is timing's
- (sum(sent) - sent[axis.index]) * own.element_size()
+ sum(sent) * own.element_size()
  bytes to itself count as sent
- own = () if whole or out is None else rows.kept
+ own = ()
  this rank's own row is not in the sum
- accumulate = accumulate or out is None and not whole
+ pass
  in place, the own row is overwritten by the others' sum
- numels = [numel // following.axis.size for numel in numels]
+ pass
  of three fused hops the last takes the second's sizes

megazero/comm/rows.py
- (to if self.drawn_by_message else at).start * n
+ at.start * n
  a patch's rows draw the noise of others

megazero/comm/watch.py
- torch.sub(row, gone, out=lost[run.at])
+ torch.sub(gone, row, out=lost[run.at])
  feedback doubles the error instead of paying it

megazero/comm/timing.py
- in self.waits[0][1]):
+ in self.waits[0][1][:1]):
  a wait is read before it is over (CUDA)
- += until - stood
+ += until
  a wait is billed to every hop before its end

megazero/pp/partition.py
- for i in reversed(range(stages)) if fixed
+ for i in range(stages) if fixed
  of equal stages the first has more layers
- costs.head * (i == stages - 1)
+ costs.head * (i == stages)
  the head costs nothing

megazero/pp/schedules.py
- + 2 * (pp - 1 - rank),
+ + (pp - 1 - rank),
  the interleaved schedule warms up too little
- range(max(0, micro_batches - delay), micro_batches)
+ range(micro_batches - delay, micro_batches)
  weights' gradients of micro-batches below 0
- min(warmup + 1 + delay, virtual * micro_batches)
+ min(warmup + 1, virtual * micro_batches)
  put-off gradients hold no activations

megazero/pp/links.py
- pp.gather_group if target > source else pp.reduce_group
+ pp.gather_group
  both directions share a communicator (NCCL hangs)
- self.after[expected[0]] <= self.issued
+ self.after[expected[0]] < self.issued
  a receive is posted an action late

megazero/pp/executor.py
-             self.deferred.discard()
+             pass
  gradients put off by a broken step stay

megazero/checkpoint/boxes.py
- end = min(stop, (start // step + 1) * step)
+ end = min(stop, start + step)
  chunks are not cut at whole rows

megazero/checkpoint/placement.py
- yield max(low, start), min(high, stop), segment
+ yield low, min(high, stop), segment
  rows before the slice are stored
- columns = [slice(self.offset1, self.offset1 + n) for n in self.local_shape[1:2]]
+ columns = [slice(n) for n in self.local_shape[1:2]]
  every rank's columns are the first
- yield self.parts[number], first, max(start - first, 0), min(stop - first, size)
+ yield self.parts[number], first, 0, min(stop - first, size)
  a slice of stacked experts begins with its expert
- RowRange((s.local + i) * here, here, (s.stored + i) * there + self.offset1)
+ RowRange((s.local + i) * here, here, (s.stored + i) * there)
  initial values of a part of stacked experts are those of the first part

megazero/moe/routing.py
-     if decision.experts is None:
+     if True:
  a recompute chooses anew
- wide = torch.promote_types(x.dtype, torch.float32)
+ wide = x.dtype
  scores are in bf16
- return scores if bias is None else scores + bias
+ return scores
  a bias chooses nothing
- ranks = self._within(ranks, self._group_sums(ranks).topk(self.group_topk).indices)
+ pass
  experts of all groups are chosen

megazero/moe/balance.py
- losses, first = self.losses, decision.counts is None
+ losses, first = self.losses, True
  a recompute counts its tokens once more
- return grad, grad.new_full((), ctx.scale), None
+ return grad, grad.new_full((), 1.0), None
  losses of more micro-batches weigh more
- keys = (sample // (samples // blocks) * count).unsqueeze(-1) + experts
+ keys = (sample % blocks * count).unsqueeze(-1) + experts
  tokens are counted in other blocks than theirs
- bias.add_((load.sum() - len(load) * load).sign().to(bias.dtype), alpha=rate)
+ bias.add_((len(load) * load - load.sum()).sign().to(bias.dtype), alpha=rate)
  a bias moves to what is full

megazero/moe/dispatch.py
- self.order = flat.argsort(stable=True)
+ self.order = flat.argsort(stable=True, descending=True)
  rows go to other experts than theirs
- return back.index_select(0, self.places).unflatten(0, (-1, self.k))
+ return back[: self.slots].unflatten(0, (-1, self.k))
  probabilities get the gradients of others
- return self.holders.exchange(rows, sent, received, codec).index_select(0, self._by_expert)
+ return self.holders.exchange(rows, sent, received, codec)
  rows that come are in the order of their sources
- return self.holders.exchange(rows.index_select(0, self._by_source), received, sent)
+ return self.holders.exchange(rows.index_select(0, self._by_expert), received, sent)
  rows go back to other tokens than theirs
- back = torch.cat([back, back.new_zeros(1, *back.shape[1:])])
+ back = torch.cat([back, back.new_ones(1, *back.shape[1:])])
  nodes to which a token does not go add to its sum
- own = came.long() - ep.across.index * share
+ own = came.long()
  every node has the first node's experts

megazero/moe/context.py
- out[coming : coming + len(kept)] = kept
+ out[coming : coming + len(kept)] = kept.bfloat16()
  rows of the own node are rounded

megazero/moe/grouped.py
- for n in weight.shape[1:]
+ for n in weight.shape[2:]
  torch's kernel gets rows that are not aligned

megazero/checkpoint/planners.py
- if self._made is None or self._made[0] is not record or self._made[1] != kind:
+ if self._made is None:
  every tensor that is made late has the first one's bits
-             padding.zero_()
+             pass
  padding keeps what it held before a load

megazero/checkpoint/reading.py
- // len(files) == rank]
+ // len(files) == rank + 1]
  some files' checksums are read by nobody

megazero/checkpoint/manifest.py
- > _SETTLED_S
+ > -1
  a manifest that changes within a tick of the clock is remembered as it was

megazero/checkpoint/store.py
-     same = same and to_json(layout, "layout") == manifest.layout
  another layout takes over ranks' own tensors
- ours.keys() | there.keys()
+ ours.keys() & there.keys()
  tensors that a model lacks are passed over

megazero/checkpoint/directory.py
- (manifest.serial, manifest.step, path)
+ (manifest.step, manifest.serial, path)
  after going back the abandoned checkpoint is the newest
-     fsync_directory(temporary)
  a manifest may be there after a power cut, its files' names not
- needed = {saved, rule.busy,
+ needed = {saved,
  a checkpoint is deleted while it is being copied

megazero/checkpoint/copying.py
- if back != entry:
+ if False:
  a copy is not checked where it lies

megazero/checkpoint/saving.py
- if error_number(error) is None:
+ if True:
  what the storage refuses is not tried again

megazero/train/state/saver.py
- and not (replacing and self._part.pause)
+ and True
  a save that is due waits for one that waits to be tried again

megazero/train/state/origin.py
- if chosen.named or error_number(error) is not None:
+ if chosen.named:
  storage that does not answer is taken for damage

megazero/data/sampler.py
-         self._ready.clear()
-         self.consumed = consumed
+         self.consumed = consumed
  after a seek come the batches prepared before it

megazero/ops/status.py
- if job and job.state in _RUNS and job.restarts > before:
+ if job and job.state in _RUNS:
  killed ranks, whose job SLURM has yet to end, are starting

megazero/ops/vitals.py
- not -FUTURE_S <= heard <= SILENT_S:
+ not heard <= SILENT_S:
  a heartbeat by a clock that is ahead lives for as long
- return None if self.begins or not last
+ return None if not last
  what was said of the start before counts for the new one
- return done.stdout if done.returncode == 0 else "" if unknown else None
+ return done.stdout if done.returncode == 0 else ""
  a controller that does not answer knows no job

megazero/ops/failures.py
- self.skipped_in_a_row += 1
+ self.skipped_in_a_row = 1
  a run of skipped steps never ends

megazero/ops/lease.py
- if max(numbers, default=number + 1) == number + 1:
+ if True:
  a start that acts on an old listing takes a living run's folder
- if own is not None and self._is_there(_file(place, own)):
+ if own is not None and _newest(self._files, place)[0] == own:
  an old listing hides that the lease was taken
- (0 if gone else SETTLE_S)
+ 0
  the next owner writes before the last one has noticed
- return other.restarts > self.restarts or bool(
+ return True or bool(
  a second step takes the folder of its own job's first

megazero/log/exit_status.py
- return recorded is None or (recorded == ExitStatus.RANK_LOST and status not in _SEEN_FROM_OUTSIDE)
+ return True
  what follows from a rank's end takes the place of its status

megazero/train/schedule/loss_scaling.py
- if overflow if unmoved is None else unmoved:
+ if overflow:
  the learning rate leaves out a step that moved some replica
- self.growth_tracker, self.hysteresis_tracker = 0, self.hysteresis
+ self.growth_tracker = 0
  after the scale grew the first overflow halves it

megazero/train/schedule/run_length.py
- each.last - each.first + 1
+ each.last - each.first
  the schedule waits an iteration too few

megazero/train/state/progress.py
- min(found[1], last_iteration)
+ found[1]
  a range is left out beyond the run's end

megazero/train/data/feeding.py
- self.mesh.stage_rows(rows, self.loss_rank).view
+ rows.view
  every stage's tokens count in the mean

megazero/train/callbacks/spikes.py
- if len(self.losses) < config.spike_window:
+ if not self.losses:
  noise of a run's first steps is a spike

megazero/train/state/checkpointing.py
- replace(options, finetune=False, load_optim=True,
+ replace(options, load_optim=True,
  a run of --finetune goes back to its weights alone

megazero/plan/memory.py
- return os * self._own_message(unit) if coded else 0.0
+ return 0.0
  with P = 1 gathers ahead of use take no bytes
- return messages + difference
+ return messages
  the difference of a delta refresh takes no memory
- n * u.elements / crossing[u]
+ n * u.elements
  residuals are those of whole units
- return held + (following if copied else 0.0)
+ return held
  what gloo gathers into takes no memory
- return step + outer if states.outer is not None and states.outer.config.outer_delay else max(step, outer)
+ return max(step, outer)
  what is on its way between replicas takes a step's buffers

megazero/plan/communication.py
- 2 * elements // coding.block)
+ elements // coding.block)
  scales have one byte
- raw = level == 1 and (g > 0 or micro_batches == 1)
+ raw = level == 1
  sums are sent in the parameters' width, G = 1

megazero/plan/gathers.py
- if unit in coming:
+ if unit in held.ahead:
  what the next module needs takes of the bytes beyond it

megazero/plan/simulate.py
- refresh = () if unit in self.here or self
+ refresh = () if self
  every gather refreshes
- max(seconds - outer.outer_delay * step, 0.0)
+ seconds
  a delay hides nothing

megazero/plan/slow_links.py
- [rung for rung in found if rung.has_room] or [least]
+ found
  intervals are proposed in which fragments have no room

megazero/verify/reference.py
- theta.grad = gradients.get(name)
+ theta.grad = gradients.get(name, torch.zeros_like(theta))
  the momentum of a fragment that is not there moves its anchor

megazero/verify/checks.py
- if bool(moved) != bool(arrived) or moved - arrived.keys():
+ if bool(moved) != bool(arrived):
  any fragment may move in a step

megazero/plan/bounds.py
- max(0.0, *map(sub, moved, hidden))
+ max(0.0, *moved)
  the bound of a layout is above its time
- crossed / (1 if cluster.inter_site is None else 2)
+ crossed
  what crosses sites counts on the link between nodes
- self.outlast else base.turns
+ False else base.turns
  short parts are gathered anew after each other part

megazero/plan/activations.py
- left = (peak - 1) * self.one
+ left = peak * self.one
  at the embedding the layers' activations are still there

megazero/families/layer_kinds.py
- return (index + marked.last) % frequency[0] == 0
+ return index % frequency[0] == 0
  every N-th layer is the first of N
- options.rotary_scaling if local is None else "none",
+ options.rotary_scaling,
  rotary positions of layers with a window are scaled, too

megazero/families/config_json/layer_groups.py
- lambda i: size is not None and i >= first,
+ lambda i: size is not None,
  windows begin in the first layer

megazero/models/rotary.py
- long = length > config.rotary_original_max_position
+ long = length >= config.rotary_original_max_position
  samples of the original length have the divisors of longer ones
- if kind not in ("yarn", "longrope"):
+ if config.rotary_attention_factor is None and kind not in ("yarn", "longrope"):
  layers that are not scaled have the attention factor of the others
- angles.cos() * factor, angles.sin() * factor
+ angles.cos() * factor, angles.sin()
  sines are without the attention factor
- (x[..., ::2], x[..., 1::2]) if interleaved else
+ (x[..., 1::2], x[..., ::2]) if interleaved else
  neighbouring channels turn the wrong way
- return _rotated(grad, cos, -sin, ctx.interleaved)
+ return _rotated(grad, cos, -sin, False)
  gradients of neighbouring channels are turned as halves
- out1.addcmul_(x2, -sin)
+ out1.addcmul_(x2, sin, value=-1)
  torch.compile makes a fused multiply-add of the rotation, with other bits than eager

megazero/models/dropout.py
- below = round(probability * 2**32) - 2**31
+ below = round(probability * 2**31) - 2**31
  half of what is to be dropped is dropped

megazero/zero/hooks.py
- @torch._disable_dynamo
-     def before(
+ def before(
  torch.compile traces the hook that gathers

megazero/families/config_json/rotary_fields.py
- implied = kind == "longrope" or "factor" in rope
+ implied = "factor" in rope
  Phi-3's factor is asked for, and no published file has it

megazero/models/masking.py
- of_key <= at - self.window
+ of_key < at - self.window
  a window has a token more

megazero/models/attention_pieces.py
- max(begin, query - back + 1)
+ max(begin, query - back + 2)
  the first query of a band misses the oldest key of its window
- key < query or stop - query > back
+ key < query
  the first band of a document has no window
- 1 - bounded.square_()
+ 1 - bounded
  capped scores have another gradient

megazero/models/attention.py
- clear = -(-first[:, last] // FLEX_BLOCK)
+ clear = first[:, last] // FLEX_BLOCK
  flex attention sees hidden keys of blocks in which a document or window begins
- causal=True
+ causal=False
  flash-attn sees later keys

megazero/convert/check.py
- kinds.index(kind) + 1
+ kinds.index(kind)
  logits are compared without the last kind of layer

megazero/convert/importing.py
- low - record.start : high - record.start].zero_()
+ low - record.start : high - record.start]
  padding keeps what it held before an import

megazero/convert/tokenizer.py
-     *(unicodedata.normalize("NFD", text) for text in SCRIPTS),
  the proof of a tokenizer.json has no decomposed letter
- left_out = [text for text in wrong if found and end in text]
+ left_out = wrong
  the check leaves every text with other ids out

megazero/convert/sentencepiece_json.py
- rf"\A +|[ {SPACE}]+\z"
+ rf"^ +|[ {SPACE}]+$"
  spaces go at the ends of lines, too

megazero/data/tokenizer_settings.py
- if "added_tokens_decoder" in config:
+ if False:
  tokens that tokenizer_config.json adds are no tokens
- return {**changed, "split_special_tokens": True} if self.split else changed
+ return {}
  data of a tokenizer without the added tokens pass for those of one with them

megazero/convert/conversions.py
- (partial / CONFIG_FILE).unlink()
+ pass
  an export whose check failed can be loaded

megazero/convert/shards.py
- if groups[-1] and held + tensor.nbytes > limit:
+ if held + tensor.nbytes > limit:
  a first tensor above the limit leaves an empty file before it
- groups.append([])
-             held = 0
+ groups.append([])
  from the second file on each tensor has its own

megazero/convert/folder.py
-     if end != size:
+     if end > size:
  a file with bytes after its tensors is taken
- counts.get(dtype, 0) + prod(entry.shape)
+ counts.get(dtype, 0) + 1
  norms in fp32 decide the dtype of a bf16 model

megazero/convert/export.py
- return f"{entries} {source.weights}"
+ return f"{entries}"
  finished files of the trained weights stay in a folder of the masters

megazero/convert/inspection.py
-             norm += float(ours.double().norm()) ** 2
  equal pieces do not count in the relative distance

megazero/config/schedule/sequence_lengths.py
- return min(wanted - wanted % multiple, end, self.full)
+ return min(wanted, end, self.full)
  lengths are no multiples
- if done >= tokens:
+ if done > tokens:
  a run in tokens takes one iteration more where lengths reach them exactly

megazero/train/schedule/learning_rate.py
-         consumed = progress * self.batch
-         if self.warmup > 0
+         consumed = progress
+         if self.warmup > 0
  iterations are taken for samples

megazero/tp/cross_entropy.py
- scale = scale * (1 + 2 * ctx.z_loss * lse).unsqueeze(1)
+ scale = scale * (1 + ctx.z_loss * lse).unsqueeze(1)
  half of the z-loss's gradient

megazero/tp/chunked_loss.py
- (grad,) = torch.autograd.grad(loss, logits, weights[part].to(loss.dtype) * scale)
+ (grad,) = torch.autograd.grad(loss, logits, weights[part].to(loss.dtype))
  gradients of a chunk leave fp16's range before the loss scale

megazero/tp/chunked_loss.py
- tp, weight, factor = ctx.tp, ctx.weight, grad / ctx.scale
+ tp, weight, factor = ctx.tp, ctx.weight, grad
  the loss scale counts twice

megazero/plan/communication.py
- again = leaving + layer.rereads_experts * back if
+ again = leaving if
  no recompute brings the rows of experts back
- backward -= wire * has_loss_chunks(config)
+ backward -= 0
  the head's input is gathered again for a loss in chunks

megazero/config/nearest.py
- return f"; nearest: {stems[near]}" if near is not None and alike else ""
+ return f"; nearest: {stems[near]}" if near is not None else ""
  another number is suggested
"""


@dataclass(frozen=True)
class Mutation:
    """``old``, which stands once in the module ``path``, becomes ``new``. why: what that breaks."""

    path: str
    old: str
    new: str
    why: str

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
            parts = [[line[2:] for line in _taken(lines, sign)] for sign in "-+ "]
            out.append(Mutation(path, *map("\n".join, parts)))
    return [each for each in out if not words or any(word in each.path for word in words)]


def _taken(lines: list[str], sign: str) -> Iterator[str]:
    """Take off the lines in front that begin so."""
    while lines and lines[0].startswith(sign):
        yield lines.pop(0)


# -- which tests -----------------------------------------------------------------------------------


@cache
def imported() -> dict[Path, set[Path]]:
    """Return, for every file of the tree, the files that it imports."""
    every = {module_name(path): path for top in TOPS for path in sorted((ROOT / top).rglob("*.py"))}
    out: dict[Path, set[Path]] = {}
    for module, path in every.items():
        found = imports(ast.parse(path.read_text()), module, path.name == "__init__.py")
        # ``from a import b`` is a.b, a module or something in a.
        names = (name if name in every else name.rpartition(".")[0] for name, _ in found)
        out[path] = {every[name] for name in names if name in every}
    return out


@cache
def steps_from(test: Path) -> dict[Path, int]:
    """Return the files that a test loads, with the number of imports from the test to each."""
    steps, reached = {test: 0}, [test]
    for file in reached:  # it grows meanwhile
        new = sorted(imported()[file] - steps.keys())
        steps |= dict.fromkeys(new, steps[file] + 1)
        reached += new
    return steps


def nearest_tests(path: str) -> list[Path]:
    """Return the test files nearest to a module by imports, of equally near ones those that load the least.

    Those of one process come first: they fail fast.
    """
    module, found = ROOT / path, []
    for test in (file for top in TESTS for file in (ROOT / top).rglob("test_*.py")):
        steps = steps_from(test)
        if module in steps:
            found.append((steps[module], len(steps), test))
    nearest = [test for _, _, test in sorted(found)[:FILES]]
    return sorted(nearest, key=lambda test: not test.is_relative_to(ROOT / "tests/unit"))


# -- running them ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What tests said. failed: the first test that failed, or ''. last: the one that ran when the time was over."""

    failed: str
    last: str
    seconds: float


def run_tests(tree: Path, tests: Sequence[str], limit_s: float) -> Outcome:
    """Run tests in ``tree`` until one fails or the time is over; then everything that they started is killed."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as out:
        command = [sys.executable, "-m", "pytest", "-x", "-vv", "-p", "no:cacheprovider", *tests]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):  # ranks outlive a pytest that was killed
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        lines = out.read().splitlines()
    named = [line.split()[0] for line in lines if line.startswith("tests/") and "::" in line]
    said = (
        line.partition(" ")[2].split(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))
    )
    failed = next(said, "")
    return Outcome(failed, named[-1] if named else "collection", time.monotonic() - began)


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


def hunt(tree: Path, mutation: Mutation, good: dict[str, bool], limit_s: float) -> tuple[bool, str]:
    """Return whether a test finds a mutation, and the words for the table.

    good: tests that have failed with a mutation, and whether they pass without; what is not known is added.
    """
    file = tree / mutation.path
    text = file.read_text()
    tests = [str(test.relative_to(ROOT)) for test in nearest_tests(mutation.path)]
    if not tests:
        return False, "survived: no test loads the module"
    try:
        file.write_text(mutation.apply(text))
        outcome = run_tests(tree, tests, limit_s)
    finally:
        file.write_text(text)
    if not outcome.failed:
        return False, f"survived {outcome.seconds:.0f} s of {len(tests)} files, the last test {outcome.last}"
    if outcome.failed not in good:
        good[outcome.failed] = not run_tests(tree, [outcome.failed], 2 * limit_s).failed
    if not good[outcome.failed]:
        return False, f"unknown: {outcome.failed} fails without it, too"
    return True, f"caught after {outcome.seconds:.0f} s by {outcome.failed}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="parts of the paths of modules")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of tests for each mutation")
    options = parser.parse_args(arguments)
    survived, good = 0, dict[str, bool]()
    chosen = mutations(options.words)
    with copied() as tree:
        for number, mutation in enumerate(chosen, 1):
            found, words = hunt(tree, mutation, good, options.limit)
            survived += not found
            print(f"{number:3} {mutation.path}: {mutation.why}\n    {words}", flush=True)
    print(f"{len(chosen)} mutations, {len(chosen) - survived} caught, {survived} not")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
