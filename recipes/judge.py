"""A judge for the recipe judge.yaml, at an OpenAI-compatible address: python recipes/judge.py PORT

It stands for a model that serves at `reward.judge.url`: it reads the question of the recipe's
template and answers as a model would, in words that end with a number.
"""

from __future__ import annotations

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

QUESTION = re.compile(r"The digits (\d+)> were to be sorted\.\nAnswer: (.*)\nHow good", re.DOTALL)


def verdict(question: str) -> str:
    found = QUESTION.search(question)
    if found is None:
        return "I was asked something else."
    digits, answer = found.groups()
    right = sum(a == b for a, b in zip(sorted(digits), answer, strict=False))
    if answer == "".join(sorted(digits)):
        return "All are in place: 10"
    size = max(len(digits), len(answer))
    return f"In place are {right} of {size}: {5 * right / size:.1f}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:  # noqa: N802 (the name that http.server calls)
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = {"role": "assistant", "content": verdict(asked["messages"][-1]["content"])}
        body = json.dumps({"choices": [{"message": said, "finish_reason": "stop"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed for a request."""


def serve(port: int) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    return server


if __name__ == "__main__":
    serve(int(sys.argv[1])).serve_forever()
