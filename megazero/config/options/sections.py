"""All sections except the model. A field here is a flag, a YAML key and a line of docs/reference/flags.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Any, ClassVar

from megazero.config.layout.shards import AUTO, GRADIENT_LIFETIMES, LIFETIMES, OVER_ALL, PRESETS
from megazero.config.model.attention import CHOICES as ATTENTION_BACKENDS
from megazero.config.model.section import EXPERTS
from megazero.config.options.callback_words import word_of
from megazero.config.options.data_inputs import FILE_OPTIONS, TOKENIZERS
from megazero.config.options.data_stages import stage_word
from megazero.config.options.fields import BEGINS, KEPT, ORDER, SHORT, UPDATE, option
from megazero.config.options.optimizers import IMPLEMENTATIONS
from megazero.pp.schedules import SCHEDULES
from megazero.products import PLAIN, RECIPES

BITS = (8, 4, 2)
BITS_OF_GRADIENTS = (8, 4)
BITS_OF_KEYS = (8,)
OUTER_BITS = (32, 16, *BITS)
TOPK = "topk"  # of --outer-format
OUTER_OPTIMIZERS = ("nesterov", "sgd", "average")
TRANSFORMS = ("none", "hadamard")
RECOMPUTE = ("none", "selective", "mlp", "full")
DISPATCH = ("no", "exact", "int8")
BALANCE_LOSSES = AUX, SEQUENCE_AUX, GLOBAL_AUX = ("aux_loss", "seq_aux_loss", "global_aux_loss")
SINKHORN = "sinkhorn"
# Needs (options/needs.py).
SHARED_SAMPLES = "context_parallel_size > 1"
QUANTISED = "sends_gradients: --zero-quantized-gradients"
ANY_QUANTISED = "sends_weights or sends_gradients: --zero-quantized-weights or --zero-quantized-gradients"
SGD = "outer_optimizer = nesterov|sgd"
FP8, FP8_GRADIENTS = "fp8_format", {"e4m3": "float8_e4m3fn", "hybrid": "float8_e5m2"}  # torch's names
FP16, DYNAMIC = "params_dtype = fp16: --fp16", "not loss_scale: a scale that changes (no --loss-scale)"
EVALUATES = "eval_iters > 0 or callbacks or eval_tasks: --eval-iters above 0"
CHECKPOINT = "not loads_hugging_face: --load of a checkpoint"
CONTINUES = "not finetune: continuing the run (no --finetune)"
COMPILE_BACKENDS = INDUCTOR, *_ = ("inductor", "aot_eager", "eager")


@dataclass(frozen=True)
class ParallelConfig:
    """How the ranks are laid out."""

    NEEDS: ClassVar = {
        **dict.fromkeys(("num_", "pipeline_", "decoder_", "use_tp_"), "pipeline_model_parallel_size > 1"),
        "cp_": SHARED_SAMPLES,
    }

    tensor_model_parallel_size: int = option(1, "ranks that share each layer", low=1)
    pipeline_model_parallel_size: int = option(1, "ranks that share the layers, stage by stage", low=1)
    context_parallel_size: int = option(
        1, "data-parallel ranks that share samples, each with its own part of every sequence", low=1
    )
    cp_comm_type: tuple[str, ...] | None = option(
        None,
        "how they attend to whole samples: a2a swaps heads for sequence before attention and back after it, "
        "all_gather gathers keys and values, a2a+p2p does both. p2p, and the default: a2a for as many ranks as there "
        "are heads for and as share a node, all_gather for the rest",
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = option(
        None,
        "U G of a2a+p2p: ranks that swap heads, and groups of these that gather keys and values",
        needs=(SHARED_SAMPLES, "cp_comm_type = a2a+p2p"),
    )
    cp_gather_bits: int | None = option(
        None,
        "bits of keys and values that are gathered across nodes, after a Hadamard transform; gradients come back "
        "exactly (default: not quantised)",
        choices=BITS_OF_KEYS,
        strict=True,
        needs=("gathers_keys: a --cp-comm-type other than a2a"),
    )
    expert_model_parallel_size: int = option(
        1,
        "ranks of a node that share the experts, tensor-parallel ranks and then data-parallel neighbours: a token "
        "goes to the ranks that hold its experts",
        low=1,
        strict=True,
        needs=EXPERTS,
    )
    moe_dispatch_across_nodes: str = option(
        "no",
        "whether ranks of several nodes may share the experts: a token goes once to each node that has some of its "
        "own. int8: rows and output gradients cross nodes in 8 bits; return trips are exact",
        choices=DISPATCH,
        strict=True,
        needs="expert_model_parallel_size > 1",
    )
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None, "layers of each stage, where a rank has several (interleaved schedule)", low=1, small=SHORT
    )
    num_virtual_stages_per_pipeline_rank: int | None = option(
        None,
        "stages of each rank (interleaved schedule), of equal sizes or not (default: as --pipeline-partition lists, "
        "else 1)",
        low=1,
    )
    pipeline_schedule: str | None = option(
        None,
        "order of forwards and backwards; zb-h1 splits backwards and fills the bubble with weights' gradients "
        "(default: 1f1b; interleaved where a rank has several stages)",
        choices=tuple(SCHEDULES),
    )
    pipeline_partition: str | None = option(
        None,
        "layers per stage: balanced (by compute, embedding and head included), uniform, type:transformer|embedding "
        "(embedding and head count as a layer each), or a list such as 5,6,6,5, or in Megatron's letters "
        "Et*5|(t*6|)*2t*5L (default: balanced)",
        aliases=("pp-partition-method", "pipeline-model-parallel-layout"),
    )
    decoder_first_pipeline_num_layers: int | None = option(
        None, "layers of the first stage; the others share the rest", low=1, small=SHORT
    )
    decoder_last_pipeline_num_layers: int | None = option(
        None, "layers of the last stage; the others share the rest", low=1, small=SHORT
    )
    use_tp_pp_dp_mapping: bool = option(
        False,
        "order of ranks, innermost first: tensor, pipeline, data instead of tensor, data, pipeline. A pipeline stays "
        "inside a node and data parallelism crosses nodes",
    )
    sequence_parallel: bool = option(
        False, "split norms and dropout over the sequence", needs="tensor_model_parallel_size > 1"
    )
    ranks_per_node: int | None = option(
        None, "overrides the launcher's node size: one machine can pretend to be several", low=1
    )
    level_sizes: tuple[int, ...] = option(
        (),
        "nodes in each level between node and cluster, lowest first: N, of a rack; N,M, of a rack and of a site. "
        "Messages then go once across each of these links",
        low=1,
        strict=True,
    )

    @property
    def model_ranks(self) -> int:
        """Return how many ranks hold a model together: tensor- and pipeline-parallel ones."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size


