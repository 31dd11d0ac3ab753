"""A real consumer evaluates an export: lm-eval's perplexity of held-out text beside ours, all without the network.

    python -m benchmarks.features.lm_eval_perplexity --folder /tmp/held-out --lm-eval venv/bin/lm_eval

trains a small Llama for a minute on sources of the standard library with a SentencePiece tokenizer, exports it, and
runs lm-eval on the task of lm_eval/. --lm-eval is the command of any environment that has lm-eval,
transformers and torch. The exit status is 1 if the two perplexities differ by more than 1e-4, relative.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks import harness
from megazero.data.text import stdlib_sources
from megazero.train.generate import load_text_model

LIMIT, CHARACTERS = 1e-4, 200  # a text is one window of the context
MODEL = """
    --model-family llama --num-layers 2 --hidden-size 192 --ffn-hidden-size 512 --num-attention-heads 4
    --num-query-groups 2 --seq-length 128 --lr 2e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1
    --micro-batch-size 16 --train-iters 60 --split 98,2,0 --eval-iters 2
"""


def run(*command: object, cwd: Path | None = None, **environment: str) -> None:
    subprocess.run(list(map(str, command)), check=True, cwd=cwd, env={**os.environ, **environment})


def write_texts(folder: Path) -> list[str]:
    """Write text/ to train on and held_out.jsonl of other files. Returns the texts that are held out."""
    sources = [path.read_text("utf-8") for path in stdlib_sources()]
    (folder / "text").mkdir(parents=True)
    for number, text in enumerate(sources):
        if number % 10:
            (folder / "text" / f"{number}.py").write_text(text, "utf-8")
    held_out = [text[len(text) // 2 :][:CHARACTERS] for text in sources[::10]]
    lines = [json.dumps({"text": text}) + "\n" for text in held_out]
    (folder / "held_out.jsonl").write_text("".join(lines), "utf-8")
    return held_out


def train(folder: Path) -> None:
    run(sys.executable, harness.ROOT / "tools/train_tokenizer.py", "--input", folder / "text", "--vocab-size", 2048,
        "--model-prefix", folder / "spm")  # fmt: skip
    tokenizer = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", folder / "spm.model"]
    run(sys.executable, harness.ROOT / "tools/preprocess_data.py", "--input", folder / "text", "--append-eod",
        "--output-prefix", folder / "data", *tokenizer)  # fmt: skip
    run(sys.executable, harness.ROOT / "pretrain/pretrain_gpt.py", *MODEL.split(), *tokenizer, "--device", "cpu",
        "--data-path", folder / "data_text_document", "--save", folder / "run", "--log-dir",
        folder / "logs")  # fmt: skip


@torch.no_grad()
def our_perplexity(checkpoint: Path, texts: list[str]) -> tuple[float, int]:
    """Return the perplexity per byte by the decoder in fp32, and the end of document, which precedes each text."""
    model = load_text_model(checkpoint)
    eod, nats = model.tokenizer.info.eod, 0.0
    for text in texts:
        ids = torch.tensor([[eod, *model.tokenizer.encode(text)]])
        assert ids.shape[1] <= 128, "a text is one window of the context"
        nats += float(model.decoder(ids[:, :-1], ids[:, 1:]).double().sum())
    return math.exp(nats / sum(len(text.encode()) for text in texts)), eod


def their_perplexity(folder: Path, command: str, eod: int) -> float:
    model = f"pretrained={folder / 'hf'},dtype=float32,prefix_token_id={eod}"
    run(command, "--model", "hf", "--model_args", model, "--tasks", "held_out", "--device", "cpu",
        "--include_path", Path(__file__).with_name("lm_eval"), "--output_path", folder / "results",
        cwd=folder, HF_HUB_OFFLINE="1", HF_HOME=str(folder / "home"))  # fmt: skip
    (file,) = (folder / "results").rglob("results_*.json")
    return json.loads(file.read_text())["results"]["held_out"]["byte_perplexity,none"]


def main() -> int:
    options = harness.parser(
        __doc__,
        folder=(Path, "folder to write everything in; it is made"),
        lm_eval=("lm_eval", "command of lm-eval"),
    ).parse_args()
    folder = options.folder.resolve()
    texts = write_texts(folder)
    train(folder)
    run(sys.executable, harness.ROOT / "tools/convert.py", "to-hf", folder / "run", folder / "hf")
    ours, eod = our_perplexity(folder / "run", texts)
    theirs = their_perplexity(folder, options.lm_eval, eod)
    difference = abs(theirs / ours - 1)
    print(
        f"perplexity per byte of {len(texts)} texts: ours {ours:.8f}, lm-eval {theirs:.8f}, relative {difference:.1e}"
    )
    return int(difference > LIMIT)


if __name__ == "__main__":
    harness.start(main)
