"""The arrival: a gateway that was started while Redis was away waits for it, and then looks at it as every start does.

Until then its clients are told to come again. Who supervises a gateway need not start it again and again, and with a
direct engine it may serve in the meantime (`keyed_admission.py` says whom).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from llmq.scheduler.errors import RedisUnavailable
from llmq.scheduler.outage import is_only_away

#: Seconds between two looks, each of which makes a connection.
LOOK_S = 1.0


async def arrival(check: Callable[[], Awaitable[object]]) -> None:
    """Return once `check` has succeeded; it is called again as long as Redis is away.

    Raises what else it does: a server that cannot be used, or data of a newer llmq, will not pass.
    """
    while True:
        try:
            await check()
            return
        except RedisUnavailable as error:
            if not is_only_away(error):
                raise
            await asyncio.sleep(LOOK_S)