@dataclass(frozen=True)
class ZeroConfig:
    """Sharding of model state over data-parallel ranks, and formats of its messages (ZeRO++: quantised).

    --zero-preset and --zero-shard exclude each other; the --zero-quantized flags go with either.
    """

    STRICT: ClassVar[bool] = True

    zero_stage: int | None = option(
        None, "ZeRO stage: 0 ddp (zero1 with --bf16, as DeepSpeed), 1 zero1, 2 zero2, 3 zero3", low=0, high=3
    )
    zero_preset: str | None = option(
        None,
        "sharding by name (default: zero1; mics and hsdp are one). zeropp shards parameters and gradients inside a "
        "node, quantises what crosses nodes and sends it once per step. auto: the fastest that fits, lifetimes and "
        "messages too, by the planner and the file of --cluster",
        choices=(*PRESETS, AUTO),
    )
    zero_shard: tuple[int, ...] | None = option(
        None, "shard factors P,G,OS: ranks that share one copy of parameters, gradients, optimizer states"
    )
    zero_hpz_partition_size: int | None = option(
        None,
        "ranks that share hpz's or zeropp's copy of the parameters (default: those of a node). It may be the "
        "ranks of a rack, or of a site, by --level-sizes",
        low=1,
    )
    num_distributed_optimizer_instances: int = option(
        1,
        "N: a preset's d becomes d / N, as in N replicas of the sharded states: with zero1 P,G,OS = 1,1,d/N, with "
        "zero3 d/N three times",
        low=1,
        needs=f"zero_preset = {'|'.join(OVER_ALL)}",
    )
    zero_params_lifetime: str | None = option(
        None,
        "how long gathered parameter shards live (default: use for P = OS, resident for P = 1 and for the "
        "delta refresh, else step). gathered: the default, and full parameters stay gathered from their first "
        "use in a step to its end: a pipeline stage gathers once a step and holds its full parameters",
        choices=LIFETIMES,
    )
    zero_gradients_lifetime: str | None = option(
        None,
        "how long whole gradients live, for G > 1: micro-batch reduces them to this rank's shard after every "
        "micro-batch (default); step accumulates them whole and reduces once a step, which takes 4 bytes for "
        "each parameter of the stage",
        choices=GRADIENT_LIFETIMES,
    )
    zero_prefetch_bytes: int = option(
        256 * 2**20, "bytes gathered, or kept, ahead of use beyond the next module's parameters", low=0
    )
    zero_chunk_numel: int = option(
        2**27, "elements of a module that move together; hops of successive chunks run side by side", low=1
    )
    zero_unit_layers: int = option(
        1,
        "layers of a stage that are gathered and reduced together: fewer messages, where delay is most of a "
        "message's cost, and the memory of that many gathered layers",
        low=1,
        small=2,
    )
    zero_quantized_weights: bool | None = option(
        None, "send weights quantised where they cross nodes (default: on in preset zeropp, else off)"
    )
    zero_weight_bits: int | None = option(
        None,
        "bits of a quantised weight (default: 8; 4 with --zero-quantized-weights-delta)",
        choices=BITS,
        needs="sends_weights: --zero-quantized-weights",
    )
    zero_quantized_weights_delta: bool | None = option(
        None,
        "quantise the weights' change since the last refresh instead of the weights: fewer bits at less error, for "
        "parameter shards that stay resident. Implies --zero-quantized-weights (default: on in preset zeropp unless "
        "--zero-params-lifetime is step, else off)",
    )
    zero_quantized_gradients: bool | None = option(
        None, "send gradients quantised where they cross nodes (default: on in preset zeropp, else off)"
    )
    zero_gradient_bits: tuple[int, ...] | None = option(
        None,
        "bits of a quantised gradient across nodes; 8 where the link allows it (default: 4). Several values, with "
        "--level-sizes: across nodes, racks, ...; the last one is also for further levels",
        choices=BITS_OF_GRADIENTS,
        needs=QUANTISED,
    )
    zero_gradient_bits_intra_node: int | None = option(
        None,
        "bits of a quantised gradient inside a node (default: not quantised there)",
        choices=BITS_OF_GRADIENTS,
        needs=QUANTISED,
    )
    zero_gradient_transform: str | None = option(
        None,
        "transform of quantised gradients: a randomised Hadamard transform spreads outliers over a block (of up to "
        "128 elements) before that is encoded (default: hadamard where a hop sends 4 bits or fewer; a resumed run "
        "keeps its checkpoint's)",
        choices=TRANSFORMS,
        needs="sends_gradients or zero_gradient_transform = none: --zero-quantized-gradients",
    )
    zero_block_size: int | None = option(
        None,
        "elements that share a scale, a power of two from 8 to 2048 (default: 128 at 8 bits, else 64)",
        needs=ANY_QUANTISED,
        small=8,
    )
    zero_exact_numel: int | None = option(
        None,
        "parameters with at most this many elements on a tensor-parallel rank are never quantised (default: 16384)",
        low=0,
        needs=ANY_QUANTISED,
    )


