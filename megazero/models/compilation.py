"""torch.compile of what decoder layers and the head compute, inside the engine's hooks.

The hooks gather parameters before a module is called and release them after, in eager Python; what is compiled is a
function of tensors, so one graph for training and one for evaluation serve all layers of a kind. Tables, masks and
dropout keys are made before the layers.

Of layers these are cut out: tensor-parallel linears and those of a split backward (``tp/linear.py``) and swaps of
context parallelism (``comm/peers.py``), whose collectives overlap, are counted and are put off as without compiling,
and experts with their router (``models/experts.py``). Where none is there, a graph is whole, and what would break it
is an error. The head with its loss is whole, too; with tensor-parallel ranks, a split backward, the loss in chunks or
further tokens what the loss does with logits is compiled (``tp/cross_entropy.py``). The embedding stays as it
is: a compiler's gradient of it adds in an order that varies.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from functools import partial
from pathlib import Path
from types import MethodType

import torch

from megazero.config.options.sections import INDUCTOR
from megazero.families.layer_kinds import layer_kinds
from megazero.models.attention import allow_graphs
from megazero.models.decoder import Decoder
from megazero.models.experts import MixtureOfExperts
from megazero.models.layer import DecoderLayer
from megazero.models.multi_token import FurtherLayer
from megazero.tp import LossPieces


def compile_decoder(decoder: Decoder, backend: str) -> None:
    """Compile the decoder's layers and its head, when each kind is first called.

    backend: of torch.compile. Raises ValueError if inductor lacks what it needs on this machine.
    """
    if backend == INDUCTOR:
        _require_compiler()
    allow_graphs(len(set(layer_kinds(decoder.config))) + (decoder.config.mtp_num_layers > 0))
    compiled = partial(torch.compile, backend=backend, dynamic=False)
    alone = decoder.tp.size == 1 and decoder.tp.deferred is None
    names = ("forward", "_layer", "_attended", "_fed")
    functions = {
        (kind, name): compiled(getattr(kind, name), fullgraph=name == "forward")
        for kind in (DecoderLayer, FurtherLayer)
        for name in names
    }
    for layer in decoder.layers.values():
        assert isinstance(layer, DecoderLayer)
        whole = alone and decoder.cp.size == 1 and not isinstance(layer.mlp, MixtureOfExperts)
        # A recompute is inside a whole graph, which chooses what is kept among all operations, and around others.
        parts = ("_attended", "_fed") if layer.recompute == "mlp" else ("_layer",)
        for name in ("forward",) if whole else parts:
            setattr(layer, name, MethodType(functions[type(layer), name], layer))
    if (head := decoder.head) is None:
        return
    if alone and head.loss_chunk is None and head.further is None:
        head.forward = compiled(head.forward, fullgraph=True)  # type: ignore[method-assign]
    else:
        head.pieces = LossPieces(*(compiled(piece, fullgraph=True) for piece in head.pieces))


def _require_compiler() -> None:
    """Raise ValueError without a C++ compiler and Python's headers, which inductor's and Triton's code needs."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    lacks = []
    if shutil.which(compiler.split()[0]) is None:
        lacks.append(f"a C++ compiler ({compiler} is not found; install the package g++, on Red Hat gcc-c++)")
    if not header.exists():
        lacks.append(f"Python's headers ({header} is not there; install the package python3-dev, or -devel)")
    if lacks:
        raise ValueError(
            f"--compile needs {' and '.join(lacks)}; nearest: --compile-backend aot_eager, or no --compile"
        )
