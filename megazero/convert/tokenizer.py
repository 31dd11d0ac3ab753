"""The tokenizer of a checkpoint in a Hugging Face folder, verified to give the same ids."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor

from megazero.bounded import load_json
from megazero.checkpoint import store
from megazero.config.model.published import MODEL_FILES, held_tokenizer
from megazero.convert.sentencepiece_json import differences, read_spec, spelt, to_tokenizer_json
from megazero.convert.their_tokenizer import is_rebuilt
from megazero.data.tokenizer import GPT2BPETokenizer, HuggingFaceTokenizer, Tokenizer, load_tokenizer
from megazero.data.tokenizer_files import (
    TOKENIZER_FILES,
    load_run_tokenizer,
    read_tokenizer_files,
    tokenizer_options,
)
from megazero.data.tokenizer_settings import CONFIG, GENERATION, OF_MODEL, TokenizerSettings

# transformers 4 and 5 both have this class; what 5 writes by itself, "TokenizersBackend", 4 does not know.
CLASS = "PreTrainedTokenizerFast"
# Both have this one, too, which asks sentencepiece itself, by a model of this name.
EXACT_CLASS, EXACT_FILE = "BertGenerationTokenizer", "spiece.model"
# The texts of a training spell no special token: a text that does is a text.
SPELT = {"split_special_tokens": True}
# Ten scripts whose letters have parts of their own.
SCRIPTS = (
    "Tiếng Việt: Ồ, ñandú, Ångström",
    "Ελληνικά: ᾧ, ΐ, ώρα",
    "Русский: ёлка, йод, Ґ, їжак",
    "かな: がぎぐ ぱぴぷ ヴガギグ",
    "한국어: 안녕하세요, 값, 읽다",
    "हिन्दी: क़लम, ज़मीन, सड़क",
    "বাংলা: বোঝা, মৌ, ড়",
    "தமிழ்: கொ, யோ, சௌ",
    "العربية: آب، أمل، إلى، مؤمن",
    "മലയാളം: കൊ, പോ, സൌ",
)
SAMPLES = (
    "",
    " ",
    "Hello, world!",
    "  two spaces before, one inside , three after   ",
    "line\nline\n\n\n  indented\r\n\ttab\n",
    "def f(x):\n    return x ** 2  # 3.14159 1,000,000\n",
    "naïve café Ærøskøbing, Straße; e\u0301 \ufb01 \u2163 \u2460",
    "Привет, мир. 你好,世界。 こんにちは 안녕하세요 שלום مرحبا नमस्ते",
    "🙂👩‍👩‍👧‍👦🇩🇪 ∑∫√ \u200bzero\u00a0width\u3000space",
    "aaaaaaaaaaaaaaaaaaaaaaaa ================ ........",
    "null\0byte \x7f \ufffd \ufb01\u0301 \u00a0x\u2003y\u3000 z\u2581 \u2581",
    "<s>spelt</s> <|endoftext|> <unk> <pad> [INST] <0x0A>",
    *(unicodedata.normalize("NFD", text) for text in SCRIPTS),
)


@dataclass(frozen=True)
class RunTokenizer:
    """A checkpoint's tokenizer: its type, its loaded model, and its files by name.

    A null tokenizer has at most those of ``OF_MODEL``, of the folder that was imported.
    """

    kind: str
    tokenizer: Tokenizer
    files: Mapping[str, bytes]


def of_checkpoint(path: Path, values: Mapping[str, Any], named: Path | None = None) -> RunTokenizer:
    """Load the tokenizer that a checkpoint holds, or the one that is ``named``, a file or a folder.

    values: the options that the checkpoint was made with, by name.

    Checkpoints of before they held their tokenizer give the path that it had in training. Raises ValueError if the
    tokenizer is not there, or is not the one that the model was trained with.
    """
    kind, manifest = values["tokenizer_type"] or "NullTokenizer", store.read_manifest(path)
    files = {name: store.read_file(path, name) for name in manifest.files if name in TOKENIZER_FILES}
    if kind == "NullTokenizer":
        if named:
            raise ValueError(f"--tokenizer {named}: '{path}' was trained on token ids, without a tokenizer")
        return RunTokenizer(kind, load_tokenizer(kind, vocab_size=values["vocab_size"] - 1), files)
    held, names = held_tokenizer(kind, path, manifest.files), MODEL_FILES[kind]
    given = (
        {option: named / name if named.is_dir() else named for option, name in names.items()} if named else {}
    )
    try:
        tokenizer = load_run_tokenizer(values, held, given)
    except ValueError as error:
        raise ValueError(f"{error}. Name the tokenizer with --tokenizer") from None
    trained = store.read_state(path)["tokenizer"]
    if tokenizer.info.fingerprint != trained:
        raise ValueError(
            f"'{named or 'what it names'}' is not the tokenizer that '{path}' was trained with: its sha256 is "
            f"{tokenizer.info.fingerprint[:12]}, that one's {trained[:12]}; name that one with --tokenizer"
        )
    if held and not named:
        return RunTokenizer(kind, tokenizer, files)
    return RunTokenizer(kind, tokenizer, read_tokenizer_files(kind, {**tokenizer_options(values), **given}))


def special_tokens(run: RunTokenizer) -> dict[str, str]:
    """Return the special tokens as tokenizer_config.json has them: eos_token and so on, as text."""
    return {f"{role}_token": text for role, (_, text) in _special(run).items()}


def added_to_texts(raw: bytes) -> dict[str, bool]:
    """Return what a SentencePiece model puts around a text, for readers that add a space and <s> unless told."""
    return {
        "add_prefix_space": read_spec(raw).dummy_prefix,
        "add_bos_token": False,
        "add_eos_token": False,
    }


def token_ids(run: RunTokenizer) -> dict[str, Any]:
    """Return bos_token_id, eos_token_id and pad_token_id: what was imported says, else the tokenizer, else None."""
    ids: dict[str, Any] = dict(TokenizerSettings.read(run.files).ids)
    if run.kind != "NullTokenizer" or not run.files:  # whose ids an imported folder says, if one does
        ids = {role: i for role, (i, _) in _special(run).items()} | ids
    return {f"{role}_token_id": ids.get(role) for role in ("bos", "eos", "pad")}


def unknown_id(run: RunTokenizer) -> int | None:
    """Return the id of what has no token, if there is one."""
    return next((i for role, (i, _) in _special(run).items() if role == "unk"), None)


def _special(run: RunTokenizer) -> dict[str, tuple[int, str]]:
    """Return the id and the text of special tokens by role; "eos" ends a document."""
    end = run.tokenizer.info.eod
    if run.kind == "SentencePieceTokenizer":
        spec = read_spec(run.files["tokenizer.model"])
        roles = {"bos": spec.bos, "eos": end, "unk": spec.unknown, "pad": spec.pad}
        return {role: (i, spec.pieces[i].text) for role, i in roles.items() if 0 <= i < len(spec.pieces)}
    if isinstance(run.tokenizer, HuggingFaceTokenizer):
        model, named = run.tokenizer.model, TokenizerSettings.read(run.files).special
        found = {
            role: (i, text) for role, text in named.items() if (i := model.token_to_id(text)) is not None
        }
        return {**found, "eos": (end, model.id_to_token(end) or "")}
    return {"eos": (end, GPT2BPETokenizer.EOD)} if run.kind == "GPT2BPETokenizer" else {"eos": (end, "")}


@dataclass(frozen=True)
class HubTokenizer:
    """A tokenizer in a Hugging Face folder: its files by name, and a note on what the folder lacks."""

    files: Mapping[str, bytes]
    note: str | None = None


def hub_tokenizer(run: RunTokenizer) -> HubTokenizer:
    """Return the tokenizer as Hugging Face has it. What was imported stays byte for byte.

    Only a class by which transformers gives other ids than the files is replaced. GPT-2's two files are written as a
    tokenizer.json, too. So is a SentencePiece model if that gives the same ids; else the folder has the model, and
    the class of transformers that asks sentencepiece itself.
    """
    if run.kind == "NullTokenizer":
        return HubTokenizer({})
    told, note = load_json(run.files.get(CONFIG, b"{}")), None
    own = {**special_tokens(run), "tokenizer_class": CLASS, "clean_up_tokenization_spaces": False}
    files = {name: data for name, data in run.files.items() if name not in OF_MODEL}
    if run.kind == "SentencePieceTokenizer":
        raw = files["tokenizer.model"]
        own |= SPELT
        try:
            files["tokenizer.json"] = _proved(raw)
            own |= added_to_texts(raw)
        except ValueError as error:
            files[EXACT_FILE] = raw
            spelt_out = ", and bytes are spelt (<0xC3>)" if read_spec(raw).byte_fallback else ""
            own |= {"tokenizer_class": EXACT_CLASS, "legacy": True, "sp_model_kwargs": {}}
            own = {"sep_token": None, "pad_token": None, **own}
            note = (
                f"the folder has no tokenizer.json: {error}. It has tokenizer.model, and {EXACT_FILE} for "
                f"transformers' {EXACT_CLASS}, which gives the ids of the training by sentencepiece. transformers 5 "
                f"decodes them without it: spaces at a text's ends are lost{spelt_out}"
            )
    elif isinstance(run.tokenizer, GPT2BPETokenizer):
        files["tokenizer.json"] = run.tokenizer.to_json()
        own |= {**SPELT, "add_prefix_space": False}
    elif (named := told.get("tokenizer_class")) not in (None, "TokenizersBackend"):
        if not is_rebuilt(files, run.tokenizer, sample_texts(run.tokenizer)):
            return HubTokenizer(files)
        note = f"its tokenizer_class is {CLASS}: transformers' {named} builds another tokenizer than the files say"
    told = {name: value for name, value in told.items() if name != "auto_map"} | own
    files[CONFIG] = (json.dumps(told, indent=2, ensure_ascii=False) + "\n").encode()
    return HubTokenizer(files, note)


def generation_config(run: RunTokenizer) -> bytes:
    """Return generation_config.json: as it was imported, or the ids of the special tokens."""
    ids = {name: value for name, value in token_ids(run).items() if value is not None}
    return run.files.get(GENERATION) or (json.dumps(ids, indent=2) + "\n").encode()


def sample_texts(tokenizer: Tokenizer) -> list[str]:
    """Return SAMPLES and 200 texts of tokens drawn at random: every kind of token comes next to every other."""
    draw = random.Random(0)
    size = tokenizer.info.vocab_size
    made = (tokenizer.decode([draw.randrange(size) for _ in range(30)]) for _ in range(200))
    return [*SAMPLES, *made]


def _proved(raw: bytes) -> bytes:
    """Return a tokenizer.json of a SentencePiece model. Raises ValueError, naming a text with other ids there."""
    made, spec, draw = to_tokenizer_json(raw), read_spec(raw), random.Random(1)
    model = SentencePieceProcessor(model_proto=raw)
    drawn = [[draw.randrange(len(spec.pieces)) for _ in range(30)] for _ in range(200)]
    single = [[i] for i in range(len(spec.pieces))]
    texts = [*SAMPLES, *(model.decode(ids) for ids in [*drawn, *single])]
    compared = [text for text in texts if not spelt(spec, text)]
    wrong = differences(raw, lambda text: made.encode(text, add_special_tokens=False).ids, compared)
    if wrong:
        raise ValueError(
            f"it would give other ids to {len(wrong)} of {len(compared)} texts, such as {wrong[0]!r}"
        )
    return made.to_str(pretty=False).encode()


@dataclass(frozen=True)
class Comparison:
    """What came of ``compare_encodings``: the texts with other ids, those left out, and how many were compared."""

    wrong: list[str]
    left_out: list[str]
    count: int


def compare_encodings(
    run: RunTokenizer, encode: Callable[[str], list[int]], texts: Sequence[str]
) -> Comparison:
    """Compare ``encode`` with the training's tokenizer.

    Texts with other ids are left out if they spell a special token of a unigram model or of a published GPT-2: there
    it is found in a text.
    """
    raw, end = run.files.get("tokenizer.model"), GPT2BPETokenizer.EOD
    if run.kind == "SentencePieceTokenizer" and raw is not None:
        spec, wrong = read_spec(raw), differences(raw, encode, texts)
        left_out = [text for text in wrong if spelt(spec, text)]
    else:
        found = isinstance(run.tokenizer, GPT2BPETokenizer) and len(encode(end)) == 1
        wrong = [text for text in texts if run.tokenizer.encode(text) != encode(text)]
        left_out = [text for text in wrong if found and end in text]
    out = set(left_out)
    return Comparison([text for text in wrong if text not in out], left_out, len(texts) - len(left_out))
