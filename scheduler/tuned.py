"""What `llmq tune` found: how much batch an engine bears beside chat, stored for each engine and model.

It lives in the queue's config hash, permanent like the live settings, in the field `tuned.<engine kind>|<model>`, and
is where the governor of a worker begins. Measuring is `workers/trial`; here it is only written and read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from llmq.scheduler import scripts
from llmq.scheduler.queue import Queue

#: What the field begins with.
FIELD = "tuned."


@dataclass(frozen=True, slots=True)
class Tuned:
    """What one engine bears: `batch` requests at once, `prefill_tps` prompt tokens of batch a second (0: none held).

    Chat's p95 to the first token was `alone_s` then without any batch, at `chat_rate` requests a second, `chat` of them
    in flight on average. `at` is when, in seconds since the epoch.
    """

    batch: int
    prefill_tps: float
    alone_s: float
    chat_rate: float
    at: float
    chat: float = 0.0

    @property
    def in_flight(self) -> float:
        """How many requests in flight held, chat's among them; 0: not even one of batch did.

        What matters is what a chat request meets: on average as many others as are in flight, and itself.
        """
        return self.batch + 1 + self.chat if self.batch else 0.0


def field_of(kind: str, models: Sequence[str]) -> str:
    """Return the field of an engine of this kind that serves these models."""
    return f"{FIELD}{kind}|{models[0] if models else ''}"


async def store_tuned(queue: Queue, kind: str, models: Sequence[str], found: Tuned) -> None:
    """Write what was found, over what was found before."""
    await scripts.run(queue.redis, scripts.configure(queue.keys, {field_of(kind, models): json.dumps(asdict(found))}))


def tuned_for(config: Mapping[bytes, bytes], kind: str, models: Sequence[str]) -> Tuned | None:
    """Return what is stored for an engine; None where it was never tuned, or somebody wrote there by hand."""
    stored = config.get(field_of(kind, models).encode())
    if stored is None:
        return None
    try:
        values = {key: float(value) for key, value in json.loads(stored).items()}
        given = [values.get(field.name, 0.0) if field.name == "chat" else values[field.name] for field in fields(Tuned)]
    except (ValueError, TypeError, AttributeError, KeyError):
        return None
    batch, *rest = given
    return Tuned(int(batch), *rest) if 0 <= batch < 1e6 else None
