"""`mcp:COMMAND` or `mcp:URL`: the tools of an MCP server.

Each episode has a separate session and, with COMMAND, a separate server that ends with it.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
from typing import Any

from mcp import Client, StdioServerParameters


class McpEnvironment:
    def __init__(self, target: str) -> None:
        command = shlex.split(target)
        is_address = target.startswith(("http://", "https://"))
        self._server = (
            target
            if is_address
            else StdioServerParameters(
                command=sys.executable if command[0] == "python" else command[0], args=command[1:]
            )
        )
        self._asked: asyncio.Queue[tuple[Any, asyncio.Future[Any]]] | None = None
        self._session: asyncio.Task[None] | None = None

    async def _do(self, action: Any) -> Any:
        """Runs an action in the task that opened the session: only this task may close it."""
        if self._asked is None or self._session is None or self._session.done():
            self._asked = asyncio.Queue()
            self._session = asyncio.create_task(self._serve(self._asked))
        answer = asyncio.get_running_loop().create_future()
        self._asked.put_nowait((action, answer))
        await asyncio.wait([answer, self._session], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            self._session.result()
            raise ConnectionError("the session with the MCP server ended")
        return answer.result()

    async def _serve(self, asked: asyncio.Queue[tuple[Any, asyncio.Future[Any]]]) -> None:
        async with Client(self._server) as client:
            while True:
                action, answer = await asked.get()
                try:
                    answer.set_result(await action(client))
                except Exception as error:
                    answer.set_exception(error)

    async def reset(self, **row: Any) -> None:
        """Nothing to reset: each episode has a new session."""

    async def tool_schemas(self) -> list[dict[str, Any]]:
        """Returns the tools of all pages, as function schemas."""
        found, cursor = [], None
        while True:
            page = await self._do(lambda client, at=cursor: client.list_tools(cursor=at))
            found += [
                {"name": t.name, "description": t.description or "", "parameters": t.input_schema}
                for t in page.tools
            ]
            cursor = page.next_cursor
            if cursor is None:
                return [{"type": "function", "function": function} for function in found]

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        result = await self._do(lambda client: client.call_tool(name, arguments))
        texts = [getattr(part, "text", f"[{part.type}]") for part in result.content]
        return "\n".join([*(["error:"] if result.is_error else []), *texts])