@dataclass(frozen=True)
class OuterConfig:
    """Outer steps across slow links (DiLoCo): replicas, each a launch of its own, train apart and meet.

    Everything else, tensor and pipeline parallelism and the sharding, is inside a replica.
    """

    STRICT: ClassVar[bool] = True
    NEEDS: ClassVar = {"outer_": "outer_meet"}

    outer_meet: str | None = option(
        None,
        "where replicas meet, each a launch of its own: HOST:PORT of `megazero meet`; or local:R, which starts R "
        "replicas of --nproc-per-node ranks on this machine (default: no outer steps)",
    )
    outer_name: str | None = option(
        None, "this replica's name, its own among those that meet (default: that of the host and the job)"
    )
    outer_secret_file: str | None = option(
        None, "file of the secret by which replicas and the meeting point know each other, 16 bytes at least"
    )
    outer_ranks: int | None = option(
        None,
        "data-parallel ranks of the replica that has the most, a multiple of every other's (default: this one's)",
        low=1,
    )
    outer_interval: int = option(
        100, "steps that replicas train apart before they meet, of their own batches each", low=1, small=2
    )
    outer_least: int = option(
        0,
        "replicas without which nobody goes on (default: more than half of those that met last, or half with the "
        "first of them by name)",
        low=0,
    )
    outer_call: float = option(
        10.0, "seconds after which one that waits calls the others, who come with what they have", low=0
    )
    outer_patience: float = option(
        60.0, "seconds after which a meeting begins without those missing", above=0
    )
    outer_silence: float = option(
        10.0, "seconds without a sign of life after which one is held for dead", above=0
    )
    outer_optimizer: str = option(
        "nesterov",
        "rule that updates the weights of the last meeting by the replicas' mean difference to them: SGD with "
        "Nesterov momentum; SGD with momentum; or average, which adds the difference whole",
        choices=OUTER_OPTIMIZERS,
    )
    outer_lr: float = option(0.7, "learning rate of the outer optimizer", above=0, needs=SGD)
    outer_lr_decay_style: str = option(
        "constant",
        "the outer learning rate over the run: constant, or linear to --outer-min-lr by the samples of all replicas",
        choices=("constant", "linear"),
        needs=SGD,
    )
    outer_min_lr: float = option(
        0.0, "outer learning rate at the end of a run", low=0, needs="outer_lr_decay_style = linear"
    )
    outer_momentum: float = option(0.5, "momentum of the outer optimizer", low=0, below=1, needs=SGD)
    outer_format: str = option(
        "dense",
        "what crosses of a difference: all of it in --outer-bits (dense); or the 64 largest of each 4,096 elements "
        "in 2 bits, and 0.95 of the rest with the next ones (topk), for links below 0.5 Gb/s",
        choices=("dense", TOPK),
    )
    outer_bits: int = option(
        32,
        "bits of a difference between replicas: 32 exact, 16 bf16, else quantised",
        choices=OUTER_BITS,
        needs="outer_format = dense",
    )
    outer_rounding: str | None = option(
        None,
        "how differences are rounded: to nearest, adding what was lost to the next ones (feedback), or not adding it "
        "(nearest) (default: feedback)",
        choices=("feedback", "nearest"),
        needs=f"outer_bits < {OUTER_BITS[0]}",
    )
    outer_evaluation: str = option(
        "anchor",
        "weights that are evaluated: anchor takes those of the last meeting, which are also exported; replica takes "
        "this replica's own",
        choices=("anchor", "replica"),
    )
    outer_delay: int = option(
        0,
        "steps of training while differences are on their way, fewer than --outer-interval; 0: training waits",
        low=0,
        small=1,
    )


