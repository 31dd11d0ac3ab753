"""This module lists the optimizers and the shapes of the learning rate, with everything that is known of each.

An optimizer is an entry of OPTIMIZERS. The engine gives it slices of the weights, so it must be elementwise:
zero/elementwise.py runs it to see. A shape is an entry of FALLING.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from types import MappingProxyType
from typing import Any

from megazero.config.options.fields import option


@dataclass(frozen=True)
class Optimizer:
    """This is one optimizer.

    ``factories`` maps --optimizer-impl to 'module:name', which is imported when the optimizer is built.
    ``arguments`` are those of every factory, by name; each is an option, or a tuple of options.
    ``moments`` is how many values it keeps beside each master weight, in the master's dtype.
    ``aliases`` are further names on the command line, each with what the notes say about it.
    ``small_rate`` is a learning rate at which a model of a few thousand parameters trains well in fp32 (megazero
    verify).
    """

    factories: Mapping[str, str]
    arguments: Mapping[str, str | tuple[str, ...]]
    moments: int
    small_rate: float
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def options(self) -> list[str]:
        """Return the names of the options that it reads."""
        nested = ((names,) if isinstance(names, str) else names for names in self.arguments.values())
        return [name for names in nested for name in names]


OPTIMIZERS: Mapping[str, Optimizer] = MappingProxyType(
    {
        "adamw": Optimizer(
            {
                "auto": "megazero.zero.one_pass:best_adamw",
                "torch": "megazero.zero.one_pass:fused_adamw",
                "triton": "megazero.zero.one_pass:OnePassAdamW",
                "apex": "megazero.train.nvidia_apex:fused_adam",
            },
            {
                "lr": "lr",
                "betas": ("adam_beta1", "adam_beta2"),
                "eps": "adam_eps",
                "weight_decay": "weight_decay",
            },
            moments=2,
            small_rate=1e-3,
            aliases={"adam": "weight decay is decoupled, as in Megatron"},
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
    }
)
IMPLEMENTATIONS = tuple(OPTIMIZERS["adamw"].factories)
# What is left of peak - minimum when a share r of the decay is over, by the style's name.
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
DECAY_STYLES = ("constant", *FALLING, "inverse-square-root", "WSD")
# What of end - start weight decay is reached when a share r of the run is over, by the style's name.
GROWING: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {"linear": lambda r: r, "cosine": lambda r: 0.5 * (math.cos(math.pi * (1.0 - r)) + 1.0)}
)


def of_schedule(name: str) -> bool:
    """Tell whether an option says the learning rate or weight decay at a time: Megatron saves those."""
    return name.startswith(("lr", "min_lr", "decoupled", "weight_decay", "start_", "end_"))


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and learning rate. Schedule lengths are in iterations, or in samples with --train-samples."""

    optimizer: str = option("adamw", "update rule (Megatron's adam is adamw)", choices=tuple(OPTIMIZERS))
    lr: float = option(MISSING, "peak learning rate", above=0, required=True)
    min_lr: float = option(0.0, "learning rate at the end of the decay", low=0)
    decoupled_lr: float | None = option(
        None, "peak learning rate of the token embedding and the head, in the place of --lr", above=0
    )
    decoupled_min_lr: float | None = option(None, "the same of --min-lr (default: --min-lr)", low=0)
    lr_decay_style: str = option("linear", "shape of the decay", choices=DECAY_STYLES)
    lr_decay_iters: int | None = option(None, "iterations to decay over (default: --train-iters)", low=1)
    lr_decay_samples: int | None = option(None, "samples to decay over (default: --train-samples)", low=1)
    lr_warmup_iters: int = option(0, "iterations of linear warm-up", low=0)
    lr_warmup_samples: int = option(0, "samples of linear warm-up", low=0)
    lr_warmup_fraction: float | None = option(None, "warm-up as a fraction of the decay", low=0, below=1)
    lr_warmup_init: float = option(0.0, "learning rate at the beginning of the warm-up", low=0)
    lr_wsd_decay_style: str = option(
        "exponential", "WSD: shape of the last phase", choices=tuple(WSD_FALLING)
    )
    lr_wsd_decay_iters: int | None = option(None, "WSD: iterations of the last phase", low=1)
    lr_wsd_decay_samples: int | None = option(None, "WSD: samples of the last phase", low=1)
    weight_decay: float = option(
        0.01, "weight decay, decoupled but for sgd (norms and biases have none)", low=0
    )
    weight_decay_incr_style: str = option(
        "constant",
        "how weight decay grows over the run, from --start-weight-decay to --end-weight-decay",
        choices=("constant", *GROWING),
    )
    start_weight_decay: float | None = option(None, "weight decay at the start, where it grows", low=0)
    end_weight_decay: float | None = option(None, "weight decay at the end, where it grows", low=0)
    adam_beta1: float = option(0.9, "decay of the first moment", low=0, below=1)
    adam_beta2: float = option(0.999, "decay of the second moment", low=0, below=1)
    adam_eps: float = option(1e-8, "added to the root of the second moment", above=0)
    sgd_momentum: float = option(0.9, "momentum of sgd", low=0, below=1)
    lion_beta1: float = option(0.95, "share of the momentum in lion's update", low=0, below=1)
    lion_beta2: float = option(0.98, "decay of lion's momentum", low=0, below=1)
    clip_grad: float = option(1.0, "largest global gradient norm; 0 does not clip", low=0)

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments that the optimizer's factory is called with besides the parameters."""
        return {
            argument: getattr(self, names)
            if isinstance(names, str)
            else tuple(getattr(self, n) for n in names)
            for argument, names in OPTIMIZERS[self.optimizer].arguments.items()
        }


def optimizer_conditions(chosen: str) -> Iterator[tuple[Collection[str], bool, str]]:
    """Yield the options that not every optimizer reads.

    Each comes with whether ``chosen`` reads it, and with which optimizers do.
    """
    for name in dict.fromkeys(name for each in OPTIMIZERS.values() for name in each.options):
        readers = [other for other, each in OPTIMIZERS.items() if name in each.options]
        if len(readers) < len(OPTIMIZERS):
            yield [name], chosen in readers, f"--optimizer {' or '.join(readers)}"
