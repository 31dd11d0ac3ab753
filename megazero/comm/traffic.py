"""Counts the bytes that this rank sends, by hop kind and link class."""

from __future__ import annotations

from collections import defaultdict

from megazero.mesh.grid import INTER, INTRA


class Traffic:
    """Counters of the bytes that this rank sends, keyed by (hop kind, link class).

    The hop kinds are 'refresh', 'gather', 'reduce', 'tp', 'pp' and 'scalar'. The link classes are grid.INTRA and
    grid.INTER. A collective over an axis of size a with a message of m bytes per peer sends (a - 1) * m bytes.
    """

    def __init__(self) -> None:
        self.bytes: defaultdict[tuple[str, str], int] = defaultdict(int)

    def add(self, kind: str, link: str, sent: int) -> None:
        self.bytes[kind, link] += sent

    def total(self, link: str) -> int:
        return sum(n for (_, at), n in self.bytes.items() if at == link)

    def take(self) -> dict[str, int]:
        """Return the totals since the last take, by 'kind_link' and by link class, and start again at 0."""
        out = {f"{kind}_{link}_bytes": n for (kind, link), n in sorted(self.bytes.items())}
        out[f"{INTRA}_bytes"], out[f"{INTER}_bytes"] = self.total(INTRA), self.total(INTER)
        self.bytes.clear()
        return out
