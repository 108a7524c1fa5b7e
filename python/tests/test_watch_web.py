"""`ironhorse watch --web` in a real browser: open, switch runs, hover, zoom, reload during a run, files.

Needs IRONHORSE_BIN. The tests that need a browser are skipped without a Chromium (Debian: `apt install chromium`).
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cli
import pytest
from browser import Browser
from cli import assert_could_not_run, ironhorse

SIZES = "hidden=24,layers=2,heads=4,kv_heads=2,experts=3,top_k=2,ffn=20,vocab=256,context=32,rope_alpha=2"
FLAGS = ["--batch", 2, "--seq", 16, "--val-every", 4, "--sample-every", 5, "--sample-tokens", 8, "--device", "cpu"]
# where pictures of the page are left to be looked at
PICTURES = os.environ.get("IRONHORSE_PICTURES")


class Server(cli.Server):
    """`ironhorse watch --web`."""

    def __init__(self, *flags: object, cwd: Path | None = None) -> None:
        super().__init__("watch", "--web", *flags, cwd=cwd)
        self.url += "/"

    def get(self, path: str, token: str = "") -> Any:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        request = urllib.request.Request(self.url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


def log_line(step: int, loss: float, **more: object) -> str:
    line = {
        "step": step,
        "loss": loss,
        "lr": 1e-3,
        "grad_norm": 0.5,
        "ms": 20.0,
        "tokens": 512,
        "tokens_per_s": 25600.0,
    }
    return json.dumps({**line, **more}) + "\n"


@pytest.fixture(scope="module")
def top(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small runs of a mixture of experts below runs/, which the tests leave as they are."""
    folder = tmp_path_factory.mktemp("web")
    for name, rate in (("first", 1e-3), ("second", 2e-3)):
        out = folder / "runs" / name
        done = ironhorse("train", "--model", SIZES, *FLAGS, "--steps", 12, "--lr", rate, "--out", out)
        assert done.returncode == 0, done.stderr
    flags = ["--batch", 1, "--seq", 16, "--steps", 1, "--warmup", 0, "--device", "cpu"]
    done = ironhorse("profile", "--model", SIZES, *flags, "--json", folder / "runs" / "second" / "profile.json")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def server(top: Path) -> Iterator[Server]:
    made = Server(cwd=top)
    yield made
    assert made.end() == 0, "SIGTERM ends it in order"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    made = Browser()
    yield made
    made.close()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    chromium.events.clear()
    chromium.look(1280, 900)
    yield chromium
    assert chromium.problems() == []
    chromium.call("Page.navigate", url="about:blank")


def drawn(name: str = "loss") -> str:
    """An expression: the curve is there and something is painted in its colour."""
    return f"""(() => {{
      const plot = plots.find(one => one.id === "{name}");
      if (!plot || plot.card.hidden || !plot.X) return false;
      const g = plot.back.getContext("2d"), data = g.getImageData(0, 0, plot.back.width, plot.back.height).data;
      let coloured = 0;
      for (let i = 0; i < data.length; i += 4) {{
        const [r, g, b, a] = [data[i], data[i + 1], data[i + 2], data[i + 3]];
        if (a && Math.max(r, g, b) - Math.min(r, g, b) > 60) coloured++;
      }}
      return coloured > 100;
    }})()"""


def place(browser: Browser, name: str, part: float, height: float = 0.5) -> tuple[float, float]:
    """Where a point of a curve's canvas is on the screen, the part counted inside of its axes."""
    browser.evaluate(f'document.getElementById("plot-{name}").scrollIntoView({{block: "center"}})')
    box = browser.evaluate(
        f'(() => {{ const p = plots.find(one => one.id === "{name}"), b = p.canvas.getBoundingClientRect(); '
        "return [b.left + p.frame.left, b.left + p.frame.right, b.top, b.height] })()"
    )
    return box[0] + part * (box[1] - box[0]), box[2] + height * box[3]


