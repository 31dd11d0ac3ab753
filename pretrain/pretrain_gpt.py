"""Pretrain a decoder-only language model: the same as ``megazero train``.

python pretrain/pretrain_gpt.py --nproc-per-node 8 FLAGS
"""

import sys

from megazero.cli import main

if __name__ == "__main__":
    sys.exit(main(command="train"))
