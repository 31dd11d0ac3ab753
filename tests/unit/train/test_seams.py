"""The trainer's use of its parts: what runs of one rank say, against a plain torch loop and Megatron's schedules."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megazero.checkpoint import store
from megazero.config import RunConfig, World, make_config
from megazero.config.model.spec import training_flops
from megazero.data.gpt import SampleSpec
from megazero.data.mock import MockDataset
from megazero.data.tokenizer import NullTokenizer
from megazero.log.metrics import read_metrics
from megazero.mesh.launch import Launch
from megazero.mesh.levels import INTER, INTRA
from megazero.models import Decoder
from megazero.ops.failures import NonFiniteLoss
from megazero.train import setup
from megazero.train.parallelize import dropout_key, make_policy
from megazero.train.trainer import Trainer
from tests.oracle import megatron_batch_sizes
from tests.oracle_muon import POLYNOMIALS, plain_step
from tests.sizes import TINY

SMALL = {**TINY, "num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "num_query_groups": 2}
SMALL |= {"ffn_hidden_size": 8, "seq_length": 4}
BY_SAMPLES = {"train_iters": None, "lr_warmup_iters": None}
RAMP = {"rampup_batch_size": (4, 4, 24), "global_batch_size": 12}  # 4, 4, 4, 8, 8, 12, ...


def run(values: dict[str, Any], watch: Callable[[Trainer], None] = lambda _: None) -> RunConfig:
    """A run of one rank in this process; its configuration. watch: gets the trainer before it runs."""
    config = make_config(values, World(1, 1))
    with ExitStack() as stack, redirect_stdout(io.StringIO()):
        trainer = setup.prepare(config, Launch(0, 1, local_world_size=1), stack)
        watch(trainer)
        trainer.run()
    return trainer.config


def megatron_rates(config: RunConfig) -> Iterator[tuple[list[float], float, int]]:
    """(learning rates, weight decay, global batch) of every iteration, as Megatron's schedulers step.

    The second rate is that of the parameters with a peak and a minimum of their own.
    """
    core = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    o, span, batch = config.optimizer, config.lr_samples, config.batch
    apart = {"max_lr": o.decoupled_lr or o.lr, "min_lr": o.min_lr}
    apart |= {} if o.decoupled_min_lr is None else {"min_lr": o.decoupled_min_lr}
    holder = SimpleNamespace(param_groups=[{}, apart])
    scheduler = core.OptimizerParamScheduler(
        holder, 0.0, o.lr, o.min_lr, span.warmup, span.decay, o.lr_decay_style,
        o.weight_decay, o.weight_decay, span.total, "constant",
        wsd_decay_steps=span.wsd_decay, lr_wsd_decay_style=o.lr_wsd_decay_style,
    )  # fmt: skip
    sizes = megatron_batch_sizes(batch.global_batch_size, batch.micro_batch_size, 1, batch.rampup_batch_size)
    consumed = 0
    while True:
        sizes.update(consumed, consistency_check=True)
        size = sizes.get_current_global_batch_size()
        yield [group["lr"] for group in holder.param_groups], apart["weight_decay"], size
        consumed += size
        scheduler.step(size)


class PlainLion(torch.optim.Optimizer):
    """Chen et al. 2023, algorithm 2, as it is printed."""

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), rate, decay = group["betas"], group["lr"], group["weight_decay"]
            for p in group["params"]:
                m, g, w = self.state[p].get("m", torch.zeros_like(p)), p.grad, p.detach()
                c = beta1 * m + (1 - beta1) * g
                w.copy_(w - rate * (torch.sign(c) + decay * w))
                self.state[p]["m"] = beta2 * m + (1 - beta2) * g


class PlainAdEMAMix(torch.optim.Optimizer):
    """Pagliardini et al. 2024, algorithm 1 and equations 3 and 4, as they are printed."""

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2, beta3), alpha, (T_alpha, T_beta) = (
                group[k] for k in ("betas", "alpha", "warmups")
            )
            for p in group["params"]:
                zeros = (torch.zeros_like(p),) * 3
                t, m1, m2, nu = self.state[p].get("all", (0, *zeros))
                t, g, w = t + 1, p.grad, p.detach()
                a = min(t * alpha / T_alpha, alpha)
                slow, fast = math.log(beta3), math.log(beta1)
                b = min(math.exp(fast * slow / ((1 - t / T_beta) * slow + t / T_beta * fast)), beta3)
                b = beta3 if t >= T_beta else b
                m1, m2 = beta1 * m1 + (1 - beta1) * g, b * m2 + (1 - b) * g
                nu = beta2 * nu + (1 - beta2) * g**2
                hats = m1 / (1 - beta1**t), nu / (1 - beta2**t)
                update = (hats[0] + a * m2) / (hats[1].sqrt() + group["eps"])
                w.copy_(w - group["lr"] * (update + group["weight_decay"] * w))
                self.state[p]["all"] = (t, m1, m2, nu)


class PlainMuon(torch.optim.AdamW):
    """Muon for ``matrices``, by their singular values (tests/oracle_muon.py), and AdamW for the rest."""

    matrices: list[torch.nn.Parameter]
    momenta: list[torch.Tensor]

    def step(self) -> None:  # type: ignore[override]
        (group,) = (g for g in self.param_groups if any(p is self.matrices[0] for p in g["params"]))
        with torch.no_grad():
            for p, momentum in zip(self.matrices, self.momenta, strict=True):
                assert p.grad is not None
                plain_step(
                    p, p.grad, momentum, lr=group["lr"], decay=group["weight_decay"], beta=0.7, nesterov=True,
                    polynomials=POLYNOMIALS["quintic"], scale=lambda m, n: 0.3 * (m / n) ** 0.5,
                )  # fmt: skip
                p.grad = None
        super().step()


def plain_optimizer(config: RunConfig, model: Decoder) -> torch.optim.Optimizer:
    """The configured optimizer over three groups: matrices, vectors, embedding and head."""
    o = config.optimizer
    tokens = [model.embedding.tokens.weight]  # type: ignore[union-attr]
    if config.model.untie_embeddings_and_output_weights:
        tokens.append(model.head.weight)  # type: ignore[union-attr]
    others = [p for p in model.parameters() if all(p is not token for token in tokens)]
    groups = [
        {"params": [p for p in others if p.ndim > 1], "weight_decay": o.weight_decay},
        {"params": [p for p in others if p.ndim <= 1], "weight_decay": 0.0},
        {"params": tokens, "weight_decay": o.weight_decay},
    ]
    if o.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=o.sgd_momentum)
    if o.optimizer == "lion":
        return PlainLion(groups, {"lr": 0.0, "betas": (o.lion_beta1, o.lion_beta2)})
    adam: dict[str, Any] = {"lr": 0.0, "betas": (o.adam_beta1, o.adam_beta2), "eps": o.adam_eps}
    if o.optimizer == "ademamix":
        mixed = {"alpha": o.ademamix_alpha, "betas": (*adam["betas"], o.ademamix_beta3)}
        warmups = (o.ademamix_alpha_warmup, o.ademamix_beta3_warmup)
        return PlainAdEMAMix(groups, {**adam, **mixed, "warmups": warmups})
    if o.optimizer != "muon":
        return torch.optim.AdamW(groups, **adam)
    muon, named = PlainMuon(groups, **adam), model.named_parameters()
    muon.matrices = [p for name, p in named if name.startswith("layers.") and p.ndim == 2]
    muon.momenta = [torch.zeros_like(p) for p in muon.matrices]
    return muon


def mean_loss(model: Decoder, rows: Sequence[Mapping[str, Any]], length: int, z_loss: float) -> torch.Tensor:
    """The mean over the tokens that count of ``rows`` of a dataset, each cut to ``length`` tokens."""
    tokens, labels, mask = (
        torch.stack([torch.from_numpy(row[k]) for row in rows])[:, :length]
        for k in ("tokens", "labels", "loss_mask")
    )
    logits = model(tokens)[..., : model.config.vocab_size]
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return ((losses + z_loss * logits.logsumexp(-1) ** 2) * mask).sum() / mask.sum()


def reference(config: RunConfig) -> list[dict[str, Any]]:
    """The lines of an uninterrupted run: whole batches, autograd, torch.optim, clip_grad_norm_."""
    o, training, batch = config.optimizer, config.training, config.batch
    torch.manual_seed(0)
    model = Decoder(config.model, dtype=torch.float64)
    model.initialize(training.seed)
    optimizer, total = plain_optimizer(config, model), training.train_samples or 0
    tokenizer = NullTokenizer(config.model.vocabulary - 1).info
    spec = SampleSpec(
        config.model.seq_length, training.seed, tokenizer, eod_mask_loss=True, goldfish=config.data.goldfish
    )
    train, valid = MockDataset(total, 0, spec), MockDataset(10**4, 1, spec)
    evaluated = [valid[i] for i in range(training.eval_iters * (batch.global_batch_size or 0))]

    def evaluation(iteration: int, consumed: int) -> dict[str, Any]:
        with torch.no_grad():
            loss = mean_loss(model, evaluated, 8, 0.0).item()
        return {"iteration": iteration, "consumed_samples": consumed, "eval_lm_loss": loss}

    consumed, lines = 0, [evaluation(0, 0)]
    for iteration, ((rate, apart), decay, size) in enumerate(megatron_rates(config), 1):
        if consumed + size > total:
            return lines
        rows = [train[i] for i in range(consumed, consumed + size)]
        loss = mean_loss(model, rows, 8, training.z_loss_strength)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip_grad).item()
        for group, own in zip(optimizer.param_groups, (rate, rate, apart), strict=True):
            group["lr"], group["weight_decay"] = own, decay if group["weight_decay"] else 0.0
        optimizer.step()
        consumed += size
        line = {
            "iteration": iteration,
            "consumed_samples": consumed,
            "lm_loss": loss.item(),
            "grad_norm": norm,
        }
        line |= {"decoupled_learning_rate": apart} if o.decoupled_lr else {}
        lines.append({**line, "learning_rate": rate, "batch_size": size})
        if iteration % training.eval_interval == 0:
            lines.append(evaluation(iteration, consumed))
    raise AssertionError("unreachable")


ADAMW = {"adam_beta1": 0.7, "adam_beta2": 0.8, "adam_eps": 1e-2}
SGD = {"optimizer": "sgd", "sgd_momentum": 0.6}


LION = {"optimizer": "lion", "lion_beta1": 0.6, "lion_beta2": 0.7}
ADEMAMIX = {**ADAMW, "optimizer": "ademamix", "ademamix_beta3": 0.95, "ademamix_alpha": 3.0}
ADEMAMIX |= {"ademamix_alpha_warmup": 3, "ademamix_beta3_warmup": 7}
MUON = {
    **{**ADAMW, "optimizer": "muon", "muon_momentum": 0.7, "muon_nesterov": True},
    **{"muon_scale_mode": "unit_rms_norm", "muon_extra_scale_factor": 0.3},
    **{"muon_fp32_matmul_prec": "high"},
}
DECOUPLED = {**ADAMW, "decoupled_lr": 0.2, "decoupled_min_lr": 0.03}
Z_LOSS = {**ADAMW, "z_loss_strength": 0.1, "goldfish_loss": True, "goldfish_k": 3, "goldfish_h": 2}
UNTIED = {**SGD, "decoupled_lr": 0.02, "untie_embeddings_and_output_weights": True}


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        ADAMW,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (SGD, LION)),
        ADEMAMIX,
        MUON,
        DECOUPLED,
        UNTIED,
        Z_LOSS,
    ],
    ids=[
        "adamw",
        "sgd",
        "lion",
        "ademamix",
        "muon",
        "decoupled",
        "decoupled, untied",
        "z-loss, goldfish loss",
    ],
)
def test_a_run_and_its_resume_are_a_loop_of_plain_torch(tmp_path: Path, options: dict[str, Any]) -> None:
    """Every number of every line in fp64, none of the options at its default; what is logged and saved when."""
    values = {
        **SMALL, **BY_SAMPLES, **RAMP, "model_family": "gpt", "params_dtype": "fp64", "micro_batch_size": 2,
        "train_samples": 110, "eod_mask_loss": True, "seed": 5, "seq_length": 8,
        "lr": 0.05, "min_lr": 0.01, "lr_warmup_samples": 10, "weight_decay": 0.5, "clip_grad": 0.8,
        **options,
        "eval_interval": 3, "eval_iters": 2, "eval_at_start": True, "save_interval": 2,
        "log_dir": str(tmp_path / "logs"), "save": str(tmp_path / "run"),
    }  # fmt: skip
    logged: list[Any] = []

    def watch(trainer: Trainer) -> None:
        trainer.outputs.loggers.log = lambda _, line: logged.append(line)  # type: ignore[method-assign]

    run({**values, "exit_interval": 5}, watch)
    assert sorted(path.name[-2:] for path in (tmp_path / "run").iterdir()) == ["02", "04", "05"]
    config = run({**values, "load": str(tmp_path / "run")}, watch)
    saved = sorted((tmp_path / "run").iterdir())
    assert [path.name[-2:] for path in saved[3:]] == ["06", "08", "10", "11"]
    (run_id,) = {store.read_state(path)["run_id"] for path in saved}
    assert run_id
    wanted, lines = reference(config), read_metrics(tmp_path / "logs")
    assert [line["iteration"] for line in lines] == [0, 1, 2, 3, 3, 4, 5, 6, 6, 7, 8, 9, 9, 10, 11]
    assert any(line.get("grad_norm", 0) > config.optimizer.clip_grad for line in lines)
    for seen, line in zip(logged, lines, strict=True):  # the file has the clock and the start's facts, too
        assert all(line[name] == value for name, value in seen.items() if name != "resumed_from")
    for got, want in zip(lines, wanted, strict=True):
        assert {name: got.get(name) for name in want} == pytest.approx(want, rel=1e-9), got
        assert ("eval_lm_loss" in got) == ("eval_lm_loss" in want)
        if "batch_size" in got:
            seconds, length = got["iteration_time_s"], got.get("seq_length", 8)
            flops = training_flops(config.model, [length], 1)
            assert got["tokens_per_s"] * seconds == pytest.approx(length * got["batch_size"])
            assert got["tflops_per_rank"] * seconds * 1e12 == pytest.approx(flops * got["batch_size"])


def test_dropout_draws_anew_in_every_iteration_and_micro_batch(tmp_path: Path) -> None:
    """The key that the decoder gets: another one per seed, iteration and first sample, none without dropout."""
    keys: list[list[int | None]] = []

    def watch(trainer: Trainer) -> None:
        step = trainer.pipeline.step
        keys.append([])

        def note(batches: Any, *rest: Any) -> torch.Tensor:
            keys[-1].extend(batch.dropout_key for batch in batches)
            return step(batches, *rest)

        trainer.pipeline.step = note  # type: ignore[method-assign]

    values = {
        **SMALL,
        "global_batch_size": 2,
        "train_iters": 3,
        "lr_warmup_iters": 0,
        "log_dir": str(tmp_path),
    }
    for changes in (
        {"hidden_dropout": 0.1},
        {"attention_dropout": 0.1},
        {"hidden_dropout": 0.1, "seed": 9},
        {},
    ):
        run({**values, **changes}, watch)
    first, second, reseeded, none = keys
    assert first == second and len({*first, *reseeded}) == 12 and none == [None] * 6
    config = make_config({**values, "hidden_dropout": 0.1}, World(1, 1))
    for iteration in range(2):
        own = [dropout_key(config, iteration, 2 * iteration + i) for i in range(2)]
        assert own == first[2 * iteration :][:2]
        assert (dropout_key(config, iteration, 0) == first[0]) == (iteration == 0)


def test_steps_that_are_not_finite_are_skipped_told_and_ten_in_a_row_the_end(tmp_path: Path) -> None:
    updated: list[int] = []

    def watch(trainer: Trainer) -> None:
        step, optimizer = trainer.engine.step, trainer.engine.optimizer

        def spoiled() -> Any:
            iteration, before = trainer.progress.iteration + 1, optimizer.runs[0].leaf.detach().clone()
            if iteration == 3 or iteration > 4:
                optimizer.runs[0].grad.fill_(torch.inf)
            info = step()
            updated.extend([] if torch.equal(before, optimizer.runs[0].leaf) else [iteration])
            return info

        trainer.engine.step = spoiled  # type: ignore[method-assign]

    with pytest.raises(NonFiniteLoss, match="iteration 14: the gradient norm is (inf|nan), and so 10 steps"):
        run({**SMALL, "train_iters": 20, "log_dir": str(tmp_path)}, watch)
    lines = read_metrics(tmp_path)
    assert updated == [2, 4]  # the first has rate 0
    assert [line["iteration"] for line in lines if line.get("skipped")] == [3, *range(5, 14)]


def test_a_run_of_a_given_duration_ends_and_is_saved(tmp_path: Path) -> None:
    began: list[float] = []
    values = {**SMALL, "exit_duration_in_mins": 1e-9, "log_dir": str(tmp_path), "save": str(tmp_path / "run")}
    before = time.monotonic()
    run(values, lambda trainer: began.append(trainer.exits.conditions.began))
    assert before <= began[0] <= time.monotonic() and store.latest(tmp_path / "run") is not None
    assert [line["iteration"] for line in read_metrics(tmp_path)] == [1]


def test_generators_go_on_from_a_checkpoint_unless_told_not_to(tmp_path: Path) -> None:
    values = {**SMALL, "train_iters": 1, "lr_warmup_iters": 0, "log_dir": str(tmp_path)}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        run({**values, "save": str(tmp_path / "run")})
        saved, seen = torch.get_rng_state(), []
        for load_rng in (True, False):
            torch.manual_seed(2)
            run(
                {**values, "load": str(tmp_path / "run"), "load_rng": load_rng},
                lambda _: seen.append(torch.equal(torch.get_rng_state(), saved)),
            )
    assert seen == [True, False]


def test_finetuning_takes_the_weights_and_nothing_else(tmp_path: Path) -> None:
    values = {**SMALL, "train_iters": 2, "lr_warmup_iters": 0, "log_dir": str(tmp_path)}
    run({**values, "save": str(tmp_path / "run")})
    masters, moments = [], []

    def watch(trainer: Trainer) -> None:
        masters.append(torch.cat([unit.master.value for unit in trainer.engine.units]).clone())
        states = trainer.engine.optimizer.torch.state.values()
        moments.append(sum(float(value.abs().sum()) for state in states for value in state.values()))

    for load in ({"load": str(tmp_path / "run")}, {"load": str(tmp_path / "run"), "finetune": True}, {}):
        run({**values, **load}, watch)
    assert torch.equal(masters[0], masters[1]) and not torch.equal(masters[0], masters[2])
    assert moments[0] > 0 and moments[1:] == [0, 0]
    assert [line["iteration"] for line in read_metrics(tmp_path)] == [1, 2]


def test_every_choice_of_the_configuration_reaches_the_engine() -> None:
    values = {
        **TINY, "zero_preset": "zeropp", "zero_exact_numel": 40, "zero_block_size": 32, "zero_chunk_numel": 999,
        "zero_prefetch_bytes": 777, "seed": 5,
        "zero_gradient_bits": 8,
        "ranks_per_node": 2, "zero_gradients_lifetime": "step", "zero_gradient_transform": "hadamard",
    }  # fmt: skip
    grid = SimpleNamespace(world_size=4, ranks_per_node=2)
    policy: Any = make_policy(make_config(values, World(4, 2)), SimpleNamespace(grid=grid))  # type: ignore[arg-type]
    assert (policy.exact_numel, policy.chunk_numel, policy.prefetch_bytes, policy.seed) == (40, 999, 777, 5)
    weights, gradients = policy.codecs.weights, policy.codecs.gradients.get(INTER)
    assert (weights.bits, weights.block, gradients.bits, gradients.block) == (
        4,
        32,
        8,
        32,
    )
    assert policy.whole_gradients
    assert policy.codecs.delta and policy.codecs.gradients.get(INTRA) is None
    assert weights.hadamard == 0 and gradients.hadamard == 32
