"""The tally: an output that counts what goes through it, line by line, for the estimate of `--sample`."""

from __future__ import annotations

from typing import Any, Self

import orjson

from llmq.scheduler.output import Output
from llmq.scheduler.records import FIRST_ERROR_STATUS
from llmq.scheduler.sampling import SampledLine

#: Characters of an engine's message that tell one reason from another.
_MOST_REASON = 120


class Tally:
    """Counts lines of output, and hands them on to `out` where there is one."""

    def __init__(self, out: Output | None = None) -> None:
        self.cursor = ""
        self.lines: list[SampledLine] = []
        self.complete = False
        self._out = out

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, line: bytes) -> None:
        """Count a line, and hand it on."""
        self.lines.append(_sampled(orjson.loads(line)))
        if self._out is not None:
            self._out.append(line)

    def sync(self, cursor: str) -> int:
        """Sync what the lines were handed to."""
        self.cursor = cursor
        return 0 if self._out is None else self._out.sync(cursor)

    def finish(self, cursor: str) -> None:
        """Finish what the lines were handed to."""
        self.complete = True
        if self._out is not None:
            self._out.finish(cursor)

    def close(self) -> None:
        """Close what the lines were handed to."""
        if self._out is not None:
            self._out.close()


def _sampled(line: dict[str, Any]) -> SampledLine:
    # With the first line, not with the command line: it brings the engines.
    from llmq.workers.engines.assembly import usage_of

    response, error = line["response"], line["error"]
    if response is None:
        return SampledLine(reason=_reason(error["code"], error["message"]))
    body = response["body"]
    usage = usage_of(body if isinstance(body, dict) else {})
    status, reason = response["status_code"], ""
    if status >= FIRST_ERROR_STATUS:
        said = body.get("error", body) if isinstance(body, dict) else body
        said = said.get("message", said) if isinstance(said, dict) else said
        reason = _reason(f"HTTP {status}", said)
    return SampledLine(usage.prompt_tokens, usage.completion_tokens, reason)


def _reason(what: str, said: object) -> str:
    text = " ".join((said if isinstance(said, str) else orjson.dumps(said).decode()).split())
    return f"{what}: {text[:_MOST_REASON]}" if text else what
