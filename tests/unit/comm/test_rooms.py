"""Rooms without processes: the point's rules by a clock of the test, sealed frames, bytes from whoever has them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero.cli.meet import MeetOptions, meet
from megazero.comm.rooms.channel import FRAME, Listener, Refused, SealedChannel, reach
from megazero.comm.rooms.member import Member, Offer, RoomLost, RoomSettings, Standing
from megazero.comm.rooms.point import Meetings, Point, Post, enough
from megazero.comm.rooms.shelf import Shelf, Shown, fetch
from tests.messages import names, refused

SECRET = b"s" * 32


class Run:
    """Members a, b, ... of one run at a point, by a clock that the test moves."""

    def __init__(self, members: str = "abc", **fields: Any) -> None:
        self.now = 100.0
        self.point = Meetings(self.now)
        self.states = {name: state(name, **fields) for name in members}
        for name in members:
            self.look(name)

    def look(self, name: str, **changes: Any) -> dict[str, Any]:
        """Post a member's state, with these changes. It takes up the run as a member does."""
        view = self.point.look(replace(self.states[name], **changes), self.now)
        if "refused" not in view:
            self.states[name] = replace(self.states[name], run=view["run"], **changes)
        return view

    def sit(self, name: str) -> dict[str, Any]:
        number = self.states[name].number
        return self.look(name, header="", message=f"{number}/{self.states[name].id}/1")

    def close(self, members: str = "abc") -> str:
        """Let these sit. Returns the line of the room, which has closed."""
        return [self.sit(name) for name in members][-1]["room"]["line"]

    def commit(self, name: str, line: str, last: str = "abc") -> dict[str, Any]:
        number = self.states[name].number + 1
        return self.look(name, number=number, line=line, last=(*last,), header=None, digest=line)

    def wait(self, seconds: float, members: str = "") -> None:
        """Let time pass in which these are heard."""
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            for name in members:
                self.look(name)


def state(name: str, **fields: Any) -> Post:
    known = {"least": 0, "call_s": 2.0, "patience_s": 5.0, "silence_s": 10.0, **fields}
    return Post(name, f"{name}1", {"model": "m"}, {"0": ("host", 1)}, **known)


def seats(view: dict[str, Any]) -> list[str]:
    return [seat["name"] for seat in view["room"]["seats"]]


@pytest.mark.parametrize(
    "here, last, least, expected",
    [
        ("a", "", 0, True),
        ("ab", "abc", 0, True),
        ("a", "abc", 0, False),
        ("axy", "abc", 0, False),  # who comes anew has no voice
        ("ab", "abcd", 0, True),  # just half, with the lowest name
        ("cd", "abcd", 0, False),
        ("a", "ab", 0, True),
        ("b", "ab", 0, False),
        ("b", "ab", 1, True),
        ("xyz", "ab", 3, True),
        ("ab", "ab", 3, False),
    ],
)
def test_of_two_parts_one_goes_on(here: str, last: str, least: int, expected: bool) -> None:
    assert enough({*here}, {*last}, least) == expected


def test_a_room_closes_when_all_sit_in_order_of_names() -> None:
    run = Run()
    run.sit("c")
    view = run.sit("a")
    assert "room" not in view
    names(view["missing"], "b")
    view = run.sit("b")
    assert seats(view) == ["a", "b", "c"] and not view["room"]["done"]
    line = view["room"]["line"]
    assert run.look("c", have=line)["room"]["done"]
    assert run.look("a")["room"]["done"]  # it has not all bytes yet, and may not open the room again
    assert run.look("a", lost=(line, ["b"]))["room"]["line"] == line


def test_who_is_late_is_called_and_then_left_out() -> None:
    run = Run()
    run.sit("a"), run.sit("b")
    assert not run.look("c")["called"]
    run.wait(2.5, "abc")
    assert run.look("c")["called"]
    run.wait(3.0, "abc")
    assert seats(run.look("a")) == ["a", "b"]
    line = run.look("a")["room"]["line"]
    run.look("a", have=line)
    run.commit("a", line, "ab")
    view = run.sit("c")
    assert view["behind"] and seats(view) == ["a", "b"]  # the messages of these it takes
    assert view["anchor"]["number"] == 1 and len(view["sources"]) == 1
    run.commit("b", line, "ab")
    run.commit("c", line, "ab")
    assert "room" not in run.sit("a") and "room" not in run.sit("b"), "c is waited for again"
    assert seats(run.sit("c")) == ["a", "b", "c"]


