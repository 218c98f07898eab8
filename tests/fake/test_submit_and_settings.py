"""Submit, looking at jobs and live settings on the fake server: what an application's own tests may use it for."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from llmq.scheduler.errors import LLMQError, NotFoundError, QueueFull, SettingsError, UsageError
from llmq.scheduler.job import Job, TrafficClass
from llmq.scheduler.limit import Limit
from llmq.scheduler.queue import CancelResult, Queue, new_job_id
from llmq.scheduler.state import JobState
from llmq.scheduler.units import Rate

JOB = Job("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]})


@pytest.fixture
def queue(redis: Redis) -> Queue:
    """An empty queue."""
    return Queue(redis)


async def test_a_submitted_job_waits(queue: Queue) -> None:
    """Its record says whose it is, and until when it may wait."""
    record = await queue.job(await queue.submit(JOB, tenant="ann", ttl=30))
    assert (JobState.WAITING, TrafficClass.INTERACTIVE, "ann", 0) == (
        record.state,
        record.cls,
        record.tenant,
        record.attempts,
    )
    assert record.expires_at == pytest.approx(record.submitted_at + 30)


async def test_a_batch_job_may_wait_for_ever(queue: Queue) -> None:
    """Only interactive jobs have a time in the queue by default."""
    record = await queue.job(await queue.submit(JOB, cls=TrafficClass.BATCH))
    assert None is record.expires_at


async def test_the_same_key_is_the_same_job(queue: Queue) -> None:
    """Of one tenant; another tenant's key is another job."""
    first = await queue.submit(JOB, key="order-7")
    assert first == await queue.submit(JOB, key="order-7")
    assert first != await queue.submit(JOB, key="order-7", tenant="ann")
    assert first == new_job_id("default", "order-7")
    assert 1 == await queue.redis.xlen(queue.keys.lane("i:default"))


async def test_a_full_queue_refuses(queue: Queue) -> None:
    """The cap of a class is a live setting; the other class is not concerned (G15)."""
    await queue.set("cap_interactive", "2")
    for _ in range(2):
        await queue.submit(JOB)
    with pytest.raises(QueueFull, match="llmq set cap_interactive") as refused:
        await queue.submit(JOB)
    assert ("interactive", 2) == (refused.value.cls, refused.value.cap)
    await queue.submit(JOB, cls=TrafficClass.BATCH)


async def test_a_job_that_is_too_large_is_refused(redis: Redis) -> None:
    """The limit is on what is stored (F-096)."""
    queue = Queue(redis, max_body_bytes=1000)
    with pytest.raises(UsageError, match="at most 1000B"):
        await queue.submit(Job(JOB.url, {"messages": [], "text": "x" * 1000}))
    assert not await redis.keys("*")


@pytest.mark.parametrize("ttl", [-1.0, float("nan"), 1e10])
async def test_a_time_in_the_queue_that_means_nothing_is_refused(queue: Queue, ttl: float) -> None:
    """Before anything is queued."""
    with pytest.raises(UsageError, match="a time in the queue"):
        await queue.submit(JOB, ttl=ttl)


async def test_an_unknown_job_is_not_found(queue: Queue) -> None:
    """The message says what may have become of it."""
    for ask in (queue.job, queue.cancel_job):
        with pytest.raises(NotFoundError, match="no job 'nobody' in queue 'default'"):
            await ask("nobody")


async def test_a_waiting_job_is_cancelled_once(queue: Queue) -> None:
    """Afterwards it has ended, and says so (F-124)."""
    job_id = await queue.submit(JOB)
    assert CancelResult.CANCELLED is await queue.cancel_job(job_id)
    assert CancelResult.ENDED is await queue.cancel_job(job_id)
    assert JobState.CANCELLED is (await queue.job(job_id)).state


async def test_settings_change_and_go_back(queue: Queue) -> None:
    """What was set is listed as set; `default` takes it out of the hash."""
    await queue.set("deadline", "15s")
    await queue.set("weight.evals", "3")
    values = {value.name: (value.value, value.source) for value in await queue.settings()}
    assert (("15s", "set"), ("3", "set")) == (values["deadline"], values["weight.evals"])
    assert b"15000" == await queue.redis.hget(queue.keys.config, "deadline")
    await queue.set("deadline", "default")
    await queue.set("weight.evals", "default")
    assert {b"format": b"1"} == await queue.redis.hgetall(queue.keys.config)


async def test_a_wrong_setting_changes_nothing(queue: Queue) -> None:
    """It is judged before it is sent."""
    for name, value in (("deadline", "never"), ("dedline", "15s")):
        with pytest.raises(SettingsError):
            await queue.set(name, value)
    assert not await queue.redis.keys("*")


async def test_the_rate_is_set_and_shown(queue: Queue) -> None:
    """A burst not given is one second's worth, at least 1; off is no limit."""
    assert None is await queue.rate()
    await queue.set_rate(Rate(5 / 60))
    assert Limit(Rate(5 / 60), 1.0) == await queue.rate()
    await queue.set_rate(Rate(2000.0, "tok"), 5000.0)
    assert Limit(Rate(2000.0, "tok"), 5000.0) == await queue.rate()
    for burst in (0.5, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="a burst of at least 1"):
            await queue.set_rate(Rate(5.0), burst)
    await queue.set_rate(None)
    assert None is await queue.rate()


async def test_windows_are_stored_with_their_plan(queue: Queue) -> None:
    """The claim script reads the plan; without windows there is none."""
    await queue.set("windows", "mon-fri 08:00-20:00 5/s; tz=Europe/Berlin")
    windows, plan = await queue.redis.hmget(queue.keys.config, "windows", "plan")
    assert b"mon-fri 08:00-20:00 5/s; tz=Europe/Berlin" == windows
    assert isinstance(plan, bytes)
    assert b" 5 5 job;" in plan
    assert not await queue.refresh_plan()
    await queue.set("windows", "default")
    assert [None, None] == await queue.redis.hmget(queue.keys.config, "windows", "plan")


async def test_a_newer_format_is_refused(queue: Queue) -> None:
    """Who finds one stops with a clear message, before anything is changed."""
    await queue.ensure_format()
    await queue.redis.hset(queue.keys.config, "format", "2")
    with pytest.raises(LLMQError, match="format 2, and this llmq reads up to 1"):
        await queue.ensure_format()
