#!/usr/bin/env python
"""Continue a text with a trained model.

python pretrain/generate.py --load runs/quickstart/checkpoint --prompt "def " --tokens 100
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megazero.log.safe_stream import guard_streams


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--load", required=True, help="folder given to --save in training, or one of its iter_* folders")
    add(
        "--ckpt-step", type=int, metavar="N", help="iteration of the checkpoint to take (default: the newest)"
    )
    add("--prompt", default="", help="text to continue; empty: the beginning of a document")
    add("--tokens", type=int, default=100, help="the most tokens to add")
    add("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    add("--top-k", type=int, default=50, help="draw from so many of the likeliest tokens; 0: from all")
    add("--seed", type=int, default=1234)
    add("--tokenizer-model", help="where the tokenizer lies now, if not where it lay in training")
    add("--vocab-file", help="the same of the GPT2BPETokenizer's vocab.json")
    add("--merge-file", help="the same of its merges.txt")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    import torch  # here, so that --help and wrong flags are quick

    from megazero.train.generate import Sampling, generate, load_text_model

    try:
        sampling = Sampling(options.temperature, options.top_k, options.seed)
        if options.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda, but torch sees no CUDA device; use --device cpu or auto")
        device = "cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu"
        model = load_text_model(
            options.load,
            options.ckpt_step,
            device=device,
            tokenizer_model=options.tokenizer_model,
            vocab_file=options.vocab_file,
            merge_file=options.merge_file,
        )
        print(generate(model, options.prompt, options.tokens, sampling))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    guard_streams()
    sys.exit(main())
