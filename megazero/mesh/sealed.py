"""Values in a store that any host can reach. torch's TCPStore has no authentication: whoever finds its port reads,
writes and deletes keys. So each value of ours carries a code that takes the job's secret to make (HMAC). What carries
none of this job's counts as not there.

The secret is a file of mode 0600 in the folder of --save, which the ranks share and other users cannot read. Without
--save there is none: the code then finds damage, but no forgery.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from megazero.files import appears

SECRET = ".secret"  # and the user's number: a folder may be a team's
BYTES = 32


class Store(Protocol):
    """What is used of torch.distributed's stores."""

    def set(self, key: str, value: str) -> None: ...
    def compare_set(self, key: str, expected: str, value: str) -> bytes: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def check(self, keys: list[str]) -> bool: ...


class SealedStore:
    """A store whose values only those who know the secret can write."""

    def __init__(self, store: Store, secret: bytes) -> None:
        self._store, self._secret = store, secret

    def set(self, key: str, value: str) -> None:
        self._store.set(key, self._sealed(key, value))

    def claim(self, key: str, value: str) -> str:
        """Set a key that nobody of the job has set, and return the value that it has then."""
        found = self._opened(key, self._store.compare_set(key, "", self._sealed(key, value)))
        if found is None:  # a stranger's
            self.set(key, value)
        return value if found is None else found

    def get(self, keys: Iterable[str]) -> dict[str, str]:
        """Return the values of those keys that someone of the job has set."""
        there = [key for key in keys if self._store.check([key])]
        values = zip(there, self._store.multi_get(there) if there else (), strict=True)
        opened = {key: self._opened(key, value) for key, value in values}
        return {key: value for key, value in opened.items() if value is not None}

    def wait(self, key: str) -> str | None:
        """Return the value of a key once it is set; None if a stranger has set it."""
        return self._opened(key, self._store.multi_get([key])[0])

    def _sealed(self, key: str, value: str) -> str:
        return f"{hmac.new(self._secret, f'{key} {value}'.encode(), 'sha256').hexdigest()} {value}"

    def _opened(self, key: str, sealed: bytes) -> str | None:
        value = sealed.decode(errors="replace").partition(" ")[2]
        return value if hmac.compare_digest(self._sealed(key, value).encode(), sealed) else None


def job_secret(save: str | None, rank: int) -> bytes:
    """Return the secret of the jobs that save in this folder. The first rank makes it where there is none.

    It is empty without a folder, and where the file cannot be written or seen (the health check says why not).
    """
    if save is None:
        return b""
    file = Path(save) / f"{SECRET}.{os.getuid()}"
    with suppress(OSError):
        if rank == 0:
            made_secret(file)
        appears(lambda: len(_read(file)) >= BYTES, file.parent)
        return _read(file)
    return b""


def made_secret(file: str | os.PathLike[str]) -> bytes:
    """Return the secret that a file holds. A new one is written unless there is a whole one. Raises OSError."""
    with open(os.open(file, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as handle:
        if os.fstat(handle.fileno()).st_size < BYTES:
            handle.write(secrets.token_bytes(BYTES))
            os.fsync(handle.fileno())
    return Path(file).read_bytes()


def _read(file: Path) -> bytes:
    return file.read_bytes() if file.exists() else b""