def test_what_the_page_is_told(server: Server, top: Path):
    said = server.get("api/runs")
    assert sorted(one["name"] for one in said["runs"]) == ["first", "second"]
    told = server.get("api/runs/second")
    once = ironhorse("watch", top / "runs" / "second", "--once").stdout
    for name, text in told["facts"]:
        assert f"{name:<16} {text}" in once, "the same words as in the terminal"
    assert [name for name, _ in told["facts"]][:2] == ["state", "step"] and told["facts"][0][1] == "done"
    assert ["lr", "0.002"] in told["settings"] and told["samples"] == [5, 10, 12]
    assert len(told["router"]) == 2 and len(told["router"][0]) == 3
    assert {"embed", "layers.0", "layers.1"} <= {one["name"] for one in told["profile"]["layers"]}
    log = [json.loads(line) for line in (top / "runs" / "second" / "metrics.jsonl").read_text().splitlines()]
    (curve,) = server.get("api/curves?run=second&quantity=loss")["curves"]
    assert curve["x"] == list(range(12)) and curve["y"] == pytest.approx([line["loss"] for line in log], rel=1e-6)


def test_other_addresses_need_a_token(top: Path, tmp_path: Path):
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for flags, expected in (
        (["--listen", "0.0.0.0:0"], "--token-file"),
        (["--listen", "192.0.2.1:0"], "--token-file"),
        (["--listen", "0.0.0.0:0", "--token-file", empty], "--token is empty"),
        (["--token-file", tmp_path / "none"], "cannot read --token-file"),
        (["--listen", "here"], "invalid"),
        (["--once"], "--once"),
        ([tmp_path], "without metrics.jsonl"),
    ):
        done = ironhorse("watch", "--web", *flags)
        assert_could_not_run(done)
        assert expected in done.stderr, done.stderr
    done = ironhorse("watch", "--listen", "127.0.0.1:0")
    assert_could_not_run(done)
    assert "--web" in done.stderr


def test_a_page_opens_and_compares_runs(browser: Browser, server: Server):
    browser.go(server.url)
    browser.wait(drawn())
    assert browser.evaluate("page.chosen") == ["second"], "the newest"
    browser.wait("document.getElementById('live').textContent === 'live'")
    # the other run beside it
    browser.evaluate("document.querySelector('#runs input[value=first]').click()")
    browser.wait("plots[0].series.length === 4 && page.told.first !== undefined")
    labels = browser.evaluate("plots[0].series.map(one => one.label)")
    assert labels == ["second training", "second validation", "first training", "first validation"]
    head = browser.evaluate("[...document.querySelectorAll('#figures th')].map(one => one.textContent)")
    assert head == ["second", "first"]
    rows = browser.evaluate(
        "[...document.querySelectorAll('#settings tr.differs td:first-child')].map(e => e.textContent)"
    )
    assert "lr" in rows and "batch" not in rows
    first = browser.evaluate("document.querySelector('#settings tr:nth-child(2)').className")
    assert first == "differs", "what differs comes first"
    # and alone
    browser.evaluate("document.querySelector('#runs input[value=second]').click()")
    browser.wait("plots[0].series.length === 2 && plots[0].series[0].name === 'first'")
    assert "run=first" in browser.evaluate("location.hash")


