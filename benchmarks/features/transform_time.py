"""What the Hadamard transform adds to coding on a CPU, in ns of the process's time for each element of the operation.

    python -m benchmarks.features.transform_time [--bits 4] [--elements 65536 196608 1048576] [--rounds 10]

One thread codes fp32 in the default block, without and with the transform of a whole block, in turns: least and
median (to most). An element is one of a slice, however many messages are summed. The sum of one message is what two
nodes need. Between two hops of one transform nothing is transformed. (``make gpu-report`` has the kernels.)
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch

from benchmarks import harness
from megazero.comm.codec import Blockwise
from megazero.comm.wire import DEFAULT_BLOCK

ENOUGH = 1 << 21  # elements of a turn, in which the clock's and the interpreter's noise are small


def operations(codec: Blockwise, n: int) -> dict[str, Callable[[], object]]:
    """Return what codes n elements, by name."""
    x, out = torch.randn(1, n), torch.empty(1, n)
    message = codec.encode(x)
    three, onward = message.repeat(3, 1), torch.empty_like(message)
    return {
        "encode": lambda: codec.encode(x, out=message),
        "decode": lambda: codec.decode(message, out),
        "decode-sum of 1": lambda: codec.decode_sum(message, out[0], accumulate=True),
        "decode-sum of 3": lambda: codec.decode_sum(three, out[0], accumulate=True),
        "decode-sum-encode of 3": lambda: codec.decode_sum_encode(three, n, codec, out=onward),
    }


def turn(operation: Callable[[], object], n: int) -> float:
    """Return the ns for an element."""
    times = max(1, ENOUGH // n)
    seconds = harness.own_seconds(lambda: [operation() for _ in range(times)], torch.device("cpu"))
    return seconds / (times * n) * 1e9


def main() -> None:
    options = harness.parser(__doc__, bits=4, elements=[1 << 16, 3 << 16, 1 << 20], rounds=10).parse_args()
    torch.set_num_threads(1)
    block = DEFAULT_BLOCK[options.bits]
    plain, mixing = (Blockwise(options.bits, block, hadamard=size) for size in (0, block))
    print(f"{'elements':>9}  {'operation':24}{'plain':24}{'Hadamard':24}added")
    for n in options.elements:
        without, with_it = operations(plain, n), operations(mixing, n)
        for name in without:
            both = {"plain": partial(turn, without[name], n), "mixed": partial(turn, with_it[name], n)}
            found = harness.take_turns(both, options.rounds)
            cells = [told(found["plain"]), told(found["mixed"])]
            added = min(found["mixed"]) - min(found["plain"])
            print(f"{n:9}  {name:24}{cells[0]:24}{cells[1]:24}{added:.2f}", flush=True)


def told(ns: list[float]) -> str:
    return f"{min(ns):.2f}, {statistics.median(ns):.2f} (to {max(ns):.2f})"


if __name__ == "__main__":
    harness.start(main)
