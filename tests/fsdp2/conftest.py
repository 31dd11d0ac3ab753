"""Under a torch that fsdp2_patch refuses there is nothing to test here: jobs and tests name its private parts."""

from __future__ import annotations

import torch

from fsdp2_patch.torch_parts import KNOWN
from megazero.patches.names import release

collect_ignore_glob = [] if release(torch.__version__) >= KNOWN[0] else ["test_*.py"]
