"""For the check of the status page: Chromium, driven by the little of WebDriver that it takes (W3C, over HTTP)."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")  # where both are, there is a check
SWITCHES = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
PATIENCE = 30.0  # seconds, for anything
HASTE = "{const later = setTimeout; window.setTimeout = (what, after, ...more) => later(what, after / 5, ...more)}"


class Browser:
    """One window, whose pages' timers run five times as fast.

    `folder`: for what the browser keeps; a fresh one, so that no other window's doings are in it.
    """

    def __init__(self, folder: Path) -> None:
        self.log, self.session = folder / "driver.log", ""
        with self.log.open("wb") as log:
            self.driver = subprocess.Popen([str(DRIVER), "--port=0"], stdout=log, stderr=log)
        try:
            self.port = self.wait_for_driver()
            options = {"binary": CHROMIUM, "args": [*SWITCHES, f"--user-data-dir={folder}", "--window-size=1400,1000"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            self.session = self.call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
            self.devtools("Page.addScriptToEvaluateOnNewDocument", source=HASTE)
        except BaseException:
            self.close()
            raise

    def wait_for_driver(self) -> int:
        """Until it takes commands; returns the port that it has chosen."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            said = self.log.read_text(encoding="utf-8", errors="replace")
            if started := re.search(r"successfully on port (\d+)", said):
                return int(started[1])
            time.sleep(0.02)
        raise TimeoutError(f"{DRIVER} does not start:\n{said}")

    def call(self, method: str, path: str, body: object = None) -> Any:
        """One command. Raises RuntimeError in the driver's own words."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            value = json.loads(connection.getresponse().read())["value"]
        finally:
            connection.close()
        if isinstance(value, dict) and "error" in value:
            raise RuntimeError(f"{value['error']}: {value['message']}")
        return value

    def tell(self, command: str, body: object) -> Any:
        """A command for the window."""
        return self.call("POST", f"/session/{self.session}/{command}", body)

    def open(self, url: str) -> None:
        """Load a page."""
        self.tell("url", {"url": url})

    def run(self, script: str, *arguments: object) -> Any:
        """What a script of the page returns."""
        return self.tell("execute/sync", {"script": script, "args": arguments})

    def until(self, condition: str, *arguments: object) -> None:
        """Wait until an expression of the page is true."""
        until = time.monotonic() + PATIENCE
        while not self.run(f"return Boolean({condition})", *arguments):
            if time.monotonic() > until:
                shown = self.run("return document.body.innerText")
                raise AssertionError(f"never true: {condition}; the page shows\n{shown}")
            time.sleep(0.03)

    def devtools(self, command: str, **parameters: object) -> Any:
        """A command of Chromium's own: screen sizes, colour schemes."""
        return self.tell("goog/cdp/execute", {"cmd": command, "params": parameters})

    def complaints(self) -> list[str]:
        """What the page's console says: errors of scripts, of loading, of the security policy."""
        return [entry["message"] for entry in self.tell("se/log", {"type": "browser"})]

    def close(self) -> None:
        """End the window and the driver."""
        try:
            if self.session:
                self.call("DELETE", f"/session/{self.session}")
        finally:
            self.driver.terminate()
            self.driver.wait(PATIENCE)
