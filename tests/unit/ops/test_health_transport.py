"""What NCCL took is read from the lines that it prints."""

from __future__ import annotations

from pathlib import Path

from megazero.ops.health_transport import ask_nccl, read_transport, transport_notes, transport_of

IB = """
n1:71:71 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>
n1:71:90 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>
n1:71:90 [0] NCCL INFO Using network IB
n1:71:90 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
n1:71:90 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/IPC
n1:71:90 [0] NCCL INFO Channel 00/0 : 15[7] -> 0[0] [receive] via NET/IB/0/GDRDMA
n1:71:90 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/1/GDRDMA
n1:71:90 [0] NCCL INFO Connected all rings
"""
SOCKET = """
n2:9:9 [0] NCCL INFO NET/IB : No device found.
n2:9:9 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.2<0>
n2:9:9 [0] NCCL INFO ncclCommInitRank comm 0x1 rank 1: Using network Socket
n2:9:9 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [send] via NET/Socket/0
n2:9:9 [0] NCCL INFO Channel 01 : 1[0] -> 2[1] via SHM/direct/direct
"""


def test_infiniband_with_gpudirect() -> None:
    found = read_transport(IB, ["mlx5_0"])
    assert found.network == "IB" and found.devices == ("mlx5_0:1/IB", "mlx5_1:1/IB")
    assert found.via == {"P2P": 2, "NET/IB/GDRDMA": 2} and not found.idle
    assert list(transport_notes([("n1", found), ("n1", found)])) == [
        "NCCL's transport: IB (mlx5_0:1/IB, mlx5_1:1/IB); channels: 2 by NET/IB/GDRDMA, 2 by P2P"
    ]


def test_sockets_beside_infiniband_are_told() -> None:
    found = read_transport(SOCKET, ["mlx5_0"])
    assert (found.network, found.devices) == ("Socket", ("eth0:10.0.0.2",))
    assert found.via == {"NET/Socket": 1, "SHM": 1}
    one, other, slow = transport_notes([("n1", read_transport(IB)), ("n2", found), ("n3", None)])
    assert one.startswith("NCCL's transport on n1: IB") and other.startswith("NCCL's transport on n2: Socket")
    assert slow.startswith("slow: NCCL takes sockets on n2, which has InfiniBand (mlx5_0)")
    assert not read_transport(SOCKET).idle


def test_nccl_is_asked_unless_the_user_asks_it_something_else(tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    file = ask_nccl(environ)
    assert file is not None and environ["NCCL_DEBUG"] == "INFO" and environ["NCCL_DEBUG_FILE"] == str(file)
    assert transport_of(file) is None
    file.write_text(IB)
    found = transport_of(file)
    assert found is not None and found.network == "IB"
    assert ask_nccl({"NCCL_DEBUG": "WARN"}) is None
