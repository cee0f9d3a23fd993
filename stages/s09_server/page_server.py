"""For the check of the status page: a server with a made-up status, which can want a key, fail, and go away."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from stages.s09_server.block_status import FINDABLE, FREE, SHARED

PAGE = Path(__file__).with_name("status.html").read_text(encoding="utf-8")
MODEL = "<img src=x onerror=alert(1)>"  # what a server says is text, whatever it looks like
NO_KEY = b'{"error": {"message": "no key"}}'
REQUEST = {
    "state": "running", "prompt_tokens": 30, "output_tokens": 12, "token_limit": 90, "kv_tokens": 41,
    "blocks": 3, "cached_tokens": 16, "preemptions": 0, "age": 1.25,
}  # fmt: skip
STATS = {
    "running": 2, "waiting": 1, "kv_blocks_used": 6, "kv_blocks": 40, "preemptions": 3, "queried_tokens": 200,
    "hit_tokens": 50, "drafted": 0, "accepted": 0, "steps": 700, "tokens": 5000, "failed_steps": 0,
}  # fmt: skip
STEP = {"seconds": 0.01, "tokens": 65, "rows": [[7, "decode", 1], [8, "chunk", 64]], "waiting": [9]}
OWNERS = [SHARED, 7, 7, 8, 8, 8, FINDABLE, FINDABLE] + [FREE] * 32


def made_up(uptime: float = 100.0, tokens: int = 5000, **changes: object) -> dict[str, Any]:
    """A status with two requests that run and one that waits."""
    waiting = {"id": 9, "state": "waiting", "kv_tokens": 0}
    return {
        "model": MODEL,
        "uptime": uptime,
        "stats": STATS | {"tokens": tokens},
        "block_size": 16,
        "steps": [STEP | {"number": number, "at": number / 10} for number in range(640, 700)],
        "blocks": {"total": 40, "used": 6, "cached": 2, "free": 32, "every": 1, "owners": OWNERS},
        "requests": [REQUEST | {"id": 7}, REQUEST | {"id": 8}, REQUEST | waiting],
    } | changes


class PageServer:
    """`status`, `code`: its answer to /status. `key`: what it wants to hear, for /status too if `guards_status`.

    To a question it says three words, or goes on for ever, if more than 100 tokens are wanted; `left` is set when
    nobody listens any more.
    """

    def __init__(self) -> None:
        self.status, self.code, self.key, self.guards_status = made_up(), 200, "", True
        self.asked = 0  # times
        self.questions: list[dict[str, Any]] = []
        self.left = threading.Event()
        self.port = 0  # any at first, then the same again
        self.start()

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        """Serve, in threads of its own."""
        handler = type("Handler", (PageHandler,), {"owner": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        """Go away."""
        self.server.shutdown()
        self.server.server_close()


class PageHandler(BaseHTTPRequestHandler):
    """One request to a `PageServer`."""

    owner: PageServer

    def do_GET(self) -> None:
        """The page, or its status."""
        owner = self.owner
        if self.path == "/":
            return self.reply(200, PAGE.encode(), "text/html; charset=utf-8")
        owner.asked += 1
        if owner.guards_status and self.lacks_key():
            return self.reply(401, NO_KEY)
        return self.reply(owner.code, json.dumps(owner.status).encode())

    def do_POST(self) -> None:
        """A stream of words."""
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.lacks_key():
            return self.reply(401, NO_KEY)
        self.owner.questions.append(question)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        endless = question["max_tokens"] > 100
        try:
            for piece in ("<b>", "né", "😀") * (10_000 if endless else 1):
                self.event({"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]})
                if endless:
                    self.owner.left.wait(0.02)
            self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
            self.event({"choices": [], "usage": {"completion_tokens": 3}})
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.owner.left.set()

    def lacks_key(self) -> bool:
        """Did it not say the key?"""
        return bool(self.owner.key) and self.headers["Authorization"] != f"Bearer {self.owner.key}"

    def event(self, data: object) -> None:
        """One event of the stream."""
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())

    def reply(self, code: int, body: bytes, kind: str = "application/json") -> None:
        """A whole answer."""
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""
