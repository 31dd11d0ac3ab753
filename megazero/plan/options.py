"""The flags of ``megazero plan`` beside those of training. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megazero.config import ConfigError, make_config
from megazero.config.layout.outer import LOCAL
from megazero.config.options.cluster import LEAST, MOST, Cluster, known_clusters, load_cluster
from megazero.config.options.data_inputs import run_vocabulary
from megazero.config.options.data_sources import NO_DATA
from megazero.config.options.fields import Resume, fault, option, section_options
from megazero.config.read.beginning import read_beginning
from megazero.config.read.completion import Known, complete_by
from megazero.config.read.flags import options_help, read_flags, read_section
from megazero.config.read.parse import read_layers
from megazero.config.read.resolve import CONDITIONS, DERIVED_LENGTHS, GELU, LOADED
from megazero.config.run import all_options
from megazero.plan.search import OUTER_POLICY, given_formats

USAGE = f"""usage: megazero plan TRAINING FLAGS --cluster FILE [flags below]

Finds the fastest layouts of a model on a cluster. It takes flags of training (megazero train --help lists them): the
model's and --global-batch-size. It keeps the flags of the layout that you give and chooses the others. It prints the
ten fastest layouts that fit, with memory, time and flags, and writes plan.json. Exit status 0: a layout fits; 1: none
does; 2: the command line or the cluster file is wrong.

Clusters that come with it: {", ".join(known_clusters())}.
"""


@dataclass(frozen=True)
class PlanConfig:
    """The plan itself."""

    nodes: int | None = option(None, "nodes to plan for (default: all of the cluster's)", low=1, high=MOST)
    plan_output: str = option("plan", "folder of plan.json")
    pays: bool = option(
        False,
        "print instead whether quantised messages pay: DDP, ZeRO-1, FSDP2, HSDP, the best exact and quantised "
        "layouts and outer steps in one table, with the tokens that rounding costs",
    )
    link_rates: tuple[float, ...] | None = option(
        None,
        "with --pays, rates in Gb/s of the slowest kind of link to compare schemes at (default: the cluster's)",
        low=LEAST,
    )
    page: str | None = option(
        None,
        "write instead an HTML file that says what schemes take on any link, for this batch, 1/4 and 4 times it",
    )
    link_delays: tuple[float, ...] | None = option(
        None, "with --pays, delays in ms added to that link's latency (default: 0)", low=0
    )

    @property
    def compares(self) -> bool:
        """Whether schemes are compared, exact and quantised ones."""
        return self.pays or self.page is not None


@dataclass(frozen=True)
class PlanRequest:
    """The request of the command line. values: the training's options by name."""

    values: dict[str, Any]
    cluster: Cluster
    loss_policy: str
    options: PlanConfig


def help_text() -> str:
    """Return what ``megazero plan --help`` prints."""
    shared = [all_options()[name] for name in ("cluster", "loss_policy")]
    return "\n".join([USAGE, *options_help([*shared, *section_options("plan", PlanConfig)])])


def read_values(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the options that flags and the files that they name say, by name, and the faults.

    Of what --load names the plan takes the model. Raises OSError if the storage does not answer.
    """
    said = read_layers(read_flags(argv))
    beginning = None if said.values.get("load") is None else read_beginning(said.values)
    done = complete_by((DERIVED_LENGTHS, LOADED, CONDITIONS, GELU), Known.of(said, None, beginning))
    begins = [opt.name for opt in all_options().values() if beginning and Resume.BEGINS in opt.resume]
    values = {name: value for name, value in done.values.items() if name not in begins}
    return values, [*said.errors, *done.errors]  # notes are the run's


def read_request(argv: Sequence[str]) -> PlanRequest:
    """Read the command line after ``plan``. Raises ConfigError with every fault at once."""
    options, rest, errors = read_section(PlanConfig, argv)
    values, faults = read_values(rest)
    errors += faults
    named, policy = (values.pop(name, all_options()[name].default) for name in ("cluster", "loss_policy"))
    errors += filter(None, [fault(all_options()["loss_policy"], policy)])
    cluster = None
    if named is None:
        errors.append(f"--cluster is required: {all_options()['cluster'].help.partition(':')[0]}")
    else:
        try:
            cluster = load_cluster(named)
            cluster = replace(cluster, nodes=options.nodes or cluster.nodes)
        except ConfigError as error:
            errors += error.errors
    if cluster is not None:
        given = values.get("ranks_per_node")
        if given not in (None, cluster.ranks_per_node):
            errors.append(
                f"--ranks-per-node {given} is not the cluster's {cluster.ranks_per_node}; leave it out"
            )
        values["ranks_per_node"] = cluster.ranks_per_node
    errors += _useless(options, policy)
    errors += _not_beside_schemes(options, values)
    if not any(line.startswith("--load ") for line in errors):  # what is missing may stand there
        proposes = (options.pays or policy == OUTER_POLICY) and any(n.startswith("outer_") for n in values)
        errors += _model_errors({**({"outer_meet": f"{LOCAL}:2"} if proposes else {}), **values})
    if errors or cluster is None:
        raise ConfigError(list(dict.fromkeys(errors)))
    return PlanRequest(values, cluster, policy, options)


def _useless(options: PlanConfig, policy: str) -> Iterator[str]:
    """Yield what flags have no effect beside the others."""
    for name in ("link_rates", "link_delays"):
        if getattr(options, name) is not None and not options.pays:
            yield f"--{name.replace('_', '-')} has no effect without --pays"
    if options.pays and options.page:
        yield "--page has what --pays says, on any link: leave out one of them"
    asked = "--pays" if options.pays else "--page"
    if options.compares and policy != all_options()["loss_policy"].default:
        yield f"{asked} tries every scheme: leave out --loss-policy"


def _not_beside_schemes(options: PlanConfig, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what would make the rows of exact and of quantised messages the same."""
    if options.compares and (given := given_formats(values)):
        flags = ", ".join(all_options()[name].flag for name in given)
        asked = "--pays" if options.pays else "--page"
        yield f"{asked} compares exact messages with quantised ones: leave out {flags}"


def with_stand_ins(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options with placeholders that a configuration needs and a plan does not depend on."""
    options, kept = (
        all_options(),
        ("reset_attention_mask", "reset_position_ids", "eod_mask_loss", "data_stages"),
    )
    done = {
        name: value
        for name, value in values.items()
        if name not in options or options[name].section != "data" or name in kept
    }
    done |= NO_DATA
    done["vocab_size"] = run_vocabulary(values.get("tokenizer_type"), values.get("vocab_size"))
    if done.get("train_samples") is None and done.get("outer_meet"):
        done = {name: value for name, value in done.items() if name != "train_iters"} | {
            "train_samples": 1 << 40
        }
    elif done.get("train_samples") is None:
        done.setdefault("train_iters", 1)
    done.setdefault("lr", 1e-4)
    return done


def _model_errors(values: dict[str, Any]) -> list[str]:
    """Return the errors in the training's flags on any world, and missing flags that a plan needs."""
    errors = []
    if values.get("vocab_size") is None:
        errors.append(
            "--vocab-size is required: a plan reads no tokenizer; --load takes it from what it names"
        )
    if values.get("global_batch_size") is None:
        errors.append(
            "--global-batch-size is required: the planner chooses the micro-batches that it is cut into"
        )
    if values.get("data_stages") and not (values.get("train_iters") or values.get("train_samples")):
        return [*errors, "--data-stages needs --train-iters or --train-samples: how long the last stage is"]
    try:
        make_config({"micro_batch_size": 1, **with_stand_ins(values)})
    except ConfigError as error:
        errors += error.errors
    return errors