@dataclass(frozen=True)
class PrecisionConfig:
    """Compute dtype, and fp8. Master weights, accumulated gradients, sums and the loss are at least fp32."""

    NEEDS: ClassVar = {
        "loss_scale": FP16,
        **dict.fromkeys(("initial_", "min_", "loss_scale_", "hysteresis"), (FP16, DYNAMIC)),
    }

    params_dtype: str = option(
        "fp32",
        "dtype of parameters and activations",
        choices=tuple(PLAIN),
        consts={dtype: dtype for dtype in PLAIN},
        resume=UPDATE,
    )
    fp8_format: str | None = option(
        None,
        "large matrices of layers are multiplied in fp8: e4m3 takes E4M3 for all, hybrid E5M2 for gradients. Head, "
        "embedding, router, experts and latent attention stay in bf16",
        choices=tuple(FP8_GRADIENTS),
        needs="params_dtype = bf16: --bf16",
        strict=True,
        resume=UPDATE,
    )
    fp8_recipe: str = option(
        "tensorwise",
        "what has a scale: a tensor (tensorwise); a token, and a row of a weight (rowwise; gradients of weights in "
        "bf16); 128 elements of a token, and 128 x 128 of a weight (blockwise; Hopper)",
        choices=RECIPES,
        needs=FP8,
        strict=True,
        resume=UPDATE,
    )
    fp8_min_size: int = option(
        2048,
        "matrices with a shorter side are multiplied in bf16, unless a larger one multiplies the same input; sides "
        "are those of one rank, whatever the layout",
        low=1,
        needs=FP8,
        strict=True,
        resume=UPDATE,
    )
    loss_scale: float | None = option(
        None, "fp16: fixed factor of losses; 0 is dynamic (default: dynamic)", low=0, high=2.0**127
    )
    initial_loss_scale: float = option(2.0**32, "fp16: first dynamic loss scale", above=0, high=2.0**127)
    min_loss_scale: float = option(1.0, "fp16: least dynamic loss scale", above=0)
    loss_scale_window: int = option(1000, "fp16: overflow-free steps in a row that double the scale", low=1)
    hysteresis: int = option(
        2, "fp16: the scale halves at the N-th overflow and each later one; growth restarts the count", low=1
    )

    @property
    def product(self) -> str:
        """Return how the layers' linears multiply, a name of PRODUCTS."""
        return f"fp8_{self.fp8_recipe}" if self.fp8_format else self.params_dtype

    @property
    def fp8_least(self) -> int | None:
        """Return the shorter side of the smallest matrices that are multiplied in fp8, None if none is."""
        return self.fp8_min_size if self.fp8_format else None

    @property
    def product_options(self) -> dict[str, Any]:
        """Return the options of that product."""
        if self.fp8_format is None:
            return {}
        return {"gradients": FP8_GRADIENTS[self.fp8_format], "least": self.fp8_min_size}


@dataclass(frozen=True)
class BatchConfig:
    """Sizes in samples."""

    micro_batch_size: int = option(
        MISSING, "samples of one forward pass on one rank", low=1, required=True, small=2, resume=UPDATE
    )
    global_batch_size: int | None = option(
        None,
        "samples of one step over all ranks (default: micro-batch x data-parallel size / --context-parallel-size)",
        low=1,
        resume=UPDATE,
    )
    rampup_batch_size: tuple[int, ...] | None = option(
        None, "START INCREMENT SAMPLES: grow the global batch from START by INCREMENT over SAMPLES samples"
    )
    step_batch_size_schedule: tuple[str, ...] = option(
        (),
        "TOKENS:SAMPLES ...: the global batch from so many consumed tokens on, such as 0:384 200B:768 400B:1152. The "
        "last one is --global-batch-size",
        small=SHORT,
    )
    elastic: bool = option(False, "keep the global batch on other numbers of ranks, by a smaller micro-batch")

    eval_global_batch_size: int | None = option(
        None,
        "samples of an evaluation's step (default: --global-batch-size)",
        low=1,
        needs=EVALUATES,
        small=SHORT,
    )

    @property
    def resized_by(self) -> str:
        """Return the flag by which the global batch changes over the run, or ''."""
        if self.step_batch_size_schedule:
            return "--step-batch-size-schedule"
        return "--rampup-batch-size" if self.rampup_batch_size else ""

    def evaluated_per_step(self, data_parallel: int) -> int:
        """Return the samples of an evaluation's step, of ``data_parallel`` shares."""
        return self.eval_global_batch_size or self.samples_per_step(data_parallel)

    def samples_per_step(self, data_parallel: int) -> int:
        """Return the global batch, after any ramp-up, of ``data_parallel`` shares."""
        return self.global_batch_size or self.micro_batch_size * data_parallel


