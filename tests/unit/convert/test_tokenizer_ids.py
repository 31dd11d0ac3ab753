"""2,000 texts through tokenizers of every kind: training, the exported folder and transformers give the same ids.

Sixteen tokenizers are made here. More are taken from a folder, each in a folder of its own as it is published:
    MEGAZERO_TOKENIZERS=FOLDER python -m pytest -m slow -s tests/unit/convert/test_tokenizer_ids.py
"""

from __future__ import annotations

import os
import random
import shutil
import unicodedata
from pathlib import Path

import pytest
import tokenizers as library
from tokenizers import models, normalizers, pre_tokenizers, trainers

from megazero.config.model.published import find_tokenizer
from megazero.convert.check import compare_ids
from megazero.convert.tokenizer import RunTokenizer, hub_tokenizer
from megazero.data.tokenizer import load_tokenizer
from megazero.data.tokenizer_files import read_tokenizer_files
from tests.hugging_face import publish_tokenizer, train_byte_level, train_sentencepiece

SCRIPTS = {
    "Latin": "Tiếng Việt có dấu: Ồ, ñandú, Ångström, Straße, naïve café, Łódź, ﬁne ﬂow ½ Ⅳ",
    "Greek": "Ελληνική γλώσσα: ᾧ, ΐ, ώρα, ὕδωρ, Ϊ, μὲν, ἐστίν",
    "Cyrillic": "Русский язык: ёлка, йод, Ґанок, їжак, Ўзбек, ѐ",
    "Hiragana": "これは がぎぐげご ぱぴぷぺぽ ゔ です、ありがとう。",
    "Katakana": "カタカナ ガギグ パピプ ヴァイオリン ｶﾞｷﾞ ﾊﾟ コーヒー",
    "Han": "漢字の豈更車 你好,世界。 中文分词 ㊗ ㍿ 神 福",
    "Hangul": "한국어 안녕하세요 값을 읽다 뷁 각하 쌍둥이",
    "Devanagari": "हिन्दी क़लम ज़मीन सड़क फ़िल्म ख़बर ऩ ऱ",
    "Bengali": "বাংলা ভাষা বোঝা মৌমাছি ড়ঢ়য় কৌতুক",
    "Gurmukhi": "ਪੰਜਾਬੀ ਸ਼ਾਮ ਖ਼ਬਰ ਗ਼ਜ਼ਲ ਫ਼ਿਲਮ",
    "Tamil": "தமிழ் கொடி யோகம் சௌக்கியம் மொழி",
    "Malayalam": "മലയാളം കൊടി പോയി സൌമ്യം ഭാഷ",
    "Kannada": "ಕನ್ನಡ ಕೊಡು ಮೋಡ ಸೇವೆ ಕೀ",
    "Sinhala": "සිංහල කෝප කොටුව කෞතුක",
    "Thai": "ภาษาไทย น้ำ กำลัง สวัสดีครับ",
    "Tibetan": "བོད་སྐད་ གྷ ཛྷ བཀྲ་ཤིས",
    "Arabic": "العربية آب أمل إلى مؤمن ئ لا ﷲ ﻻ ٱلرحمن",
    "Hebrew": "עברית שָׁלוֹם שׁ שּׁ אָ בּ כּ",
    "Georgian": "ქართული ენა Ⴀ გამარჯობა",
    "Balinese": "ᬩᬮᬶ ᬆ ᬈ ᬊ ᭀ ᭁ",
}
ODD = (
    *"\0\x01\t\x7f\x85\u200b\u200d\u00ad\ufeff\ufffd\u2028\u00a0\u3000\u2581\u0301\u3099🙂",
    "\n\n",
    "\r\n",
)
ODD += (
    "  ",
    "   ",
    " \u2581",
    "\u0323\u0302",
    "👩‍👩‍👧",
    "🇩🇪",
    "❤️",
    "def f(x):\n    return 1",
    "1,234.5",
    "e=mc²",
)
SPECIAL = ("<s>", "</s>", "<unk>", "<pad>", "<|endoftext|>", "<|im_start|>", "[INST]", "[/INST]", "<0x0A>")
SPECIAL += ("<mask>", "[CLS]", "<tool>", "{{x}}", "[REFERENCE_DOC_1]")
FORMS = ("NFC", "NFD", "NFKC", "NFKD")


