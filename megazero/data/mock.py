"""Made-up samples."""

from __future__ import annotations

import numpy as np

from megazero.config.options.data_inputs import SPLITS
from megazero.config.options.sections import DataConfig
from megazero.data.gpt import Sample, SampleSpec, finish_sample
from megazero.data.source import DatasetSource, OpenPart

MEAN_DOCUMENT = 64  # tokens


class MockDataset:
    """Synthetic data with something to learn, for tests, and timing without a corpus.

    Its documents count upwards: a random first token, then +stride modulo the vocabulary, then the eod.
    Lengths are geometric with mean 64, so the best loss is about (ln(vocabulary) + 5.2) / 65 nats per token: all but
    the first token of a document can be learned, its end cannot. A sample depends on (seed, split, index) alone.
    ``split`` is 0 for train, 1 for valid and 2 for test.
    """

    def __init__(self, num_samples: int, split: int, spec: SampleSpec) -> None:
        if spec.tokenizer.vocab_size < 3:
            raise ValueError(f"mock data needs a vocabulary of at least 3, not {spec.tokenizer.vocab_size}")
        self.num_samples, self.split, self.spec = num_samples, split, spec

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        random = np.random.default_rng([self.spec.seed, self.split, int(index)])
        length, eod = self.spec.seq_length + 1, self.spec.tokenizer.eod
        words = self.spec.tokenizer.vocab_size - 1  # every id but the eod
        ends = random.random(length) < 1 / (MEAN_DOCUMENT + 1)
        at = np.arange(length)
        begins = np.maximum.accumulate(np.where(np.roll(ends, 1), at, 0))
        first = random.integers(0, words, length)[begins]
        stride = max(1, words // 3)
        word = (first + (at - begins) * stride) % words
        text = np.where(ends, eod, word + (word >= eod)).astype(np.int64)
        return finish_sample(text, self.spec)


def mock_parts(data: DataConfig) -> dict[str, OpenPart]:
    """Return made-up text to train and to evaluate on, whose samples have one order for any number of them."""

    def opener(split: int) -> OpenPart:
        return lambda spec, count, ordered_for: DatasetSource(MockDataset(count, split, spec))

    return {name: opener(SPLITS.index(name)) for name in ("train", "valid")}