@dataclass(frozen=True)
class TrainingConfig:
    """Length of the run, evaluation, recomputation, device."""

    NEEDS: ClassVar = {"moe_": EXPERTS}
    SMALL: ClassVar = dict.fromkeys(("exit_", "kill_", "eval_", "distributed_", "health_"), SHORT)
    RESUME: ClassVar = {"moe_": UPDATE}

    train_iters: int | None = option(None, "iterations to train (or --train-samples)", low=1)
    train_samples: int | None = option(None, "samples to train (or --train-iters)", low=1, small=SHORT)
    exit_interval: int | None = option(None, "save and exit at iterations divisible by this; 0: never", low=0)
    exit_duration_in_mins: float | None = option(None, "save and exit after these minutes; 0: never", low=0)
    kill_switch_path: str | None = option(
        None, "save and exit after an iteration if this file exists; do not begin if it does"
    )
    exit_signal_handler: bool = option(False, "save and exit on SIGTERM, SIGUSR1 or SIGINT")
    eval_interval: int = option(1000, "iterations between evaluations; 0: none", low=0, needs=EVALUATES)
    eval_at_start: bool = option(False, "evaluate before a fresh run's first iteration, too", needs=EVALUATES)
    eval_iters: int = option(100, "global batches of one evaluation; 0 does not evaluate", low=0, small=0)
    eval_tasks: tuple[str, ...] = option(
        (),
        "tasks of lm-eval's harness (pip install lm_eval) to evaluate behind the validation data, by name or YAML "
        "file, such as hellaswag,arc_easy; texts are encoded as training data are, with no token before them",
        strict=True,
        needs=(
            "tokenizer_type != NullTokenizer: --tokenizer-type, a tokenizer of texts",
            "eval_interval > 0: --eval-interval above 0",
        ),
        aliases=("tasks",),
    )
    eval_tasks_interval: int | None = option(
        None,
        "iterations between evaluations of tasks, a multiple of --eval-interval (default: that)",
        low=1,
        strict=True,
        needs="eval_tasks",
    )
    eval_tasks_limit: int | None = option(
        None, "examples of each task (default: all)", low=1, strict=True, needs="eval_tasks"
    )
    seed: int = option(1234, "seed of weights, samples and dropout", low=0, high=2**32 - 1, resume=ORDER)
    deterministic_mode: bool = option(False, "only deterministic kernels")
    recompute_granularity: str = option(
        "none",
        "activations that the backward recomputes: those of attention's core (selective), of the MLP or experts and "
        "their norms (mlp), or of whole layers (full)",
        choices=RECOMPUTE,
    )
    attention_backend: str = option(
        "auto",
        "implementation of attention: a kernel of torch's (flash with documents is its attention of variable "
        "lengths), matrix products in bands of queries (math), torch's flex attention, or the package flash-attn",
        choices=ATTENTION_BACKENDS,
    )
    compile: bool = option(False, "compile decoder layers, and the head with its loss, with torch.compile")
    compile_backend: str = option(
        INDUCTOR,
        "compiler of the graphs; aot_eager runs their operations as they are",
        choices=COMPILE_BACKENDS,
        strict=True,
        needs="compile",
    )
    z_loss_strength: float = option(
        0.0,
        "weight of log(Z)^2, added to each token's loss, where Z is the sum of exp(logits) (PaLM: 1e-4). Evaluations "
        "report the loss without it",
        low=0,
        resume=UPDATE,
    )
    mtp_loss_scaling_factor: float = option(
        0.1,
        "weight of the mean loss of layers that predict further tokens. Evaluations report the loss without it",
        above=0,
        needs="mtp_num_layers > 0",
        resume=UPDATE,
    )
    moe_router_load_balancing_type: tuple[str, ...] = option(
        ("aux_loss",),
        "losses that balance experts: over each micro-batch, each sample (seq_aux_loss), or the step so far "
        "(global_aux_loss); or none; or sinkhorn, by which the tokens of each micro-batch choose experts evenly",
        choices=(*BALANCE_LOSSES, SINKHORN, "none"),
        needs="moe_aux_loss_coeff > 0 or moe_router_load_balancing_type = sinkhorn",
    )
    moe_aux_loss_coeff: tuple[float, ...] = option(
        (0.0,),
        "weight of each of the losses that balance experts; 0: none",
        low=0,
        needs=f"moe_router_load_balancing_type = {'|'.join(BALANCE_LOSSES)}",
    )
    moe_z_loss_coeff: float | None = option(
        None, "weight of log(Z)^2 of a router, where Z is the sum of exp(scores) (ST-MoE: 1e-3)", low=0
    )
    moe_router_bias_update_rate: float = option(
        1e-3, "how far a step moves an expert's bias", low=0, needs="moe_router_enable_expert_bias"
    )
    loss_chunk_tokens: int | str | None = option(
        None,
        "tokens of a micro-batch whose logits a rank holds at once; their loss and gradients are computed together. "
        "auto: by the planner's memory, and whole where chunks save less than 5% of the peak (default: all tokens)",
        low=1,
        word=AUTO,
        small=3,
    )
    distributed_timeout_minutes: float = option(10.0, "limit of one collective", above=0)
    health_check: bool | None = option(None, "try nodes first, name bad ones (default: on under SLURM)")
    distributed_init_timeout_minutes: float = option(
        5.0, "limit of the start: until all ranks joined, and again until communicators are made", above=0
    )
    optimizer_impl: str = option(
        "auto",
        "implementation of AdamW's update: torch's fused step; triton, one pass over memory. auto: triton on CUDA if "
        "it is there (torch in fp64), else torch",
        choices=IMPLEMENTATIONS,
    )
    device: str = option(
        "auto", "device; auto takes CUDA if there is one", choices=("auto", "cpu", "cuda"), small="cpu"
    )

    @property
    def tasks(self) -> list[str]:
        return [name for word in self.eval_tasks for name in word.split(",") if name]

    @property
    def balance_weights(self) -> Mapping[str, float]:
        """Map the losses that balance experts to their weights, which are above 0."""
        pairs = zip(self.moe_router_load_balancing_type, self.moe_aux_loss_coeff, strict=False)
        return {kind: weight for kind, weight in pairs if kind in BALANCE_LOSSES and weight > 0}

    @property
    def sinkhorn(self) -> bool:
        """Tell whether a micro-batch's experts are chosen evenly."""
        return SINKHORN in self.moe_router_load_balancing_type

    @property
    def balances_micro_batches(self) -> bool:
        """Tell whether experts are balanced over micro-batches, so that their size changes the loss."""
        return self.sinkhorn or bool({AUX, GLOBAL_AUX} & self.balance_weights.keys())


