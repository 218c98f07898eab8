"""An engine that streams at a fixed pace and does nothing else: `python -m bench.stream_engine`, one process.

Each token is the moment at which it was sent, on the clock that all processes of this machine share, so that whoever
gets it knows how long it was on its way. The first comes at once; what the schedule says is kept to, however late one
token was. It says `ready URL` on stderr.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

#: Between two tokens of an answer, in seconds: a model that writes 25 a second.
PACE_S = 0.04

_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def main() -> None:
    """Serve until killed."""
    server = await asyncio.start_server(_serve, "127.0.0.1", 0)
    print(f"ready http://127.0.0.1:{server.sockets[0].getsockname()[1]}", file=sys.stderr, flush=True)
    await server.serve_forever()


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            size = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")), 0)
            body = await reader.readexactly(size)
            if b"/chat/completions" in head:
                await _stream(json.loads(body), writer)
            else:
                _answer(head, writer)
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


def _answer(head: bytes, writer: asyncio.StreamWriter) -> None:
    known = {b"/v1/models": {"object": "list", "data": [{"id": "bench", "object": "model"}]}, b"/health": {}}
    path = head.split()[1]
    status, told = (b"200 OK", known[path]) if path in known else (b"404 Not Found", {"error": {"message": "no"}})
    body = json.dumps(told).encode()
    head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
    writer.write(head + body)


async def _stream(asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    tokens = int(asked["max_tokens"])
    began = time.monotonic()
    writer.write(_STREAM)
    for number in range(tokens):
        await asyncio.sleep(began + number * PACE_S - time.monotonic())
        _event(writer, _TOKEN % (b"%.6f " % time.monotonic()))
        await writer.drain()
    usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}
    _event(writer, _chunk({}, "stop"))
    _event(writer, json.dumps({**json.loads(_chunk({})), "choices": [], "usage": usage}).encode())
    _event(writer, b"[DONE]")
    writer.write(b"0\r\n\r\n")


def _chunk(delta: dict[str, str], reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return json.dumps(
        {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "bench", "choices": [choice]}
    ).encode()


#: A chunk with one token, as it is written 5,000 times a second.
_TOKEN = _chunk({"role": "assistant", "content": "%s"})


def _event(writer: asyncio.StreamWriter, data: bytes) -> None:
    event = b"data: " + data + b"\n\n"
    writer.write(b"%x\r\n" % len(event) + event + b"\r\n")


if __name__ == "__main__":
    asyncio.run(main())
