"""The evaluation loss of one trained master under each weight codec, which has no noise of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.loss.run import TRACE, Evaluation, Settings, own_slices, shard, trace_file, traced
from benchmarks.loss.variants import WEIGHT_CODECS, Variant
from benchmarks.rank_threads import MeshOf
from megazero import zero
from megazero.models import Decoder

Master = dict[str, torch.Tensor]


def compare_codecs(mesh_of: MeshOf, folder: Path, settings: Settings, trace: Path) -> list[dict[str, Any]]:
    """Return for each traced step and codec the loss, and the decoded weights' error relative to the master's norm.
    Collective."""
    rows = []
    for last in traced(settings.steps):
        masters = [load_file(trace_file(trace, step)) for step in range(last - TRACE, last + 1)]
        for name, codecs in WEIGHT_CODECS.items():
            # Where differences are sent, the copy follows the steps before; else only the last master counts.
            history = masters if codecs.delta else masters[-1:]
            model, engine = shard(mesh_of, settings, Variant("hhd", codecs), history[0].__getitem__)
            evaluate = Evaluation(folder, settings, engine.mesh)
            for master in history[1:]:
                engine.refresh()
                _update(engine, master)
            loss = evaluate(model, engine, settings.evaluation)
            rows.append(
                {"step": last, "codec": name, "loss": loss, "error": _error(model, engine, history[-1])}
            )
    return rows


def _update(engine: zero.Engine, master: Master) -> None:
    """Write new values into this rank's slices and count a version, as the optimizer does."""
    for name, low, high, values in own_slices(engine):
        values.copy_(master[name].view(-1)[low:high])
    for unit in engine.units:
        unit.master.changed()


def _error(model: Decoder, engine: zero.Engine, master: Master) -> float:
    """Return ||weights that the model computes with - master|| / ||master||."""
    with engine.gathered():
        pairs = [(p.detach().double(), master[name].double()) for name, p in model.named_parameters()]
        wrong, whole = ([x.norm() for x in xs] for xs in zip(*((p - m, m) for p, m in pairs), strict=True))
        return float(torch.stack(wrong).norm() / torch.stack(whole).norm())
