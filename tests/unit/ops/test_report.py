"""The page of a run: numbers become points, texts stay texts, and there is a page whatever the files hold."""

from __future__ import annotations

import html
import json
import math
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from megazero.charts import SIZE, Mark, Scale, Series, chart
from megazero.cli.report import main
from megazero.config import make_config
from megazero.log.curves import read_curves
from megazero.ops import live_page
from megazero.ops.live_page import LivePage
from megazero.ops.report import report
from tests.messages import names, refused
from tests.sizes import SMALL
from tests.unit.ops.test_status import at, write, write_run

HOSTILE = '</table><script>document.title="theirs"</script><img src=x onerror=alert(1)>"\''
PREDICTED = {
    "memory": {"parameters": 600.0, "head": 300.0},
    "in_use_before": 100,
    "seconds": 0.5,
    "bytes": {"reduce_inter_node_bytes": 200},
}


def points(drawn: str, name: str) -> list[list[tuple[int, int]]]:
    """Return the pieces of a line."""
    (d,) = re.findall(rf'data-name="{name}" d="([^"]*)"', drawn)
    return [[tuple(map(int, p.split(","))) for p in piece.split()] for piece in d.rstrip("z").split("M")[1:]]


def whole_run(folder: Path, **changed: Any) -> Path:
    """A run with everything that a page draws: 300 iterations, 3 starts, the last of 4 ranks on 2 nodes."""
    write_run(
        folder, ends=({"event": "end", "time": at(900), "iteration": 300, "status": 65, "why": HOSTILE},)
    )
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    events[-2] |= {"ranks": 4, "ranks_per_node": 2, "device": HOSTILE, "hosts": [HOSTILE, "n2"]}
    events[-2] |= {"predicted": PREDICTED, "software": "torch 2", **changed}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[7] |= {"bytes": {"reduce_inter_node_bytes": 210, f"{HOSTILE}_bytes": 5}, "skipped": 1}
    lines += [{"iteration": 300, "eval_lm_loss": 5.2, "eval_data": HOSTILE}]
    (folder / "config.yaml").write_text(
        yaml.safe_dump(make_config({**SMALL, "mock_data": False, "data_path": (HOSTILE,)}).to_dict())
    )
    return write(folder, events=events, metrics=lines)


def test_numbers_become_points() -> None:
    drawn = chart(
        "t", [Series("a", [0, 1, 2, 3, 4], [1.0, math.nan, 3.0, 2.0, math.inf])], marks=[Mark(2, "m", "save")]
    )
    up = Scale(1.0, 3.0).wider(keep_low=False)
    places = [SIZE - up.place(v) for v in (1.0, 3.0, 2.0)]
    assert points(drawn, "a") == [[(0, places[0])], [(5000, places[1]), (7500, places[2])]]
    assert 'class="mark save" style="left:50.00%" title="m"' in drawn
    bands = chart("t", [Series(name, [0, 10], [1.0, 3.0], kind="band") for name in "ab"])
    (a,), (b,) = points(bands, "a"), points(bands, "b")
    assert a[:2] == b[:1:-1], "the second band does not stand on the first"
    assert SIZE - b[1][1] == Scale(0.0, 6.0).wider(keep_low=True).place(6.0)


def test_axes_have_a_few_round_ticks() -> None:
    assert Scale(0.0, 119.0).ticks() == [0, 25, 50, 75, 100]
    assert Scale.over([1, 3]).ticks() == [1, 2, 3]
    assert Scale(2.3, 11.0, log=True).ticks() == [4, 6, 8, 10]
    assert Scale(1e-3, 2e2, log=True).ticks() == pytest.approx([1e-3, 1e-2, 0.1, 1, 10, 100])
    assert len(Scale.over([0.0, math.nan], log=True).ticks()) > 0


def test_a_long_run_is_thinned_to_what_is_seen() -> None:
    noise, count = random.Random(0), 100_000
    y = [noise.gauss(5, 1) for _ in range(count)]
    y[77_777] = 100.0
    each = [Series(f"s{i}", range(count), y, i) for i in range(4)]
    drawn = chart("t", each)
    assert len(drawn) < 200_000
    (ranges,) = set(re.findall(r'class="range"[^>]* d="([^"]*)"', drawn))
    top = min((tuple(map(int, p.split(","))) for p in ranges[1:].split()), key=lambda p: p[1])
    assert abs(top[0] - 7778) < 10, "the spike is gone"
    mean = [p for piece in points(drawn, "s0") for p in piece]
    up = Scale.over(y).wider(keep_low=False)
    assert all(abs(SIZE - v - up.place(5.0)) < 0.02 * SIZE for _, v in mean)


def test_later_lines_replace_those_of_their_iterations(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"iteration": i, "lm_loss": 9.0, "time_bill": {"data": 1.0}} for i in (1, 2, 3)
    ]
    lines += [{"iteration": i, "lm_loss": 8.0} for i in (2, 3, 4)]
    file = write(tmp_path, metrics=lines) / "metrics.jsonl"
    odd = f'{{"iteration": 1{"0" * 400}, "lm_loss": 1}}\n{"[" * 600}\n{{"iteration": "x", "lm_loss": 1}}\n[]\n{{"torn'
    file.write_text(file.read_text() + odd)
    curves = read_curves(tmp_path)
    assert [*zip(*curves["lm_loss"], strict=True)] == [(1, 9), (2, 8), (3, 8), (4, 8)]
    assert [*curves["time_bill/data"].x] == [1, 2, 3]
    assert read_curves(tmp_path / "none") == {}


