"""Work off the event loop: daemon threads, and the queue for the text of requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

SMALL_BYTES = 32 << 10
"""A request of at most this many bytes is small: its text is a few milliseconds of work."""
NUM_SMALL = 2


class TextWork:
    """Reads, renders, encodes and decodes in threads.

    Small requests have threads of their own, so they never wait for a large one; large ones are
    done one at a time, in the order they came. A thread is free again when its work has ended,
    not when the client has left: clients that come and go start no further threads.
    """

    def __init__(self) -> None:
        self.small = asyncio.Semaphore(NUM_SMALL)
        self.large = asyncio.Semaphore(1)
        self.num_running = 0

    async def run(self, num_bytes: int, action: Callable[[], T]) -> T:
        free = self.small if num_bytes <= SMALL_BYTES else self.large
        await free.acquire()
        work = in_thread(action)
        self.num_running += 1

        def ended(done: asyncio.Future[Any]) -> None:
            free.release()
            self.num_running -= 1
            if not done.cancelled():
                done.exception()  # nobody may be left to hear of it

        work.add_done_callback(ended)
        result: T = await asyncio.shield(work)
        return result


def in_thread(action: Callable[[], Any]) -> asyncio.Future[Any]:
    """Its result. A thread cannot be ended: one that is given up does not keep the process from
    ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, failure: BaseException | None) -> None:
        if future.done():
            return
        if failure is None:
            future.set_result(result)
        elif isinstance(failure, StopIteration):  # no future takes one
            future.set_exception(RuntimeError(repr(failure)))
        else:
            future.set_exception(failure)

    def run() -> None:
        result, failure = None, None
        try:
            result = action()
        except BaseException as error:  # exit() in a program is its error, not an end
            failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name=getattr(action, "__name__", "work"), daemon=True).start()
    return future