def test_nobody_waits_for_the_dead_or_for_who_is_behind() -> None:
    run = Run()
    line = run.close()
    run.look("a", have=line)
    run.commit("a", line), run.commit("b", line)  # c dies with its bytes
    run.wait(4.0, "ab")
    run.sit("a")
    assert seats(run.sit("b")) == ["a", "b"], "c's number is the last one's"

    run = Run()
    run.wait(9.0, "ab")
    run.sit("a")
    assert "room" not in run.sit("b"), "c was heard 9 s ago"
    run.wait(1.5, "ab")
    assert seats(run.look("b")) == ["a", "b"]


def test_messages_that_cannot_be_had_open_a_room_again() -> None:
    run = Run()
    line = run.close()
    run.wait(3.0, "ab")  # c is frozen
    view = run.look("a", lost=(line, ["c"]))
    assert "room" not in view
    names(view["missing"], "c")
    run.wait(0.5, "ab")
    assert "room" not in run.look("a"), "it has a second to be heard again"
    run.wait(0.5, "ab")
    again = run.look("b")
    assert seats(again) == ["a", "b"] and again["room"]["line"] != line


def test_a_launch_with_a_rank_that_hangs_is_left_out() -> None:
    """Its leader is heard, but nobody gets its messages: the second report counts."""
    run = Run()
    run.look("a", lost=(run.close(), ["c"]))
    again = run.look("c") and run.look("b")["room"]
    assert [seat["name"] for seat in again["seats"]] == ["a", "b", "c"]
    run.look("a", lost=(again["line"], ["c"]))
    run.look("c")
    assert seats(run.look("b")) == ["a", "b"] and "room" not in run.look("c")


def test_a_verdict_is_void_if_all_that_had_the_bytes_died() -> None:
    run = Run()
    line = run.close()
    assert run.look("c", have=line)["room"]["done"]
    run.wait(10.5, "ab")
    again = run.look("a")["room"]
    assert again["line"] != line and not again["done"] and seats(run.look("b")) == ["a", "b"]
    run.look("a", have=again["line"])
    run.commit("a", again["line"], "ab")
    view = run.commit("c", line)  # thawed, with an anchor of its own
    assert view["behind"] and "room" not in view and view["anchor"]["line"] == again["line"]


def test_a_point_that_starts_anew_knows_all_when_each_has_posted() -> None:
    run = Run()
    line = run.close()
    run.look("a", have=line)
    run.commit("a", line)
    run.point = Meetings(run.now)
    assert "room" not in run.look("b"), "the others may still come"
    names(run.look("b")["missing"], "new")
    assert run.look("a")["behind"] is False
    assert run.look("b")["behind"] and run.look("b")["anchor"]["number"] == 1


def test_a_point_that_was_stopped_waits_for_the_others_first() -> None:
    run = Run()
    line = run.close()
    run.look("a", have=line)
    for name in "abc":
        run.commit(name, line)
    run.now += 30
    run.sit("a")
    run.sit("b")
    assert "room" not in run.look("a")
    run.wait(10.5, "ab")
    assert seats(run.look("a")) == ["a", "b"]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"id": "b2"}, ["'b'", "is here"]),
        ({"run": "of-last-week"}, ["of-last-week"]),
        ({"same": {"model": "x"}}, ["model", "x", "'a'", "m"]),
        ({"digest": "0ff"}, ["hash", "0ff", "'a'", "same weights"]),
    ],
)
def test_who_does_not_belong_is_refused_with_the_reason(changes: dict[str, Any], words: list[str]) -> None:
    run = Run()
    names(run.look("b", **changes)["refused"], *words)
    line = run.close()
    assert run.look("a", have=line)["room"]["done"], "the others are not disturbed"


def test_who_has_left_is_not_waited_for_nor_counted() -> None:
    run = Run()
    line = run.close()
    run.look("a", have=line)
    for name in "abc":
        run.commit(name, line)
    assert run.look("a")["lag"] == []
    run.look("a", left=True), run.look("b", left=True)
    assert seats(run.sit("c")) == ["c"]


def listen(answer: Callable[[SealedChannel, Any], None], secret: bytes = SECRET) -> tuple[str, int]:
    return "127.0.0.1", Listener(0, secret, answer).port


