"""Tasks of lm-eval's harness on a model in memory, on any layout.

The first rank runs the harness. Whenever that asks for rows of tokens, all ranks get them and score them together:
data-parallel ranks share the rows, and the others do with them what they do in an evaluation. lm-eval is optional.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.checkpoint.errors import agree_local, first_bytes
from megazero.comm.lane import CommunicationError
from megazero.config import RunConfig
from megazero.config.layout.context import parts
from megazero.data.tokenizer import Tokenizer
from megazero.mesh.mesh import Mesh, world_group
from megazero.models import Decoder
from megazero.pp.executor import Pipeline
from megazero.tp import vocab_parallel_argmax, vocab_parallel_cross_entropy
from megazero.train.data.feeding import own_tokens
from megazero.train.parallelize import MicroBatch
from megazero.zero import Engine

# Tokens, the token that follows each, and of how many of the last ones the scores are asked for.
Row = tuple[Sequence[int], Sequence[int], int]
NEW_TOKENS = 256  # that a task generates at most if it does not say how many, as in lm-eval


class Score(NamedTuple):
    """Sums over what a row asks for: log-probabilities in nats, how many labels are the likeliest, the likeliest."""

    logprob: float
    likeliest: float
    token: float


class Interrupted(Exception):
    """The run is to stop before all rows are scored."""


@dataclass(frozen=True)
class Scorer:
    """Scores rows with the weights of ``engine``, on all ranks. interrupted: as ``mean_loss``'s."""

    config: RunConfig
    mesh: Mesh
    decoder: Decoder
    engine: Engine
    pipeline: Pipeline
    interrupted: Callable[[], bool] = lambda: False

    @property
    def most(self) -> int:
        """Return how many rows are scored at once: a micro-batch on each data-parallel rank for each stage."""
        return self.config.batch.micro_batch_size * self.mesh.pp.size * self.mesh.batch_ranks

    def score(self, rows: Sequence[Row]) -> list[Score]:
        """Return the scores of up to ``most`` rows. Collective. Raises Interrupted on every rank.

        Rows of fewer tokens are filled up behind, which changes nothing of what stands before.
        """
        if self.interrupted():
            raise Interrupted
        ranks, each = self.mesh.batch_ranks, self.config.batch.micro_batch_size
        filled = torch.zeros(
            3, self.most, self._length(max(len(tokens) for tokens, _, _ in rows)), dtype=torch.int64
        )
        for row, (tokens, labels, asked) in zip(filled.unbind(1), rows, strict=False):
            row[:2, : len(tokens)] = torch.tensor([tokens, labels])
            row[2, len(tokens) - asked : len(tokens)] = 1
        own = filled[:, self.mesh.batch_rank :: ranks].to(self.mesh.device)
        found = self.pipeline.evaluate([self._micro_batch(*part) for part in own.split(each, 1)])
        sums = torch.zeros(own.shape[1] * 3, dtype=torch.float64, device=self.mesh.device)
        if found is not None:
            sums += found.flatten()
        every = self.mesh.stage_rows(self.mesh.gather_rows(sums), self.pipeline.loss_rank)
        by_row = every.view(ranks, self.mesh.grid.cp, -1, 3).sum(1).transpose(0, 1).reshape(-1, 3)
        return [Score(*row) for row in by_row[: len(rows)].tolist()]

    def _length(self, tokens: int) -> int:
        """Return a length that ranks can cut, of few: a power of two of their parts, at most the run's samples."""
        unit = parts(self.config.parallel, self.mesh.grid.cp_keys)
        return min(unit << (-(-tokens // unit) - 1).bit_length(), self.config.model.seq_length)

    def _micro_batch(self, tokens: Tensor, labels: Tensor, asked: Tensor) -> MicroBatch:
        own = own_tokens({"tokens": tokens, "labels": labels, "loss_mask": asked}, self.mesh)
        return MicroBatch(own["tokens"], None, own["loss_mask"], read=partial(self._sums, own))

    def _sums(self, own: Any, logits: Tensor) -> Tensor:
        """Return the Scores fp64 [b, 3] of this rank's tokens, of its part of their logits [b, s, rows]."""
        head, logits = self.decoder.head, logits.transpose(0, 1)
        assert head is not None
        losses = vocab_parallel_cross_entropy(logits, own["labels"].t(), head.shard, head.tp).t()
        likeliest = vocab_parallel_argmax(logits, head.shard, head.tp).t()
        columns = (-losses, likeliest == own["labels"], likeliest)
        return torch.stack([(each.double() * own["loss_mask"]).sum(1) for each in columns], -1)


def evaluate_tasks(
    scorer: Scorer, tokenizer: Tokenizer, tasks: Sequence[str], limit: int | None = None
) -> dict[str, float] | None:
    """Return the metrics of tasks as TASK/METRIC; None if the run is to stop before the end. Collective.

    tasks: names of lm-eval's, or YAML files of its form. limit: examples of each; None: all. Texts are encoded as
    training data are, with no token before them. Raises ValueError on every rank for what lm-eval refuses.
    """
    tell = partial(first_bytes, world_group(), f"--eval-tasks {' '.join(tasks)}")
    scorer.decoder.eval()
    try:
        with scorer.engine.evaluation(scorer.config.outer.outer_evaluation == "anchor"):
            if scorer.mesh.rank:
                return _follow(scorer, tell)
            return _lead(scorer, tell, lambda ask: _harness(ask, scorer, tokenizer, tasks, limit))
    except Interrupted:
        return None
    finally:
        scorer.engine.traffic.take()  # of no iteration


def find_tasks(tasks: Sequence[str], first: bool) -> None:
    """Let the first rank load tasks, so that a mistake ends the run before it trains. Collective.

    Raises ValueError on every rank.
    """

    doing = f"--eval-tasks {' '.join(tasks)}"
    agree_local(world_group(), doing, lambda: _manager().load(list(tasks)) if first else None)


@cache
def _manager() -> Any:
    """Return lm-eval's table of its tasks, which takes seconds to make."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


Tell = Callable[[Callable[[], bytes]], bytes]
Ask = Callable[[Sequence[Row]], list[Score]]


def _lead(scorer: Scorer, tell: Tell, run: Callable[[Ask], dict[str, float]]) -> dict[str, float]:
    """Run the harness on the first rank, and tell the others its rows, and at last its results or its error."""

    def ask(rows: Sequence[Row]) -> list[Score]:
        tell(lambda: json.dumps(rows).encode())
        return scorer.score(rows)

    try:
        results = run(ask)
    except (Interrupted, CommunicationError, dist.DistError):
        raise
    except Exception as error:
        raised = error

        def fail() -> NoReturn:
            raise raised

        tell(fail)
    tell(lambda: json.dumps(results).encode())
    return results


def _follow(scorer: Scorer, tell: Tell) -> dict[str, float]:
    """Score the rows that the first rank tells, until it tells the results."""
    while isinstance(told := json.loads(tell(bytes)), list):
        scorer.score(told)
    return dict(told)


def _harness(
    ask: Ask, scorer: Scorer, tokenizer: Tokenizer, tasks: Sequence[str], limit: int | None
) -> dict[str, float]:
    from lm_eval import simple_evaluate
    from lm_eval.api.model import TemplateLM

    class Model(_Model, TemplateLM):  # type: ignore[misc, no-any-unimported]
        pass

    model = Model(ask, scorer.most, scorer.config.model.seq_length, tokenizer)
    # Seeds of its few-shot examples are its own; torch's generators are the training's.
    told = simple_evaluate(
        model,
        tasks=list(tasks),
        task_manager=_manager(),
        limit=limit,
        bootstrap_iters=0,
        log_samples=False,
        torch_random_seed=None,
    )
    return {
        f"{task}/{name.removesuffix(',none')}": float(value)
        for task, metrics in told["results"].items()
        for name, value in metrics.items()
        if "," in name and "_stderr" not in name and isinstance(value, int | float)
    }


class _Model:
    """What lm-eval calls a model (its TemplateLM has the rest), of rows that all ranks score.

    most: rows of a call. length: tokens of the longest.
    """

    def __init__(self, ask: Ask, most: int, length: int, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.ask, self.most, self.length, self.words = ask, most, length, tokenizer

    @property
    def eot_token_id(self) -> int:
        return self.words.info.eod

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.words.encode(string)

    def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)  # type: ignore[misc]
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        def logprob(text: str) -> float:
            windows = get_rolling_token_windows(self.tok_encode(text), self.eot_token_id, self.length, 1)
            pairs = [("", *make_disjoint_window(window)) for window in windows]
            return sum(found for found, _ in self._loglikelihood_tokens(pairs))

        return [logprob(request.args[0]) for request in requests]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether each of its tokens is the likeliest.

        Contexts that are too long lose their beginning, as lm-eval has it.
        """
        rows = list[Row]()
        for _, context, continuation in requests:
            text = [*context, *continuation][-(self.length + 1) :]
            rows.append((text[:-1], text[1:], min(len(continuation), len(text) - 1)))
        found = dict(self._scored(rows))
        return [(found[i].logprob, found[i].likeliest == asked) for i, (_, _, asked) in enumerate(rows)]

    def _scored(self, rows: Sequence[Row]) -> Iterator[tuple[int, Score]]:
        """Yield rows' places with their scores, the longest rows first, so that those of a call are alike."""
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
        for some in (order[i : i + self.most] for i in range(0, len(order), self.most)):
            yield from zip(some, self.ask([rows[i] for i in some]), strict=True)

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """Return the likeliest continuations. A token costs a forward of its whole context: there is no cache."""
        asked = (request.args for request in requests)
        texts = [_Text.of(context, options, self.words, self.length) for context, options in asked]
        while left := [text for text in texts if text.goes_on]:
            rows: list[Row] = [(text.tokens, [0] * len(text.tokens), 1) for text in left]
            for place, score in self._scored(rows):
                left[place].add(int(score.token), self.words)
        return [text.said for text in texts]


@dataclass
class _Text:
    """A text that is continued until it has one of ``until`` or the end of document, or ``most`` tokens more."""

    tokens: list[int]
    until: Sequence[str]
    most: int
    new: int = 0
    said: str = ""

    @classmethod
    def of(cls, context: str, options: dict[str, Any], words: Tokenizer, length: int) -> _Text:
        if options.get("do_sample") and options.get("temperature", 1.0) > 0:
            raise ValueError(
                "a task that draws tokens (do_sample) is not evaluated: only the likeliest are taken"
            )
        until, most = options.get("until") or [], options.get("max_gen_toks", NEW_TOKENS)
        if most >= length:
            raise ValueError(
                f"max_gen_toks {most} leaves no context of --seq-length {length}; nearest: {length - 1}"
            )
        tokens = words.encode(context)[-(length - most) :] or [words.info.eod]
        return cls(tokens, [until] if isinstance(until, str) else until, most)

    @property
    def goes_on(self) -> bool:
        return self.new < self.most

    def add(self, token: int, words: Tokenizer) -> None:
        if token == words.info.eod:
            self.most = self.new
            return
        self.new += 1
        self.tokens.append(token)
        self.said = words.decode(self.tokens[-self.new :])
        if any(stop and stop in self.said for stop in self.until):
            self.most = self.new
            for stop in filter(None, self.until):
                self.said = self.said.split(stop)[0]
