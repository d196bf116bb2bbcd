"""A headless Chromium, driven over its debugging pipe: no driver and no library beside the browser itself.

Promises: the browser is looked for under its usual names; it has a profile of its own and ends with the test.
Must not know: any page.
"""

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
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 30.0
CODES = {"Enter": 13, "Escape": 27, "ArrowUp": 38, "ArrowDown": 40, "Tab": 9}

# The least contrast of text with what lies behind it, by the formula of WCAG 2: 4.5 is its level AA.
CONTRAST = """(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (text) => rgb(text).slice(0, 3).map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if ((rgb(colour)[3] ?? 1) > 0) return colour;
    }
  };
  const ratios = [...document.querySelectorAll("body *")]
    .filter((node) => node.checkVisibility() && [...node.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
    .map((node) => [light(getComputedStyle(node).color), light(behind(node))].sort((a, b) => b - a))
    .map(([high, low]) => (high + 0.05) / (low + 0.05));
  return Math.min(...ratios);
})()"""


def find() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """`with Browser() as browser: browser.open(url); browser.run("document.title")`. One page at a time."""

    def __init__(self, *, width: int = 1200, height: int = 800, dark: bool = False, still: bool = False) -> None:
        self._size = (width, height)
        self._dark, self._still = dark, still  # `still`: its user wants no motion
        self._last_id = 0
        self._buffer = b""
        self.complaints: list[str] = []  # what the page logged as an error, exceptions included
        self.requested: list[str] = []  # addresses

    def __enter__(self) -> Browser:
        path = find()
        assert path is not None
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
        quiet = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio")
        # The browser expects its pipe as the descriptors 3 and 4.
        command = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        arguments = (*flags, *quiet, f"--user-data-dir={self._profile.name}", "--remote-debugging-pipe", "about:blank")
        self._process = subprocess.Popen(
            ["bash", "-c", command, path, *arguments],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        target = self._ask("Target.createTarget", {"url": "about:blank"}, session=None)["targetId"]
        attached = self._ask("Target.attachToTarget", {"targetId": target, "flatten": True}, session=None)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")
        self.resize(*self._size)
        self.prefer(dark=self._dark)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._ask("Emulation.setDeviceMetricsOverride", size)

    def open(self, url: str) -> None:
        self._ask("Page.navigate", {"url": url})
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page; promises are awaited."""
        asked = {"expression": script, "returnByValue": True, "awaitPromise": True, "userGesture": True}
        reply = self._ask("Runtime.evaluate", asked)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def until(self, script: str, seconds: float = PATIENCE) -> None:
        """Waits until the expression is true."""
        deadline = time.monotonic() + seconds
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < deadline, f"never true: {script}\n{self.run('document.body.innerText')}"
            time.sleep(0.02)

    def type(self, selector: str, text: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self._ask("Input.insertText", {"text": text})

    def press_enter(self) -> None:
        self.press("Enter")

    def press(self, key: str, *, shift: bool = False) -> None:
        """A key that is no letter, by its name in the DOM."""
        sent: dict[str, object] = {"key": key, "code": key, "windowsVirtualKeyCode": CODES[key], "modifiers": 8 * shift}
        if key == "Enter":
            sent["text"] = "\r"
        for kind in ("keyDown", "keyUp"):
            self._ask("Input.dispatchKeyEvent", {"type": kind, **sent})

    def be_offline(self, is_offline: bool) -> None:
        """Takes the page's network away, or gives it back."""
        rates = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        self._ask("Network.emulateNetworkConditions", {"offline": is_offline, **rates})

    def prefer(self, *, dark: bool) -> None:
        """Sets the colour scheme of the browser's user."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        motion = {"name": "prefers-reduced-motion", "value": "reduce" if self._still else "no-preference"}
        self._ask("Emulation.setEmulatedMedia", {"features": [scheme, motion]})

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def picture(self) -> bytes:
        """The whole page as PNG."""
        shot = self._ask("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True})
        return base64.b64decode(shot["data"])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(self.picture())

    def _ask(self, method: str, params: dict[str, Any] | None = None, session: str | None = "") -> dict[str, Any]:
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params or {}}
        if session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._next()
            if reply.get("id") == self._last_id:
                assert "error" not in reply, (method, reply)
                result: dict[str, Any] = reply["result"]
                return result
            self._note(reply)

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            readable, _, _ = select.select([self._read], [], [], max(deadline - time.monotonic(), 0))
            assert readable, "the browser is silent"
            part = os.read(self._read, 1 << 20)
            assert part, "the browser has ended"
            self._buffer += part
        first, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif event.get("method") == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
