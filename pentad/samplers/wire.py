"""HTTP to one server: every call bounded in time, every failure one sentence."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from pentad.core.errors import InfraFailure

CONNECT_TIMEOUT_S = 10.0
CALL_TIMEOUT_S = 60.0
MAX_QUOTED = 300
"""Characters of a server's answer that a sentence quotes."""

M = TypeVar("M", bound=BaseModel)


class Wire:
    """One server's address. Sentences name it."""

    def __init__(self, address: str, kind: str) -> None:
        self.address = address.rstrip("/")
        self.where = f"{kind} at {self.address}"
        # No limit on connections: one request of a batch is one connection.
        self.http = httpx.AsyncClient(
            base_url=self.address,
            timeout=httpx.Timeout(CALL_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )

    async def get(self, path: str, **params: str) -> Any:
        answer = await self._call("GET", path, params=params)
        return self._parsed(path, answer) if answer else None

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = CALL_TIMEOUT_S,
        is_json: bool = True,
        **params: str | Sequence[str],
    ) -> Any:
        answer = await self._call("POST", path, body=body, timeout_s=timeout_s, params=params)
        return self._parsed(path, answer) if is_json and answer else None

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any]:
        """The server-sent events of an answer, parsed; ends at its [DONE]."""
        async with self._failing(path):
            timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
            async with self.http.stream("POST", path, json=body, timeout=timeout) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise self.refused(path, response)
                async for line in response.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    text = line.removeprefix("data:").strip()
                    if text == "[DONE]":
                        return
                    yield self._parsed(path, text)
        raise InfraFailure(f"{self.where}: {path} ended before its answer was whole")

    def read(self, path: str, schema: type[M], answer: Any) -> M:
        """The answer as what it must be."""
        try:
            return schema.model_validate(answer)
        except ValidationError as error:
            first = error.errors()[0]
            at = ".".join(map(str, first["loc"])) or "the answer"
            found = f"{at}: {first['msg']}"
            raise InfraFailure(f"{self.where}: {path} answered garbage ({found})") from error

    async def close(self) -> None:
        await self.http.aclose()

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        timeout_s: float | None = CALL_TIMEOUT_S,
        params: Mapping[str, str | Sequence[str]],
    ) -> str:
        async with self._failing(path):
            timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
            response = await self.http.request(
                method, path, json=body, params=params, timeout=timeout
            )
        if response.status_code != 200:
            raise self.refused(path, response)
        return response.text

    @asynccontextmanager
    async def _failing(self, path: str) -> AsyncIterator[None]:
        try:
            yield
        except httpx.TimeoutException as error:
            raise InfraFailure(f"{self.where}: {path} was not answered in time") from error
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise InfraFailure(f"{self.where}: {path} failed ({reason})") from error

    def refused(self, path: str, response: httpx.Response) -> InfraFailure:
        text = " ".join(response.text[:MAX_QUOTED].split())
        return InfraFailure(f"{self.where}: {path} answered {response.status_code} ({text})")

    def _parsed(self, path: str, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            start = " ".join(text[:40].split())
            raise InfraFailure(f"{self.where}: {path} answered no JSON ({start!r})") from error
