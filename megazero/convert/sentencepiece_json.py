"""Turns a SentencePiece model into a tokenizer.json with the same ids, verified before use.

transformers' own conversion gives other ids: it normalises (spaces are stripped, runs of them become one), and adds a
space before the text, whatever the model says.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

SPACE = "\u2581"  # stands for a space in pieces
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNIGRAM, BPE = 1, 2
_FP32 = 1e-6  # of a sum of scores


@dataclass(frozen=True)
class VocabPiece:
    """One piece of the vocabulary, as sentencepiece_model.proto has it."""

    text: str = ""
    score: float = 0.0
    kind: int = NORMAL


@dataclass(frozen=True)
class Spec:
    """The model file's settings, with the proto's defaults."""

    pieces: tuple[VocabPiece, ...]
    model_type: int = UNIGRAM
    byte_fallback: bool = False
    space_is_suffix: bool = False
    bos: int = 1
    eos: int = 2
    pad: int = -1
    charsmap: bytes = b""
    dummy_prefix: bool = True
    remove_extra_spaces: bool = True
    escape_spaces: bool = True

    def of_kind(self, *kinds: int) -> list[str]:
        return [piece.text for piece in self.pieces if piece.kind in kinds]

    @property
    def unknown(self) -> int:
        """The id of the unknown piece, which every model has."""
        return next(i for i, piece in enumerate(self.pieces) if piece.kind == UNKNOWN)


def read_spec(raw: bytes) -> Spec:
    """Read a serialised ModelProto (sentencepiece_model.proto), by the numbers of its fields. Needs no protobuf."""
    pieces, trainer, normalizer = [], dict[int, Any](), dict[int, Any]()
    for number, value in _fields(raw):
        if number == 1:
            piece = dict(_fields(value))
            score = struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0
            pieces.append(VocabPiece(piece[1].decode(), score, piece.get(3, NORMAL)))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    return Spec(
        pieces=tuple(pieces),
        model_type=trainer.get(3, UNIGRAM),
        byte_fallback=bool(trainer.get(35, 0)),
        space_is_suffix=bool(trainer.get(24, 0)),
        bos=_signed(trainer.get(41, 1)),
        eos=_signed(trainer.get(42, 2)),
        pad=_signed(trainer.get(43, -1)),
        charsmap=normalizer.get(2, b""),
        dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_spaces=bool(normalizer.get(4, 1)),
        escape_spaces=bool(normalizer.get(5, 1)),
    )


def _signed(value: int) -> int:
    """Return an int32 that a varint holds: below zero it has 64 bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of a protobuf message: an int, or bytes where the value is longer than a varint."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                return value

    while at < len(data):
        tag = varint()
        if tag & 7 == 0:
            yield tag >> 3, varint()
            continue
        length = {1: 8, 5: 4}[tag & 7] if tag & 7 != 2 else varint()
        yield tag >> 3, data[at : at + length]
        at += length


def to_tokenizer_json(raw: bytes) -> Any:
    """Return a tokenizers.Tokenizer with the ids of the SentencePiece model ``raw``.

    Raises ValueError for a model of a kind that the tokenizers library cannot express. ``differences`` proves the
    rest. Characters are replaced by another rule there (spm_precompiled's normalize_string): by whole graphemes of
    less than six bytes, whose first character decides, else by single characters. So neither decomposed kana and
    Hangul nor a ligature with an accent become what the model makes of them.
    """
    spec = read_spec(raw)
    if spec.model_type not in (UNIGRAM, BPE) or spec.space_is_suffix or not spec.escape_spaces:
        raise ValueError(
            "tokenizer.json can express SentencePiece models of type unigram and bpe whose spaces are escaped and "
            "begin pieces; this model is another"
        )
    if spec.charsmap:
        raise ValueError(
            "this SentencePiece model replaces characters (as nmt_nfkc, its trainer's default), and tokenizer.json "
            "cannot replace several at once"
        )
    unknown = spec.pieces[spec.unknown].text
    model: Any
    if spec.model_type == UNIGRAM:
        scores = [(piece.text, piece.score) for piece in spec.pieces]
        model = models.Unigram(scores, unk_id=spec.unknown, byte_fallback=spec.byte_fallback)
    else:
        vocabulary = {piece.text: i for i, piece in enumerate(spec.pieces)}
        model = models.BPE(
            vocabulary, _merges(spec), unk_token=unknown, fuse_unk=True, byte_fallback=spec.byte_fallback
        )
    made = Tokenizer(model)
    steps = list[Any]()
    if spec.remove_extra_spaces:
        # Of the text's own marks those at its end count as spaces, too. (^ and $ are the ends of lines.)
        edges = normalizers.Replace(Regex(rf"\A +|[ {SPACE}]+\z"), "")
        steps += [edges, normalizers.Replace(Regex(" +"), " ")]
    if spec.dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    defined = spec.of_kind(USER_DEFINED)
    if defined and not spec.dummy_prefix:  # else the text would be normalised between them, prefix and all
        made.add_tokens([AddedToken(text, normalized=False) for text in defined])
    elif defined:
        longest_first = sorted(defined, key=len, reverse=True)
        made.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), "isolated")
    back: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    # Before a text the piece of a prefix is dropped, or the mark of every piece where spaces are removed.
    leading = len(spec.pieces) if spec.remove_extra_spaces else int(spec.dummy_prefix)
    made.decoder = decoders.Sequence([*back, *([decoders.Strip(" ", leading, 0)] if leading else [])])
    return made


def _merges(spec: Spec) -> list[tuple[str, str]]:
    """Return the pairs that make each piece, best piece first: SentencePiece merges by the score of the result."""
    known = {piece.text for piece in spec.pieces if piece.kind in (NORMAL, UNUSED)}
    ranked = sorted((piece for piece in spec.pieces if piece.kind == NORMAL), key=lambda p: -p.score)
    return [
        (piece.text[:cut], piece.text[cut:])
        for piece in ranked
        for cut in range(1, len(piece.text))
        if piece.text[:cut] in known and piece.text[cut:] in known
    ]


def spelt(spec: Spec, text: str) -> bool:
    """Tell whether the text spells a control or byte piece, which SentencePiece never finds in a text.

    A tokenizer.json of a unigram model does.
    """
    return spec.model_type == UNIGRAM and any(word in text for word in spec.of_kind(CONTROL, UNKNOWN, BYTE))


def differences(raw: bytes, encode: Callable[[str], list[int]], texts: Sequence[str]) -> list[str]:
    """Return those of ``texts`` to which ``encode`` gives other ids than the SentencePiece model ``raw``.

    Segmentations of equal probability are no difference: SentencePiece adds scores in fp32 and the tokenizers library
    in fp64, and rounding decides which of them is taken.
    """
    model, spec = SentencePieceProcessor(model_proto=raw), read_spec(raw)

    def score(ids: Sequence[int]) -> float:
        return sum(spec.pieces[i].score for i in ids)

    def same(text: str) -> bool:
        ours, theirs = model.encode(text), encode(text)
        if ours == theirs or spec.model_type != UNIGRAM or model.decode(ours) != model.decode(theirs):
            return ours == theirs
        return abs(score(ours) - score(theirs)) <= _FP32 * abs(score(ours))

    return [text for text in texts if not same(text)]
