"""The pipeline of a run: stages per rank, their layers, and the order in which they compute."""

from __future__ import annotations

import re

from megazero.config.model.section import ModelConfig
from megazero.config.model.spec import model_spec
from megazero.config.options.sections import ParallelConfig
from megazero.pp.partition import Costs


def virtual_stages(parallel: ParallelConfig, num_layers: int) -> int:
    """Return how many stages each pipeline rank holds, 1 if nothing is asked for.

    An illegal choice is taken as 1 or rounded.
    """
    pp, layers = parallel.pipeline_model_parallel_size, parallel.num_layers_per_virtual_pipeline_stage
    if pp < 2:
        return 1
    if layers and layers > 0:
        return max(1, num_layers // (pp * layers))
    said = parallel.num_virtual_stages_per_pipeline_rank
    if said is None and not isinstance(method := partition_method(parallel, pp), str):
        return max(1, len(method) // pp)
    return max(1, said or 1)


def schedule_name(parallel: ParallelConfig, virtual: int) -> str:
    return parallel.pipeline_schedule or ("interleaved" if virtual > 1 else "1f1b")


def partition_method(parallel: ParallelConfig, stages: int) -> str | tuple[int, ...]:
    """Return, for pp.partition, a method's name or the layers per stage. Other text is taken as a method's name."""
    layers, said = parallel.num_layers_per_virtual_pipeline_stage, parallel.pipeline_partition
    if said is None:
        return (layers,) * stages if layers else "balanced"
    pieces = said.replace(",", " ").split()
    if pieces and all(piece.isascii() and piece.isdigit() for piece in pieces):
        return tuple(map(int, pieces))
    return layout_layers(said) or said


def layout_layers(layout: str) -> tuple[int, ...]:
    """Return the layers per stage of a layout in Megatron's letters, or () if it is none.

    E is the embedding, t a layer, m one that predicts a further token, L the head with the loss; | ends a stage, *N
    repeats the letter or the brackets before it, and commas mean nothing (Megatron's PipelineParallelLayerLayout).
    """
    letters = layout_letters(layout)
    return () if letters is None else tuple(stage.count("t") for stage in letters.split("|"))


def layout_letters(layout: str) -> str | None:
    """Return such a layout without repetitions and commas; None if it is none."""
    plain = layout.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d{1,4})", r"(.)\*(\d{1,4})"):
        plain = re.sub(repeated, lambda found: found[1] * int(found[2]), plain)
    return plain if re.fullmatch("E[t|]*m*L", plain) else None


def stage_costs(model: ModelConfig, recompute: str) -> Costs:
    """Return the multiply-adds of one token, which are a third of its forward and backward without recompute.

    - A layer costs its matrices, and what its mixer multiplies with the causal half of the sequence. Where layers are
      of several kinds, each counts as the mean.
    - The head costs h V for each prediction. The accounting is that of config/model/spec.py.
    - A recompute is one more forward, so it makes the cost 4/3: that of layers ('full'), of the MLP ('mlp'), but for
      what nothing reads, or of attention ('selective').
    - The embedding costs h. A lookup moves h numbers per token and multiplies none, which is less than what a
      layer's norms move.
    """
    spec, again, layer = model_spec(model), 4 / 3, 0.0
    for kind in spec.layers:
        work = kind.mixer.work
        mixed = work.pair * model.seq_length / 2 + work.token
        mixed += (again - 1) * (mixed + work.expansion) if recompute == "selective" else 0
        fed = kind.fed.multiply_adds / 3 if recompute == "mlp" else 0
        layer += (kind.multiply_adds + mixed + fed) * (len(kind.places) / len(model.all_layers))
    if recompute == "full":
        layer *= again
    return Costs(embedding=model.hidden_size, layer=layer, head=spec.predictions * spec.head.multiply_adds)
