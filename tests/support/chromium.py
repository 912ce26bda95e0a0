"""A headless Chromium that opens local files: what it shows, what it complains of, and pictures of it.

It is driven by the DevTools protocol over a pair of pipes (``--remote-debugging-pipe``), which needs no package and no
open port. Only what a page's tests need is here.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_SECONDS = 60.0
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # containers lack what the sandbox is made of; the pages are our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
    # Whatever a page asks of the network finds nobody.
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
# The browser reads commands from descriptor 3 and answers on 4, whatever they were before.
_LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_chromium() -> str | None:
    """Return the path of a Chromium, or None if there is none; ``CHROMIUM`` in the environment names one."""
    return os.environ.get("CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass
class Page:
    """One open page.

    Attributes
    ----------
    context
        What it shares with no other page.
    complaints
        Errors and warnings of the console, exceptions, and requests that failed, as text.
    requests
        The addresses that it asked for, its own first.
    """

    _browser: Browser
    _session: str
    context: str
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def open(self, path: Path) -> None:
        """Open a file and wait until it is loaded and drawn."""
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=path.as_uri())
        loaded = f"document.readyState === 'complete' && location.href === {json.dumps(path.as_uri())}"
        self._browser.wait(lambda: self.run(loaded))
        self.settle()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return what it answers."""
        return self._browser.call(method, params, self._session)

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def settle(self) -> None:
        """Wait until two frames were drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def resize(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Show the page on a screen of this width, in CSS pixels, with a preference for light or dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.settle()

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key."""
        modifiers = 8 if shift else 0
        codes = {"Tab": 9, "Enter": 13, "ArrowRight": 39, "ArrowDown": 40, "ArrowLeft": 37, "ArrowUp": 38, " ": 32}
        facts = {"key": key, "windowsVirtualKeyCode": codes[key], "modifiers": modifiers}
        if key in ("Enter", " "):
            facts["text"] = "\r" if key == "Enter" else " "
        self.call("Input.dispatchKeyEvent", type="keyDown", **facts)
        self.call("Input.dispatchKeyEvent", type="keyUp", **facts)
        self.settle()

    def type(self, text: str) -> None:
        """Type a text where the focus is."""
        self.call("Input.insertText", text=text)
        self.settle()

    def screenshot(self, path: Path) -> bytes:
        """Write a picture of the whole page as PNG, and return it."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        data = base64.b64decode(answer["data"])
        path.write_bytes(data)
        return data

    def overflow(self) -> int:
        """Return by how many pixels the page is wider than its window."""
        return int(self.run("document.scrollingElement.scrollWidth - window.innerWidth"))

    def take(self, event: dict[str, Any]) -> None:
        """Take an event of the page."""
        method, params = event["method"], event.get("params", {})
        if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(f"console: {[argument.get('value') for argument in params['args']]}")
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(f"exception: {params['exceptionDetails']}")
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"log: {params['entry']['text']}")
        elif method == "Network.loadingFailed":
            self.complaints.append(f"request failed: {params}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Page.javascriptDialogOpening":
            self.complaints.append(f"dialog: {params['message']}")


class Browser:
    """A running Chromium. Made by `chromium`."""

    def __init__(self, process: subprocess.Popen[bytes], to_browser: int, from_browser: int) -> None:
        self._process = process
        self._to, self._from = to_browser, from_browser
        self._rest = b""
        self._number = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._pages: dict[str, Page] = {}

    def new_page(self) -> Page:
        """Open a blank page that shares nothing with others, such as what they stored."""
        context = self.call("Target.createBrowserContext", {})["browserContextId"]
        target = self.call("Target.createTarget", {"url": "about:blank", "browserContextId": context})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        self._pages[session] = Page(self, session, context)
        return self._pages[session]

    def close(self, page: Page) -> None:
        """Close a page."""
        self.call("Target.disposeBrowserContext", {"browserContextId": page.context})

    def call(self, method: str, params: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        self.wait(lambda: number in self._answers, poll=False)
        answer = self._answers.pop(number)
        if "error" in answer:
            raise AssertionError(f"{method}: {answer['error']}")
        found: dict[str, Any] = answer["result"]
        return found

    def wait(self, condition: Any, *, poll: bool = True) -> None:
        """Read what the browser says until a condition holds."""
        until = time.monotonic() + _SECONDS
        while not condition():
            if time.monotonic() > until or self._process.poll() is not None:
                raise AssertionError(f"Chromium does not answer (exit code {self._process.poll()})")
            if poll:
                time.sleep(0.02)
            else:
                self._read()

    def _read(self) -> None:
        if not select.select([self._from], [], [], 1.0)[0]:
            return
        self._rest += os.read(self._from, 1 << 20)
        *messages, self._rest = self._rest.split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            elif message.get("sessionId") in self._pages:
                self._pages[message["sessionId"]].take(message)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Run a Chromium with a profile of its own, which is gone afterwards."""
    path = find_chromium()
    assert path is not None, "there is no Chromium: install the package `chromium`, or name one in CHROMIUM"
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    with tempfile.TemporaryDirectory(prefix="mergepipe-chromium-", ignore_cleanup_errors=True) as profile:
        command = [path, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, str(to_read), str(from_write), *command],
            pass_fds=(to_read, from_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": profile},
        )
        os.close(to_read)
        os.close(from_write)
        try:
            yield Browser(process, to_write, from_read)
        finally:
            os.close(to_write)  # it ends when nobody can command it any more
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(60)
            os.close(from_read)
