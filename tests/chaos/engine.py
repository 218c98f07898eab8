"""The recording engine: an OpenAI-compatible server in a process of its own, with moods.

    python -m tests.chaos.engine PORT JOURNAL NAME SEED

It writes the beginning and the end of each request into the journal, with the name of the job (the first word of its
prompt) and of the run; that name is the answer's text as well, so that an accepted answer tells which run it is from.
`POST /mood` changes how it behaves: `refuse` (429), `fail` (500), `garbage`, `break` (a stream that ends in its
middle), `die` (an error chunk, as vLLM reports its death) and `hang`, each for a share of the requests. A prompt with
the word `poison` ends the process, as a request does that a real engine cannot bear.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from tests.chaos.journal import Journal
from tests.chaos.stalls import watch_for_stalls

MOODS = ("refuse", "fail", "garbage", "break", "die", "hang")
POISON = "poison"

#: Seconds between two tokens of an answer.
TOKEN_S = 0.05

#: What a refusal asks for, in seconds: short, so that the run sees many of them.
RETRY_AFTER = "0.3"


@dataclass
class Recording:
    """One engine: its mood now, and its runs so far."""

    journal: Journal
    rng: random.Random
    mood: str = ""
    share: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the mood changes; each mood has its own."""
    runs: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def application(self) -> web.Application:
        """Return what it serves."""
        application = web.Application()
        application.add_routes(
            [
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.post("/v1/chat/completions", self._complete),
                web.post("/mood", self._change_mood),
            ]
        )
        return application

    async def _models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [{"id": "model", "object": "model", "owned_by": "chaos"}]})

    async def _health(self, request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def _change_mood(self, request: web.Request) -> web.Response:
        asked = orjson.loads(await request.read())
        self.mood, self.share = asked["mood"], asked["share"]
        self.changed.set()
        self.changed = asyncio.Event()
        return _json({})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        prompt = body["messages"][0]["content"]
        run = f"{self.journal.who}.{os.getpid()}.{next(self.runs)}"
        name = prompt.partition(" ")[0]
        mood = self.mood if self.rng.random() < self.share else ""
        self.journal.say("run", name=name, run=run, mood=mood)
        if POISON in prompt:
            self.journal.say("poisoned", name=name)
            os._exit(1)
        how = "aborted"
        try:
            response = await self._behave(request, mood, run, body)
            how = mood or "answered"
            return response
        except ConnectionError:
            raise asyncio.CancelledError from None  # the client has left
        finally:
            self.journal.say("ran", name=name, run=run, how=how)

    async def _behave(self, request: web.Request, mood: str, run: str, body: Any) -> web.StreamResponse:
        if mood == "refuse":
            return _json({"error": {"message": "too many requests"}}, status=429, headers={"Retry-After": RETRY_AFTER})
        if mood == "fail":
            return _json({"error": {"message": "internal error"}}, status=500)
        if mood == "hang":
            await self.changed.wait()
            return _json({"error": {"message": "hung for a while"}}, status=500)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        tokens = int(body.get("max_tokens", 4))
        for number in range(tokens):
            await asyncio.sleep(TOKEN_S)
            await response.write(_event({"content": run if number == 0 else " word"}))
            if number == tokens // 2 and mood in ("garbage", "break", "die"):
                await response.write(_BROKEN[mood])
                return response
        await response.write(_event({}, finish="stop") + b"data: [DONE]\n\n")
        return response


def run_of(body: bytes) -> str:
    """Return the name of the run that an answer is from; empty where it is no answer of a recording engine."""
    try:
        return str(orjson.loads(body)["choices"][0]["message"]["content"]).partition(" ")[0]
    except (ValueError, LookupError, TypeError):
        return ""


_BROKEN = {
    "garbage": b"data: {\x00\xff not json\n\n",
    "break": b"",
    "die": b'data: {"error": {"message": "EngineDeadError", "code": 500}}\n\ndata: [DONE]\n\n',
}


def _event(delta: dict[str, str], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + orjson.dumps({"id": "c", "object": "chat.completion.chunk", "choices": [choice]}) + b"\n\n"


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, headers=headers, content_type="application/json")


async def _serve(port: int, engine: Recording) -> None:
    # A client that leaves aborts its request: the handler is cancelled.
    runner = web.AppRunner(engine.application(), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    engine.journal.say("engine up")
    print("ready", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Serve until killed."""
    port, path, who, seed = sys.argv[1:]
    journal = Journal(Path(path), who)
    watch_for_stalls(journal)
    asyncio.run(_serve(int(port), Recording(journal, random.Random(f"{seed} {who} {os.getpid()}"))))


if __name__ == "__main__":
    main()