@dataclass(frozen=True)
class DataConfig:
    """Text and tokenizer."""

    SMALL: ClassVar = SHORT
    NEEDS: ClassVar = {
        name: f"tokenizer_type = {'|'.join(kind for kind, files in TOKENIZERS.items() if name in files)}"
        for name in FILE_OPTIONS
    } | {"fim_": "fim_data", "stream_": "data_source = stream"}

    data_path: tuple[str, ...] = option(
        (), "PREFIX ..., or WEIGHT PREFIX WEIGHT PREFIX ... to blend", resume=ORDER
    )
    split: str = option(
        "969,30,1",
        "shares of train, validation and test in --data-path",
        needs=("not names_parts: --data-path, which it divides", "data_source = indexed"),
        resume=ORDER,
    )
    train_data_path: tuple[str, ...] = option(
        (), "data to train on, in the form of --data-path, instead of it and --split", resume=ORDER
    )
    valid_data_path: tuple[str, ...] = option(
        (), "data to evaluate on while training, in the form of --data-path (default: nothing is evaluated)"
    )
    test_data_path: tuple[str, ...] = option(
        (), "data to evaluate on after the last iteration, in the form of --data-path"
    )
    data_source: str = option(
        "indexed",
        "what the data paths name: indexed: Megatron's files, by prefix. stream: JSON lines, Parquet or Megatron's "
        "files, by path or address (s3://, gs://, https://), which are encoded while the run trains",
        choices=("indexed", "stream"),
        needs="not mock_data: --data-path instead of --mock-data",
        resume=ORDER,
    )
    stream_key: str = option(
        "text", "key of JSON lines, or column of Parquet files, that holds the text", resume=ORDER
    )
    stream_shards: int = option(
        64,
        "virtual shards that samples come from in turn. Each is read by one rank where the micro-batch of all ranks "
        "divides them, else by several",
        low=1,
        resume=ORDER,
    )
    stream_shuffle: bool = option(True, "shuffle files in pieces, and the records of a piece", resume=ORDER)
    stream_workers: int = option(2, "processes of a rank that encode; 0: it does so itself", low=0)
    skip_bad_lines: bool = option(
        False,
        "leave out records that are damaged or lack the key, with a warning",
        needs="data_source = stream",
        resume=ORDER,
    )
    data_stages: tuple[str, ...] = option(
        (),
        "stages of training; in YAML a list of mappings, as flags JSON objects, with until (the consumed samples at "
        "which it ends; all but the last), data-path (in the form of --train-data-path; default: the run's training "
        "data), seq-length (at most --seq-length, which evaluations have) and global-batch-size",
        entry=stage_word,
        resume=ORDER,
    )
    data_cache_path: str | None = option(
        None,
        "folder of index caches (default: beside the data), and of what streams have fetched from other machines "
        "(default: not kept)",
        needs="not mock_data: --data-path instead of --mock-data",
    )
    chats: bool = option(
        False,
        "the data are conversations (megazero preprocess --chats), whole in a sample: the loss counts answers alone",
        resume=ORDER,
        strict=True,
        needs=(
            "not mock_data: --data-path instead of --mock-data",
            "not fim_data",
            "reset_attention_mask: --reset-attention-mask, which keeps attention within a conversation",
        ),
    )
    fim_data: bool = option(
        False,
        "fill in the middle: of documents, cut at two places, the middle stands last (Bavarian et al. 2022)",
        resume=ORDER,
        strict=True,
        needs=("not mock_data: --data-path instead of --mock-data", "tokenizer_type"),
    )
    fim_rate: float | None = option(
        None, "probability of a document to be cut (default: 0.5)", low=0, high=1, strict=True, resume=ORDER
    )
    fim_spm_rate: float | None = option(
        None,
        "probability that the suffix stands first, then the prefix (default: 0.5)",
        low=0,
        high=1,
        strict=True,
        resume=ORDER,
    )
    fim_split_sample: str | None = option(
        None, "token that ends files of a document: these are cut, if the document would be", resume=ORDER
    )
    fim_fragment_rate: float | None = option(
        None, "probability of such a file to be cut", low=0, high=1, needs="fim_split_sample", resume=ORDER
    )
    fim_no_prefix: str | None = option(None, "what begins so is not cut", resume=ORDER)
    fim_prefix_token: str = option("<fim_prefix>", "token before the prefix", resume=ORDER)
    fim_middle_token: str = option("<fim_middle>", "token before the middle", resume=ORDER)
    fim_suffix_token: str = option("<fim_suffix>", "token before the suffix", resume=ORDER)
    fim_pad_token: str = option("<fim_pad>", "token that fills a sample that became shorter", resume=ORDER)
    fim_eod_token: str = option("<|endoftext|>", "token that ends documents", resume=ORDER)
    mock_data: bool = option(False, "made-up tokens instead of --data-path", small=True, resume=ORDER)
    tokenizer_type: str | None = option(
        None,
        "tokenizer that made the data (default: that of --load; GPT2BPETokenizer with --vocab-file or --merge-file)",
        choices=tuple(TOKENIZERS),
    )
    tokenizer_model: str | None = option(None, "file or folder of the tokenizer")
    vocab_file: str | None = option(None, "vocab.json of the GPT2BPETokenizer")
    merge_file: str | None = option(None, "merges.txt of the GPT2BPETokenizer")
    eod_mask_loss: bool = option(False, "leave end-of-document tokens out of the loss", resume=UPDATE)
    goldfish_loss: bool = option(
        False,
        "leave tokens out of the loss, in evaluations, too: about one in --goldfish-k, by a hash of the last "
        "--goldfish-h, so that a text that comes often is not learnt by heart",
        resume=UPDATE,
    )
    goldfish_k: int = option(
        50, "tokens of which goldfish loss leaves out one", low=2, needs="goldfish_loss", resume=UPDATE
    )
    goldfish_h: int = option(
        50, "tokens that goldfish loss hashes", low=1, needs="goldfish_loss", resume=UPDATE
    )
    reset_position_ids: bool = option(
        False,
        "positions begin at 0 in every document, as --reset-attention-mask has them",
        small=KEPT,
        resume=UPDATE,
    )
    reset_attention_mask: bool = option(
        False,
        "attention stays within documents, which end-of-document tokens end, or within conversations",
        small=KEPT,
        resume=UPDATE,
    )

    @property
    def goldfish(self) -> tuple[int, int] | None:
        return (self.goldfish_k, self.goldfish_h) if self.goldfish_loss else None

    @property
    def masks_loss(self) -> bool:
        """Tell whether some tokens are left out of the loss."""
        return self.eod_mask_loss or self.goldfish_loss or self.chats


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and loading."""

    SMALL: ClassVar = SHORT
    NEEDS: ClassVar = {"save_": "save", "load_": "load"}

    save: str | None = option(None, "folder to save checkpoints in")
    load: str | None = option(
        None,
        "folder of checkpoints, to load the newest complete one, or folder of one checkpoint. If it holds "
        "none, that is an error, except for the folder of --save: then training starts from random weights. "
        "hf:DIR starts from the weights, the model and the tokenizer of a Hugging Face folder",
        resume=BEGINS,
    )
    ckpt_step: int | None = option(
        None,
        "iteration of the checkpoint in --load to continue from, instead of the newest. Newer ones in --save are "
        "renamed, and the same command, started again, continues from what it has saved since",
        low=0,
        strict=True,
        needs=("load", CHECKPOINT),
        resume=BEGINS,
    )
    accept_field: tuple[str, ...] = option(
        (),
        "unknown fields of the config.json of --load hf:DIR to ignore, because they change nothing",
        strict=True,
        needs="loads_hugging_face: --load hf:DIR",
    )
    allow_fresh_start: bool = option(
        False,
        "start from random weights where --load, another folder than --save, holds no checkpoint",
        strict=True,
        needs=("load", CHECKPOINT),
    )
    exit_on_missing_checkpoint: bool = option(
        False, "--load without a checkpoint is an error even in --save's folder", needs=("load", CHECKPOINT)
    )
    save_interval: int | None = option(None, "iterations between saves (default, 0: at exit only)", low=0)
    save_retain_interval: int | None = option(
        None,
        "keep for good the first checkpoint at or after every N-th iteration; of the rest, keep the newest "
        "--save-keep-last (default 1)",
        low=1,
        needs="save_interval > 0",
    )
    save_keep_last: int | None = option(
        None, "how many of the newest checkpoints to keep (default: all)", low=1, needs="save_interval > 0"
    )
    save_retry_minutes: float = option(
        10.0, "how long a save is retried after the storage's first refusal; 0: not at all", low=0
    )
    async_save: bool = option(
        False,
        "copy what is saved to host memory and write it while training continues; a stop waits for it",
        needs=("save", "save_interval > 0"),
    )
    finetune: bool = option(
        False, "load weights alone; optimizer, schedule, data and RNG start new", needs="load", resume=BEGINS
    )
    load_optim: bool = option(True, "load optimizer states", needs=CONTINUES, resume=BEGINS)
    load_rng: bool = option(True, "load RNG states", needs=CONTINUES, resume=BEGINS)
    use_checkpoint_opt_param_scheduler: bool = option(
        False, "take the checkpoint's schedule of learning rate and weight decay", needs=("load", CONTINUES)
    )


@dataclass(frozen=True)
class PlanningConfig:
    """Predictions of memory and time, before the run allocates, and beside the measurements at its end."""

    SMALL: ClassVar = SHORT

    cluster: str | None = option(
        None, "cluster file, or the name of one of the planner's: for step times and --zero-preset auto"
    )
    loss_policy: str = option(
        "exact",
        "which messages the planner may quantise, safest first. exact: none; int8: weights and gradients in 8 bits; "
        "zeropp: what ZeRO++ quantises, gradients after a transform (docs/results/loss.md); aggressive: gradients "
        "inside nodes, too; outer: megazero plan proposes outer steps and compares them with the others",
        choices=("exact", "int8", "zeropp", "aggressive", "outer"),
        needs="zero_preset = auto",
    )
    memory_check: bool = option(True, "refuse, before it allocates, a run of more memory than devices have")


@dataclass(frozen=True)
class ProfilingConfig:
    """A trace of a few iterations, as LOG_DIR/profile/rank_N.json.gz for chrome://tracing or ui.perfetto.dev."""

    SMALL: ClassVar = SHORT
    NEEDS: ClassVar = {"profile_": "profile"}

    profile: bool = option(False, "write a trace of what the ranks compute and send")
    profile_step_start: int = option(10, "the trace begins after this iteration", low=0)
    profile_step_end: int = option(12, "the trace ends after this iteration", low=1)
    profile_ranks: tuple[int, ...] = option((0,), "ranks that write a trace")


