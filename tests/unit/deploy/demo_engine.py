"""What `backhaul demo` asks of an engine, without a model: `python demo_engine.py PORT [LIMIT]`.

It dies, as an engine does whose core failed, at the completion that follows LIMIT others.
"""

from __future__ import annotations

import http.server
import itertools
import json
import os
import sys
from typing import Any

LIMIT = int(sys.argv[2]) if len(sys.argv) > 2 else sys.maxsize
COUNT = itertools.count(1)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._send("text/plain", b"")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}")
        if self.path == "/reset_prefix_cache":
            self._send("application/json", b'{"success": true}')
            return
        if next(COUNT) > LIMIT:
            print("the core fell over", file=sys.stderr, flush=True)
            os._exit(7)
        choice = {"index": 0, "token_ids": [97] * body["max_tokens"], "finish_reason": "stop"}
        answer: dict[str, Any] = {
            "choices": [choice],
            "usage": {"prompt_tokens": len(body["prompt"])},
            "kv_transfer_params": {"do_remote_prefill": True},
        }
        text = json.dumps(answer)
        if body["stream"]:
            self._send("text/event-stream", f"data: {text}\n\ndata: [DONE]\n\n".encode())
        else:
            self._send("application/json", text.encode())

    def _send(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


if __name__ == "__main__":
    with http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler) as server:
        server.serve_forever()
