"""A separate program of the lowest priority that writes shared memory to a file.

    python -I -S image_writer.py MEMORY FILE BYTES PARENT

MEMORY and FILE are open descriptors. A line of output, the number of bytes written, comes after every write and when
a piece is on the disk, and at last "crc32 N", or "errno N" where the operating system refused. It ends when PARENT is
no longer its parent, or its output is closed.
"""

import errno
import fcntl
import mmap
import os
import sys
import zlib
from contextlib import suppress

# Bytes after which the disk is waited for: only then is it known to get on. A slow one must do that well within a
# minute, or it would be taken for one that hangs.
PIECE = 1 << 24
BLOCK = 1 << 12  # bytes of which whole ones can go to the disk from where they are


def write(memory: int, file: int, size: int, parent: int) -> int:
    """Return the checksum of what was read, and written and synced."""
    done = crc32 = 0
    if not size:
        return crc32
    whole = size - size % BLOCK
    _past_the_cache(file, True)
    with mmap.mmap(memory, size, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as data:
        while done < size and os.getppid() == parent:
            if done == whole:
                _past_the_cache(file, False)
            end = min(done + PIECE, whole if done < whole else size)
            with data[done:end] as piece:
                crc32 = zlib.crc32(piece, crc32)
            while done < end:
                with data[done:end] as rest:
                    done += _write(file, rest)
                print(done, flush=True)
            os.fdatasync(file)
            print(done, flush=True)
    os.fsync(file)
    return crc32


def _write(file: int, data: memoryview) -> int:
    try:
        return os.write(file, data)
    except OSError as error:  # else a file system, or a place in the file, that wants the cache
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        _past_the_cache(file, False)
        return os.write(file, data)


def _past_the_cache(file: int, on: bool) -> None:
    """Avoid the copy into the page cache: 256 MiB take 100 ms of processor time with it, and 6 ms without."""
    direct = getattr(os, "O_DIRECT", 0)
    with suppress(OSError):
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        fcntl.fcntl(file, fcntl.F_SETFL, flags | direct if on else flags & ~direct)


if __name__ == "__main__":
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    try:
        print("crc32", write(*(int(word) for word in sys.argv[1:])), flush=True)
    except BrokenPipeError:  # the rank has died
        os._exit(1)
    except OSError as error:
        print("errno", error.errno, flush=True)
