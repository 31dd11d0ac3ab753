"""Recompute, dropout, initialisation, placements, counts and errors of the decoder."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from megazero.config.model.attention import TORCH
from megazero.config.model.spec import model_spec, parameter_count, training_flops
from megazero.families import FAMILIES
from megazero.families.layer_kinds import LATENT, SOFTMAX, frequency_of, layer_kind, layer_kinds
from megazero.models import Decoder, ModelConfig, initializer, make_model
from megazero.models.dropout import key_words, keyed_dropout
from megazero.models.norm import RMSNorm
from megazero.models.positions import Documents, Positions
from megazero.models.rotary import Rotate, rotary_frequencies
from megazero.tp import TensorParallel
from tests.hugging_face import to_hf_state_dict
from tests.messages import refused

SIZES = {
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "num_layers": 2,
    "hidden_size": 48,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 301,
    "max_position_embeddings": 32,
    "make_vocab_size_divisible_by": 64,
}
DROPOUT = {"attention_dropout": 0.2, "hidden_dropout": 0.3}


# Of a head of 12 channels, half is an even number of pairs.
HALF = {"gpt_neox": {"rotary_percent": 0.5}}
HALF["qwen3_next"] = {
    **{"rotary_percent": 0.5, "linear_attention_freq": (0, 1), "linear_num_key_heads": 4},
    **{"linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 6},
}
HALF["qwen3_5"] = HALF["qwen3_next"]
HALF["nemotron_h"] = {
    **{"hybrid_layer_pattern": "*M", "mamba_num_heads": 8, "mamba_head_dim": 6, "mamba_state_dim": 8},
    **{"mamba_num_groups": 4},
}


def make(family: str, **changes) -> ModelConfig:
    return make_model(model_family=family, **{**SIZES, **HALF.get(family, {}), **changes})


def batch(length: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 301, (2, length), generator=torch.Generator().manual_seed(1))
    return tokens, tokens.roll(-1, 1)


def gradients(config: ModelConfig, key: int | None = None, recompute: str = "none"):
    decoder = Decoder(config, recompute=recompute)
    decoder.initialize(7)
    loss = decoder(*batch(), dropout_key=key)
    loss.sum().backward()
    return loss.detach(), {name: p.grad for name, p in decoder.named_parameters()}


def assert_same(a, b):
    assert torch.equal(a[0], b[0])
    assert all(torch.equal(a[1][name], b[1][name]) for name in b[1])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recompute", ["selective", "mlp", "full"])
@pytest.mark.parametrize("dropout", [{}, DROPOUT], ids=["plain", "dropout"])
def test_recompute_gives_the_same_bits(family, recompute, dropout):
    config = make(family, **dropout)
    kept = gradients(config, key=11)
    assert_same(gradients(config, 11, recompute), kept)
    if dropout:
        assert not torch.equal(gradients(config, key=12)[0], kept[0])
        assert not torch.equal(gradients(make(family))[0], kept[0])


WINDOW = {"sliding_window": 3, "window_attn_skip_freq": (2,)}


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("gpt", {}), ("llama", WINDOW), ("gemma2", WINDOW)],
)
def test_positions_and_attention_go_by_documents_each_by_itself(family, changes):
    decoder = Decoder(make(family, **changes), dtype=torch.float64)
    decoder.initialize(7)
    tokens, labels = batch()
    starts = torch.tensor([[0] * 6 + [6] * 10, [0] * 16])
    ids = torch.arange(16) - starts
    plain, alone = decoder(tokens, labels), decoder(tokens[:, 6:], labels[:, 6:])
    whole = decoder(tokens, labels, documents=Documents(ids, starts))
    assert torch.allclose(whole[0, 6:], alone[0], rtol=1e-12)
    assert torch.allclose(whole[1], plain[1], rtol=1e-12) and torch.allclose(
        whole[0, :6], plain[0, :6], rtol=1e-12
    )
    attended = decoder(tokens, labels, documents=Documents(starts=starts))
    moved = decoder(tokens, labels, documents=Documents(ids))
    # Rotary positions are relative: where attention stays within documents nothing is left to restart.
    assert torch.allclose(attended[0, 6:], alone[0], rtol=1e-12) == (family != "gpt")
    assert not torch.allclose(moved[0, 7:], plain[0, 7:], rtol=1e-12)
    assert not torch.allclose(attended[0, 7:], plain[0, 7:])


def test_layers_of_a_kind_share_a_mask_and_tables():
    choices = {"num_layers": 6, **WINDOW, "rotary_window_base": 50.0, "no_rope_freq": (3,)}
    decoder = Decoder(make("llama", **choices))
    decoder.initialize(7)
    kinds = [layer_kind(decoder.config, i) for i in range(6)]
    assert [(kind.window, kind.rotary) for kind in kinds] == [
        *((3, True), (None, True), (3, False)),
        *((None, True), (3, True), (None, False)),
    ]
    assert [kind.rotary_base for kind in kinds] == [50.0, 10000.0] * 3
    positions = decoder.positions
    for length in (8, 16):  # of one length at a time: masks of every length of a ramp would fill the memory
        decoder(*batch(length))
        names = [name[0] for name in positions._kept if name[0] != "backend"]
        assert sorted(names) == ["attention", "attention", "rope", "rope"]
    like = torch.zeros(())
    hidden = positions.tables(kinds, 16, like)[kinds[0]].attention.masking.dense(16, like)[0, 0].isinf()
    at = torch.arange(16)
    back = at[:, None] - at
    assert torch.equal(hidden, (back < 0) | (back >= 3))
    covered = positions.tables(kinds, 3, like)[kinds[0]].attention
    assert covered.masking.plain and covered.backend == TORCH  # a window that covers all hides nothing


TURNED, WINDOWED, SPARSE = "no_rope_freq", "window_attn_skip_freq", "moe_layer_freq"


@pytest.mark.parametrize(
    ("chosen", "name", "frequency"),
    [
        ((0, 0, 0), TURNED, None),
        ((0, 0, 1, 0, 0, 1, 0), TURNED, (3,)),
        ((0, 0, 1, 0), WINDOWED, (3,)),
        ((1, 1), WINDOWED, (1,)),
        ((1, 0), WINDOWED, (0, 1)),
        ((1, 0, 1), TURNED, (1, 0, 1)),
        ((1, 0, 0, 1, 0), SPARSE, (3,)),
        ((1, 1, 1), SPARSE, (1,)),
        ((1, 0), SPARSE, (2,)),
        ((0, 1, 1), SPARSE, (0, 1, 1)),
        ((0, 0, 1), SPARSE, (0, 0, 1)),
    ],
)
def test_lists_of_layers_become_options_and_are_read_again(chosen, name, frequency):
    assert frequency_of([bool(c) for c in chosen], name) == frequency
    given = {"num_layers": len(chosen), "sliding_window": 3, "num_experts": 4, name: frequency}
    config = make("llama", **given)
    kinds = [layer_kind(config, i) for i in range(len(chosen))]
    found = {
        TURNED: lambda k: not k.rotary,
        WINDOWED: lambda k: k.window is None,
        SPARSE: lambda k: k.experts,
    }
    assert [found[name](kind) for kind in kinds] == [bool(c) for c in chosen]


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_dropout_rate_and_scale(probability):
    words = key_words([(1, 2)], torch.device("cpu"))[0]
    dropped = keyed_dropout(torch.ones(200_000), probability, words)
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / (1 - probability)])
    assert (dropped == 0).float().mean().item() == pytest.approx(probability, abs=0.005)


def test_dropout_leaves_the_default_generator_alone_and_needs_a_key():
    decoder = Decoder(make("llama", **DROPOUT))
    decoder.initialize(0)
    state = torch.get_rng_state()
    decoder(*batch(), dropout_key=3).sum().backward()
    assert torch.equal(state, torch.get_rng_state())
    with refused("dropout_key"):
        decoder(*batch())
    decoder.eval()
    plain = Decoder(make("llama"))
    plain.initialize(0)
    assert torch.equal(decoder(*batch(), dropout_key=3), plain(*batch()))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [2, 4])
def test_initialisation_and_slices_do_not_depend_on_tp(family, size):
    config = make(family)
    whole = Decoder(config)
    whole.initialize(5)
    expected = to_hf_state_dict(whole)
    merged: dict[str, torch.Tensor] = {}
    for rank in range(size):
        part = Decoder(config, TensorParallel(None, rank, size))
        part.initialize(5)
        to_hf_state_dict(part, merged)
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], expected[name]) for name in expected)


def test_initial_values_follow_the_scheme():
    config = make("gpt", hidden_size=256, ffn_hidden_size=512, vocab_size=2000)
    decoder = Decoder(config, dtype=torch.float64)
    decoder.initialize(0)
    p = dict(decoder.named_parameters())
    assert p["layers.0.mlp.up_proj.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    assert p["layers.0.mlp.down_proj.weight"].std().item() == pytest.approx(0.02 / 2, rel=0.02)
    assert p["layers.0.attention.o_proj.weight"].std().item() == pytest.approx(0.02 / 2, rel=0.02)
    assert torch.all(p["layers.1.input_norm.weight"] == 1)
    assert torch.all(p["layers.1.attention.q_proj.bias"] == 0)
    assert torch.all(p["embedding.tokens.weight"][2000:] == 0)
    q, k = p["layers.0.attention.q_proj.weight"], p["layers.0.attention.k_proj.weight"]
    rows = torch.cat((q, k, p["layers.1.attention.q_proj.weight"])).float()
    assert torch.corrcoef(rows).triu(1).abs().max() < 0.4  # no row drawn twice (blocks are 256 rows)
    other = Decoder(config)
    other.initialize(1)
    assert not torch.equal(other.head.weight, decoder.head.weight.float())
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert initializer(decoder, 0)("embedding.tokens.weight").dtype == torch.float32
    finally:
        torch.set_default_dtype(default)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_names_units_and_sets(family, tied):
    tp = TensorParallel(None, 1, 2, sequence_parallel=True)
    decoder = Decoder(make(family, untie_embeddings_and_output_weights=not tied), tp, device="meta")
    parameters = dict(decoder.named_parameters())
    placements = decoder.placements()
    assert list(placements) == list(parameters)
    assert all(p.local_shape == tuple(parameters[name].shape) for name, p in placements.items())
    replicated = {name for name, p in decoder.specs.items() if p.replicated(2)}
    assert replicated == {name for name, p in decoder.specs.items() if p.partial(2, sequence_parallel=True)}
    whole = {name for name, p in decoder.specs.items() if p.partial(2, sequence_parallel=False)}
    norms, shared = ("q_norm", "k_norm"), ("k_proj", "v_proj")  # of a rank's own heads, or of several
    own = dict.fromkeys(("qwen3_next", "qwen3_5"), (*norms, "attention.norm"))
    own |= {"apertus": (*norms, "mlp.activation")}
    own |= {"qwen3": norms, "qwen3_moe": norms, "dots1": norms, "gemma3": norms, "falcon": shared}
    assert whole == {n for n in parameters if any(part in n for part in own.get(family, ()))}
    shared = Decoder(make("llama", num_query_groups=2), TensorParallel(None, 3, 4), device="meta")
    heads = {f"layers.{i}.attention.{kind}_proj.weight" for i in (0, 1) for kind in "kv"}
    assert heads == {name for name, p in shared.specs.items() if p.partial(4, sequence_parallel=False)}
    assert {shared.specs[name].copies(4) for name in heads} == {2}
    assert all(shared.placements()[name].segments[0].stored == 12 for name in heads)  # the second head's rows
    ends = ("bias", "sinks", "A_log", ".D", "alpha_p", "alpha_n")
    biases_and_norms = {name for name in parameters if "norm" in name or name.endswith(ends)}
    assert decoder.no_weight_decay() == biases_and_norms
    assert {name for name, p in placements.items() if p.local_shape == p.shape} <= replicated
    in_units = itertools.chain(*(m.parameters() for unit in decoder.units() for m in unit))
    assert {id(p) for p in in_units} == {id(p) for p in parameters.values()}
    assert (decoder.head.weight is decoder.embedding.tokens.weight) == tied
    assert [u[0] for u in decoder.units()] == [decoder.embedding, *decoder.layers.values(), decoder.head]
    layers = tuple(decoder.layers.values())
    assert decoder.units(joined=len(layers)) == [(decoder.embedding,), layers, (decoder.head,)]
    assert decoder.units(joined=len(layers) - 1)[1:3] == [layers[:-1], layers[-1:]]


@pytest.mark.parametrize("family", FAMILIES)
def test_parameter_count_and_flops(family):
    config = make(family)
    whole = Decoder(dataclasses.replace(config, make_vocab_size_divisible_by=1), device="meta")
    assert parameter_count(config) == sum(p.numel() for p in whole.parameters())

    from torch.utils.flop_counter import FlopCounterMode

    decoder = Decoder(config)
    decoder.initialize(0)
    with FlopCounterMode(display=False) as counter:
        decoder(*batch()).sum().backward()
    # The counter takes whole score matrices where the formula takes the causal half: leave attention out.
    counted = counter.get_flop_counts()["Global"]
    attention = sum(v for op, v in counted.items() if "attention" in str(op) or "bmm" in str(op))
    formula = training_flops(config, [16, 16])
    widths = 2 * config.kv_channels  # of a key and a value
    if config.multi_latent_attention:
        widths = config.qk_head_dim + config.qk_pos_emb_head_dim + config.v_head_dim
    layers = [kind.mixer in (SOFTMAX, LATENT) for kind in layer_kinds(config)].count(True)
    half_attention = 3 * config.num_attention_heads * widths * layers * 2 * 16 * 16
    # Of states products of whole chunks, where the formula takes those with the state.
    states = 6 * 32 * sum(len(kind.places) * kind.mixer.work.token for kind in model_spec(config).layers)
    assert sum(counted.values()) - attention == formula - half_attention - states
    assert config.padded_vocab_size(1) == 320
    assert training_flops(config, [32]) > formula
    windows = dataclasses.replace(
        config, sliding_window=6, window_attn_skip_freq=(2,)
    )  # in the first layer of two
    assert (
        formula - training_flops(windows, [16, 16])
        == 3 * config.num_attention_heads * widths * 2 * (16 - 6) ** 2
    )
    padded = dataclasses.replace(config, pad_vocab_size_to=400)
    assert parameter_count(padded) == parameter_count(config)
    assert training_flops(padded, [16, 16]) - formula == 6 * 32 * 48 * 80


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rms_norm_equals_torch(dtype):
    torch.manual_seed(0)
    norm = RMSNorm(40, 1e-5, dtype=dtype)
    x = torch.randn(3, 5, 40, dtype=dtype, requires_grad=True)
    with torch.no_grad():
        norm.weight.normal_()
    # Laid out as attention's gradient of queries that no rotary positions turn.
    g = torch.randn(5, 3, 40, dtype=dtype).transpose(0, 1)
    norm(x).backward(g)
    x64, w64 = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    torch.nn.functional.rms_norm(x64, (40,), w64, 1e-5).backward(g.double())
    bound = 8 * torch.finfo(dtype).eps
    for got, expected in ((x.grad, x64.grad), (norm.weight.grad, w64.grad)):
        assert ((got.double() - expected).norm() / expected.norm()).item() < bound
        assert got.dtype == dtype
    if dtype == torch.float64:
        assert torch.autograd.gradcheck(
            lambda a: type(norm).forward(norm, a), torch.randn(2, 3, 40, dtype=dtype, requires_grad=True)
        )


def rotated(positions: Positions, x: torch.Tensor, documents: Documents | None = None) -> torch.Tensor:
    kind = layer_kind(positions.config, 0)
    tables = positions.tables([kind], len(x), x, documents)[kind]
    return Rotate.apply(x, *tables.rotary, positions.config.rotary_interleaved)


def test_rotary_tables_are_fp64_and_change_with_the_length():
    """How they are scaled is transformers' (test_parity.py), at the lengths of its variants."""
    plain = make("llama", kv_channels=64, rotary_base=500000.0)

    def ratio(kind, length, **changes):
        scaled = dataclasses.replace(plain, rotary_scaling=kind, rotary_scaling_factor=8.0, **changes)
        return rotary_frequencies(scaled, length) / rotary_frequencies(plain, length)

    lists = {"rotary_short_factor": (2.0,) * 32, "rotary_long_factor": (4.0,) * 32}
    assert [ratio("longrope", n, **lists)[5].item() for n in (1, 8192, 8193)] == [0.5, 0.5, 0.25]
    positions = Positions(make("llama"))
    with torch.inference_mode():
        rotated(positions, torch.randn(8, 1, 4, 12, dtype=torch.float64))
    x = torch.randn(8, 1, 4, 12, dtype=torch.float64, requires_grad=True)
    # tables first made in inference mode can be saved for backward
    y = rotated(positions, x)
    y.pow(2).sum().backward()
    assert torch.allclose(x.grad, 2 * x, rtol=1e-14)  # a rotation keeps lengths to fp64
    assert torch.allclose(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-14)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_share_of_a_head_and_its_pairs_are_megatrons(interleaved):
    ropes = pytest.importorskip("megatron.core.models.common.embeddings")
    config = make("llama", kv_channels=20, rotary_percent=0.41, rotary_interleaved=interleaved)  # 8.2 are 8
    x = torch.randn(9, 2, 4, 20, generator=torch.Generator().manual_seed(0))
    theirs = ropes.rotary_pos_embedding.RotaryEmbedding(20, 0.41, use_cpu_initialization=True)
    angles = theirs.get_freqs_non_repeated(9)
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), dim=-1)
    angles = angles[:, None, None]
    expected = ropes.rope_utils._apply_rotary_pos_emb_bshd(x, angles, rotary_interleaved=interleaved)
    turned = rotated(Positions(config), x)
    torch.testing.assert_close(turned, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(turned[..., 8:], x[..., 8:]) and not torch.equal(turned[1:, ..., :8], x[1:, ..., :8])


def test_the_sample_and_not_its_documents_decides_a_scaling_by_length():
    lists = {"rotary_short_factor": (1.0,) * 6, "rotary_long_factor": (4.0,) * 6}
    config = make("llama", rotary_scaling="longrope", rotary_original_max_position=8, **lists)
    x = torch.randn(12, 2, 4, 12, dtype=torch.float64)
    ids = torch.arange(12).remainder(6).expand(2, -1)
    positions = Positions(config)
    long, packed = rotated(positions, x), rotated(positions, x, Documents(position_ids=ids))
    assert torch.equal(long[:6], packed[:6]) and not torch.equal(rotated(positions, x[:6]), packed[:6])


def test_learned_positions_have_a_limit_and_others_do_not():
    decoder = Decoder(make("llama"))
    decoder.initialize(0)
    assert decoder(*batch(40)).shape == (2, 40)
    decoder = Decoder(make("gpt"))
    decoder.initialize(0)
    with refused("40 exceeds the 32"):
        decoder(*batch(40))


HEADS = {"num_attention_heads": 6, "num_query_groups": 4, "ffn_hidden_size": 63, "kv_channels": 7}
SHARED = {"num_attention_heads": 12, "num_query_groups": 3}
TP = "--tensor-model-parallel-size"
WRONG = [
    (
        ("gpt", {"normalization": "RMSnorm", "vocab_size": 0, "num_layers": 0, "hidden_dropout": 1.0}, 1),
        ("RMSnorm", "nearest: RMSNorm", "--vocab-size 0", "--num-layers 0", "--hidden-dropout 1"),
    ),
    (
        ("llama", HEADS, 4),
        (
            "--num-attention-heads 6",
            "nearest groups: 3 or 6",
            "--ffn-hidden-size 63",
            f"{TP} 4",
            "--kv-channels 7",
        ),
    ),
    (
        ("llama", {"squared_relu": True, "swiglu": True, "rotary_percent": 0.3, "pad_vocab_size_to": 300}, 2),
        ("--squared-relu", "--swiglu", "--rotary-percent 0.3", "0.1667", "--pad-vocab-size-to 300", "302"),
    ),
    (("gpt", {"pad_vocab_size_to": 303}, 2), (f"{TP} 2",)),
    (("gpt", {"pad_vocab_size_to": 352}, 1), ("--make-vocab-size-divisible-by 64",)),
    (("llama", SHARED, 4), ("--num-query-groups 3", f"{TP} 4", "nearest size that fits all: 1")),
]


@pytest.mark.parametrize(("made", "said"), WRONG)
def test_all_configuration_errors_are_reported_at_once(made, said):
    family, changes, tp = made
    with refused(*said):
        Decoder(make(family, **changes), TensorParallel(None, 0, tp), device="meta")


def test_another_recompute_is_refused():
    with refused("'some'", "none, selective, mlp, full"):
        Decoder(make("llama"), device="meta", recompute="some")


@pytest.mark.parametrize(
    "family, change, own",
    [
        ("gpt", {}, True),
        ("gpt", {"untie_embeddings_and_output_weights": True, "ffn_hidden_size": 63}, True),
        ("gpt", {"normalization": "RMSNorm"}, False),
        ("gpt", {"num_query_groups": 2}, False),
        ("falcon", {}, True),
        ("falcon", {"position_embedding_type": "learned_absolute"}, False),
    ],
)
def test_what_a_familys_names_cannot_express_is_stored_under_llamas(family, change, own):
    config = make(family, **change)
    assert (config.family_names in FAMILIES[family].names) == own
    names = [p.name for p in Decoder(config, device="meta").placements().values()]
    assert all(
        name.startswith("transformer." if own else "model.") for name in names if "lm_head" not in name
    )
