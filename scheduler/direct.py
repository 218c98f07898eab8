"""The direct way of a blocking client's single jobs into a queue: from the caller's own thread, on its own connection.

A submit that is handed to the client's loop in its thread and waited for takes twice as long as one that is sent from
here. All else goes through the loop, and so do the first submit into a queue, which opens it and begins to listen for
answers there, and jobs with a key, which may be somebody else's. Several threads may submit at once.

A connection is kept between two submits, not given back to its pool: taking it from there, with what redis-py does
around a command, costs the producer as much as sending one.
"""

from __future__ import annotations

from typing import Any, TypeVar

from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from llmq.scheduler import scripts
from llmq.scheduler.connection import connect_sync, redis_errors
from llmq.scheduler.handles import AsyncJobHandle
from llmq.scheduler.job import Job, TrafficClass
from llmq.scheduler.queue import new_job_id
from llmq.scheduler.routed_sync import SyncRouted
from llmq.scheduler.settings import check_tenant
from llmq.scheduler.waiting import Listener

T = TypeVar("T")

#: Connections kept between submits. Threads above this many take theirs from the pool, and give them back.
MOST_KEPT = 4


class DirectLine:
    """The direct way into one queue. `listener` is open already; the jobs' ends are told to `client_id`."""

    def __init__(self, url: str, listener: Listener, client_id: str, tenant: str, *, max_connections: int) -> None:
        self._url = url
        self._listener = listener
        self._client_id = client_id
        self._tenant = tenant
        self._redis = connect_sync(url, max_connections=max_connections, client_name="llmq-client")
        # Of several servers (Sentinel, Cluster) the right one is found for each command.
        self._may_keep = not isinstance(self._redis, SyncRouted)
        self._kept: list[_KeptConnection] = []

    def submit(
        self, job: Job, *, cls: TrafficClass, tenant: str | None = None, timeout: float | None = None
    ) -> AsyncJobHandle:
        """Submit one job, as `AsyncClient.submit` does."""
        tenant = check_tenant(tenant or self._tenant)
        queue, job_id = self._listener.queue, new_job_id(tenant)
        call = queue.submission(job, cls=cls, tenant=tenant, ttl=timeout, job_id=job_id, reply_to=self._client_id)
        # Known to the listener before it is sent: no delta can come too early.
        watch = self._listener.watch(job_id, foreign=False, ttl=timeout)
        with redis_errors(self._url):
            try:
                verdict = self._run(call)
            except (RedisConnectionError, RedisTimeoutError):
                # As `Queue.submit`: an id is taken only once. Not on another that is kept: a server that was started
                # again has closed them all, and the pool looks before it gives one.
                verdict = scripts.run_sync(self._redis, call)
        queue.accept(verdict, cls)
        return AsyncJobHandle(self._url, self._listener, watch)

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    def _run(self, call: scripts.Call[T]) -> T:
        """Make one call, on a connection that no other thread has."""
        if not self._may_keep:
            return scripts.run_sync(self._redis, call)
        try:
            kept = self._kept.pop()
        except IndexError:
            kept = _KeptConnection(self._redis.client())  # type: ignore[no-untyped-call]
        try:
            answer = scripts.run_sync(kept, call)
        except BaseException:  # also Ctrl-C: a reply that was not read may not be taken for the next one
            kept.give_back(closed=True)
            raise
        if len(self._kept) < MOST_KEPT:
            self._kept.append(kept)
        else:
            kept.give_back()
        return answer


class _KeptConnection:
    """A connection out of its pool, which calls scripts as a client does. What fails closes it, as in a client."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._connection: Any = client.connection

    def evalsha(self, *arguments: Any) -> Any:
        """Call a script by its SHA-1."""
        return self._call("EVALSHA", *arguments)

    def eval(self, *arguments: Any) -> Any:
        """Call a script by its text."""
        return self._call("EVAL", *arguments)

    def give_back(self, *, closed: bool = False) -> None:
        """Let the pool have the connection again."""
        if closed:
            self._connection.disconnect()
        self._client.close()

    def _call(self, *command: Any) -> Any:
        self._connection.send_command(*command)
        return self._connection.read_response()
