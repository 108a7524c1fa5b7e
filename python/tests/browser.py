"""A headless Chromium, driven over a pipe by the DevTools protocol: no package and no port is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE = 30.0


def program() -> str:
    """The browser of this machine; the test that asks is skipped where there is none."""
    for name in (os.environ.get("IRONHORSE_CHROMIUM"), *NAMES):
        found = name and shutil.which(name)
        if found:
            return found
    pytest.skip("there is no Chromium: `apt install chromium`, or name one by IRONHORSE_CHROMIUM")


class Browser:
    """The browser with one page."""

    def __init__(self) -> None:
        chromium = program()
        self.folder = Path(tempfile.mkdtemp(prefix="ironhorse-browser-"))
        (to_browser, self.out), (self.into, from_browser) = os.pipe(), os.pipe()
        # Chromium reads its file 3 and writes to its file 4; ours are moved out of the way before
        ours = [os.dup(one) for one in (to_browser, from_browser)]

        def place() -> None:
            high = [os.dup(one) for one in ours]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--disable-background-networking", "--disable-component-update", "--hide-scrollbars"]
        flags += ["--remote-debugging-pipe", f"--user-data-dir={self.folder / 'profile'}", "about:blank"]
        self.log = (self.folder / "log").open("wb")
        # HOME: Chromium writes crash reports and settings there
        self.process = subprocess.Popen(
            [chromium, *flags],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            pass_fds=(3, 4),
            preexec_fn=place,
            env={**os.environ, "HOME": str(self.folder)},
        )
        for one in (to_browser, from_browser, *ours):
            os.close(one)
        self.rest, self.number, self.session = b"", 0, None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def _read(self, until: float) -> dict[str, Any]:
        while b"\0" not in self.rest:
            left = until - time.monotonic()
            ready = left > 0 and select.select([self.into], [], [], left)[0]
            piece = os.read(self.into, 1 << 20) if ready else b""
            if not piece:
                pytest.fail("the browser does not answer: " + (self.folder / "log").read_text(errors="replace")[-2000:])
            self.rest += piece
        message, self.rest = self.rest.split(b"\0", 1)
        said: dict[str, Any] = json.loads(message)
        if "method" in said:
            self.events.append(said)
        return said

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": params}
        if self.session and not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + PATIENCE
        while True:
            said = self._read(until)
            if said.get("id") == self.number:
                assert "error" not in said, (method, said["error"])
                result: dict[str, Any] = said["result"]
                return result

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, or of the promise it gives."""
        said = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in said, (expression, said["exceptionDetails"])
        return said["result"].get("value")

    def wait(self, expression: str, seconds: float = PATIENCE) -> Any:
        """Waits until an expression is true; gives its value."""
        until = time.monotonic() + seconds
        while True:
            value = self.evaluate(expression)
            if value or time.monotonic() > until:
                assert value, f"{expression} is not true after {seconds} s: {self.problems()}"
                return value
            time.sleep(0.05)

    def look(self, width: int, height: int, *, dark: bool = False, scale: float = 1) -> None:
        """The size of the window, and whether the system is dark."""
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def mouse(self, kind: str, x: float, y: float, clicks: int = 0) -> None:
        button = {} if kind == "mouseMoved" and not clicks else {"button": "left", "buttons": 1, "clickCount": clicks}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        self.mouse("mousePressed", *start, 1)
        for part in (0.3, 0.6, 1.0):
            x, y = (a + (b - a) * part for a, b in zip(start, end, strict=True))
            self.mouse("mouseMoved", x, y, 1)
        self.mouse("mouseReleased", *end, 1)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        said = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(said["data"]))

    def problems(self) -> list[str]:
        """What went wrong on the page: exceptions, errors of the console, what its policy forbade."""
        found = []
        for event in self.events:
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(event["params"]["exceptionDetails"]))
            if event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                found.append(json.dumps(event["params"]["entry"]))
        return found

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for one in (self.out, self.into):
            os.close(one)
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)