def test_hover_zoom_smoothing_and_axes(browser: Browser, server: Server, top: Path):
    browser.go(server.url + "#run=second")
    browser.wait(drawn())
    log = [json.loads(line) for line in (top / "runs" / "second" / "metrics.jsonl").read_text().splitlines()]
    browser.mouse("mouseMoved", *place(browser, "loss", 0.5))
    text = browser.wait("!document.getElementById('tip').hidden && document.getElementById('tip').textContent")
    found = re.match(
        r"training ([0-9.]+), mean ([0-9.]+) at step ([0-9]+)\nvalidation ([0-9.]+) at step ([0-9]+)", text
    )
    assert found, text
    step = int(found[3])
    assert step in (5, 6) and float(found[1]) == pytest.approx(log[step]["loss"], rel=1e-3)
    assert float(found[4]) == pytest.approx(log[int(found[5])]["val_loss"], rel=1e-3)
    browser.mouse("mouseMoved", 5, 5)
    browser.wait("document.getElementById('tip').hidden")
    # a part of the steps
    browser.drag(place(browser, "loss", 3 / 11), place(browser, "loss", 7 / 11))
    browser.wait("page.zoom && plots[0].series[0].curve.x.length < 8")
    zoom = browser.evaluate("page.zoom")
    assert 2 <= zoom[0] <= 3 and 7 <= zoom[1] <= 8, zoom
    assert browser.evaluate("plots.every(one => one.card.hidden || one.series[0].curve.x[0] >= 2)"), (
        "all curves together"
    )
    assert "from=" in browser.evaluate("location.hash")
    browser.evaluate("document.getElementById('out').click()")
    browser.wait("plots[0].series[0].curve.x.length > 5")
    at = place(browser, "loss", 0.5)
    for clicks in (1, 2):
        browser.mouse("mousePressed", *at, clicks)
        browser.mouse("mouseReleased", *at, clicks)
    browser.wait("page.zoom === null && plots[0].series[0].curve.x.length === 12")
    # axes and smoothing
    browser.evaluate("document.getElementById('logy').click(); document.getElementById('logx').click()")
    browser.wait(drawn())
    middle = browser.evaluate("plots[0].step((plots[0].frame.left + plots[0].frame.right) / 2)")
    assert middle == pytest.approx(math.sqrt(12) - 1, rel=0.02), "equal factors have the same room"
    browser.evaluate(
        "(() => { const s = document.getElementById('smooth'); s.value = '0'; s.dispatchEvent(new Event('change')) })()"
    )
    browser.wait("plots[0].series[0].curve.smooth_x === undefined")
    # keys
    browser.evaluate("plots[0].canvas.focus()")
    for key in ("ArrowLeft", "+"):
        browser.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=key if len(key) == 1 else "")
        browser.call("Input.dispatchKeyEvent", type="keyUp", key=key)
    browser.wait("page.zoom !== null")
    # what was chosen is there after a reload
    browser.call("Page.reload")
    browser.wait("typeof page !== 'undefined' && page.logy && page.logx && page.share === 0 && page.zoom !== null")
    browser.wait(drawn())


