"""A call of a script: its text, which KEYS and ARGV, how to read its reply, and how calls are made."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Generic, Protocol, TypeVar, cast

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

T = TypeVar("T")

#: Names of all scripts; `queue.lua` is what each of them begins with.
NAMES = (
    "submit_job", "open_batch", "submit_lines", "seal_batch", "claim", "renew", "first_delta", "finish", "retry",
    "hand_back", "sweep", "reap", "cancel_job", "cancel_batch", "pause_batch", "collect", "delete_batch", "delete_job",
    "configure", "beat", "lead", "forget", "lose", "recount", "keep_key", "enter", "stay", "leave", "hold", "let_go",
    "tell",
)  # fmt: skip

_WORD = re.compile(r"\w+")

#: A statement of `queue.lua`: from one `local` at the left margin to the next.
_STATEMENT = re.compile(r"^local .*\n(?:(?!local ).*\n)*", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Script:
    """One script: its text as sent to the server, and the SHA-1 by which it is called."""

    name: str
    text: str
    sha: str


@cache
def script(name: str) -> Script:
    """Return a script of this package."""
    text = source(name)
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def source(name: str) -> str:
    """Read the text of a script, with what it uses of `queue.lua` in front of it."""
    folder = resources.files("llmq.scheduler") / "lua"
    own = _without_comments((folder / f"{name}.lua").read_text())
    return _used(_without_comments((folder / "queue.lua").read_text()), own) + own


def _without_comments(lua: str) -> str:
    """Take out the lines that are comments: the server would only store them."""
    return re.sub(r"^\s*--.*\n", "", lua, flags=re.MULTILINE)


def _used(prelude: str, script: str) -> str:
    """Return the statements of a prelude that a script comes to use.

    Redis runs the whole text at each call: to make all functions of `queue.lua` takes 4 of the 45 us of a submit. Each
    of its statements begins at the left margin with `local`, and names what it makes.
    """
    used, words = "", set(_WORD.findall(script))
    for statement in reversed(_STATEMENT.findall(prelude)):
        made = _WORD.findall(statement.partition("(" if statement.startswith("local function ") else "=")[0])
        if not words.isdisjoint(set(made) - {"local", "function"}):
            used = statement + used
            words.update(_WORD.findall(statement))
    return used


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One call of a script that has not been made yet."""

    script: Script
    keys: tuple[str, ...]
    argv: Sequence[Any]
    read: Callable[[Any], T]


async def run(redis: Redis, call: Call[T]) -> T:
    """Make one call. Loads the script where the server does not know it (a restart, SCRIPT FLUSH, a failover)."""
    try:
        reply = await cast(Any, redis).evalsha(call.script.sha, len(call.keys), *call.keys, *call.argv)
    except NoScriptError:
        reply = await cast(Any, redis).eval(call.script.text, len(call.keys), *call.keys, *call.argv)
    return call.read(reply)


class Caller(Protocol):
    """What calls scripts and blocks its thread: a synchronous client."""

    def evalsha(self, sha: str, numkeys: int, *keys_and_args: Any) -> Any:
        """Call a script by its SHA-1."""

    def eval(self, script: str, numkeys: int, *keys_and_args: Any) -> Any:
        """Call a script by its text."""


def run_sync(redis: Caller, call: Call[T]) -> T:
    """Make one call, and block this thread until it is answered."""
    try:
        reply = redis.evalsha(call.script.sha, len(call.keys), *call.keys, *call.argv)
    except NoScriptError:
        reply = redis.eval(call.script.text, len(call.keys), *call.keys, *call.argv)
    return call.read(reply)


async def run_all(redis: Redis, calls: Sequence[Call[Any]]) -> list[Any]:
    """Make several calls in one trip. A reply may be an exception: one that fails does not undo the others."""
    if len(calls) == 1:
        return [await run(redis, calls[0])]
    pipe = redis.pipeline(transaction=False)
    for call in calls:
        pipe.evalsha(call.script.sha, len(call.keys), *call.keys, *call.argv)
    replies: list[Any] = list(await pipe.execute(raise_on_error=False))
    for position, (call, reply) in enumerate(zip(calls, replies, strict=True)):
        if isinstance(reply, NoScriptError):  # it did not run: sending it again is safe
            replies[position] = await run(redis, call)
        elif not isinstance(reply, Exception):
            replies[position] = call.read(reply)
    return replies


def text(value: bytes | str) -> str:
    """Return a reply's text."""
    return value.decode() if isinstance(value, bytes) else value
