#!/usr/bin/env python
"""Train a SentencePiece tokenizer: the same as ``megazero tokenizer``."""

import sys

from megazero.cli import main

if __name__ == "__main__":
    sys.exit(main(command="tokenizer"))