def test_samples_experts_and_profile(browser: Browser, server: Server, top: Path):
    browser.go(server.url + "#run=second")
    folder = top / "runs" / "second" / "samples"
    texts = {int(file.stem[5:]): file.read_bytes().decode(errors="replace") for file in folder.iterdir()}
    shown = "document.getElementById('sample').textContent"
    browser.wait(f"{shown} === {json.dumps(texts[12])}")
    browser.evaluate("document.getElementById('older').click()")
    browser.wait(f"{shown} === {json.dumps(texts[10])}")
    assert "after 10 steps, 2 of 3" in browser.evaluate("document.getElementById('after').textContent")
    browser.evaluate("at('which').value = 0; at('which').dispatchEvent(new Event('input'))")
    browser.wait(f"{shown} === {json.dumps(texts[5])}")
    # the busiest expert of the first layer
    loads = json.loads((top / "runs" / "second" / "metrics.jsonl").read_text().splitlines()[-1])["router"][0]["load"]
    cell = browser.evaluate(
        "(() => { const c = document.querySelector('#experts canvas'); c.scrollIntoView({block: 'center'}); "
        "const b = c.getBoundingClientRect(), { left, room, cell } = c.cells; "
        "return [b.left + left, b.top + 18, room, cell] })()"
    )
    for expert, load in enumerate(loads):
        browser.mouse("mouseMoved", cell[0] + cell[2] * (expert + 0.5), cell[1] + cell[3] / 2)
        said = browser.wait("!document.getElementById('tip').hidden && document.getElementById('tip').textContent")
        assert said.startswith(f"layer 0, expert {expert}: {100 * load / sum(loads):.2f} %"), said
    # the second layer over the steps: every logged step is a column
    lines = [json.loads(line) for line in (top / "runs" / "second" / "metrics.jsonl").read_text().splitlines()]
    over = {line["step"]: line["router"][1]["load"] for line in lines if line.get("router")}
    browser.evaluate("at('layer').value = '1'; at('layer').dispatchEvent(new Event('change'))")
    left, top_, room, line, columns = browser.wait(
        "(() => { const c = document.querySelector('#experts canvas'), b = c.getBoundingClientRect(); "
        "const { left, room, line, over } = c.cells; "
        "return over && [b.left + left, b.top + 18, room, line, over.steps.length] })()"
    )
    assert columns == len(over)
    for step, loads in list(over.items())[:: max(1, len(over) // 3)]:
        for expert, load in enumerate(loads):
            browser.mouse("mouseMoved", left + room * (step - min(over) + 0.5), top_ + line * (expert + 0.5))
            tip, wanted = "document.getElementById('tip').textContent", f"step {step}, expert {expert}: "
            said = browser.wait(f"{tip}.startsWith({json.dumps(wanted)}) && {tip}")
            percent = float(said.removeprefix(wanted).split(" %")[0])
            assert percent == pytest.approx(100 * load / sum(loads), abs=0.0051), said
    browser.evaluate("at('layer').value = ''; at('layer').dispatchEvent(new Event('change'))")
    browser.wait("!document.querySelector('#experts canvas').cells.over")
    assert not browser.evaluate("document.getElementById('profile').hidden")
    assert "ms" in browser.evaluate("document.querySelector('#profile h2 small').textContent")
    browser.go(server.url + "#run=first")
    browser.wait("document.getElementById('profile').hidden && !document.getElementById('experts').hidden")


def test_files_to_keep(browser: Browser, server: Server, tmp_path: Path):
    browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    browser.go(server.url + "#run=second&from=2&to=6")
    browser.wait(drawn())
    browser.evaluate("document.getElementById('csv').click()")
    browser.evaluate("document.querySelector('#plot-loss button').click()")
    until = time.monotonic() + 30
    wanted = {"second.csv", "second-loss.png"}
    while {one.name for one in tmp_path.iterdir()} != wanted:
        assert time.monotonic() < until, list(tmp_path.iterdir())
        time.sleep(0.05)
    rows = (tmp_path / "second.csv").read_text().splitlines()
    assert rows[0].startswith("step,loss,val_loss,") and [row.split(",")[0] for row in rows[1:]] == [
        "2",
        "3",
        "4",
        "5",
        "6",
    ]
    assert (tmp_path / "second-loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_goes_on_and_a_reload(browser: Browser, tmp_path: Path):
    run = tmp_path / "runs" / "live"
    run.mkdir(parents=True)
    (run / "config.toml").write_text("steps = 1000\n")
    log = (run / "metrics.jsonl").open("w")
    log.write("".join(log_line(step, 5 - step / 100) for step in range(20)))
    log.flush()
    server = Server(cwd=tmp_path)
    try:
        browser.go(server.url)
        browser.wait("page.told.live && page.told.live.made === 20")
        browser.wait("plots[0].series && plots[0].series[0].curve.x.length === 20")
        log.write("".join(log_line(step, 5 - step / 100) for step in range(20, 30)))
        log.flush()
        browser.wait("page.told.live.made === 30 && plots[0].series[0].curve.x.length === 30")
        assert browser.evaluate(
            "[...document.querySelectorAll('#figures td')].some(one => one.textContent === '30 of 1,000')"
        )
        # half a line, then a reload, then the rest of it
        line = log_line(30, 4.0)
        log.write(line[:30])
        log.flush()
        browser.call("Page.reload")
        browser.wait("typeof page !== 'undefined' && page.told.live && page.told.live.made === 30")
        log.write(line[30:])
        log.flush()
        browser.wait("page.told.live.made === 31 && plots[0].series[0].curve.x.length === 31")
        # another run begins, and appears in the list
        other = tmp_path / "runs" / "<b>other"
        other.mkdir()
        (other / "metrics.jsonl").write_text(log_line(0, 1.0))
        browser.wait("[...document.querySelectorAll('#runs b')].some(one => one.textContent === '<b>other')")
        # the server goes, and comes back
        server.end()
        browser.wait("document.getElementById('live').classList.contains('lost')")
        port = server.url.rsplit(":", 1)[1].strip("/")
        server.process = subprocess.Popen(
            [os.environ["IRONHORSE_BIN"], "watch", "--web", "--listen", f"127.0.0.1:{port}"], cwd=tmp_path
        )
        browser.wait("document.getElementById('live').textContent === 'live'")
        # what the network says while the server is away is no fault of the page
        browser.events = [one for one in browser.events if "ERR_" not in json.dumps(one)]
    finally:
        log.close()
        server.end()


def test_the_token_is_asked_for(browser: Browser, top: Path, tmp_path: Path):
    (tmp_path / "token").write_text("a-token-of-the-test\n")
    server = Server("--token-file", tmp_path / "token", cwd=top)
    try:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            server.get("api/runs", "another")
        assert len(server.get("api/runs", "a-token-of-the-test")["runs"]) == 2
        browser.go(server.url)
        browser.wait("!document.getElementById('ask').hidden")
        assert browser.evaluate("document.getElementById('all').hidden")
        browser.evaluate("document.getElementById('token').value = 'a-token-of-the-test'")
        browser.evaluate("document.getElementById('ask').requestSubmit()")
        browser.wait(drawn())
        assert browser.evaluate("document.getElementById('ask').hidden")
        browser.evaluate("sessionStorage.clear()")
        browser.go("about:blank")
        browser.go(server.url + "#token=a-token-of-the-test")
        browser.wait(drawn())
        assert "token" not in browser.evaluate("location.href"), "it is not left in the address"
        browser.events = [one for one in browser.events if "401" not in json.dumps(one)]
    finally:
        assert server.end() == 0


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", [(390, 844), (1280, 900)])
def test_phones_and_desktops_light_and_dark(
    browser: Browser, server: Server, size: tuple[int, int], dark: bool, tmp_path: Path
):
    browser.look(*size, dark=dark, scale=2 if size[0] < 600 else 1)
    browser.go(server.url + "#run=second&run=first")
    browser.wait(drawn())
    browser.wait("plots[0].series.length === 4")
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is wider than the screen"
    back = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(15, 20, 32)") == dark, back
    small = browser.evaluate(
        "[...document.querySelectorAll('button, select')].filter(e => e.offsetParent)"
        ".filter(e => e.getBoundingClientRect().height < 24).length"
    )
    assert small == 0, "fingers can meet every button"
    folder = Path(PICTURES) if PICTURES else tmp_path
    picture = folder / f"web-{size[0]}-{'dark' if dark else 'light'}.png"
    browser.picture(picture)
    assert picture.stat().st_size > 10_000


def test_a_million_steps(browser: Browser, tmp_path: Path):
    run = tmp_path / "runs" / "long"
    run.mkdir(parents=True)
    steps = 1_000_000
    with (run / "metrics.jsonl").open("w") as log:
        for step in range(steps):
            log.write(log_line(step, 9.5 if step == 654_321 else 2 + 3 / (1 + step / 2e4)))
    server = Server(cwd=tmp_path)
    try:
        began = time.monotonic()
        browser.go(server.url)
        browser.wait(drawn())
        opened = time.monotonic() - began
        points = browser.evaluate("plots[0].series[0].curve.x.length")
        assert points <= 4 * 1400
        assert browser.evaluate("plots[0].series[0].curve.x.indexOf(654321) >= 0"), "the spike is there"
        frames = browser.evaluate("""(async () => {
          const began = performance.now();
          for (let i = 0; i < 20; i++) {
            hover = 5e4 * i;
            plots.forEach(plot => plot.card.hidden || overlay(plot));
            await new Promise(then => requestAnimationFrame(then));
          }
          return (performance.now() - began) / 20;
        })()""")
        began = time.monotonic()
        browser.evaluate("zoom(654000, 655000)")
        browser.wait("plots[0].series[0].curve.x.length === 1001")
        zoomed = time.monotonic() - began
        print(f"opened in {opened:.2f} s with {points} points, {frames:.1f} ms a frame, zoomed in {zoomed:.2f} s")
        # the goal is 1 s on a machine that is free; a test must not depend on how busy it is
        assert opened < 20 and zoomed < 20
    finally:
        server.end()
