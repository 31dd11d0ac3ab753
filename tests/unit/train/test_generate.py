"""Text from a checkpoint: the right weights, drawn as asked, and clear errors."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from megazero import cli
from megazero.checkpoint import reading, store
from megazero.checkpoint.records import SliceRecord
from megazero.config import make_config
from megazero.data.tokenizer import HuggingFaceTokenizer, NullTokenizer
from megazero.models import Decoder
from megazero.train.generate import (
    Sampling,
    TextModel,
    answer,
    generate,
    load_text_model,
    next_token,
    sample_tokens,
)
from megazero.train.parallelize import DTYPES
from tests.chat_cases import TEMPLATES, theirs, write_tokenizer
from tests.messages import refused
from tests.sizes import SMALL

VOCABULARY = 23  # the last id is the end of a document
CONTEXT = 8


def make_run(folder, tokenizer=None, dtype="fp32", **changes):
    """A checkpoint as a trainer writes it, of a decoder whose weights are returned."""
    config = make_config(
        {
            **{**SMALL, "num_layers": 2, "hidden_size": 16, "num_attention_heads": 2},
            **{"seq_length": CONTEXT, "vocab_size": VOCABULARY, "micro_batch_size": 1},
            "init_method_std": 0.5,
            "params_dtype": dtype,
            **changes,
        }
    )
    decoder = Decoder(config.model)
    decoder.initialize(3)
    placements = decoder.placements()
    records = [
        SliceRecord(
            placements[name], 0, value.numel(), {"weights": value.detach().to(DTYPES[dtype]).view(-1)}
        )
        for name, value in decoder.named_parameters()
    ]
    info = (tokenizer or NullTokenizer(VOCABULARY - 1)).info
    state = {"tokenizer": info.fingerprint}
    store.save(folder, store.Snapshot(7, records, state=state, configuration=config.to_dict()))
    return decoder.eval()


@pytest.fixture
def model(tmp_path):
    torch.set_num_threads(1)
    make_run(tmp_path / "run")
    return load_text_model(tmp_path / "run")


@pytest.mark.parametrize(("window", "backend"), [(None, "auto"), (4, "math")])
def test_no_kernel_is_compiled_for_each_length(window, backend, tmp_path):
    """As flex attention, which auto may prefer on GPUs."""
    make_run(tmp_path, sliding_window=window)
    decoder = load_text_model(tmp_path).decoder
    assert decoder.positions.backend == backend


def test_loads_the_weights_that_were_saved(tmp_path):
    decoder = make_run(tmp_path)
    tokens = torch.arange(6).reshape(1, 6)
    for folder in (tmp_path, tmp_path / "iter_0000007"):
        loaded = load_text_model(folder).decoder
        assert not loaded.training
        assert torch.equal(loaded.full_logits(tokens), decoder.full_logits(tokens))


def test_the_tensors_are_checked_once(tmp_path, monkeypatch):
    """Not once to read the tokenizer's fingerprint, and again with the weights: a file may have 100 GB."""
    make_run(tmp_path)
    checked, check = [], reading.check_checksum
    monkeypatch.setattr(
        reading, "check_checksum", lambda path, name, entry: checked.append(name) or check(path, name, entry)
    )
    load_text_model(tmp_path)
    assert [name for name in checked if name.endswith(".distcp")] == ["__0_0.distcp"]


def test_greedy_takes_the_likeliest_token_of_the_recomputed_context(model):
    context = [1, 2, 3]
    for _ in range(4):
        context.append(int(model.decoder.full_logits(torch.tensor([context]))[0, -1].argmax()))
    expected = context[3:]
    if VOCABULARY - 1 in expected:
        expected = expected[: expected.index(VOCABULARY - 1)]
    assert list(sample_tokens(model, [1, 2, 3], 4, Sampling(temperature=0))) == expected


