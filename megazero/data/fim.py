"""Fill in the middle (Bavarian et al. 2022): documents whose middle stands behind prefix and suffix.

The arithmetic is that of Megatron's GPTFIMDataset. Its one generator makes a sample depend on those that the process
read before; here each sample has a generator of its own, so that it is the same on every layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megazero.config.options.sections import DataConfig
from megazero.data.tokenizer import Tokenizer

Ids = NDArray[np.int64]
TOKENS = ("prefix", "middle", "suffix", "pad", "eod")


@dataclass(frozen=True)
class FillInTheMiddle:
    """Changes samples. ``ids`` are those of TOKENS, and ``split`` the one of --fim-split-sample."""

    data: DataConfig
    tokenizer: Tokenizer
    ids: tuple[int, ...]
    split: int | None

    @classmethod
    def of(cls, data: DataConfig, tokenizer: Tokenizer) -> FillInTheMiddle:
        """Raises ValueError for words that are no token."""
        words = {f"--fim-{name}-token": getattr(data, f"fim_{name}_token") for name in TOKENS}
        if data.fim_split_sample is not None:
            words["--fim-split-sample"] = data.fim_split_sample
        named = {flag: tokenizer.token(word) for flag, word in words.items()}
        ids = {flag: found for flag, found in named.items() if found is not None}
        if missing := [f"{flag} {words[flag]}" for flag in words if flag not in ids]:
            raise ValueError(
                f"{', '.join(missing)}: no token of the tokenizer; name those that it has, or add them to its files"
            )
        return cls(data, tokenizer, tuple(ids.values())[: len(TOKENS)], ids.get("--fim-split-sample"))

    def __call__(self, text: Ids, seed: int, sample: int) -> Ids:
        """Return text int64 [s + 1] with changed documents, cut or padded to its length."""
        random = np.random.RandomState([seed, sample])
        *_, pad, eod = self.ids
        found = _by_part(text, eod, partial(self._document, random))[: len(text)]
        return np.concatenate([found, np.full(len(text) - len(found), pad)])

    def _document(self, random: np.random.RandomState, text: Ids) -> Ids:
        rate = _half(self.data.fim_rate)
        if self.split is None or self.split not in text:
            return self._permuted(random, rate, text)
        if not random.binomial(1, rate):
            return text
        return _by_part(text, self.split, partial(self._permuted, random, self.data.fim_fragment_rate or 0.0))

    def _permuted(self, random: np.random.RandomState, rate: float, text: Ids) -> Ids:
        """Return one document or fragment, cut at two characters with the probability ``rate``."""
        if not random.binomial(1, rate):
            return text
        contents, kept = self.tokenizer.decode(text.tolist()), self.data.fim_no_prefix
        if kept is not None and contents.startswith(kept):
            return text
        low, high = sorted(random.randint(low=0, high=len(contents) + 1, size=2))
        pieces = contents[:low], contents[low:high], contents[high:]
        first, middle, last = (self.tokenizer.encode(piece) for piece in pieces)
        prefix, between, suffix, *_ = self.ids
        if random.binomial(1, _half(self.data.fim_spm_rate)):
            return np.array([prefix, suffix, *last, between, *first, *middle], np.int64)
        return np.array([prefix, *first, suffix, *last, between, *middle], np.int64)


def _half(rate: float | None) -> float:
    return 0.5 if rate is None else rate


def _by_part(text: Ids, mark: int, change: Callable[[Ids], Any]) -> Ids:
    """Return the text whose parts between ``mark`` are changed. Of empty parts only the last is, and others end."""
    parts, begin = [], 0
    for at in np.flatnonzero(text == mark).tolist():
        if at > begin:
            parts += [change(text[begin:at]), text[at : at + 1]]
        begin = at + 1
    return np.concatenate([*parts, change(text[begin:])])
