"""The storage: where files and batches stand, in a folder or any place that fsspec reaches; this is its async face.

    storage = open_storage("s3://bucket/llmq", "default", home)
    await storage.write("open/batch_1.json", b"{}")

A `Backend` does the work, in threads that are the storage's own, so that a slow disk or object store holds up neither
chat nor anybody else's threads. An object appears whole or not at all, and what `write` and `commit` have returned for
is there after a crash. There is no appending and no locking: object stores have neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Protocol, TypeVar

from llmq.scheduler.errors import LLMQError
from llmq.scheduler.input_file import InputFile

T = TypeVar("T")

#: Threads for a storage: as many requests to an object store at a time.
_THREADS = 16

#: Bytes read at once of what is sent on.
_BLOCK = 256 * 1024

#: Bytes of an upload that are written at once.
_WRITE = 1 << 20


class StorageError(LLMQError):
    """The storage of files and batches cannot be read or written now."""


class Spool(Protocol):
    """An object in the making, on this host."""

    def write(self, data: bytes) -> None:
        """Append bytes."""
        ...

    def commit(self, path: str) -> None:
        """Make it the object at `path`, and certain."""
        ...

    def discard(self) -> None:
        """Leave nothing behind; after `commit` it does nothing."""
        ...


class Backend(Protocol):
    """What a storage must be able to do, blocking. Paths are relative, with `/` between; what is missing raises
    FileNotFoundError, everything else any error.
    """

    name: str

    def read(self, path: str) -> bytes:
        """Return an object."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Write or replace an object."""
        ...

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, in any order; none where there is no such folder."""
        ...

    def remove(self, path: str) -> None:
        """Remove an object, if it is there."""
        ...

    def remove_folder(self, path: str) -> None:
        """Remove a folder with everything in it, if it is there."""
        ...

    def open(self, path: str) -> IO[bytes]:
        """Open an object for reading."""
        ...

    def open_input(self, path: str, name: str, max_line_bytes: int) -> InputFile:
        """Open an object as a file of requests; messages call it `name`."""
        ...

    def spool(self) -> Spool:
        """Begin an object."""
        ...

    def tidy(self) -> None:
        """Remove what processes that were killed have left in the making."""
        ...


class Storage:
    """A backend, used without blocking. Raises StorageError where it fails, FileNotFoundError for what is missing."""

    def __init__(self, backend: Backend) -> None:
        self.name = backend.name
        self._backend = backend
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="llmq-storage")

    async def read(self, path: str) -> bytes:
        """Return an object."""
        return await self._do(self._backend.read, path)

    async def read_if_there(self, path: str) -> bytes | None:
        """Return an object, or None."""
        try:
            return await self.read(path)
        except FileNotFoundError:
            return None

    async def read_many(self, paths: Sequence[str]) -> list[bytes | None]:
        """Return several objects, None for each that is not there."""
        return list(await asyncio.gather(*map(self.read_if_there, paths)))

    async def write(self, path: str, data: bytes) -> None:
        """Write or replace an object."""
        await self._do(self._backend.write, path, data)

    async def names(self, folder: str) -> list[str]:
        """Return the sorted names in a folder."""
        return sorted(await self._do(self._backend.names, folder))

    async def remove(self, path: str) -> None:
        """Remove an object, if it is there."""
        await self._do(self._backend.remove, path)

    async def remove_folder(self, path: str) -> None:
        """Remove a folder, if it is there."""
        await self._do(self._backend.remove_folder, path)

    async def open_input(self, path: str, name: str, max_line_bytes: int) -> InputFile:
        """Open an object as a file of requests; the caller closes it. Raises InputFileError for what can be none."""
        return await self._do(self._backend.open_input, path, name, max_line_bytes, give_back=InputFile.close)

    async def blocks(self, path: str) -> AsyncGenerator[bytes, None]:
        """Iterate over an object in blocks; it is opened with the first. Close it: `contextlib.aclosing`."""
        file = await self._do(self._backend.open, path, give_back=lambda opened: opened.close())
        try:
            while block := await self._do(file.read, _BLOCK):
                yield block
        finally:
            await self._do(file.close)

    async def lines(self, path: str) -> AsyncGenerator[list[bytes], None]:
        """Iterate over the lines of an object, some at a time, without their newlines."""
        rest = b""
        async with contextlib.aclosing(self.blocks(path)) as blocks:
            async for block in blocks:
                *lines, rest = (rest + block).split(b"\n")
                if lines:
                    yield lines
        if rest:
            yield [rest]

    async def spool(self) -> AsyncSpool:
        """Begin an object: `async with await storage.spool() as spool`."""
        return AsyncSpool(await self._do(self._backend.spool, give_back=lambda spool: spool.discard()), self._do)

    async def tidy(self) -> None:
        """Remove what processes that were killed have left in the making."""
        await self._do(self._backend.tidy)

    def close(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _do(
        self, work: Callable[..., T], *arguments: object, give_back: Callable[[T], object] | None = None
    ) -> T:
        """Do it in a thread, and never leave it running: it may use a file that is closed next.

        `give_back` frees what the work returns, where nobody is there any more to take it.
        """
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(loop.run_in_executor(self._threads, functools.partial(work, *arguments)))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            if not task.cancelled() and task.exception() is None and give_back is not None:
                give_back(task.result())
            raise
        except (FileNotFoundError, LLMQError):
            raise
        except Exception as error:  # object stores have errors of their own, with no base in common
            raise StorageError(
                f"the storage {self.name} cannot be used ({type(error).__name__}: {error}); "
                "check that it is there, has room, and may be written"
            ) from error


class AsyncSpool:
    """A spool, used without blocking; small writes are gathered. It is discarded at the end of its block."""

    def __init__(self, spool: Spool, do: Callable[..., object]) -> None:
        self.size = 0
        self._spool = spool
        self._do = do
        self._held = bytearray()

    async def __aenter__(self) -> AsyncSpool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._run(self._spool.discard)

    async def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        self._held += data
        self.size += len(data)
        if len(self._held) >= _WRITE:
            await self._flush()

    async def commit(self, path: str) -> None:
        """Make it the object at `path`."""
        await self._flush()
        await self._run(self._spool.commit, path)

    async def _flush(self) -> None:
        held, self._held = bytes(self._held), bytearray()
        await self._run(self._spool.write, held)

    async def _run(self, *work: object) -> None:
        await self._do(*work)  # type: ignore[misc]


def open_storage(place: str | None, queue: str, home: Path) -> Storage:
    """Return the storage of a queue at a place: a folder, a URL of fsspec, or (None) a folder in `home`.

    Each queue has a part of its own there. Raises UsageError for a URL that fsspec has no driver for.
    """
    from llmq.gateway.batch.folder_storage import FolderBackend
    from llmq.gateway.batch.object_storage import ObjectBackend

    part = f"queue-{queue}"
    place = place or str(home / "gateway")
    if "://" not in place or place.startswith("file://"):
        return Storage(FolderBackend(Path(place.removeprefix("file://")).expanduser() / part))
    return Storage(ObjectBackend(f"{place.rstrip('/')}/{part}"))
