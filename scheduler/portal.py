"""The portal: an event loop in a thread of its own, with a client on it, and the way in for threads that block.

What runs here outlives no one who holds it: when nobody holds the portal any more, or the process ends, the client is
closed and the thread ends. What is called through it is for `blocking.py` to say.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Mapping
from typing import Any, TypeVar

from llmq.scheduler.client import AsyncClient
from llmq.scheduler.direct import DirectLine
from llmq.scheduler.errors import UsageError
from llmq.scheduler.tasks import end_tasks

T = TypeVar("T")

#: How long closing waits for the thread: its last act is to close sockets.
CLOSE_S = 5.0


class Portal:
    """An event loop in a thread, with the client that lives on it, and the way in from other threads.

    Clients, handles and iterators hold it; when none does any more, or the process ends, the thread ends. The thread
    itself holds only what it runs.
    """

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_serve, args=(self._loop,), name="llmq-client", daemon=True)
        self._thread.start()
        self._lines: dict[str | None, DirectLine] = {}
        # Runs once, whoever calls it first: `close`, the garbage collector, or the end of the process.
        self.close = weakref.finalize(self, _end, self._pid, self._loop, self._thread, client, self._lines)

    @property
    def here(self) -> bool:
        """Whether this is the process that the thread runs in; threads do not survive a fork."""
        return self._pid == os.getpid()

    def direct_line(self, queue: str | None) -> DirectLine:
        """Return the way of single jobs into a queue, from any thread."""
        if (line := self._lines.get(queue)) is None:
            opened = self.run(self.client._direct_line(queue))
            line = self._lines.setdefault(queue, opened)  # another thread may have been quicker
        return line

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return what it returns. What interrupts this call cancels it."""
        if not self.here or not self.close.alive:
            work.close()
            raise UsageError(
                "this handle's client is closed, or was made before a fork; make a new handle by its id: client.job(ID)"
            )
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """Iterate over an asynchronous generator; leaving early closes it."""
        try:
            while (item := self.run(_next(items))) is not None:
                yield item[0]
        finally:
            # The garbage collector may come by in any thread, the loop's own too: there is nothing to wait for.
            if self.here and self.close.alive:
                asyncio.run_coroutine_threadsafe(items.aclose(), self._loop)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop in this thread until it is stopped, then end what is left on it."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.run_until_complete(_end_tasks())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _end(
    pid: int,
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
    client: AsyncClient,
    lines: Mapping[str | None, DirectLine],
) -> None:
    """Close a client and end its thread; in a forked child nothing: all of it is the parent's."""
    if pid != os.getpid() or not thread.is_alive():
        return
    for line in lines.values():
        line.close()
    closing = asyncio.run_coroutine_threadsafe(client.aclose(), loop)
    closing.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
    if threading.current_thread() is not thread:
        thread.join(CLOSE_S)  # what cannot be closed in time ends with the process


async def _end_tasks() -> None:
    await end_tasks(*asyncio.all_tasks() - {asyncio.current_task()})


async def _next(items: AsyncIterator[T]) -> tuple[T] | None:
    """Return the next item, boxed; None at the end."""
    async for item in items:
        return (item,)
    return None
