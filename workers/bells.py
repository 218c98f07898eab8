"""Bells: wake a worker when there may be something to claim, and carry commands to it.

One connection that blocks on the worker's control list and the bells of the classes that it has room for. A bell
carries no job: whoever hears it claims under the policy. A ring that cannot be used any more goes back, for others.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from llmq.scheduler.keys import QueueKeys
from llmq.workers.contact import Contact
from llmq.workers.governor import Allowance

#: How long one wait lasts; short, so that the key list follows the room. The server is no finer than 100 ms.
LISTEN_S = 1.0

PAUSE_S = 0.5


async def listen(
    redis: Redis,
    keys: QueueKeys,
    worker_id: str,
    contact: Contact,
    allowance: Callable[[], Allowance],
    on_ring: Callable[[], None],
    on_command: Callable[[str], None],
) -> None:
    """Wait for rings and commands until cancelled."""
    control, bell_i, bell_b = keys.control(worker_id), keys.bell("i"), keys.bell("b")
    while True:
        now = allowance()
        heard = [control]
        if now.room > 0:
            heard.append(bell_i)
        if now.free > now.reserve:
            heard.append(bell_b)
        try:
            reply = await cast(Any, redis).blpop(heard, timeout=LISTEN_S * (1 + random.random() / 10))
            contact.seen()
            if reply is None:
                continue
            key, value = reply[0].decode(), reply[1].decode()
            if key == control:
                on_command(value)
            elif _usable(allowance(), key == bell_i):
                on_ring()
            else:
                await cast(Any, redis).lpush(key, value)
                await redis.pexpire(key, 60_000)
        except (RedisError, OSError):
            await asyncio.sleep(PAUSE_S)


def _usable(now: Allowance, interactive: bool) -> bool:
    return now.room > 0 if interactive else now.free > now.reserve