def texts(count: int = 2000) -> list[str]:
    draw, made = random.Random(24), list[str]()
    for number in range(count):
        script = list(SCRIPTS.values())[number % len(SCRIPTS)]
        words = script.split(" ")
        some = [draw.choice(words) for _ in range(draw.randrange(1, 9))]
        for things, often in ((ODD, 0.5), (SPECIAL, 0.3), (script, 0.3)):
            while draw.random() < often:
                some.insert(draw.randrange(len(some) + 1), draw.choice(things))
        text = draw.choice((" ", " ", "")).join(some)
        text = (
            draw.choice(("", "", "", " ", "  ", "\n"))
            + text
            + draw.choice(("", "", "", " ", "  ", "\n", "\u2581"))
        )
        made.append(unicodedata.normalize(FORMS[number // len(SCRIPTS) % 4], text))
    return made


NORMAL = {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True, "add_dummy_prefix": True}
SHORT = {"byte_fallback": False, "vocab_size": 900, "user_defined_symbols": []}
TRAINED = {"sentences": [text for text in SCRIPTS.values() for text in (text, text[::2], "low lower lowest")]}
SENTENCEPIECE = {
    "bpe": ("bpe", {}),
    "unigram": ("unigram", {}),
    "bpe, Llama's": ("bpe", {"add_dummy_prefix": True, "user_defined_symbols": []}),
    "bpe, spaces removed": (
        "bpe",
        {**NORMAL, "normalization_rule_name": "identity", "user_defined_symbols": []},
    ),
    "unigram, spaces removed": ("unigram", {**NORMAL, **SHORT, "normalization_rule_name": "identity"}),
    "bpe, trainer's defaults": ("bpe", {**NORMAL, **SHORT}),
    "unigram, trainer's defaults": ("unigram", {**NORMAL, **SHORT}),
    "unigram, folded case": ("unigram", {**NORMAL, **SHORT, "normalization_rule_name": "nmt_nfkc_cf"}),
    "bpe, symbols": (
        "bpe",
        {"add_dummy_prefix": True, "user_defined_symbols": ["[INST]", "<tool>", "{{x}}", "{{"]},
    ),
    "words": ("word", {**NORMAL, **SHORT, "split_by_whitespace": True}),
}


def word_level() -> library.Tokenizer:
    made = library.Tokenizer(models.WordLevel(unk_token="<unk>"))
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.train_from_iterator(
        SCRIPTS.values(), trainers.WordLevelTrainer(special_tokens=["<unk>", "</s>"], show_progress=False)
    )
    return made


ADDED = {"content": "<tool>", "lstrip": True, "rstrip": False, "normalized": False, "special": False}
END = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
GPT2 = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "add_prefix_space": True}
# The files beside a tokenizer.json, by name.
PUBLISHED: dict[str, dict[str, dict]] = {
    "byte-level": {"tokenizer_config": END},
    "byte-level, tokens added": {
        "tokenizer_config": {**END, "eos_token": "<|im_end|>", "pad_token": "<pad>"},
        "added_tokens": {"<|im_start|>": 900, "<|im_end|>": 901},
    },
    "byte-level, decoder of added": {"tokenizer_config": {**END, "added_tokens_decoder": {"900": ADDED}}},
    "byte-level, space before": {"tokenizer_config": {**END, "add_prefix_space": True}},
    "GPT-2, space before": {"tokenizer_config": GPT2},
    "words of a list": {"tokenizer_config": {**END, "eos_token": "</s>", "unk_token": "<unk>"}},
}


def run_of(folder: Path, kind: str | None = None) -> RunTokenizer:
    found = find_tokenizer(folder)
    kind = found.pop("tokenizer_type")
    return RunTokenizer(kind, load_tokenizer(kind, **found), read_tokenizer_files(kind, found))


def exported(run: RunTokenizer, folder: Path) -> Path:
    hub = hub_tokenizer(run)
    folder.mkdir()
    for name, data in {"config.json": b'{"model_type": "llama"}', **hub.files}.items():
        (folder / name).write_bytes(data)
    return folder


def outcome(name: str, source: Path, work: Path) -> list[str]:
    """The words of the check on the published folder, if it is one, and on the exported one. All of them hold."""
    run, words, sample = run_of(source), list[str](), texts()
    shutil.copytree(source, work / "published")
    if not (work / "published" / "config.json").exists():
        (work / "published" / "config.json").write_text('{"model_type": "llama"}')
    out = exported(run, work / "out")
    as_published = (source / "tokenizer_config.json").exists()  # else nothing says how transformers reads it
    published = (("published", work / "published"),) if as_published else ()
    for what, folder in (*published, ("exported", out)):
        lines = list(compare_ids(run, folder, sample))
        words += [f"{name} | {what} | {line.what.strip()} | {line.figure}" for line in lines]
        assert all(line.good is not False for line in lines), words
    again = run_of(out)  # what is exported is read here as what it was
    # A unigram model may spell a special token or a byte otherwise than tokenizer.json; the check has named it.
    plain = [
        text
        for text in sample
        if not any(token in text for token in ("<s>", "</s>", "<unk>", "<pad>", "<0x"))
    ]
    assert len(plain) > 1000
    assert [t for t in plain if again.tokenizer.encode(t) != run.tokenizer.encode(t)] == []
    return words


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SENTENCEPIECE, *PUBLISHED])
def test_tokenizers_made_here(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    if name in SENTENCEPIECE:
        (tmp_path / "made").mkdir()
        kind, options = SENTENCEPIECE[name]
        train_sentencepiece(
            tmp_path / "made" / "tokenizer.model", kind, **TRAINED, **{"vocab_size": 900, **options}
        )
    else:
        made = word_level() if "words" in name else train_byte_level(SCRIPTS.values(), 900)
        publish_tokenizer(tmp_path / "made", made, **PUBLISHED[name])
    print(*outcome(name, tmp_path / "made", tmp_path), sep="\n")


FOUND = sorted(Path(os.environ.get("MEGAZERO_TOKENIZERS", "/nowhere")).glob("*/"))


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOUND, ids=lambda folder: folder.name)
def test_published_tokenizers(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    print(*outcome(folder.name, folder, tmp_path), sep="\n")