def test_same_seed_same_text_and_other_seeds_differ(model):
    texts = [generate(model, "1 2", 20, Sampling(top_k=0, seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("1 2")


def test_context_slides_beyond_the_longest_sequence(model):
    long, end = list(range(20)), list(range(20))[-CONTEXT:]
    greedy = Sampling(temperature=0)
    assert list(sample_tokens(model, long, 1, greedy)) == list(sample_tokens(model, end, 1, greedy))
    assert len(generate(model, " ".join(map(str, long)), 0).split()) == 20


class Scripted(torch.nn.Module):
    """Says a fixed sequence, whatever it is asked."""

    def __init__(self, words, config, vocabulary=VOCABULARY):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.words, self.config, self.vocabulary, self.seen = list(words), config, vocabulary, []

    def full_logits(self, tokens):
        self.seen.append(tokens[0].tolist())
        logits = torch.zeros(*tokens.shape, self.vocabulary)
        logits[0, -1, self.words.pop(0)] = 50.0
        return logits


def test_stops_before_the_end_of_document_and_begins_with_it(model):
    eod = VOCABULARY - 1
    scripted = Scripted([4, 5, eod, 6], model.decoder.config)
    spoken = list(sample_tokens(TextModel(scripted, model.tokenizer), [], 10, Sampling()))
    assert spoken == [4, 5]
    assert scripted.seen == [[eod], [eod, 4], [eod, 4, 5]]


def test_top_k_and_temperature_shape_the_draw():
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0])
    generator = torch.Generator().manual_seed(0)
    drawn = [next_token(logits, Sampling(1.0, 2), generator) for _ in range(2000)]
    assert set(drawn) == {2, 3}
    share = drawn.count(3) / len(drawn)
    assert abs(share - torch.softmax(logits[2:], 0)[1].item()) < 0.04
    cold = [next_token(logits, Sampling(0.1, 0), generator) for _ in range(200)]
    assert cold.count(3) > 195
    everything = [next_token(logits, Sampling(1.0, 99), generator) for _ in range(2000)]
    assert set(everything) == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(temperature):
    for value, what in ((torch.nan, "NaN"), (torch.inf, "infinite")):
        with pytest.raises(ValueError, match=f"logits are {what}: its weights are.*an earlier checkpoint"):
            next_token(torch.tensor([0.0, value, 2.0]), Sampling(temperature, 0), torch.Generator())


def test_bf16_weights_run_as_fp32_on_a_cpu(tmp_path):
    make_run(tmp_path, dtype="bf16")
    assert {p.dtype for p in load_text_model(tmp_path).decoder.parameters()} == {torch.float32}


def test_errors_name_the_cure(tmp_path, model):
    with refused("absent", "--save", by=store.CheckpointError):
        store.find_checkpoint(tmp_path / "absent")
    make_run(tmp_path / "other", NullTokenizer(5))
    with refused("--tokenizer-model", by=store.CheckpointError):
        load_text_model(tmp_path / "other")
    with refused("--temperature -1"):
        Sampling(temperature=-1)
    with refused("--top-k -1"):
        Sampling(top_k=-1)
    with refused("--tokens -1"):
        list(sample_tokens(model, [1], -1, Sampling()))


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_follows_the_template_and_ends_with_its_turn(name, tmp_path):
    """Llama 3's turn ends with a token that is not the end of a document."""
    plain, _ = TEMPLATES[name]
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path, plain))
    talk = [{"role": "user", "content": "Rhea?"}]
    render = partial(theirs(tmp_path).apply_chat_template, return_dict=False)
    asked = render(talk, add_generation_prompt=True)
    talk.append({"role": "assistant", "content": "Titan"})
    said = render(talk)[len(asked) :]
    script = [*said, *tokenizer.encode(" and more")]
    decoder = Scripted(script, SimpleNamespace(max_position_embeddings=99), tokenizer.info.vocab_size)
    greedy = Sampling(temperature=0)
    assert answer(TextModel(decoder, tokenizer), "Rhea?", 50, greedy) == "Titan"
    assert decoder.seen[-1] == [*asked, *tokenizer.encode("Titan")]


def test_an_answer_needs_a_question(capsys):
    assert cli.main(["generate", "--load", "x", "--chat"]) == 2
    assert "--chat needs --prompt" in capsys.readouterr().err