@dataclass(frozen=True)
class LoggingConfig:
    """Logs, loggers and callbacks. Throughput is always logged."""

    SMALL: ClassVar = SHORT
    NEEDS: ClassVar = {"wandb_": "wandb_project", "moe_": EXPERTS}

    log_interval: int = option(100, "iterations between console lines; figures are means over them", low=1)
    log_dir: str = option("logs", "folder of metrics.jsonl, events.jsonl and the resolved configuration")
    log_max_attention_logit: bool = option(
        False, "the largest score of attention of every step in its line, as with --qk-clip", small=SHORT
    )
    moe_per_layer_logging: bool = option(False, "balance of experts of each layer in every line, too")
    report: bool = option(False, "keep LOG_DIR/report.html, the page of `megazero report`, up to date")
    tensorboard_dir: str | None = option(None, "folder of TensorBoard events")
    wandb_project: str | None = option(None, "Weights & Biases project (default: none, and nothing is sent)")
    wandb_entity: str | None = option(None, "user or team of the project (default: wandb's own)")
    wandb_exp_name: str | None = option(None, "name of the run in Weights & Biases")
    wandb_save_dir: str | None = option(None, "folder of wandb's local files")
    callbacks: tuple[str, ...] = option(
        (),
        "your classes that watch the run (docs/develop/extending.md): MODULE:NAME, or with options "
        "'MODULE:NAME {\"every\": 10}'; in YAML a list, whose entries may map MODULE:NAME to options",
        entry=word_of,
    )
