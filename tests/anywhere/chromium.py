"""A page in headless Chromium, driven over its debugging pipe."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = "--headless=new --no-sandbox --disable-background-networking --hide-scrollbars --no-first-run"
# WebGPU without a GPU, by Chromium's own renderer
SOFTWARE_GPU = "--enable-unsafe-webgpu --use-webgpu-adapter=swiftshader"


class Page:
    """A tab; ``call`` sends a command of the DevTools protocol."""

    def __init__(self, commands: int, results: int) -> None:
        self._commands, self._results, self._buffer, self._number = commands, results, b"", 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(self, method: str, **params: Any) -> Any:
        """Send a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._buffer:
                self._buffer += os.read(self._results, 1 << 16)
            text, _, self._buffer = self._buffer.partition(b"\0")
            answer = json.loads(text)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def run(self, script: str) -> Any:
        """Return the value of an expression, which may be a promise."""
        done = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait(self, script: str, seconds: float = 120) -> Any:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < end, (
                f"{script} within {seconds} s; the page says {self.run('document.body.innerText')}"
            )
            time.sleep(0.1)
        return value

    def draw(self, selector: str, points: list[tuple[float, float]]) -> None:
        """Draw a line with the mouse through points, which are shares of an element's width and height."""
        box = self.run(f"(({{x, y, width, height}}) => ({{x, y, width, height}}))({_box(selector)})")
        for index, (across, down) in enumerate(points):
            where = {"x": box["x"] + across * box["width"], "y": box["y"] + down * box["height"]}
            if index == 0:
                self.call("Input.dispatchMouseEvent", type="mousePressed", button="left", clickCount=1, **where)
            self.call("Input.dispatchMouseEvent", type="mouseMoved", button="left", buttons=1, **where)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", button="left", clickCount=1, **where)

    def picture(self, path: Path, width: int) -> None:
        """Take a picture of the whole page at a width."""
        size = {"width": width, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", height=600, **size)
        height = self.run("document.documentElement.scrollHeight")
        self.call("Emulation.setDeviceMetricsOverride", height=height, **size)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
        self.call("Emulation.clearDeviceMetricsOverride")


def _box(selector: str) -> str:
    return f"document.querySelector({selector!r}).getBoundingClientRect()"


@contextlib.contextmanager
def page(url: str, flags: str = "--disable-gpu") -> Iterator[Page]:
    """Open a page in a browser of its own."""
    assert CHROMIUM is not None
    (read_commands, commands), (results, write_results) = os.pipe(), os.pipe()

    def connect() -> None:  # Chromium reads 3 and writes 4
        first, second = os.dup(read_commands), os.dup(write_results)
        os.dup2(first, 3)
        os.dup2(second, 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, *FLAGS.split(), *flags.split(), "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        process = subprocess.Popen(command, close_fds=False, preexec_fn=connect, stderr=subprocess.DEVNULL)
        try:
            tab = Page(commands, results)
            tab.call("Page.enable")
            tab.call("Page.navigate", url=url)
            yield tab
        finally:
            process.kill()
            process.wait()
            for handle in (read_commands, commands, results, write_results):
                os.close(handle)
