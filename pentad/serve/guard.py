"""Who may ask: the key, the names a server at loopback answers to, and one framing of a body.

A web page can have a browser send requests to loopback under a name of its own (DNS rebinding);
what it cannot do is send them with another Host or Origin than its own.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from pentad.core.errors import Problem
from pentad.serve.app import refuse
from pentad.serve.wire import ApiError

Application = Callable[..., Awaitable[None]]
"""Of ASGI: scope, receive, send."""
OPEN_PATHS = ("/health",)
"""Answered without the key: they say nothing of what is asked."""


class Guard:
    """An application behind its checks."""

    def __init__(
        self,
        app: Application,
        *,
        api_key: str | None = None,
        is_loopback: bool,
        hosts: Iterable[str] = (),
    ) -> None:
        """`hosts` are further names that a server at loopback answers to."""
        self.app = app
        self.api_key = api_key
        self.is_loopback = is_loopback
        self.hosts = frozenset(name_of(host) or host.lower() for host in hosts)

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            headers: dict[str, str] = {}
            for name, value in scope["headers"]:  # one that is given twice has both values
                key, text = name.decode("latin-1"), value.decode("latin-1")
                headers[key] = f"{headers[key]}, {text}" if key in headers else text
            try:
                self.check(scope["path"], headers)
            except ApiError as error:
                await refuse(error, scope, receive, send)
                return
        await self.app(scope, receive, send)

    def check(self, path: str, headers: Mapping[str, str]) -> None:
        """Raises ApiError."""
        if "content-length" in headers and "transfer-encoding" in headers:
            rule = "a request has one of the two, or two servers may read it differently"
            problem = Problem("content-length and transfer-encoding", rule)
            raise ApiError(problem, closes=True)
        if self.is_loopback:
            self.check_name("host", headers.get("host", ""), name_of(headers.get("host", "")))
            if (origin := headers.get("origin")) is not None:
                self.check_name("origin", origin, name_of(origin.partition("://")[2]))
        if self.api_key is not None and path not in OPEN_PATHS:
            check_key(headers, self.api_key, "this server")

    def check_name(self, header: str, value: str, name: str) -> None:
        if name.lower() in self.hosts or is_local(name):
            return
        rule = "a server at loopback answers to localhost alone"
        remedy = f"start it with --allow-host {name or 'NAME'}"
        problem = Problem(f"{header} = {value or 'none'}", rule, remedy)
        raise ApiError(problem, status=403, kind="permission_error", code="host_not_allowed")


def check_key(headers: Mapping[str, str], key: str, whose: str) -> None:
    """Raises ApiError unless the request has the key; takes as long for any other."""
    given = headers.get("authorization", "")
    if given[:7].lower() == "bearer ":
        given = given[7:]
    if not secrets.compare_digest(given.encode(), key.encode()):
        problem = Problem("authorization", f"is not the api_key of {whose}")
        raise ApiError(problem, status=401, kind="authentication_error", code="invalid_api_key")


def name_of(host: str) -> str:
    """The header without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_local(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name.lower() == "localhost"
