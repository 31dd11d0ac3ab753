"""A rank's activations while a backward is at its head, at a layer of each kind and at its embedding.

Activations are what autograd keeps of models/layer.py with a fused attention kernel (the counts of Korthikanti et al.
2022, section 4, for the layers of config/model/spec.py). Sizes are in bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megazero.config import RunConfig, World
from megazero.config.layout.shards import AUTO
from megazero.config.model.attention import BAND, TORCH, needs_mask, planned
from megazero.config.model.mixers import MIXERS
from megazero.config.model.section import ModelConfig
from megazero.config.model.spec import (
    EMBEDDING,
    HEAD,
    LargeLinears,
    LayerSpec,
    ModuleSpec,
    is_layer,
    padded_spec,
)
from megazero.families.layer_kinds import layer_kinds
from megazero.plan.communication import nodes_of_token
from megazero.pp.partition import StageSpec
from megazero.products import operand_bytes

# Elements of logits that the loss handles at once (tp/cross_entropy.py).
DEVICE_LOGITS, HOST_LOGITS = 1 << 26, 1 << 19
# Tokens of the smallest chunk that is chosen. A chunk reads the weight twice and adds to its gradient: 12 to 16 bytes
# for each element beside 6 operations a token, which 1,024 tokens hide on a GPU (unmeasured). On a CPU 256 take no
# longer (benchmarks/features/loss_chunks.py).
LEAST_CHUNK = 1024


@dataclass(frozen=True)
class LayerActivations:
    """Bytes of one micro-batch and layer. kept: until its backward. working: additionally during its backward."""

    kept: float
    working: float


def layer_activations(
    config: RunConfig, layer: LayerSpec, width: int, on_host: bool = False, world: World | None = None
) -> LayerActivations:
    """Return what a kind of layer keeps for its backward on one rank, whose elements have ``width`` bytes.

    on_host: on CPUs torch has no fused kernel for attention with dropout, so its scores, their mask and their product
    stay, in at least fp32. Matrix products in bands of queries keep no more than fused kernels do; in the backward
    they hold the matrices of one band. world: the ranks and their nodes, as far as they are known: which of those
    that share samples gather keys depends on them.
    """
    model, size, tp = config.model, config.batch.micro_batch_size, config.parallel.tensor_model_parallel_size
    tokens, (ranks, groups) = size * config.own_length, config.context_levels(world)
    share = tp if config.parallel.sequence_parallel else 1
    stream, heads = model.hidden_size / share, layer.mixer.heads.number / tp if layer.mixer.heads else 0.0
    # Keys and values of a token, with copies and without.
    own, once = (sum(layer.mixer.exchanged(tp, each).gathered) for each in (ranks, 1))
    # Those that are there again: copies, since ranks outnumber the key/value heads, and what is gathered.
    again = own - once + (groups - 1) * own
    # Keys and values that are made of latents: of all groups' tokens.
    work, wide = layer.mixer.work, max(width, 4)
    made = (groups - 1) * work.expanded / tp
    elements = layer.kept.stream / share + layer.kept.inner / tp + work.shared + again + made
    inside = wide * work.wide / tp
    masks = 2 * stream if model.hidden_dropout else 0.0  # a byte an element
    pairs = heads * model.seq_length
    backend = _backend(config, width, on_host, groups > 1)
    scores = 3 * tokens * pairs * wide if on_host and backend == TORCH and model.attention_dropout else 0.0
    transient = 0.0
    if heads and (backend == "math" or (on_host and backend == "flash")):
        transient = _piece(config, layer, heads / ranks, width, backend == "math", groups > 1)
    large, product = layer.in_fp8(config.precision.fp8_least), config.precision.product
    whole = tokens * (width * elements + inside + wide * work.gated / tp + masks + 4 * heads) + scores
    whole -= tokens * _narrower(large, product, stream, tp, width)
    inner: float = layer.gradients.inner
    if layer.experts and (nodes := config.expert_nodes(world)) > 1:
        inner = max(inner, rows_between_nodes(model, nodes))
    gradients = inner / tp + layer.gradients.stream + (groups - 1) * own
    # Gradients in fp8 and their transpose, a byte an element.
    gradients = tokens * (width * gradients + 2 * large.widest / tp) + transient
    if config.training.recompute_granularity == "full":
        return LayerActivations(tokens * width * stream, whole + gradients)
    if config.training.recompute_granularity == "mlp":
        fed = width * (layer.fed.kept.stream / share + layer.fed.kept.inner / tp) + masks / 2
        fed -= _narrower(layer.in_fp8(config.precision.fp8_least, "mlp."), product, stream, tp, width)
        return LayerActivations(whole - tokens * fed, tokens * fed + gradients)
    if config.training.recompute_granularity == "selective":
        core = tokens * (width * (work.core / tp + again + made) + inside + 4 * heads) + scores
        return LayerActivations(whole - core, core + gradients)
    return LayerActivations(whole, gradients)


def _narrower(large: LargeLinears, product: str, stream: float, tp: int, width: int) -> float:
    """Return how many bytes of a token are saved where inputs are kept as their products read them."""
    inputs = ((stream, large.columns), (large.rows / tp, 1))
    return sum((width * each - operand_bytes(product, int(each), width)) * count for each, count in inputs)


def _piece(
    config: RunConfig, layer: LayerSpec, heads: float, width: int, matrix: bool, chunks: bool
) -> float:
    """Return the bytes of a piece of queries while its attention is computed (models/attention_pieces.py).

    heads: those of this rank between the swaps. matrix: by matrices of scores. chunks: as for ``wants_of``.
    """
    model, wide = config.model, max(width, 4)
    length = model.seq_length
    back = max(min(kind.window or length, length) for kind in layer_kinds(model, layer.places))
    whole = matrix or chunks or back < length  # else only short documents share a bias
    queries, keys = min(BAND, length), min(back + BAND, length) if whole else min(BAND, length)
    bias = queries * keys * (width + 1)  # with whether a key is hidden
    # Scores, their softmax, and the gradients of both; tanh of capped ones.
    held = (5 if model.attn_logit_softcapping else 4) if matrix else 0
    return held * queries * heads * length * wide + bias


def rows_between_nodes(model: ModelConfig, nodes: int) -> float:
    """Return the elements of a token's rows where they are added at the nodes that it goes to (moe/dispatch.py).

    There are its experts' rows, the same as they came back inside these nodes, and at each node room for all of its
    experts, those of other nodes, too.
    """
    return model.moe_router_topk * model.hidden_size * (2 + nodes_of_token(model, nodes))


def loss_chunks(config: RunConfig) -> tuple[int | None, ...]:
    """Return the sizes that --loss-chunk-tokens allows, the largest first. None: logits of all tokens at once."""
    size = config.training.loss_chunk_tokens
    if not isinstance(size, str):
        return (size,)
    assert size == AUTO
    tokens, found = config.batch.micro_batch_size * config.own_length, list[int]()
    while LEAST_CHUNK << len(found) < tokens:
        found.append(LEAST_CHUNK << len(found))
    return (None, *reversed(found))


class MicroBatchActivations:
    """The activations of a micro-batch, whatever the stages. They are sizes of one rank, in bytes.

    width: of an element. on_host: the ranks compute on processors. world: as for ``layer_activations``.
    """

    def __init__(
        self, config: RunConfig, width: int, on_host: bool = False, world: World | None = None
    ) -> None:
        model, tp = config.model, config.parallel.tensor_model_parallel_size
        self.config, self.width, self.on_host = config, width, on_host
        self.spec = padded_spec(model, tp, config.parallel.expert_model_parallel_size)
        self.layers = {
            kind.kind: layer_activations(config, kind, width, on_host, world) for kind in self.spec.layers
        }
        tokens = config.batch.micro_batch_size * config.own_length
        self.stream = tokens * width * model.hidden_size / (tp if config.parallel.sequence_parallel else 1)
        least = config.precision.fp8_least
        self.raw = {
            kind: width * _largest_gradient(module, tp, tp > 1 or least is not None)
            for kind, module in self.spec.modules.items()
        }
        backend = _backend(config, width, on_host, config.context_levels(world)[1] > 1)
        self.masked = needs_mask(model, backend, config.data.reset_attention_mask)

    def moments(
        self, stages: Sequence[StageSpec], peak: int, loss_chunk: int | None = None
    ) -> dict[str, dict[str, float]]:
        """Return the bytes of activations and of the head, on the rank that holds these stages, by moment: the last
        micro-batch's backward at a layer of each kind, at the embedding and at the head, as far as the rank has them.

        The backward frees activations as it proceeds, and the head's before it needs the layers' working memory. A
        parameter's gradient, as autograd makes it, counts with them. If embedding and head are one parameter on one
        rank, autograd adds both gradients, so the head's stays to the end.

        peak: the most forwards of one part and micro-batch whose backward has not ended. loss_chunk: the tokens whose
        logits are held at once. None: all.
        """
        config, width, stream, raw = self.config, self.width, self.stream, self.raw
        numbers = Counter(self.spec.by_place[i].kind for s in stages for i in s.layers)
        one = sum(n / len(stages) * self.layers[kind].kept for kind, n in numbers.items()) + stream
        first, last = any(s.embedding for s in stages), any(s.head for s in stages)
        always = 0.0 if first and last else 4 * stream  # messages under way in a pipeline, both directions
        if self.masked:
            if config.data.reset_attention_mask:  # masks of one micro-batch, which a stage's layers share
                one += width * sum(mask_elements(config, s.layers) for s in stages) / len(stages)
            else:
                always += width * mask_elements(config, [i for s in stages for i in s.layers])
        here = last and any(s.embeds for s in stages)
        tied = here and not config.model.untie_embeddings_and_output_weights
        # A head that embeds further tokens leaves a gradient of the table until the first stage's is there.
        waiting = raw[HEAD] if tied else raw[EMBEDDING] if first and config.model.mtp_num_layers else 0.0
        held = always + peak * one
        moments = {
            kind: {"activations": held + (self.layers[kind].working + raw[kind] + waiting), "head": 0.0}
            for kind in numbers
        }
        if first:
            left = (peak - 1) * one + (2 * stream + raw[EMBEDDING] + waiting)
            moments[EMBEDDING] = {"activations": always + left, "head": 0.0}
        if last:
            head = _head(config, width, stream, raw[HEAD], self.on_host, loss_chunk)
            moments[HEAD] = {"activations": held, "head": head}
        return moments


def _head(
    config: RunConfig, width: int, stream: float, raw: float, on_host: bool, loss_chunk: int | None
) -> float:
    """Return the head's own bytes at its backward; in chunks (tp/chunked_loss.py), at the last chunk's backward.

    stream: bytes of the input on this rank. raw: bytes of the weight's gradient, as autograd makes it.
    """
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    rows, tokens = model.padded_vocab_size(tp) / tp, config.batch.micro_batch_size * config.own_length
    chunked = loss_chunk is not None and loss_chunk < tokens
    logits = rows * (loss_chunk if chunked and loss_chunk else tokens)
    # While a part is widened, its exponentials are there, too.
    part = min(logits, max(HOST_LOGITS if on_host else DEVICE_LOGITS, rows)) * (8 if width < 4 else 4)
    # How many times logits are there in the loss, in its backward, and after it: a soft cap has tanh's result and a
    # gradient before and after each of its operations, and a chunk keeps what they began with.
    capped = bool(model.final_logit_softcapping)
    first, then, last = ((3, 5, 2) if chunked else (2, 3, 1)) if capped else (1, 1, 1)
    if config.training.compile:  # no part is widened, and the gradient is not written over what it is of
        part = 0.0
        if chunked:
            then, last = then + 1, last + 1
        elif tp == config.parallel.pipeline_model_parallel_size == 1:
            first, then = 1, 2  # a whole graph, which computes tanh again
        else:
            then = max(then, 2)
    sums, product, inputs = 0.0, raw, 2 * stream
    if chunked:
        sums = raw * max(width, 4) / width
        # A chunk's product, where it is narrower than the sum; processors add it through a copy that is as wide.
        product = raw + (sums if on_host else 0.0) if width < 4 else 0.0
        # The input, gathered, and its gradient before the reduction; beside them the input as the norm left it.
        inputs = 2 * tokens * width * model.hidden_size
        inputs += stream if config.parallel.sequence_parallel and tp > 1 else 0.0
    logits *= width
    ahead = model.mtp_num_layers * (
        inputs + (sums if chunked else last * logits)
    )  # wait for the first's backward
    return sums + inputs + max(first * logits + part, then * logits, last * logits + product) + ahead


def mask_elements(config: RunConfig, layers: Sequence[int]) -> float:
    """Return the elements of the masks that a rank with these layers holds, if its backend needs them."""
    model, packed = config.model, config.data.reset_attention_mask
    kinds = {kind.window for kind in layer_kinds(model, layers) if MIXERS[kind.mixer](model).heads}
    windows = {window if window and window < model.seq_length else None for window in kinds}
    if not packed:  # torch's kernels need no mask to be causal
        windows.discard(None)
    return len(windows) * (config.batch.micro_batch_size if packed else 1) * model.seq_length**2


def _backend(config: RunConfig, width: int, on_host: bool, chunks: bool) -> str:
    choice, documents = config.training.attention_backend, config.data.reset_attention_mask
    return planned(config.model, choice, documents, 8 * width, on_host, chunks)


def _largest_gradient(module: ModuleSpec, tp: int, joint: bool) -> int:
    """Return the most gradient elements that autograd holds at once before it accumulates them.

    joint: linears of one input (tp/linear.py) compute theirs together, q, k and v, or gate and up.
    """
    largest = max(p.local_numel(tp) for p in module.parameters)
    if not is_layer(module.kind) or not joint:
        return largest
    together = Counter[str]()
    for p in module.parameters:
        together[p.name.partition(".")[0]] += p.numel * (p.multiplies and p.cut == 0)
    return max(largest, *(numel // tp for numel in together.values()))