def test_a_channel_refuses_another_secret_and_damaged_frames() -> None:
    where = listen(lambda channel, words: channel.say(words))
    with reach(where, SECRET, 5) as channel:
        assert channel.ask({"a": [1, None]}) == {"a": [1, None]}
    with refused("another secret", f"{where[1]}", by=Refused):
        reach(where, b"old", 5)

    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = socket.create_connection(server.getsockname()), server.accept()[0]
    served: list[SealedChannel] = []
    thread = threading.Thread(target=lambda: served.append(SealedChannel(ends[1], SECRET, asks=False)))
    thread.start()
    asking = SealedChannel(ends[0], SECRET, asks=True)
    thread.join()
    asking.send(b"first")
    assert served[0].receive(5) == b"first"
    frame = b"\0\0\0\5again" + asking._seal(0, b"again")
    ends[0].sendall(frame + frame)  # the second is a replay
    assert served[0].receive(5) == b"again"
    with refused("seal"):
        served[0].receive(5)
    ends[0].sendall(b"\xff\xff\xff\xff")
    with refused("4294967295", "most 5"):
        served[0].receive(5)


def test_bytes_come_from_whoever_has_them_and_go_on_where_they_broke_off() -> None:
    data = bytes(range(256)) * (5 * FRAME // 512)  # two frames and a half
    asked: list[tuple[str, int]] = []

    def shelf(name: str, ends: bool) -> tuple[str, int]:
        shown = Shelf()
        shown.put("message", 0, Shown.of(data))

        def answer(channel: SealedChannel, words: Any) -> None:
            asked.append((name, words["from"]))
            if ends:
                channel.say({"size": len(data)})
                channel.send(data[:FRAME])
                raise ConnectionError
            shown.answer(channel, words)

        return listen(answer)

    nowhere = socket.create_server(("127.0.0.1", 0))
    places = [nowhere.getsockname(), shelf("broken", True), listen(Shelf().answer), shelf("whole", False)]
    nowhere.close()
    fetch("message", places, SECRET, 5, out := bytearray(len(data)))
    assert out == data and asked == [("broken", 0), ("whole", FRAME)]
    with pytest.raises(LookupError, match="not there with 7 bytes"):
        fetch("message", places[3:], SECRET, 5, bytearray(7))
    with pytest.raises(LookupError, match="not there"):
        fetch("another", places[3:], SECRET, 5, bytearray(7))


def test_an_anchor_may_change_while_others_fetch_it() -> None:
    """Who has begun gets the old bytes to their end; who comes after gets none."""
    memory, shelf, read = bytearray(b"a" * 3 * FRAME), Shelf(), threading.Event()

    def slowly(offset: int, count: int) -> bytes:
        read.set()
        return bytes(memory[offset : offset + count])

    shelf.put("anchor", 1, Shown(len(memory), slowly), passing=True)
    where = listen(shelf.answer)
    with reach(where, SECRET, 5) as channel:
        assert channel.ask({"get": "anchor", "from": 0}) == {"size": len(memory)}
        assert read.wait(5)
        with shelf.changing():
            memory[:] = b"b" * len(memory)
        assert b"".join(channel.receive(FRAME) for _ in range(3)) == b"a" * 3 * FRAME
    with suppress(LookupError):
        fetch("anchor", [where], SECRET, 5, out := bytearray(len(memory)))
        assert out == b"a" * len(memory), "a copy is of before the change"
    with shelf.changing():
        pass
    with pytest.raises(LookupError):
        fetch("anchor", [where], SECRET, 5, bytearray(len(memory)))


def test_what_the_command_refuses(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("hello")
    with refused("--secret-file", "5 bytes", "32"):
        meet(MeetOptions(1, str(tmp_path / "short")))
    with refused("--secret-file", "nowhere"):
        meet(MeetOptions(1, str(tmp_path / "nowhere/secret")))
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        refused("--port", f"{other.getsockname()[1]}", "in use"),
    ):
        meet(MeetOptions(other.getsockname()[1]))


def test_every_wait_has_an_end_that_says_what_is_missing() -> None:
    with Point(0, b"") as point:
        for port, words in ((point.port, ["a there", "at least 2"]), (1, ["no answer", "127.0.0.1", "1"])):
            where = ("127.0.0.1", port)
            settings = RoomSettings(where, "a", b"", {}, least=2, silence_s=0.5, give_up_s=0.6)
            waits: list[str] = []
            with Member(settings, {0: 4}, on_wait=waits.append) as member, refused(*words, by=RoomLost):
                member.join(Standing(), Offer({0: "0"}))
                member.meet(b"", {0: torch.zeros(4, dtype=torch.uint8)})
            assert waits, "a watchdog would end this launch"
