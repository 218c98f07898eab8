"""The remains: what the store holds of jobs and batches when a run is over, read back into the journal."""

from __future__ import annotations

from typing import Any

from tests.chaos.cast import Cast
from tests.chaos.engine import run_of
from tests.redis.serving import KEYS


def note_remains(cast: Cast) -> None:
    """Write down each job's record (`job left`) and each batch's results (`batch left`)."""
    with cast.server.client() as redis:
        prefix = KEYS.job("").encode()
        for key in redis.scan_iter(match=prefix + b"*", count=1000):
            state, body = redis.hmget(key, "state", "body")
            job = key.removeprefix(prefix).decode()
            cast.journal.say("job left", job=job, state=(state or b"").decode(), run=run_of(body or b""))
        for batch in [name.decode() for name in redis.zrange(KEYS.batches, 0, -1)]:
            ended, total = redis.hmget(KEYS.batch(batch), "ended_at", "total")
            rows: list[Any] = redis.xrange(KEYS.results(batch))
            lines = [int(fields[b"n"]) for _, fields in rows]
            cast.journal.say("batch left", name=batch, ended=ended is not None, total=int(total or 0), lines=lines)
