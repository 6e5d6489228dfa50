"""The end of asyncio tasks."""

from __future__ import annotations

import asyncio
from typing import Any


async def end(*tasks: asyncio.Future[Any], timeout_s: float | None = None) -> bool:
    """Cancels the tasks that run, waits until they have ended, and retrieves their exceptions, so
    that asyncio does not log them. Returns whether all ended within the time limit."""
    pending = [task for task in tasks if not task.done()]
    for task in pending:
        task.cancel()
    if pending:
        await asyncio.wait(pending, timeout=timeout_s)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()
    return all(task.done() for task in tasks)
