"""The direct way of a blocking client's single jobs into a queue: from the caller's own thread, on its own connection.

A submit that is handed to the client's loop in its thread and waited for takes twice as long as one that is sent from
here. All else goes through the loop, and so do the first submit into a queue, which opens it and begins to listen for
answers there, and jobs with a key, which may be somebody else's. Several threads may submit at once.
"""

from __future__ import annotations

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from llmq.scheduler import scripts
from llmq.scheduler.connection import connect_sync, redis_errors
from llmq.scheduler.handles import AsyncJobHandle
from llmq.scheduler.job import Job, TrafficClass
from llmq.scheduler.queue import new_job_id
from llmq.scheduler.settings import check_tenant
from llmq.scheduler.waiting import Listener


class DirectLine:
    """The direct way into one queue. `listener` is open already; the jobs' ends are told to `client_id`."""

    def __init__(self, url: str, listener: Listener, client_id: str, tenant: str, *, max_connections: int) -> None:
        self._url = url
        self._listener = listener
        self._client_id = client_id
        self._tenant = tenant
        self._redis = connect_sync(url, max_connections=max_connections, client_name="llmq-client")

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
                verdict = scripts.run_sync(self._redis, call)
            except (RedisConnectionError, RedisTimeoutError):  # as `Queue.submit`: an id is taken only once
                verdict = scripts.run_sync(self._redis, call)
        queue.accept(verdict, cls)
        return AsyncJobHandle(self._url, self._listener, watch)

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()
