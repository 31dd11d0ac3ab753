"""The whole configuration of a run. It answers the questions that need the size of the world."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, Self, get_type_hints

from megazero.comm.wire import Coding
from megazero.config.errors import ConfigError
from megazero.config.layout.context import gather_coding, levels
from megazero.config.layout.pipeline import partition_method, schedule_name, stage_costs, virtual_stages
from megazero.config.layout.shards import DEFAULT_PRESET, Shards, resolve_shards
from megazero.config.layout.wire import Wire, quantizes_changes, resolve_wire
from megazero.config.model.section import ModelConfig, as_trained, complete
from megazero.config.nearest import did_you_mean
from megazero.config.options.data_inputs import SPLITS
from megazero.config.options.data_stages import DataStage, parse_stages
from megazero.config.options.fields import Option, convert, section_of, section_options
from megazero.config.options.optimizers import OptimizerConfig
from megazero.config.options.sections import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    LoggingConfig,
    OuterConfig,
    ParallelConfig,
    PlanningConfig,
    PrecisionConfig,
    ProfilingConfig,
    TrainingConfig,
    ZeroConfig,
)
from megazero.config.options.skipping import SkippingConfig
from megazero.mesh.grid import data_ranks
from megazero.mesh.levels import make_levels
from megazero.pp.partition import StageSpec, partition
from megazero.pp.schedules import micro_batch_multiple


class Removed(NamedTuple):
    """A removed option: what to do instead, and the word with which it did nothing.

    Files of earlier versions may have it. It is ignored where it is off.
    """

    cure: str
    off: str = "false"


_NO_CLIP = Removed(
    "it searched a clip for each block, which helps at 2 bits alone: leave it out, give more bits, or "
    "--zero-gradient-transform hadamard",
    off="0",
)
_SPIKE = (
    "look at the loss in metrics.jsonl (a callback may end the run), and start again from before a spike with "
    "--ckpt-step N --skip-train-iteration-range FIRST-LAST, which leaves its samples out"
)
_FEEDBACK = (
    "gradients are rounded to nearest, as error feedback and random rounding keep less of a step's gain after the "
    "Hadamard transform (the default): leave it out; --zero-gradient-bits 8 loses less"
)
_BOUND = (
    "no measurement shows that a fallback helps: leave it out; a run warns where gradients lose much by rounding, "
    "and --zero-gradient-bits 8 loses less"
)
_NO_FRAGMENTS = "replicas meet in all parameters at once: leave it out, and hide a meeting with --outer-delay"
_ORDER = (
    "SLURM orders nodes: TopologyPlugin=topology/tree in slurm.conf, and srun --distribution; a list of nodes in an "
    "order of your own goes to srun --distribution=arbitrary by SLURM_HOSTFILE"
)
_BLOOM = "BLOOM and Falcon RW had it, and nobody has pretrained so since 2023"
_LENGTHS = "--data-stages says from which sample on samples have which seq-length"
_COPY = "a batch script copies what --save holds (rsync -a); `megazero inspect` checks a copy: leave it out"
_WEIGHT_DECAY = "weight decay is the same over the run: --weight-decay"
REMOVED = {
    **{
        f"{split}_weighted_split_paths{file}": Removed(
            f"--{split}-data-path WEIGHT PREFIX ... takes whole data sets; --data-path and --split divide each alike",
            off,
        )
        for split in SPLITS
        for file, off in (("", "[]"), ("_path", "none"))
    },
    "outer_fragments": Removed(_NO_FRAGMENTS, off="1"),
    "outer_fragment_pattern": Removed(_NO_FRAGMENTS, off="strided"),
    "outer_replicas": Removed("each replica is a launch of its own: --outer-meet HOST:PORT, or local:R"),
    "outer_mixing": Removed(
        "replicas go on from the new common weights: leave it out; a longer --outer-interval drops less",
        off="1.0",
    ),
    "outer_offload": Removed(
        "common weights and outer momentum stay on the device, a part of each rank's slice: leave it out; "
        "--outer-optimizer average keeps no momentum"
    ),
    "compile_cache": Removed("torch reads the folder from the variable TORCHINDUCTOR_CACHE_DIR"),
    "data_args_path": Removed("let the shell read the file: --data-path $(cat FILE)"),
    "embed_layernorm": Removed(f"{_BLOOM}: leave it out"),
    "scaled_alibi": Removed(f"{_BLOOM}: --position-embedding-type rope"),
    "end_weight_decay": Removed(_WEIGHT_DECAY),
    "lr_by_tokens": Removed("the learning rate counts samples: --lr-decay-samples"),
    "muon_coefficient_type": Removed("the iteration takes the five sets of quintic", off="quintic"),
    "muon_num_ns_steps": Removed("the Newton-Schulz iteration has 5 steps", off="5"),
    "muon_tp_mode": Removed("matrices that ranks cut are stepped whole: leave it out", off="distributed"),
    "per_split_data_args_path": Removed("write --train-data-path, --valid-data-path and --test-data-path"),
    "rampup_seq_length": Removed(_LENGTHS, off="none"),
    "rampup_seq_length_root": Removed(_LENGTHS, off="1.0"),
    "save_copy": Removed(_COPY, off="none"),
    "save_copy_interval": Removed(_COPY, off="none"),
    "save_copy_keep_last": Removed(_COPY, off="none"),
    "save_hf": Removed(
        "`megazero convert to-hf` writes the folder of a checkpoint, and compares it", off="none"
    ),
    "seq_length_steps": Removed(_LENGTHS),
    "start_weight_decay": Removed(_WEIGHT_DECAY),
    "weight_decay_incr_style": Removed(_WEIGHT_DECAY, off="constant"),
    "log_each_rank": Removed(
        "the launcher keeps a log for each rank: srun --output=LOGS/%j.%t, or torchrun --redirects 3 "
        "--log-dir LOGS (--tee 3 prints it, too)"
    ),
    "norm_impl": Removed("norms are torch's, with kernels of their own on CPUs: leave it out", off="torch"),
    **{name: Removed(_SPIKE) for name in ("stop_on_spike", "rollback_on_spike", "max_rollbacks")},
    **{
        f"spike_{name}": Removed(_SPIKE, off)
        for name, off in (
            ("loss_bound", "0.5"),
            ("norm_bound", "10.0"),
            ("window", "100"),
            ("iterations", "10"),
        )
    },
    "zero_weight_clip_search": _NO_CLIP,
    "zero_gradient_clip_search": _NO_CLIP,
    "zero_weight_transform": Removed(
        "a transform makes the errors of weights larger: leave it out; gradients have --zero-gradient-transform",
        off="none",
    ),
    "zero_quantized_gradients_until": Removed(
        "a callback sets engine.exact_gradients (docs/develop/extending.md), as does a loop of your own on the engine"
    ),
    "zero_gradient_rounding": Removed(_FEEDBACK, off="nearest"),
    "zero_gradient_feedback_beta": Removed(_FEEDBACK, off="0.0"),
    "zero_gradient_feedback_reset": Removed(_FEEDBACK, off="0"),
    "price": Removed("a worth of 1.10 saves a tenth of what the GPUs cost: leave it out"),
    "topology": Removed(_ORDER),
    "topology_nodes": Removed(_ORDER),
    "zero_weight_error_bound": Removed(_BOUND),
    "zero_gradient_error_bound": Removed(_BOUND),
}
# Values of options with which checkpoints hold models that are not built any more.
_UNBUILT = {"model_family": "bloom", "position_embedding_type": "alibi", "embed_layernorm": True}


@dataclass(frozen=True)
class World:
    """The number of ranks, and how many share a node according to the launcher.

    --ranks-per-node overrides the latter. ``ranks_per_node`` is 0 if the launcher does not give it and the ranks have
    not exchanged their host names yet.
    """

    world_size: int
    ranks_per_node: int


@dataclass(frozen=True)
class ScheduleLengths:
    """The lengths of the learning-rate schedule. All are in ``unit``, which is 'iterations' or 'samples'.

    ``warmup`` need not be whole, as in Megatron: it may be a fraction of ``decay``. ``batch``: the samples of one
    unit of the run's length, 1 if the lengths are in that unit.
    """

    unit: str
    total: int
    decay: int
    warmup: float
    wsd_decay: int
    batch: int = 1


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The configuration of a run, in frozen sections.

    ``notes`` says what was accepted, implied or overridden on the way. ``said`` holds what the user said while the
    folder of --load is not read yet (read/parse.py: begun), else None. Without a world the global batch may be open
    (None); until the tokenizer is read, so may the vocabulary.
    """

    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    batch: BatchConfig
    optimizer: OptimizerConfig
    training: TrainingConfig = field(default_factory=TrainingConfig)
    skipping: SkippingConfig = field(default_factory=SkippingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    planning: PlanningConfig = field(default_factory=PlanningConfig)
    notes: tuple[str, ...] = field(default=(), compare=False)
    said: object = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, values: Mapping[str, Any], notes: Sequence[str] = ()) -> RunConfig:
        """Make a configuration of completed values by option name. None means "not said"."""
        sections: dict[str, Any] = {
            name: section_of(section, values) for name, section in section_types().items()
        }
        return cls(**sections, notes=tuple(notes))

    def get(self, name: str) -> Any:
        """Return the value of an option by its field name, which is unique over all sections."""
        return getattr(getattr(self, all_options()[name].section), name)

    def values(self) -> dict[str, Any]:
        sections = (getattr(self, section) for section in section_types())
        return {name: value for section in sections for name, value in vars(section).items()}

    def knows_nodes(self, world: World | None) -> bool:
        """Tell whether the size of a node is known, so that what depends on it can be asked."""
        return world is not None and bool(self.parallel.ranks_per_node or world.ranks_per_node)

    def ranks_per_node(self, world: World) -> int:
        ranks = self.parallel.ranks_per_node or world.ranks_per_node
        assert ranks, "the size of a node is not known yet"
        return ranks

    def data_parallel_size(self, world: World) -> int:
        """Return the number of shares of a global batch, as Megatron counts: the data-parallel ranks, of which
        context-parallel ranks have one share together."""
        return world.world_size // (self.parallel.model_ranks * self.parallel.context_parallel_size)

    def shard_ranks(self, world: World) -> int:
        """Return d, the number of ranks in one data-parallel group, over which states are sharded."""
        return world.world_size // self.parallel.model_ranks

    def data_ranks_per_node(self, world: World) -> int:
        """Return h, the number of ranks of one data-parallel group that share a node (``data_ranks``)."""
        return self.data_ranks(world)[0]

    def data_ranks(self, world: World) -> tuple[int, ...]:
        """Return how many ranks of one data-parallel group share each level below the whole: first h, of a node.

        Raises ValueError if groups straddle nodes, or higher levels, unevenly.
        """
        node, parallel = self.ranks_per_node(world), self.parallel
        levels = make_levels(world.world_size, node, parallel.level_sizes)
        return data_ranks(
            levels,
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
            dp_outermost=parallel.use_tp_pp_dp_mapping,
        )

    def context_levels(self, world: World | None) -> tuple[int, int]:
        """Return u, g: u x g ranks share samples, u swap heads and g groups of these gather keys (layout/context.py).

        Raises ValueError if data-parallel groups straddle nodes unevenly.
        """
        near = self.data_ranks_per_node(world) if world is not None and self.knows_nodes(world) else None
        return levels(self.parallel, self.model, near)

    def expert_nodes(self, world: World | None) -> int:
        """Return on how many nodes the ranks that share the experts lie, as far as nodes are known.

        Raises ValueError if data-parallel groups straddle nodes unevenly.
        """
        if world is None or not self.knows_nodes(world):
            return 1
        near = self.data_ranks_per_node(world) * self.parallel.tensor_model_parallel_size
        return max(1, self.parallel.expert_model_parallel_size // near)

    def gathered_keys(self, world: World) -> Coding | None:
        """Return the format of keys and values that are gathered across nodes. None: they are exact, or none are."""
        crosses = self.parallel.context_parallel_size > self.data_ranks_per_node(world)
        return gather_coding(self.parallel) if crosses and self.context_levels(world)[1] > 1 else None

    @property
    def own_length(self) -> int:
        """Return how many tokens of a sample a rank has; under sequence parallelism its tensor-parallel group."""
        return self.model.seq_length // self.parallel.context_parallel_size

    @property
    def training_stages(self) -> tuple[DataStage, ...]:
        """Return the stages of training with their lengths in tokens. Raises ValueError: ``parse_stages``."""
        length = self.model.seq_length
        return tuple(
            replace(stage, seq_length=stage.seq_length or length)
            for stage in parse_stages(self.data.data_stages)
        )

    def at_length(self, seq_length: int) -> Self:
        """Return the configuration for samples of so many tokens."""
        return replace(self, model=replace(self.model, seq_length=seq_length))

    @property
    def virtual_stages(self) -> int:
        """Return how many stages each pipeline rank holds."""
        return virtual_stages(self.parallel, self.model.num_layers)

    @property
    def pipeline_schedule(self) -> str:
        """Return one of pp.schedules.SCHEDULES. It is 1f1b where there is no pipeline."""
        return schedule_name(self.parallel, self.virtual_stages)

    @property
    def micro_batch_multiple(self) -> int:
        """Return the number that the schedule needs the micro-batches of every step to be a multiple of."""
        pp = self.parallel.pipeline_model_parallel_size
        return micro_batch_multiple(self.pipeline_schedule, pp, self.virtual_stages)

    def stages(self) -> tuple[StageSpec, ...]:
        """Return every stage of the pipeline in the order of the model. Without a pipeline, one stage holds it all.

        It needs the sizes of the model, the vocabulary too. Raises ValueError if the partition does not fit.
        """
        parallel, virtual = self.parallel, self.virtual_stages
        pp = parallel.pipeline_model_parallel_size
        costs = stage_costs(self.model, self.training.recompute_granularity)
        if pp * virtual == 1:  # the options of stages change nothing
            return partition(self.model.num_layers, 1, costs=costs, further=self.model.mtp_num_layers)
        return partition(
            self.model.num_layers,
            pp,
            virtual,
            costs=costs,
            method=partition_method(parallel, pp * virtual),
            first=parallel.decoder_first_pipeline_num_layers,
            last=parallel.decoder_last_pipeline_num_layers,
            further=self.model.mtp_num_layers,
        )

    def shards(self, world: World) -> Shards:
        """Return the sharing factors and lifetime of the ZeRO policy on this world.

        Raises ValueError if there are none.
        """
        return resolve_shards(
            self.zero.zero_shard or self.zero.zero_preset or DEFAULT_PRESET,
            self.shard_ranks(world),
            self.data_ranks(world),
            self.zero.zero_params_lifetime,
            self.zero.zero_hpz_partition_size,
            quantizes_changes(self.zero),
            self.zero.zero_gradients_lifetime,
            self.zero.num_distributed_optimizer_instances,
        )

    def wire(self, world: World) -> Wire:
        """Return what the hops of this world send.

        Raises ValueError if there are no legal shards, or if formats have no effect.
        """
        return resolve_wire(self.zero, self.shards(world), self.shard_ranks(world), self.data_ranks(world))

    def num_micro_batches(self, world: World) -> int:
        """Return how many micro-batches one rank has in a step at the full global batch (after any ramp-up)."""
        d = self.data_parallel_size(world)
        return self.batch.samples_per_step(d) // (self.batch.micro_batch_size * d)

    @property
    def lr_lengths(self) -> ScheduleLengths:
        """Return the schedule lengths, in the unit of the run's length, with their defaults filled in."""
        return self._lr_lengths("samples" if self.training.train_samples is not None else "iterations", 1)

    @property
    def lr_samples(self) -> ScheduleLengths:
        """Return the same in samples, as Megatron schedules: an iteration has the full global batch."""
        iterations = self.training.train_samples is None
        return self._lr_lengths("samples", (self.batch.global_batch_size or 1) if iterations else 1)

    def _lr_lengths(self, unit: str, batch: int) -> ScheduleLengths:
        opt, by_samples = self.optimizer, self.training.train_samples is not None
        total = (self.training.train_samples if by_samples else self.training.train_iters) or 0
        decay = ((opt.lr_decay_samples if by_samples else opt.lr_decay_iters) or total) * batch
        warmup: float = (opt.lr_warmup_samples if by_samples else opt.lr_warmup_iters) * batch
        fraction = opt.lr_warmup_fraction
        if fraction is not None and 0 <= fraction < 1:  # another one is reported as illegal
            warmup = fraction * decay
        wsd = ((opt.lr_wsd_decay_samples if by_samples else opt.lr_wsd_decay_iters) or 0) * batch
        return ScheduleLengths(unit, total * batch, decay, warmup, wsd, batch)

    def changed(self, values: Mapping[str, Any]) -> RunConfig:
        """Return the configuration with other values of these options, by name. No rule is asked.

        None is the default. What a command line completes from other options stays as it is.
        """
        sections = defaultdict[str, dict[str, Any]](dict)
        for name, value in with_defaults(values, values).items():
            sections[all_options()[name].section][name] = value
        return replace(self, **{name: replace(getattr(self, name), **own) for name, own in sections.items()})

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return the sections as plain JSON values, which are also a legal --config file."""
        return to_store(self.values())


@lru_cache(maxsize=1)
def section_types() -> Mapping[str, type]:
    """Return the dataclass of each section name, in order."""
    hints = get_type_hints(RunConfig).items()
    return MappingProxyType({name: cls for name, cls in hints if name not in ("notes", "said")})


@lru_cache(maxsize=1)
def all_options() -> Mapping[str, Option]:
    """Return the option of each field name, over all sections."""
    options = [opt for section, cls in section_types().items() for opt in section_options(section, cls)]
    assert len({opt.name for opt in options}) == len(options), "option names are unique over sections"
    return MappingProxyType({opt.name: opt for opt in options})


def with_defaults(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the values of these options by name: the default of one that is not said (absent, or None)."""
    options = all_options()
    return {name: options[name].default if values.get(name) is None else values[name] for name in names}


def to_store(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return values by option name in sections of plain JSON values. What is absent is the default, or null."""
    sections: dict[str, dict[str, Any]] = {section: {} for section in section_types()}
    for name, opt in all_options().items():
        value = values.get(name, opt.default)
        sections[opt.section][name] = list(value) if isinstance(value, tuple) else value
    return sections


def stored_values(stored: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Undo to_store: return every option by name. What is absent is the default, or None.

    A checkpoint that was imported has no learning rate, an older one not every option. Raises ConfigError, which
    names every section or key that does not exist.
    """
    read, errors = known_values(stored)
    for section, values in stored.items():
        if section not in section_types():
            errors.append(f"section {section!r} does not exist{did_you_mean(section, section_types())}")
            continue
        known = [opt.name for opt in all_options().values() if opt.section == section]
        errors += [
            f"{section}.{key} does not exist{did_you_mean(key, known)}"
            for key in values
            if key not in known and key not in REMOVED
        ]
    if errors:
        raise ConfigError(errors)
    return {name: opt.default for name, opt in all_options().items()} | complete(as_trained(read))


def known_values(stored: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return stored options by name, and a line for each that its option cannot have. Other names are left out."""
    read, errors = dict[str, Any](), list[str]()
    for section in section_types():
        values = stored.get(section, {})
        if not isinstance(values, Mapping):
            errors.append(f"section {section} holds {values!r}, not names and values")
            continue
        errors += [
            f"{section}.{name} {value} was removed: {_BLOOM}"
            for name, value in _UNBUILT.items()
            if values.get(name) == value
        ]
        for opt in all_options().values():
            if opt.section != section or values.get(opt.name) is None:
                continue
            try:
                read[opt.name] = convert(opt, values[opt.name])
            except ValueError as error:
                errors.append(f"{section}.{opt.name} {error}")
    return read, errors
