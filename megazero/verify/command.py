"""The command ``megazero verify``: it prints its help and messages and returns its exit status.

It needs no torch before a run begins.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megazero.config import ConfigError
from megazero.mesh.local_ranks import LocalRanks, RanksFailed
from megazero.verify.options import help_text, read_request


def main(argv: Sequence[str]) -> int:
    """Return the exit status.

    It is 0 if every check holds, 1 if one does not hold or the ranks failed, and 2 if the configuration is wrong.
    """
    if "-h" in argv or "--help" in argv:
        print(help_text())
        return 0
    try:
        request = read_request(argv)
        from megazero.verify import verification

        with LocalRanks(preload=["megazero.verify.training_run"]) as ranks:
            certificate = verification.verify(request, ranks)
    except ConfigError as error:
        print(f"{error}\n--help lists the flags of verify", file=sys.stderr)
        return 2
    except RanksFailed as error:
        print(f"the ranks failed, so nothing is certified:\n{error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    path = certificate.save(request.options.verify_output)
    certificate.print()
    print(f"certificate: {path}")
    return 0 if certificate.good else 1
