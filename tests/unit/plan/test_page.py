"""The page "does it pay?": its planes, and what a browser shows of them, against the planner."""

from __future__ import annotations

import html
import json
import random
import re
import shutil
import statistics
import subprocess
from itertools import product
from pathlib import Path

import pytest

from megazero.plan import compare
from megazero.plan.page import Case, Link, height, tangents
from tests.messages import names
from tests.unit.plan.test_outer import question
from tests.unit.plan.test_plan import ALONE, cluster, plan

RATES, DELAYS = (0.5, 2.0, 10.0, 60.0, 400.0), (0.0, 0.5, 5.0, 50.0)  # 20 links
CLOSE, WORST = (
    0.002,
    0.05,
)  # of a plan's seconds: at the median, and where a plan has a layout that the page lacks
CHROMIUM = shutil.which("chromium")
browser = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")


def shown(path: Path, fragment: str = "") -> str:
    """Return what a browser shows of a page when its script has run."""
    assert CHROMIUM is not None
    words = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={path.parent}/chromium",
    ]
    done = subprocess.run(
        [*words, "--dump-dom", f"{path.as_uri()}#{fragment}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.split("<script>")[0]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    assert plan(folder, 1, *ALONE, "--page", str(folder / "page.html"))[0] == 0
    return folder / "page.html"


def test_planes_are_exact_where_a_step_is_the_largest_of_sums() -> None:
    """Compute, bytes behind it, messages one after the other: each is the longest on some links."""

    def step(link: Link) -> float:
        rate, delay = link
        return max(2.0, 0.5 + 30 / rate, 1.0 + 0.4 * delay) + 0.01 * delay

    planes, chance = tangents(step), random.Random(1)
    assert len(planes) == 3
    for _ in range(50):
        link = chance.uniform(0.5, 800), chance.uniform(0, 100)
        assert height(planes, link) == pytest.approx(step(link), rel=1e-3)


def test_a_layout_takes_on_another_link_what_a_plan_for_that_link_says() -> None:
    on = cluster(2, 4)
    case = Case("lab", question(on), on)
    slow, fast = case.fastest("zeropp", (0.5, 0)), case.fastest("zeropp", (400, 0))
    assert slow is not None and fast is not None
    assert case.seconds(fast.layout, (0.5, 0)) >= slow.timing.seconds == case.seconds(slow.layout, (0.5, 0))


@browser
def test_a_browser_says_what_plan_pays_says_at_twenty_links(written: Path, tmp_path: Path) -> None:
    rates, delays = (",".join(map(str, each)) for each in (RATES, DELAYS))
    status, out = plan(tmp_path, 1, *ALONE, "--pays", "--link-rates", rates, "--link-delays", delays)
    planned = json.loads((out / "plan.json").read_text())["pays"]
    assert status == 0 and len(planned) == 20
    links = [{"rate": rate, "delay": delay} for delay, rate in product(DELAYS, RATES)]
    call = "(link) => answer({...question(), ...link})"
    asks = f"document.body.textContent = JSON.stringify({json.dumps(links)}.map({call}))"
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", written.read_text())
    asking = tmp_path / "asking.html"
    asking.write_text(text.replace("</body>", f"<script>{asks}</script></body>"))
    answers = json.loads(html.unescape(shown(asking).split("<body>")[1].split("</body>")[0]))
    off = []
    for each, rows in zip(planned, answers, strict=True):
        found = {row["name"]: row["seconds"] for row in rows}
        asked = {row["name"]: row["seconds"] for row in each["schemes"]}
        assert {*compare.KNOWN, compare.EXACT, "zeropp", compare.OUTER} == {*found}
        off += [abs(found[name] / asked[name] - 1) for name in (*compare.KNOWN, compare.EXACT)]
    assert statistics.median(off) < CLOSE and max(off) < WORST, sorted(off)[-5:]


@browser
def test_a_page_draws_itself_under_its_policy(written: Path) -> None:
    """A script that the policy refuses would leave the table and the chart empty."""
    text = shown(written, "rate=0.5&delay=0")
    assert text.count('class="line"') == 7 and text.count("<td>TP ") == 7
    names(
        text,
        "At 0.5 Gb/s a node zeropp comes to the same loss",
        "FSDP2's step takes",
        "rates: of data sheets",
    )
    hand = shown(written, "shape=sizes%20by%20hand&rate=0.5")
    names(hand, "Scaled from ", 'name="layers"')