def test_a_page_has_all_parts_and_escapes_texts(tmp_path: Path) -> None:
    made, wrong = report([whole_run(tmp_path / "a")])
    assert not wrong and "not drawn" not in made
    assert made.count("<script>") == 1 and "<img" not in made and html.escape(HOSTILE) in made
    names(
        made,
        "needs a person",
        "reduce across nodes",
        "<td class=brief>210 B</td><td class=brief>200 B</td><td class=brief>+5.0%</td>",
        "start after iteration 150",
    )
    names(
        made,
        "iteration 8 was skipped",
        "rank 3\n",
        "node 1 (n2)",
        "--data-path",
        "--num-layers",
        "before the model",
    )
    first, *_ = points(made, "training")
    assert 'class="mark alarm" style="left:100.00%"' in made, "the end is not on the axis"
    assert len(first) == 300 and first[0][1] < first[-1][1], "the loss falls"


def test_runs_lie_over_each_other(tmp_path: Path) -> None:
    a, b = whole_run(tmp_path / "a"), write_run(tmp_path / "b", iterations=100)
    (b / "config.yaml").write_text("model: {no_option: 1}\n")
    made, wrong = report([a, tmp_path / "none", b])
    names(made, 'data-name="a training"', 'data-name="b training"', "b not drawn", "no_option", "<th>a</th>")
    assert len(wrong) == 1 and "none" in wrong[0]
    assert points(made, "b training")[0][-1][0] < points(made, "a training")[0][-1][0] / 2
    with refused("none"):
        report([tmp_path / "none"])


@pytest.mark.parametrize(
    "events",
    [
        [{"event": "start"}],
        [{"event": ["start"], "lease": {}}, {"event": "end", "status": "x", "iteration": []}],
        [
            {
                "event": "start",
                "predicted": {"memory": 5, "bytes": []},
                "hosts": 3,
                "ranks": 1,
                "ranks_per_node": 0,
            }
        ],
        [
            {"event": "start", "last_iteration": "x", "time": 5, "ranks": "x"},
            {"event": "save", "iteration": {}},
        ],
    ],
)
def test_broken_files_still_give_a_page(tmp_path: Path, events: list[dict[str, Any]]) -> None:
    lines = [{"iteration": 1, "consumed_samples": None, "lm_loss": 2.0, "iteration_time_s": 1, "skipped": 1}]
    made, _ = report([write(tmp_path, events=events, metrics=lines)])
    names(made, "not drawn", 'data-name="training"', "</html>")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "a")
    assert main([f"{folder}"]) == 0 and capsys.readouterr().out == f"{folder}/report.html\n"
    assert main([f"{folder}", f"{tmp_path}/no", "--output", f"{tmp_path}/both/page.html"]) == 2
    assert (tmp_path / "both" / "page.html").read_text().endswith("</html>\n")
    assert "tmp_path" not in capsys.readouterr().out


def test_a_run_keeps_its_page_and_goes_on_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = LivePage(f"{write_run(tmp_path / 'a')}")
    live.tick()
    live.tick()  # not a second one at once
    live.close()
    assert "</html>" in (tmp_path / "a" / "report.html").read_text()
    monkeypatch.setattr(live_page.sys, "executable", "/no/python")
    lost = LivePage(f"{tmp_path}")
    with pytest.warns(UserWarning, match="--report.*/no/python"):
        lost.tick()
    with pytest.warns(UserWarning, match="--report.*/no/python"):
        lost.close()


PROBE = """
const said = [];
for (const frame of document.querySelectorAll("iframe")) {
  const inner = frame.contentDocument, plot = inner.querySelector(".plot"), box = plot.getBoundingClientRect();
  const clash = (side) => [...inner.querySelectorAll(".plot")].some((each) => {
    const boxes = [...each.querySelectorAll(`span.${side}`)].map((span) => span.getBoundingClientRect());
    return boxes.some((a, i) => boxes.slice(i + 1).some((b) =>
      a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom));
  });
  plot.dispatchEvent(new frame.contentWindow.PointerEvent("pointermove", { clientX: box.left + box.width * 0.5 }));
  said.push([inner.documentElement.scrollWidth <= frame.clientWidth, clash("x"), clash("y"),
    box.width > 200, inner.title.includes("theirs"), inner.querySelector(".tip").textContent]);
}
document.body.textContent = "found " + JSON.stringify(said) + " end";
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium")
def test_a_browser_shows_the_page(tmp_path: Path) -> None:
    """At the width of a telephone and of a screen nothing sticks out or overlaps; the pointer is told the values."""
    made, _ = report([whole_run(tmp_path / "a")])
    made = made.replace("</main>", '<script>document.title = "theirs"</script></main>')  # by a fault of ours
    frames = "".join(
        f'<iframe style="width:{w}px;height:900px" srcdoc="{html.escape(made)}"></iframe>'
        for w in (390, 1280)
    )
    (tmp_path / "frames.html").write_text(f"<body>{frames}<script>onload = () => {{{PROBE}}}</script>")
    command = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}/profile",
    ]
    command += ["--virtual-time-budget=5000", "--dump-dom", f"file://{tmp_path}/frames.html"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = json.loads(html.unescape(re.findall("found (.*) end", shown)[0]))
    for fits, across, up, wide, theirs, tip in found:
        assert (fits, across, up, wide, theirs) == (True, False, False, True, False)
        assert re.match(r"iteration 15[01]\ntraining: 6\.(49|5)\n", tip), tip
    assert len(found) == 2
