"""The command ``megazero verify``: it prints its help and messages and returns its exit status.

It needs no torch before a run begins.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megazero.config import run_command
from megazero.mesh.local_ranks import LocalRanks, RanksFailed
from megazero.verify.options import VerifyRequest, help_text, read_request


def main(argv: Sequence[str]) -> int:
    """Return the exit status.

    It is 0 if every check holds, 1 if one does not hold or the ranks failed, and 2 if the configuration is wrong.
    """
    return run_command("verify", argv, help_text, lambda: _verify(read_request(argv)))


def _verify(request: VerifyRequest) -> int:
    from megazero.verify import verification  # brings torch

    try:
        with LocalRanks(preload=["megazero.verify.training_run"]) as ranks:
            certificate = verification.verify(request, ranks)
    except RanksFailed as error:
        print(f"the ranks failed, so nothing is certified:\n{error}", file=sys.stderr)
        return 1
    path = certificate.save(request.options.verify_output)
    certificate.print()
    print(f"certificate: {path}")
    return 0 if certificate.good else 1
