"""Conversations: the tokens and masks of transformers and TRL, packed whole, with attention inside each."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megazero import cli
from megazero.data.build import build_dataset, whole_blend
from megazero.data.chat_template import ChatTemplate
from megazero.data.chats import pack
from megazero.data.gpt import SampleSpec
from megazero.data.indexed import IndexedDataset, mask_prefix
from megazero.data.tokenizer import HuggingFaceTokenizer, NullTokenizer
from tests.chat_cases import MISTRAL, SMOLLM2, TALK, TEMPLATES, theirs, write_tokenizer
from tests.messages import names, refused


def template_of(folder: Path, template: str | None) -> ChatTemplate:
    return ChatTemplate(HuggingFaceTokenizer(write_tokenizer(folder, template)))


def wanted(folder: Path, template: str, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Return transformers' tokens and its mask of a marked template."""
    found = theirs(folder).apply_chat_template(
        messages, chat_template=template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return found["input_ids"], found["assistant_masks"]


def found(chat: ChatTemplate, **record: Any) -> tuple[list[int], list[int]]:
    ids, counted = chat.encode(record)
    return ids, counted.tolist()


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_are_those_of_transformers_with_and_without_marks(name: str, tmp_path: Path) -> None:
    plain, marked = TEMPLATES[name]
    chat = template_of(tmp_path, plain)
    ids, mask = wanted(tmp_path, marked, TALK)
    assert 0 < sum(mask) < len(mask)
    for template in (plain, marked):
        (tmp_path / "chat_template.jinja").write_text(template)
        assert found(ChatTemplate(HuggingFaceTokenizer(tmp_path)), messages=TALK) == (ids, mask), template
    counted = [token for token, counts in zip(ids, mask, strict=True) if counts]
    assert chat.tokenizer.decode(counted).startswith("Titan, the largest of many.<")
    completed = found(chat, prompt=TALK[:4], completion=TALK[4:])
    assert completed[0] == ids
    last = len(mask) - mask[::-1].index(1)
    first = last - mask[:last][::-1].index(0)
    assert completed[1] == [int(first <= i < last) for i in range(len(mask))]


@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.parametrize("name", ["llama3", "gemma3", "qwen3"])
def test_answers_are_those_of_trl(name: str, tmp_path: Path) -> None:
    """TRL swaps a published template for one that it marks; Qwen3's own cannot be told in talks of many turns."""
    from trl.chat_template_utils import _CHAT_TEMPLATES_DIR as folder  # noqa: N811

    plain, marked = ((folder / f"{name}{which}.jinja").read_text() for which in ("", "_training"))
    talk = TALK[:3] if name == "qwen3" else TALK
    chat = template_of(tmp_path, plain)
    ids, mask = wanted(tmp_path, marked, talk)
    assert 0 < sum(mask) < len(mask) and found(chat, messages=talk) == (ids, mask)
    if name == "qwen3":
        with refused("first 3 messages", "{% generation %}", "chat_template.jinja"):
            chat.encode({"messages": TALK})
        (tmp_path / "chat_template.jinja").write_text(marked)
        again = ChatTemplate(HuggingFaceTokenizer(tmp_path))
        assert found(again, messages=TALK) == wanted(tmp_path, marked, TALK)


def test_texts_of_prompt_and_completion(tmp_path: Path) -> None:
    chat = template_of(tmp_path, MISTRAL)
    ids, mask = found(chat, prompt="Name the moon: ", completion="Titan")
    encode, eod = chat.tokenizer.encode, chat.tokenizer.info.eod
    assert ids == [*encode("Name the moon: Titan"), eod]
    answer = [token for token, counts in zip(ids, mask, strict=True) if counts]
    assert chat.tokenizer.decode(answer).strip() == f"Titan{chat.tokenizer.decode([eod])}" and mask == sorted(
        mask
    )


def test_what_cannot_be_a_conversation_is_refused(tmp_path: Path) -> None:
    chat = template_of(
        tmp_path, "{{ raise_exception('roles must alternate') if messages|length == 1 else 'x' }}"
    )
    for record, word in (
        ({"text": "a"}, "'messages'"),
        ({"messages": []}, "'messages' holds no list"),
        ({"messages": [{"content": "a"}]}, "'role'"),
        ({"prompt": "a", "completion": TALK}, "'prompt' holds no list"),
        ({"messages": TALK[:1]}, "roles must alternate"),
        ({"messages": TALK[:2]}, "no token counts"),
    ):
        with refused(word):
            chat.encode(record)
    for tokenizer in (HuggingFaceTokenizer(write_tokenizer(tmp_path / "bare", None)), NullTokenizer(5)):
        with refused("no chat template", "HuggingFaceTokenizer"):
            ChatTemplate(tokenizer)


@pytest.mark.parametrize("room", [40, 100])
def test_items_are_packed_once_and_tightly(room: int) -> None:
    sizes = np.random.RandomState(0).randint(1, 41, 500).astype(np.int32)
    packed = pack(sizes, room)
    assert sorted(packed["items"].tolist()) == list(range(500))
    filled = [sizes[part].sum() for part in np.split(packed["items"], packed["starts"][1:-1])]
    assert max(filled) <= room and min(filled) > 0
    assert len(filled) <= np.ceil(sizes.sum() / room) * 1.02 + 1


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[dict[str, str]]]]:
    """Return a folder with tokenizer/, talks.jsonl and talks_chats_document, and the talks; the third is long."""
    folder = tmp_path_factory.mktemp("chats")
    write_tokenizer(folder / "tokenizer", SMOLLM2)
    talks = [
        [
            {"role": "user", "content": f"{n}?"},
            {"role": "assistant", "content": "moon " * (2 + 90 * (n == 2))},
        ]
        for n in range(30)
    ]
    (folder / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    assert cli.main([*words(folder, "talks.jsonl"), "--workers", "2"]) == 0
    return folder, talks


def words(folder: Path, name: str) -> list[str]:
    model = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", f"{folder / 'tokenizer'}"]
    return [
        "preprocess",
        "--chats",
        "--input",
        f"{folder / name}",
        "--output-prefix",
        f"{folder / 'talks'}",
        *model,
    ]


def samples(folder: Path, length: int, count: int, **changes: Any) -> Any:
    info = HuggingFaceTokenizer(folder / "tokenizer").info
    options = {"chats": True, "reset_attention_mask": True, "reset_position_ids": True, **changes}
    prefix = f"{folder / 'talks_chats_document'}"
    return build_dataset("train", whole_blend([prefix]), SampleSpec(length, 7, info, **options), count)


def test_samples_hold_whole_conversations_and_count_their_answers(made: Any) -> None:
    folder, talks = made
    chat = ChatTemplate(HuggingFaceTokenizer(folder / "tokenizer"))
    source = IndexedDataset(folder / "talks_chats_document")
    kept = {tuple(ids[:128]): counted[:128] for ids, counted in (chat.encode({"messages": t}) for t in talks)}
    assert [source.get(i).tolist() for i in range(30)] == [chat.encode({"messages": t})[0] for t in talks]
    data = samples(folder, 128, 40)
    assert data.truncated == 1 and len(data) >= 40 and data.samples < 40
    for epoch in range(2):
        left = dict(kept)
        for index in range(data.samples):
            sample = data[epoch * data.samples + index]
            starts, text = sample["document_starts"], np.append(sample["tokens"], sample["labels"][-1])
            for begin in np.unique(starts).tolist():
                at = np.flatnonzero(starts == begin)
                assert (sample["position_ids"][at] == at - begin).all()
                counted = left.pop(tuple(text[at].tolist()), None)
                if counted is None:  # what fills the sample up
                    assert (text[at] == chat.tokenizer.info.eod).all() and not sample["loss_mask"][at].any()
                else:
                    assert (sample["loss_mask"][at][:-1] == counted[1:]).all() and not sample["loss_mask"][
                        at[-1]
                    ]
        assert not left, "each conversation is there once an epoch"
    turns = [[data[e * data.samples + i]["tokens"].tobytes() for i in range(data.samples)] for e in range(2)]
    assert turns[0] != turns[1] and sorted(turns[0]) == sorted(turns[1])
    assert (samples(folder, 128, 500)[3]["tokens"] == data[3]["tokens"]).all(), (
        "the order is that of any number"
    )


def test_data_and_flag_belong_together(made: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = made
    with refused("add --chats"):
        samples(folder, 128, 4, chats=False)
    for suffix in ("bin", "idx"):
        (tmp_path / f"talks_chats_document.{suffix}").write_bytes(
            (folder / f"talks_chats_document.{suffix}").read_bytes()
        )
    write_tokenizer(tmp_path / "tokenizer", None)
    with refused("holds no conversations", "preprocess --chats"):
        samples(tmp_path, 128, 4)
    for suffix in ("bin", "idx"):
        Path(f"{mask_prefix(tmp_path / 'talks_chats_document')}.{suffix}").write_bytes(
            (tmp_path / f"talks_chats_document.{suffix}").read_bytes()
        )
    with refused("mask of other conversations"):
        samples(tmp_path, 128, 4)
    (folder / "bad.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n{"text": "a"}\n')
    assert cli.main(words(folder, "bad.jsonl")) == 2
    names(capsys.readouterr().err, "bad.jsonl, line 1", "no token counts", "--skip-bad-lines")
    (folder / "text.txt").write_text("a")
    assert cli.main(words(folder, "text.txt")) == 2
    names(capsys.readouterr().err, "text.txt", "JSON lines")
    assert cli.main([*words(folder, "talks.jsonl"), "--append-eod"]) == 2
    names(capsys.readouterr().err, "--append-eod")


def test_the_command_shows_what_counts(made: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = made
    assert cli.main(words(folder, "talks.jsonl")) == 0
    names(capsys.readouterr().err, "count in the loss", "<|im_start|>assistant\n[[moon moon <|im_end|>\n]]")
