"""Headless Chromium in tests, by its DevTools protocol and without a network."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helpers import LIMIT, until

COMMAND = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)


class Browser:
    """One page of a browser.

    Args:
        address: of its DevTools.
        folder: of the browser's profile.

    Attributes:
        requested: addresses that pages have requested.
    """

    def __init__(self, address: str, folder: Path) -> None:
        from websockets.sync.client import connect

        self._socket = connect(address, max_size=None, open_timeout=LIMIT)
        self._folder, self._number = folder, 0
        self.requested: list[str] = []
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result; events that arrive meanwhile are read."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            reply = json.loads(self._socket.recv(timeout=LIMIT))
            if reply.get("method") == "Network.requestWillBeSent":
                self.requested.append(reply["params"]["request"]["url"])
            if reply.get("id") == self._number:
                assert "error" not in reply, reply
                return dict(reply["result"])

    def open(self, page: Path, width: int, *, dark: bool = False) -> None:
        """Open a file in a window of a width, and wait until its figures are drawn."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.resolve().as_uri())
        until(lambda: self.value("document.body && document.body.dataset.drawn !== undefined"), self._folder)

    def value(self, expression: str) -> Any:
        """Evaluate JavaScript and return its plain value."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Write a PNG of the whole page."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start a browser without a network, whose profile is in ``folder``."""
    assert COMMAND is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    options += ["--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-port=0", f"--user-data-dir={folder}"]
    process = subprocess.Popen(
        [COMMAND, *options, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        port_file = folder / "DevToolsActivePort"
        until(lambda: port_file.is_file() and port_file.read_text().count("\n") == 1, folder)
        port = port_file.read_text().splitlines()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=LIMIT) as reply:
            pages = [target for target in json.load(reply) if target["type"] == "page"]
        yield Browser(pages[0]["webSocketDebuggerUrl"], folder)
    finally:
        process.terminate()
        process.wait(LIMIT)
