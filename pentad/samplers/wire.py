"""HTTP to one server: every call bounded in time, every failure one sentence."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlencode

from pydantic import BaseModel, ValidationError

from pentad.core.errors import InfraFailure
from pentad.samplers.http import HttpClient, HttpError

CONNECT_TIMEOUT_S = 10.0
CALL_TIMEOUT_S = 60.0
MAX_QUOTED = 300
"""Characters of a server's answer that a sentence quotes."""

M = TypeVar("M", bound=BaseModel)


class Wire:
    """One server's address. Sentences name it."""

    def __init__(self, address: str, kind: str) -> None:
        self.address = address.rstrip("/")
        self.http = HttpClient(self.address, CONNECT_TIMEOUT_S)
        scheme, _, _ = self.address.partition("://")
        # Without the name and the password that may stand in it.
        self.where = f"{kind} at {scheme}://{self.http.authority}{self.http.path}"

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
        try:
            async with self.http.call("POST", path, json.dumps(body).encode()) as (status, pieces):
                if status != 200:
                    raise self.refused(path, status, await joined_text(pieces))
                async for line in lines_of(pieces):
                    if not line.startswith("data:"):
                        continue
                    text = line.removeprefix("data:").strip()
                    if text == "[DONE]":
                        return
                    yield self._parsed(path, text)
        except HttpError as error:
            raise InfraFailure(f"{self.where}: {path} failed ({error})") from error
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
        await self.http.close()

    async def answer(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout_s: float | None = CALL_TIMEOUT_S,
    ) -> tuple[int, str]:
        """The status and the text of an answer, whatever they are."""
        sent = None if body is None else json.dumps(body).encode()
        try:
            async with (
                asyncio.timeout(timeout_s),
                self.http.call(method, path, sent) as (status, pieces),
            ):
                return status, await joined_text(pieces)
        except TimeoutError as error:
            raise InfraFailure(f"{self.where}: {path} was not answered in time") from error
        except HttpError as error:
            raise InfraFailure(f"{self.where}: {path} failed ({error})") from error

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        timeout_s: float | None = CALL_TIMEOUT_S,
        params: Mapping[str, str | Sequence[str]],
    ) -> str:
        query = f"?{urlencode(params, doseq=True)}" if params else ""
        status, text = await self.answer(method, path + query, body, timeout_s)
        if status != 200:
            raise self.refused(path, status, text)
        return text

    def refused(self, path: str, status: int, text: str) -> InfraFailure:
        quoted = " ".join(text[:MAX_QUOTED].split())
        return InfraFailure(f"{self.where}: {path} answered {status} ({quoted})")

    def _parsed(self, path: str, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            quoted = " ".join(text[:40].split())
            raise InfraFailure(f"{self.where}: {path} answered no JSON ({quoted!r})") from error


async def joined_text(pieces: AsyncIterator[bytes]) -> str:
    return b"".join([piece async for piece in pieces]).decode("utf-8", "replace")


async def lines_of(pieces: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """As they come; the last one may have no end."""
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line.decode("utf-8", "replace")
    if rest:
        yield rest.decode("utf-8", "replace")
