"""The optimizers and the shapes of the learning rate, with everything that is known of each.

An optimizer is an entry of OPTIMIZERS. The engine gives it slices of the weights, so it is elementwise,
which zero/elementwise.py checks by running it, or by matrix (zero/by_matrix.py). A shape is an entry of FALLING.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any, ClassVar

from megazero.config.options.fields import SHORT, Resume, option


@dataclass(frozen=True)
class Optimizer:
    """What is known of one optimizer.

    ``factories`` maps --optimizer-impl to 'module:name', which is imported when the optimizer is built.
    ``arguments`` are those of every factory, by name; each is an option, or a tuple of options.
    ``moments`` is how many values it keeps beside each master weight, in the master's dtype but where one of
    ``moment_dtypes``, the names of options, says another (MOMENT_DTYPES). ``matrix_moments`` is the same of the
    layers' matrices, for an optimizer that steps them whole; None: it is elementwise.
    ``small_rate`` is a learning rate at which a model of a few thousand parameters trains well in fp32 (megazero
    verify).
    """

    factories: Mapping[str, str]
    arguments: Mapping[str, str | tuple[str, ...]]
    moments: int
    small_rate: float
    moment_dtypes: tuple[str, ...] = ()
    matrix_moments: int | None = None

    @property
    def by_matrix(self) -> bool:
        return self.matrix_moments is not None

    @property
    def options(self) -> list[str]:
        """Return the names of the options that it reads."""
        nested = ((names,) if isinstance(names, str) else names for names in self.arguments.values())
        return [name for names in nested for name in names]


OPTIMIZERS: Mapping[str, Optimizer] = MappingProxyType(
    {
        "adamw": Optimizer(
            {
                "auto": "megazero.zero.elementwise:best_adamw",
                "torch": "megazero.zero.elementwise:fused_adamw",
                "triton": "megazero.zero.elementwise:OnePassAdamW",
            },
            {
                "lr": "lr",
                "betas": ("adam_beta1", "adam_beta2"),
                "eps": "adam_eps",
                "weight_decay": "weight_decay",
                "exp_avg_dtype": "exp_avg_dtype",
                "exp_avg_sq_dtype": "exp_avg_sq_dtype",
            },
            moments=2,
            small_rate=1e-3,
            moment_dtypes=("exp_avg_dtype", "exp_avg_sq_dtype"),
        ),
        "sgd": Optimizer(
            dict.fromkeys(("auto", "torch"), "torch.optim:SGD"),
            {"lr": "lr", "momentum": "sgd_momentum", "weight_decay": "weight_decay"},
            moments=1,
            small_rate=2e-2,
        ),
        "lion": Optimizer(
            dict.fromkeys(("auto", "torch"), "megazero.train.lion:Lion"),
            {"lr": "lr", "betas": ("lion_beta1", "lion_beta2"), "weight_decay": "weight_decay"},
            moments=1,
            small_rate=1e-4,
        ),
        "ademamix": Optimizer(
            dict.fromkeys(("auto", "torch"), "megazero.train.ademamix:AdEMAMix"),
            {
                "lr": "lr",
                "betas": ("adam_beta1", "adam_beta2", "ademamix_beta3"),
                "alpha": "ademamix_alpha",
                "warmups": ("ademamix_alpha_warmup", "ademamix_beta3_warmup"),
                "eps": "adam_eps",
                "weight_decay": "weight_decay",
            },
            moments=3,
            small_rate=1e-3,
        ),
        "muon": Optimizer(
            {
                "auto": "megazero.zero.by_matrix:Muon",
                "torch": "megazero.zero.by_matrix:torch_muon",
                "triton": "megazero.zero.by_matrix:triton_muon",
            },
            {
                "lr": "lr",
                "betas": ("adam_beta1", "adam_beta2"),
                "eps": "adam_eps",
                "weight_decay": "weight_decay",
                "momentum": "muon_momentum",
                "nesterov": "muon_nesterov",
                "scale": "muon_scale_mode",
                "extra_scale": "muon_extra_scale_factor",
                "precision": "muon_fp32_matmul_prec",
            },
            moments=2,
            small_rate=2e-4,
            matrix_moments=1,
        ),
    }
)
IMPLEMENTATIONS = tuple(OPTIMIZERS["adamw"].factories)
NEWTON_SCHULZ_STEPS = 5  # of muon, as in zero/by_matrix.py, which needs torch; a test keeps the two equal
SMALL_MOMENTS = ("auto", "triton")  # the implementations that keep moments in bf16
# The bytes that a moment of an element takes, by what it is kept in. None: as many as a master weight.
MOMENT_DTYPES: Mapping[str, int | None] = MappingProxyType({"fp32": None, "bf16": 2})
# Factor of peak - minimum in [0, 1] at progress r of the decay, by the style's name.
FALLING: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {
        "linear": lambda r: 1.0 - r,
        "cosine": lambda r: 0.5 * (math.cos(math.pi * r) + 1.0),
    }
)
# The same of WSD's last phase.
WSD_FALLING: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {
        "exponential": lambda r: 2.0 * math.pow(0.5, r) - 1.0,
        **FALLING,
        "minus_sqrt": lambda r: 1.0 - math.sqrt(r),
    }
)
DECAYS = "lr_decay_style != constant: a --lr-decay-style that decays"
DECAY_STYLES = ("constant", *FALLING, "inverse-square-root", "WSD")


def of_schedule(name: str) -> bool:
    """Tell whether an option is of the schedule of learning rate and weight decay, which Megatron saves."""
    return name.startswith(("lr", "min_lr", "decoupled", "weight_decay"))


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and learning rate. Schedule lengths are in iterations, or in samples with --train-samples."""

    RESUME: ClassVar = Resume.BY_NAME | Resume.UPDATE
    SMALL: ClassVar = dict.fromkeys(("lr_", "min_lr", "decoupled_min_"), SHORT)
    NEEDS: ClassVar = {
        "lr_wsd_": "lr_decay_style = WSD",
        **dict.fromkeys(("min_lr", "decoupled_min_", "lr_decay_iters", "lr_decay_samples"), DECAYS),
    } | {
        name: f"optimizer = {'|'.join(o for o, each in OPTIMIZERS.items() if name in each.options)}"
        for name in chain.from_iterable(each.options for each in OPTIMIZERS.values())
    }

    optimizer: str = option("adamw", "update rule (Megatron's adam is adamw)", choices=tuple(OPTIMIZERS))
    lr: float = option(MISSING, "peak learning rate", above=0, required=True)
    min_lr: float = option(0.0, "learning rate at the end of the decay", low=0)
    decoupled_lr: float | None = option(
        None, "peak learning rate of the token embedding and the head, instead of --lr", above=0
    )
    decoupled_min_lr: float | None = option(
        None, "--decoupled-lr at the end of the decay (default: --min-lr)", low=0, needs="decoupled_lr"
    )
    lr_decay_style: str = option("linear", "shape of the decay", choices=DECAY_STYLES, small="constant")
    lr_decay_iters: int | None = option(None, "iterations to decay over (default: --train-iters)", low=1)
    lr_decay_samples: int | None = option(None, "samples to decay over (default: --train-samples)", low=1)
    lr_warmup_iters: int = option(0, "iterations of linear warm-up", low=0)
    lr_warmup_samples: int = option(0, "samples of linear warm-up", low=0)
    lr_warmup_fraction: float | None = option(None, "warm-up as a fraction of the decay", low=0, below=1)
    lr_warmup_init: float = option(
        0.0,
        "learning rate at the beginning of the warm-up",
        low=0,
        needs="lr_warmup_iters or lr_warmup_samples or lr_warmup_fraction: a warm-up",
    )
    lr_wsd_decay_style: str = option("exponential", "WSD: the last phase's shape", choices=tuple(WSD_FALLING))
    lr_wsd_decay_iters: int | None = option(None, "WSD: iterations of the last phase", low=1)
    lr_wsd_decay_samples: int | None = option(None, "WSD: samples of the last phase", low=1)
    weight_decay: float = option(0.01, "weight decay, decoupled but in sgd; not of norms and biases", low=0)
    apply_wd_to_qk_layernorm: bool = option(
        False,
        "weight decay of the norms of queries and keys, too (Qwen3-Next)",
        small=SHORT,
        needs="qk_norm = head|all-heads",
    )
    adam_beta1: float = option(0.9, "decay of the first moment", low=0, below=1)
    adam_beta2: float = option(0.999, "decay of the second moment", low=0, below=1)
    adam_eps: float = option(1e-8, "added to the root of the second moment", above=0)
    exp_avg_dtype: str = option(
        "fp32",
        "dtype of the stored first moment: fp32 (fp64 with --fp64), or bf16, rounded at random, without bias",
        choices=tuple(MOMENT_DTYPES),
    )
    exp_avg_sq_dtype: str = option("fp32", "dtype of the stored second moment", choices=tuple(MOMENT_DTYPES))
    sgd_momentum: float = option(0.9, "momentum of sgd", low=0, below=1)
    lion_beta1: float = option(0.95, "share of the momentum in lion's update", low=0, below=1)
    lion_beta2: float = option(0.98, "decay of lion's momentum", low=0, below=1)
    ademamix_beta3: float = option(0.999, "decay of ademamix's slow momentum", above=0, below=1)
    ademamix_alpha: float = option(5.0, "factor of ademamix's slow momentum in the update", low=0)
    ademamix_beta3_warmup: int = option(
        0, "steps in which the half-life of the slow momentum grows from that of --adam-beta1", low=0, small=2
    )
    ademamix_alpha_warmup: int = option(0, "steps in which --ademamix-alpha grows from 0", low=0, small=4)
    muon_momentum: float = option(0.9, "share of the momentum that muon keeps", low=0, below=1)
    muon_nesterov: bool = option(False, "muon takes Nesterov's momentum")
    muon_scale_mode: str = option(
        "spectral",
        "factor of an orthogonalised [m, n] matrix: spectral is sqrt(max(m, n)), unit_rms_norm is sqrt(m / n), "
        "shape_scaling is sqrt(max(1, m / n))",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
    )
    muon_extra_scale_factor: float = option(
        1.0, "extra factor of muon's update; 0.2 with spectral matches AdamW's update size and --lr", above=0
    )
    muon_fp32_matmul_prec: str = option(
        "medium",
        "dtype in which matrices are moved and iterated: medium is bfloat16, high is the master weights'",
        choices=("medium", "high"),
    )
    qk_clip: bool = option(
        False,
        "where a step had larger scores of attention than --qk-clip-threshold, what makes their queries and keys is "
        "scaled down after its update (Kimi K2)",
        small=SHORT,
    )
    qk_clip_threshold: float = option(100.0, "bound of scores of attention", above=0, needs="qk_clip")
    qk_clip_alpha: float = option(
        0.5,
        "power of the factor of scores that queries take; keys take the rest",
        low=0,
        high=1,
        needs="qk_clip",
    )
    clip_grad: float = option(1.0, "largest global gradient norm; 0 does not clip", low=0)

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments that the optimizer's factory is called with besides the parameters.

        Moments in fp32 need none: not every implementation has others.
        """
        return {
            argument: getattr(self, names)
            if isinstance(names, str)
            else tuple(getattr(self, n) for n in names)
            for argument, names in OPTIMIZERS[self.optimizer].arguments.items()
            if names not in self.moments_in("fp32")
        }

    def moments_in(self, *dtypes: str) -> list[str]:
        """Return the options by which the optimizer keeps a moment in one of these dtypes."""
        return [name for name in OPTIMIZERS[self.optimizer].moment_dtypes if getattr(self, name) in dtypes]

    def moment_bytes(self, master: int, matrices: float = 0.0) -> float:
        """Return what the moments of an element take beside a master weight of ``master`` bytes, on average.

        matrices: the share of the elements that are of the layers' matrices.
        """
        own = OPTIMIZERS[self.optimizer]
        said = [MOMENT_DTYPES[getattr(self, name)] or master for name in own.moment_dtypes]
        others = sum(said) + master * (own.moments - len(said))
        if own.matrix_moments is None:
            return others
        return (1 - matrices) * others + matrices * own.matrix_moments * master
