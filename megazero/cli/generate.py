"""The command ``megazero generate``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass

from megazero.config import run_with_arguments
from megazero.config.options.fields import option

USAGE = """usage: megazero generate --load DIR [--prompt TEXT] [flags below]
       megazero generate --load DIR --chat --prompt QUESTION [flags below]
       megazero generate --load runs/a/checkpoint --prompt "def " --tokens 100

Continues a text with a checkpoint's model, in one process, and prints prompt and continuation; with --chat, it prints
the answer to the prompt. Any layout may have written the checkpoint. Exit status 0: the text is printed; 2: a flag,
the checkpoint or its tokenizer is wrong.
"""


@dataclass(frozen=True)
class GenerateOptions:
    """The flags of the command."""

    load: str = option(
        MISSING, "folder that --save named in training, or one of its iter_* folders", required=True
    )
    ckpt_step: int | None = option(None, "iteration of the checkpoint to load (default: the newest)", low=0)
    prompt: str | None = option(None, "text to continue (default: begin a document)")
    chat: bool = option(False, "answer the prompt as a user's message, by the chat template of the tokenizer")
    tokens: int = option(100, "maximum number of tokens to add", low=0)
    temperature: float = option(0.8, "divisor of the logits; 0 always takes the likeliest token", low=0)
    top_k: int = option(50, "number of likeliest tokens to draw from; 0 draws from all", low=0)
    seed: int = option(1234, "seed of the draws")
    tokenizer_model: str | None = option(None, "tokenizer to use in place of the checkpoint's own")
    vocab_file: str | None = option(
        None, "vocab.json to use in place of the checkpoint's own (GPT2BPETokenizer)"
    )
    merge_file: str | None = option(
        None, "merges.txt to use in place of the checkpoint's own (GPT2BPETokenizer)"
    )
    device: str = option("auto", "device that computes", choices=("auto", "cpu", "cuda"))


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 if the text is printed, 2 if something is wrong."""
    return run_with_arguments("generate", argv, USAGE, GenerateOptions, _generate)


def _generate(options: GenerateOptions) -> int:
    import torch

    from megazero.train.generate import Sampling, answer, generate, load_text_model  # brings torch

    if options.chat and not options.prompt:
        raise ValueError("--chat needs --prompt, the message to answer")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but torch sees no CUDA device; use --device cpu or auto")
    model = load_text_model(
        options.load,
        options.ckpt_step,
        device="cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu",
        tokenizer_model=options.tokenizer_model,
        vocab_file=options.vocab_file,
        merge_file=options.merge_file,
    )
    sampling = Sampling(options.temperature, options.top_k, options.seed)
    print((answer if options.chat else generate)(model, options.prompt or "", options.tokens, sampling))
    return 0
