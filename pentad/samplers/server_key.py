"""The key of a server that a run starts: every request must carry it, on every path.

Runs in the server's environment, so this imports only the standard library. vLLM's `--api-key`
leaves its development endpoints open, so the middleware `KeyGate` protects all paths
(`--middleware`). SGLang checks its key on every path but /health and /metrics. It takes the key as
an argument, which all users of the machine could read, so `main` adds it inside the process.
"""

from __future__ import annotations

import hmac
import json
import os
import runpy
import sys
from collections.abc import Mapping
from typing import Any

VARIABLE = "PENTAD_SERVER_KEY"
"""Variable with the key: in the environment of a started server, which only its user can read; in
that of a run, for servers that it did not start."""


class KeyGate:
    """ASGI middleware that answers 401 to requests without the key."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.wanted = f"Bearer {os.environ[VARIABLE]}".encode()

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket") or self._has_key(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            body = json.dumps({"error": "the key of this server is missing or wrong"}).encode()
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def _has_key(self, scope: Mapping[str, Any]) -> bool:
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self.wanted)


def main() -> None:
    """Runs the module named by the first argument, with the key appended to the other arguments."""
    del sys.argv[0]
    sys.argv += ["--api-key", os.environ.pop(VARIABLE)]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
