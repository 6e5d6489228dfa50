"""Headless Chromium, controlled by the DevTools protocol over two pipes, for tests of the page and
pictures of the docs. Needs no package; `find_browser` returns its path if installed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from pentad.runtime.process import Child

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking"),
    *("--hide-scrollbars", "--force-color-profile=srgb", "--disable-dev-shm-usage"),
)


def find_browser() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class PageError(Exception):
    """An error from the browser or from a script on the page."""


class Browser:
    """One page in a separate browser process; a context manager."""

    def __init__(self, program: str, *, timeout_s: float = 60.0) -> None:
        self.timeout_s = timeout_s
        self.events: list[dict[str, Any]] = []
        self._number = 0
        self._rest = b""
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command = [program, *OPTIONS, f"--user-data-dir={self._profile.name}", "about:blank"]
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # The protocol uses file descriptors 3 and 4, which a shell can set.
        moved = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "browser", *command]
        self._child = Child.start(
            moved, pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        os.set_blocking(self._in, False)
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._child.end()
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a protocol method and returns its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + self.timeout_s
        while True:
            found = self._receive(end)
            if found.get("id") == self._number:
                if "error" in found:
                    raise PageError(f"{method}: {found['error'].get('message')}")
                return dict(found["result"])
            self.events.append(found)

    def _receive(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            try:
                data = os.read(self._in, 1 << 20)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise PageError(f"no answer within {self.timeout_s:g} s") from None
                time.sleep(0.01)
                continue
            if not data:
                raise PageError("the browser ended")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(line))

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)

    def run(self, script: str) -> Any:
        """Evaluates an expression on the page, awaits it and returns its value."""
        found = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise PageError(details.get("exception", {}).get("description", details["text"]))
        return found["result"].get("value")

    def wait_for(self, script: str, timeout_s: float = 60.0) -> None:
        """Waits until the expression is true on the page."""
        end = time.monotonic() + timeout_s
        while not self.run(f"Boolean({script})"):
            if time.monotonic() > end:
                text = self.run("document.body.innerText.slice(0, 500)")
                raise PageError(f"{script}: not within {timeout_s:g} s; the page says: {text}")
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """Presses a key by its name, such as Tab or ArrowLeft."""
        code = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text
            )

    def resize(self, width: int, height: int, *, scale: float = 1.0) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )

    def set_dark(self, is_dark: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def picture(self, path: Path, *, is_whole: bool = False) -> None:
        """Saves a PNG of the window, or of the whole page."""
        given: dict[str, Any] = {"captureBeyondViewport": True} if is_whole else {}
        if is_whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            given["clip"] = {"x": 0, "y": 0, **_size(size), "scale": 1}
        found = self.call("Page.captureScreenshot", format="png", **given)
        path.write_bytes(base64.b64decode(found["data"]))

    def faults(self) -> list[str]:
        """Exceptions and errors reported by the page so far."""
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                found.append(details.get("exception", {}).get("description", details["text"]))
            entry = params.get("entry", {})
            if event.get("method") == "Log.entryAdded" and entry.get("level") == "error":
                found.append(str(entry.get("text")))
        return found


def _size(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: metrics[name] for name in ("width", "height")}
