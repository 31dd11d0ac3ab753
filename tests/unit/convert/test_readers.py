"""Exported folders in the hands of their users: two releases of transformers, its Trainer, and llama.cpp.

    MEGAZERO_TRANSFORMERS_4=venv4/bin/python python -m pytest -m slow tests/unit/convert/test_readers.py

The variable names a python that has torch and transformers 4.57. Without it the test makes a virtual environment,
whose torch is this one's; it is skipped where transformers 4.57 cannot be installed.

    LLAMA_CPP=FOLDER python -m pytest -m slow tests/unit/convert/test_readers.py -k llama_cpp

names the sources of llama.cpp, whose converter reads exports then. It takes a minute.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

from megazero.convert.export import finish, write_folder
from megazero.convert.importing import Published, write_checkpoint
from megazero.convert.source import Source
from megazero.train.generate import load_text_model
from tests.family_models import VARIANTS, save, transformers
from tests.hugging_face import save_model, train_sentencepiece

torch.set_num_threads(1)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
CHANGES = {"llama-rope-llama3": {"rope_parameters": LLAMA3}}  # of Llama 3.1
# 4.57's class of Qwen2-MoE has no heads of another width than hidden size over heads, and windows in other layers.
CHANGES |= {
    name: {"head_dim": 12, "use_sliding_window": False} for name in VARIANTS if name.startswith("qwen2_moe")
}
TOKENS = torch.arange(20)[None]
READ = """
import json, sys, torch, transformers
from transformers import AutoConfig, AutoModelForCausalLM
for folder in sys.argv[1:]:
    capped = getattr(AutoConfig.from_pretrained(folder), "attn_logit_softcapping", None)
    options = {"attn_implementation": "eager"} if capped else {}  # 4.57's default leaves the cap out
    model = AutoModelForCausalLM.from_pretrained(folder, **options).float().eval()
    logits = model(torch.arange(20)[None], use_cache=False).logits
    print("read", json.dumps([transformers.__version__, type(model).__name__, logits.flatten().tolist()]))
"""


@pytest.fixture(scope="module")
def version4(tmp_path_factory) -> str:
    given = os.environ.get("MEGAZERO_TRANSFORMERS_4")
    if given:
        return given
    root = tmp_path_factory.mktemp("venv")
    venv.create(root, with_pip=True)
    python = str(root / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "transformers==4.57.*"]
    done = subprocess.run(install, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"transformers 4.57 cannot be installed: {done.stderr[-200:]}")
    (packages,) = root.glob("lib/python*/site-packages")
    (packages / "zz_torch.pth").write_text(
        str(Path(torch.__file__).parents[1])
    )  # after the environment's own
    return python


@pytest.mark.slow
def test_both_releases_of_transformers_read_the_same_models(version4: str, tmp_path: Path) -> None:
    """Every family in each of its variants, read in one go by each release."""
    folders, ours = [], []
    for name in VARIANTS:
        root = tmp_path / name
        path = write_checkpoint(Published.open(save(name, root / "hf", **CHANGES.get(name, {}))), root / "ck")
        folders.append(str(finish(write_folder(Source(path), root / "out"))))
        with torch.no_grad():
            ours.append(load_text_model(path).decoder.full_logits(TOKENS).flatten())
    wrong = []
    for python in (sys.executable, version4):
        done = subprocess.run([python, "-c", READ, *folders], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-2000:]
        lines = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("read ")]
        for name, wanted, (version, kind, logits) in zip(VARIANTS, ours, lines, strict=True):
            theirs = torch.tensor(logits)
            error = float((wanted - theirs).norm() / theirs.norm())
            print(f"{version} {kind} {name}: {error:.1e}")
            if not error < 5e-6:
                wrong.append((version, name, error))
    assert not wrong


def test_transformers_trainer_finds_our_perplexity(tmp_path):
    """A consumer of its own, transformers' Trainer, evaluates an export: the loss is the decoder's."""
    pytest.importorskip("accelerate")
    path = write_checkpoint(Published.open(save_model(tmp_path / "hf")), tmp_path / "ck")
    out = finish(write_folder(Source(path), tmp_path / "out"))
    texts = torch.randint(0, 51, (6, 33), generator=torch.Generator().manual_seed(1))
    decoder = load_text_model(path).decoder
    with torch.no_grad():
        ours = decoder(texts[:, :-1], texts[:, 1:]).mean().exp()
    settings = transformers.TrainingArguments(
        str(tmp_path / "trainer"), per_device_eval_batch_size=2, report_to=[], use_cpu=True
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    data = [{"input_ids": row, "labels": row} for row in texts]
    loss = transformers.Trainer(model=model, args=settings, eval_dataset=data).evaluate()["eval_loss"]
    assert float(torch.tensor(loss).exp()) == pytest.approx(float(ours), rel=1e-4)


LLAMA_CPP = "LLAMA_CPP"
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
# llama.cpp knows a byte-level BPE by a hash of ids, so one of one's own is named in its source before it converts.
CONVERT = """
import sys
from conversion.base import TextModel
if sys.argv[1]:
    TextModel.get_vocab_base_pre = lambda self, tokenizer, name=sys.argv[1]: name
