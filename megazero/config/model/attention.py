"""Which attention backend computes what, as data: the rules of --attention-backend and what ``auto`` takes.

Plain causal attention is what every backend computes. What a model or its data want beyond it is a set of words.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from megazero.config.model.mixers import mixers_of
from megazero.config.model.section import ModelConfig

DENSE_TOKENS = 2048  # the longest sample for which a mask [b or 1, 1, s, s] is made
BAND = 256  # queries of a piece that has a matrix of scores or a bias (models/attention_pieces.py)
DOCUMENTS, WINDOWS, CAPS = "documents", "windows", "capped scores"
DROPOUT, CHUNKS, SINKS = "dropout", "chunks of queries", "sinks"
ODD_HEADS = "heads whose width is no multiple of 8 or above 256"
# Where each want comes from, for errors.
ASKED_BY = {
    DOCUMENTS: "--reset-attention-mask",
    WINDOWS: "--sliding-window",
    CAPS: "--attn-logit-softcapping",
    SINKS: "--softmax-type",
    DROPOUT: "--attention-dropout",
    ODD_HEADS: "--kv-channels",
    CHUNKS: "--context-parallel-size: ranks that gather keys",
}
_MASKS = frozenset({DOCUMENTS, WINDOWS})
PLAIN = frozenset({DROPOUT, ODD_HEADS})  # what torch's causal attention takes
Wants = frozenset[str]


@dataclass(frozen=True)
class Backend:
    """What one backend computes on one kind of device: any part of one of the sets ``takes``.

    bits: of the dtypes that it computes in. dense: whether it needs a dense mask for what is in _MASKS; then samples
    may have DENSE_TOKENS tokens.
    """

    name: str
    device: str
    takes: tuple[Wants, ...]
    bits: tuple[int, ...] = (16,)
    dense: bool = False

    def lacks(self, wants: Wants, bits: int, length: int) -> Wants:
        """Return what it does not take: as little as possible, in words for errors."""
        least = min((wants - each for each in self.takes), key=len)
        if bits not in self.bits:
            least |= {f"numbers of {bits} bits (--params-dtype)"}
        if self.dense and length > DENSE_TOKENS:
            least |= {f"{want} above {DENSE_TOKENS:,} tokens" for want in wants & _MASKS}
        return least


_ALL = (16, 32, 64)
# Of each device in the order in which ``auto`` prefers them. Plain attention, also with dropout, is torch's choice.
BACKENDS = (
    Backend("flash", "cpu", (_MASKS | {ODD_HEADS, CHUNKS, SINKS},), _ALL),
    Backend("math", "cpu", (_MASKS | PLAIN | {CAPS, CHUNKS, SINKS},), _ALL),
    Backend("flash", "cuda", (_MASKS | {CHUNKS}, PLAIN)),
    Backend("flash-attn", "cuda", tuple(_MASKS | {CHUNKS, each} for each in (CAPS, DROPOUT))),
    Backend("flex", "cuda", (_MASKS | {CAPS, ODD_HEADS, CHUNKS, SINKS},), (16, 32)),
    Backend("efficient", "cuda", (_MASKS | PLAIN,), (16, 32), dense=True),
    Backend("cudnn", "cuda", (frozenset({DROPOUT}),)),
    Backend("math", "cuda", (_MASKS | PLAIN | {CAPS, CHUNKS, SINKS},), _ALL),
)
TORCH = "torch"  # scaled_dot_product_attention with the kernel that torch prefers
CHOICES = ("auto", *dict.fromkeys(each.name for each in BACKENDS))


def wants_of(model: ModelConfig, documents: bool, window: bool | None = None, chunks: bool = False) -> Wants:
    """Return what attention wants beyond plain causal attention, in any layer.

    ``documents``: attention stays within them. ``window``: whether the layer has one, if one layer is meant.
    ``chunks``: a rank has the queries of some chunks of a sample, and all keys.
    """
    if window is None:
        window = model.sliding_window is not None and model.sliding_window < model.seq_length
    every = [mixer.heads for mixer in mixers_of(model) if mixer.heads]
    if not every:
        return frozenset()
    held = {
        DOCUMENTS: documents,
        WINDOWS: window,
        CAPS: bool(model.attn_logit_softcapping),
        DROPOUT: bool(model.attention_dropout),
        ODD_HEADS: any(heads.width % 8 or heads.width > 256 for heads in every),
        CHUNKS: chunks,
        SINKS: model.softmax_type != "vanilla",
    }
    return frozenset(want for want, asked in held.items() if asked)


def able(wants: Wants, bits: int, length: int, device: str | None = None) -> Iterator[Backend]:
    """Yield the backends that compute this, on one kind of device ("cpu" or "cuda") or on any."""
    for backend in BACKENDS:
        if device in (None, backend.device) and not backend.lacks(wants, bits, length):
            yield backend


def refusal(choice: str, wants: Wants, bits: int, length: int, device: str | None = None) -> str | None:
    """Return why the backend ``choice`` does not compute this, and which do; None if it does.

    ``device``: as for ``able``. Before it is known, what one of them computes is not refused.
    """
    rows = [each for each in BACKENDS if each.name == choice and device in (None, each.device)]
    names = list(dict.fromkeys(each.name for each in able(wants, bits, length, device)))
    if choice == "auto" or choice in names:
        return None
    lacking = min((each.lacks(wants, bits, length) for each in rows), key=len, default=frozenset[str]())
    words = " and ".join(
        f"{each} ({ASKED_BY[each]})" if each in ASKED_BY else each for each in sorted(lacking)
    )
    why = f"does not compute {words}" if words else f"does not run on {'CPUs' if device == 'cpu' else 'GPUs'}"
    return f"--attention-backend {choice} {why}; nearest: {', '.join(names)}"


def pick(
    choice: str, wants: Wants, bits: int, length: int, device: str, missing: Collection[str] = ()
) -> str:
    """Return the backend that computes this: ``choice``, or the first that ``auto`` prefers. TORCH is plain attention
    by torch's own choice. ``missing``: optional backends that are not there.

    Raises ValueError where ``choice`` does not compute it.
    """
    if error := refusal(choice, wants, bits, length, device):
        raise ValueError(error)
    if choice != "auto":
        return choice
    if wants <= PLAIN:
        return TORCH
    return next(each.name for each in able(wants, bits, length, device) if each.name not in missing)


def planned(
    model: ModelConfig, choice: str, documents: bool, bits: int, on_host: bool, chunks: bool = False
) -> str:
    """Return the backend that a run is planned with, on processors or on GPUs without the package flash-attn."""
    wants = wants_of(model, documents, chunks=chunks)
    return pick(choice, wants, bits, model.seq_length, "cpu" if on_host else "cuda", ("flash-attn",))


def needs_mask(model: ModelConfig, backend: str, documents: bool) -> bool:
    """Tell whether ``backend`` holds a mask [b or 1, 1, s, s]."""
    dense = {each.name for each in BACKENDS if each.dense}
    return backend in dense and bool(wants_of(model, documents) & _MASKS)
