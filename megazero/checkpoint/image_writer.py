"""A program of its own: write a stretch of shared memory to a file, where no other process wants to run.

    python -I -S image_writer.py MEMORY FILE BYTES PARENT

MEMORY and FILE are open descriptors. A line of output, the number of bytes written, comes after every write and when
a piece is on the disk, and at last "crc32 N", or "errno N" where the operating system refused. It ends when PARENT
is not its parent any more, or nobody reads its output.
"""

import mmap
import os
import sys
import zlib
from contextlib import suppress

# Bytes after which the disk is waited for: only then is it known to get on. A slow one must do that well within a
# minute, or it would be taken for one that hangs.
PIECE = 1 << 24


def write(memory: int, file: int, size: int, parent: int) -> int:
    """Return the checksum of what was written and synced."""
    done = crc32 = 0
    with mmap.mmap(memory, size, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as data:
        while done < size and os.getppid() == parent:
            with data[done : done + PIECE] as piece:
                crc32 = zlib.crc32(piece, crc32)
                end = done + len(piece)
            while done < end:
                with data[done:end] as rest:
                    done += os.write(file, rest)
                print(done, flush=True)
            os.fdatasync(file)
            print(done, flush=True)
    os.fsync(file)
    return crc32


if __name__ == "__main__":
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    try:
        print("crc32", write(*(int(word) for word in sys.argv[1:])), flush=True)
    except BrokenPipeError:  # the rank has died
        os._exit(1)
    except OSError as error:
        print("errno", error.errno, flush=True)