del sys.argv[1]
import convert_hf_to_gguf
convert_hf_to_gguf.main()
"""


def published_model(kind: str, folder: Path) -> Path:
    """Save a model of transformers in bf16 with a tokenizer: SentencePiece's, or Qwen's kind of byte-level BPE."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    class_name = {"llama": "LlamaConfig", "mistral": "MistralConfig", "qwen2": "Qwen2Config"}[kind]
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = getattr(transformers, class_name)(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.to(torch.bfloat16).save_pretrained(folder)
    if kind != "qwen2":
        train_sentencepiece(folder / "tokenizer.model")
        return folder
    made = tokenizers.Tokenizer(models.BPE())
    made.normalizer, made.decoder = normalizers.NFC(), decoders.ByteLevel()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    made.train_from_iterator(["lower newer wider faster lowest"] * 10, trainer)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return folder


@pytest.mark.slow
@pytest.mark.skipif(LLAMA_CPP not in os.environ, reason=f"{LLAMA_CPP} names no folder of llama.cpp's sources")
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
def test_llama_cpp_converts_exports(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor has the same values, every id the same token, and nothing is added around a text. -m slow"""
    path = write_checkpoint(Published.open(published_model(kind, tmp_path / "hf")), tmp_path / "ck")
    out, file = finish(write_folder(Source(path), tmp_path / "out")), tmp_path / "model.gguf"
    sources = Path(os.environ[LLAMA_CPP]).resolve()
    command = [
        sys.executable,
        "-c",
        CONVERT,
        "qwen2" if kind == "qwen2" else "",
        str(out),
        "--outfile",
        str(file),
    ]
    environ = {**os.environ, "PYTHONPATH": f"{sources}:{sources / 'gguf-py'}", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]

    monkeypatch.syspath_prepend(sources / "gguf-py")
    import gguf

    read = gguf.GGUFReader(file)
    theirs = {t.name: torch.tensor(gguf.quants.dequantize(t.data, t.tensor_type)) for t in read.tensors}
    ours = Published.open(out)
    assert len(theirs) == len(ours.shapes)
    for name in ours.shapes:
        there, tensor = name, ours.tensor(name).float()
        for old, new in GGUF_NAMES.items():
            there = there.replace(old, new)
        if kind != "qwen2" and there.endswith(
            ("attn_q.weight", "attn_k.weight")
        ):  # its channels turn in pairs
            tensor = tensor.unflatten(0, (-1, 2, 8)).transpose(1, 2).flatten(0, 2)
        assert torch.equal(theirs[there], tensor), name

    said = {name: field.contents() for name, field in read.fields.items() if name.startswith("tokenizer.")}
    tokens = said["tokenizer.ggml.tokens"]
    assert len(tokens) == 320
    if kind == "qwen2":
        vocabulary = json.loads((out / "tokenizer.json").read_text())["model"]["vocab"]
        assert all(tokens[i] == text for text, i in vocabulary.items()) and len(vocabulary) > 250
        assert said["tokenizer.ggml.eos_token_id"] == vocabulary["<|endoftext|>"]
        return
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(out / "tokenizer.model"))
    assert tokens[: len(model)] == [model.id_to_piece(i) for i in range(len(model))]
    assert said["tokenizer.ggml.scores"][: len(model)] == [model.get_score(i) for i in range(len(model))]
    assert said["tokenizer.ggml.eos_token_id"] == model.eos_id()
    assert said["tokenizer.ggml.add_space_prefix"] is said["tokenizer.ggml.add_bos_token"] is False
