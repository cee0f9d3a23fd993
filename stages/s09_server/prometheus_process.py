"""For checks: a real Prometheus, where it is installed, that scrapes one server of this machine four times a second."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import httpx

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")


class PrometheusProcess:
    """It is gone after the `with` block, and scrapes five seconds after its beginning at the earliest.

    target: the server's address. folder: for its data, and for what it says.
    """

    def __init__(self, target: str, folder: Path) -> None:
        scrape = {
            "job_name": "stepinfer",
            "scrape_interval": "250ms",
            "scrape_timeout": "250ms",
            "static_configs": [{"targets": [target.removeprefix("http://")]}],
        }
        config = folder / "prometheus.yml"
        config.write_text(json.dumps({"scrape_configs": [scrape]}), encoding="utf-8")  # JSON is YAML
        self.log = folder / "log"
        self.client = httpx.Client(timeout=10)
        command = [PROMETHEUS, f"--config.file={config}", "--web.listen-address=127.0.0.1:0"]
        command += [f"--storage.tsdb.path={folder / 'data'}"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([*map(str, command)], stdout=log, stderr=log)

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series that the expression gives now; none while it is starting."""
        listens = re.search(r'Listening on".* address=(\S+)', self.log.read_text(encoding="utf-8"))
        if listens is None:
            return []
        answer = self.client.get(f"http://{listens[1]}/api/v1/query", params={"query": expression})
        if answer.status_code == 503:
            return []
        answer.raise_for_status()
        return [(series["metric"], float(series["value"][1])) for series in answer.json()["data"]["result"]]

    def wait_for(self, expression: str, seconds: float = 60.0) -> list[tuple[dict[str, str], float]]:
        """What an expression gives, once it gives something: not while scrapes fail. Raises TimeoutError."""
        deadline = time.monotonic() + seconds
        while not (series := self.query(expression)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{expression} gives nothing in {seconds} s")
            time.sleep(0.05)
        return series

    def __enter__(self) -> PrometheusProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.client.close()
