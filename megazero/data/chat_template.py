"""Conversations as tokens, by the chat template in a tokenizer's files, and which of them the loss counts.

Answers count: what the assistant says, with the tokens that end its turn. A template may mark them with
``{% generation %}``, as transformers reads it. Of another, an answer is what it puts behind the cue to answer
(``add_generation_prompt``); that needs a template that renders a conversation's beginning as the whole's beginning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megazero.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from megazero.data.tokenizer_settings import TEMPLATE

MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
HOW_TO_MARK = (
    f"write the template as {TEMPLATE} beside the tokenizer's files, with the assistant's part marked: "
    "{% generation %}{{ message['content'] + '<its end of turn>' }}{% endgeneration %}"
)
EXAMPLE = "Yes, 42."
Message = Mapping[str, Any]
Span = tuple[int, int]  # characters [begin, end) of a text


class ChatTemplate:
    """Renders conversations. Raises ValueError for a tokenizer without a template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not isinstance(tokenizer, HuggingFaceTokenizer) or tokenizer.settings.chat_template is None:
            raise ValueError(
                f"the tokenizer has no chat template; nearest: a HuggingFaceTokenizer with {TEMPLATE} beside its "
                "tokenizer.json"
            )
        self.tokenizer, self.template = tokenizer, tokenizer.settings.chat_template
        self.marked = bool(MARK.search(self.template))

    def encode(self, record: Mapping[str, Any]) -> tuple[list[int], NDArray[np.uint8]]:
        """Return a conversation's tokens [n], and uint8 [n]: 1 for those that the loss counts.

        The record has ``messages``, or ``prompt`` and ``completion``, which are messages, too, or two texts; it may
        have ``tools``. Of a completion the answers count, or the whole text and the end of document behind it.
        A token counts if one of its characters does. Raises ValueError for other records, for those that the template
        refuses or renders ambiguously, and where nothing counts.
        """
        text, spans = self._conversation(record)
        found = self.tokenizer.model.encode(text, add_special_tokens=False)
        ids, offsets = found.ids, np.array(found.offsets, np.int64).reshape(-1, 2)
        counted = np.zeros(len(ids), np.uint8)
        for begin, end in spans:
            counted[(offsets[:, 1] > begin) & (offsets[:, 0] < end)] = 1
        if isinstance(record.get("completion"), str):
            ids, counted = [*ids, self.tokenizer.info.eod], np.append(counted, np.uint8(1))
        if not counted.any():
            raise ValueError("no token counts in the loss: nothing is the assistant's")
        return ids, counted

    def question(self, text: str) -> list[int]:
        """Return the tokens of a user's one message, up to where the assistant answers."""
        return self.tokenizer.encode(self._render([_said("user", text)], cue=True)[0])

    def stops(self) -> set[int]:
        """Return the tokens that end an answer: the end of document, and what the template puts behind answers."""
        rendered, _ = self._render([_said("user", EXAMPLE), _said("assistant", EXAMPLE)])
        return {self.tokenizer.info.eod, *self.tokenizer.encode(rendered.rpartition(EXAMPLE)[2])[:1]}

    def _conversation(self, record: Mapping[str, Any]) -> tuple[str, list[Span]]:
        tools = record.get("tools")
        if "messages" in record:
            return self._answers(_messages(record, "messages"), tools)
        if not {"prompt", "completion"} <= record.keys():
            raise ValueError(f"no key 'messages', nor 'prompt' and 'completion'; it has {', '.join(record)}")
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return prompt + completion, [(len(prompt), len(prompt + completion))]
        asked = _messages(record, "prompt")
        text, spans = self._answers([*asked, *_messages(record, "completion")], tools)
        begin = len(self._beginning(text, asked, tools))
        return text, [(max(first, begin), end) for first, end in spans if end > begin]

    def _answers(self, messages: Sequence[Message], tools: Any) -> tuple[str, list[Span]]:
        """Return a conversation as text, and where in it the assistant's answers are."""
        text, marked = self._render(messages, tools)
        if self.marked:
            return text, marked
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        return text, [
            (
                len(self._beginning(text, messages[:i], tools)),
                len(self._beginning(text, messages[: i + 1], tools, cue=False)),
            )
            for i in answers
        ]

    def _beginning(self, text: str, messages: Sequence[Message], tools: Any, cue: bool = True) -> str:
        """Return the first of a conversation's messages as text, with which ``text``, the whole, must begin."""
        begins, _ = self._render(messages, tools, cue)
        if not text.startswith(begins):
            raise ValueError(
                f"the chat template renders the first {len(messages)} messages otherwise where more follow, so it "
                f"does not say which tokens are the assistant's: {HOW_TO_MARK}"
            )
        return begins

    def _render(
        self, messages: Sequence[Message], tools: Any = None, cue: bool = False
    ) -> tuple[str, list[Span]]:
        """Return messages as text, at its end the cue to answer or not, and the spans that the template marks."""
        try:
            from transformers.utils.chat_template_utils import render_jinja_template
        except ImportError:
            raise ValueError(
                "chat templates are rendered by transformers: pip install 'megazero[hf]'"
            ) from None
        named: dict[str, Any] = {
            f"{role}_token": text for role, text in self.tokenizer.settings.special.items()
        }
        try:
            rendered: Any = render_jinja_template(  # which says str of a list
                [[dict(message) for message in messages]],
                tools=tools,
                chat_template=self.template,
                return_assistant_tokens_mask=self.marked,
                add_generation_prompt=cue,
                **named,
            )
        except Exception as error:  # noqa: BLE001 - a template is a program of anyone's making
            raise ValueError(f"the chat template refuses the messages: {error}") from None
        (text,), spans = rendered
        return text, spans[0] if spans else []


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _messages(record: Mapping[str, Any], key: str) -> list[Message]:
    found = record[key]
    if (
        not isinstance(found, list)
        or not found
        or not all(isinstance(m, dict) and "role" in m for m in found)
    ):
        raise ValueError(f"{key!r} holds no list of messages, which are objects with a 'role'")
    return found
