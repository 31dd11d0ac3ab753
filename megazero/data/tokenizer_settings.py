"""Settings in the files beside a tokenizer, read as transformers does: added and special tokens, spaces."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from megazero.bounded import load_json
from megazero.config.model.published import CONFIG_FILE

CONFIG, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
ADDED, GENERATION = "added_tokens.json", "generation_config.json"
TEMPLATE = "chat_template.jinja"
OF_MODEL = (GENERATION, CONFIG_FILE)  # they say the model's ids, with a tokenizer or without
# The files that say how a tokenizer is used. They travel with it, byte for byte.
BESIDE = (CONFIG, SPECIAL, ADDED, TEMPLATE, *OF_MODEL)
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


@dataclass(frozen=True)
class TokenizerSettings:
    """The settings of a folder, or of one tokenizer file in it.

    added: the tokens of added_tokens_decoder, or of added_tokens.json, by id. special: the text of special tokens by
    role, such as "eos"; the first file that names one decides. extra: special tokens without a role. ids: what
    generation_config.json, else config.json gives, by role: one id or several. split: special tokens in a text are
    spelt, not found. chat_template: TEMPLATE's, else that of tokenizer_config.json, of several the "default".
    """

    added: Mapping[int, AddedToken]
    special: Mapping[str, str]
    extra: tuple[str, ...]
    ids: Mapping[str, int | list[int]]
    add_prefix_space: bool | None
    split: bool
    chat_template: str | None

    @classmethod
    def read(cls, files: Mapping[str, bytes]) -> TokenizerSettings:
        """Read the files of ``BESIDE`` by name, of which any may be absent. Raises ValueError for a damaged one."""
        told = {name: json_object(name, files.get(name, b"{}")) for name in BESIDE if name.endswith(".json")}
        config, marks = told[CONFIG], told[SPECIAL]
        special = {role: text for role in ROLES if (text := _first(f"{role}_token", config, marks))}
        extra = tuple(dict.fromkeys([*_extra(config), *_extra(marks)]))
        if "added_tokens_decoder" in config:
            added = {int(i): _token(**token) for i, token in config["added_tokens_decoder"].items()}
        else:
            marked = {*special.values(), *extra}
            added = {
                i: _token(content=text, special=text in marked, normalized=text not in marked)
                for text, i in told[ADDED].items()
            }
        given = {**told[CONFIG_FILE], **{name: i for name, i in told[GENERATION].items() if i is not None}}
        ids = {role: given[f"{role}_token_id"] for role in ROLES if given.get(f"{role}_token_id") is not None}
        return cls(
            added=added,
            special=special,
            extra=extra,
            ids=ids,
            add_prefix_space=config.get("add_prefix_space"),
            split=bool(config.get("split_special_tokens")),
            chat_template=_template(files.get(TEMPLATE), config.get("chat_template")),
        )

    @classmethod
    def beside(cls, path: Path) -> TokenizerSettings:
        """Read the files that lie beside ``path``. Raises ValueError, naming the folder, for damaged ones."""
        there = {name: path.with_name(name) for name in BESIDE}
        try:
            return cls.read({name: file.read_bytes() for name, file in there.items() if file.is_file()})
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"the tokenizer's files in '{path.parent}' are damaged: {error}") from None

    @property
    def end(self) -> int:
        """The first of eos_token_id, or -1 where it is not given."""
        given = self.ids.get("eos", -1)
        return given if isinstance(given, int) else next(iter(given), -1)

    def apply(self, model: Tokenizer) -> dict[str, Any]:
        """Apply the settings to the ``model`` of a tokenizer.json. Returns those that change the ids of a text.

        Raises ValueError if a token has one id in a file beside it and another in tokenizer.json.
        """
        before = {i: repr(token) for i, token in model.get_added_tokens_decoder().items()}
        model.add_tokens([token for i, token in sorted(self.added.items()) if before.get(i) != repr(token)])
        wrong = [
            (token.content, i, there)
            for i, token in self.added.items()
            if (there := model.token_to_id(token.content)) != i
        ]
        if wrong:
            raise ValueError(
                f"{wrong[0][0]!r} has id {wrong[0][1]} in {CONFIG} or {ADDED} and {wrong[0][2]} by tokenizer.json: "
                "the files are not of one tokenizer"
            )
        known = {token.content for token in model.get_added_tokens_decoder().values()}
        named = dict.fromkeys([*self.special.values(), *self.extra])
        if (end := self.special.get("eos")) and model.token_to_id(end) is None:
            named.pop(end)  # transformers would add it; a document's end without a token is a mistake
        model.add_tokens([AddedToken(text, special=True) for text in named if text not in known])
        after = model.get_added_tokens_decoder()
        changed: dict[str, Any] = {
            str(i): token.__getstate__() for i, token in sorted(after.items()) if before.get(i) != repr(token)
        }
        if self.add_prefix_space is not None and model.pre_tokenizer is not None:
            state = json.loads(model.pre_tokenizer.__getstate__())
            if state.get("add_prefix_space", self.add_prefix_space) != self.add_prefix_space:
                kind = getattr(pre_tokenizers, state.pop("type"))
                model.pre_tokenizer = kind(**{**state, "add_prefix_space": self.add_prefix_space})
                changed["add_prefix_space"] = self.add_prefix_space
        model.encode_special_tokens = self.split
        return {**changed, "split_special_tokens": True} if self.split else changed


def json_object(name: str, raw: bytes) -> dict[str, Any]:
    """Return what one of ``BESIDE`` holds. Raises ValueError if it is no JSON object, but {} for config.json."""
    try:
        read = load_json(raw)
        if isinstance(read, dict):
            return read
        error = f"it is a {type(read).__name__}"
    except ValueError as wrong:
        error = str(wrong)
    if name == CONFIG_FILE:  # anyone's, where a tokenizer lies beside other things
        return {}
    raise ValueError(f"{name} is not a JSON object: {error}")


def _token(content: str, **flags: Any) -> AddedToken:
    known = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(content, **{name: flags[name] for name in known if name in flags})


def _template(file: bytes | None, configured: str | list[dict[str, str]] | None) -> str | None:
    if file is not None:
        return file.decode()
    if isinstance(configured, list):
        return {each["name"]: each["template"] for each in configured}.get("default")
    return configured


def _text(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _first(key: str, *files: Mapping[str, Any]) -> str | None:
    return next((text for file in files if (text := _text(file.get(key)))), None)


def _extra(file: Mapping[str, Any]) -> Iterator[str]:
    """Yield special tokens without a role, under the name that transformers 4 or 5 gives them."""
    for key in ("additional_special_tokens", "extra_special_tokens"):
        tokens = file.get(key) or ()
        for token in tokens.values() if isinstance(tokens, dict) else tokens:
            if text := _text(token):
                yield text
