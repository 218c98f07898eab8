"""The script submit_job: what it leaves in Redis, what it refuses, and that refusal changes nothing."""

from __future__ import annotations

import pytest
from redis.exceptions import OutOfMemoryError

from tests.scripted_queue import T0, ScriptedQueue, changes, names

WAITING = pytest.mark.leaves("llmq:{q}:*")


@WAITING
async def test_a_submitted_job_is_whole_in_the_keys(queue: ScriptedQueue) -> None:
    """`ok` means: entry, record, count, order and bell are there (G1)."""
    before = await queue.state()
    verdict = await queue.submit("j1", tenant="anna", ttl_ms=5_000)
    assert "ok" == verdict.word
    assert {
        "bell:i": (None, 1),
        "bell:i ttl": (None, True),
        "counts i": (None, "1"),
        "job:j1 class": (None, "i"),
        "job:j1 client": (None, "c"),
        "job:j1 entry": (None, verdict.value),
        "job:j1 expires_at": (None, str(T0 + 5_000)),
        "job:j1 lane": (None, "i:anna"),
        "job:j1 submitted_at": (None, str(T0)),
        "job:j1 tenant": (None, "anna"),
        "lane:i:anna": (None, 1),
        "lanes i:anna": (None, "+i|anna|0000000000000"),
        "order:i anna|0000000000000|i:anna": (None, 0.0),
        "ready:i anna": (None, 0.0),
    } == changes(before, await queue.state())


@WAITING
async def test_the_same_id_again_is_the_same_job(queue: ScriptedQueue) -> None:
    """A submit whose reply was lost may be sent again: one job, and the same answer (F-084)."""
    first = await queue.submit("j1")
    before = await queue.state()
    again = await queue.submit("j1", tenant="other")
    assert ("exists", first.value) == (again.word, again.value)
    assert {} == changes(before, await queue.state())


@WAITING
async def test_an_id_with_another_digest_is_another_request(queue: ScriptedQueue) -> None:
    """A key that was used for something else is told apart; without a digest nothing is compared."""
    first = await queue.submit("j1", digest="d1")
    before = await queue.state()
    words = [(await queue.submit("j1", digest=digest)).word for digest in ("d1", "d2", "")]
    assert ["exists", "differs", "exists"] == words
    assert first.value == (await queue.submit("j1", digest="d2")).value
    assert {} == changes(before, await queue.state())


@WAITING
@pytest.mark.parametrize(("cls", "setting"), [("i", "cap_interactive"), ("b", "cap_batch")])
async def test_a_full_queue_refuses_and_changes_nothing(queue: ScriptedQueue, cls: str, setting: str) -> None:
    """Waiting and running jobs of the class fill the cap; the other class has its own (G15)."""
    await queue.configure(**{setting: 2})
    await queue.submit("j1", cls=cls)
    await queue.submit("j2", cls=cls)
    await queue.claim(1)
    before = await queue.state()
    verdict = await queue.submit("j3", cls=cls)
    assert ("full", 2) == (verdict.word, verdict.number)
    assert {} == changes(before, await queue.state())
    assert "ok" == (await queue.submit("j4", cls="b" if cls == "i" else "i")).word


async def test_an_ended_job_makes_room(queue: ScriptedQueue) -> None:
    """What has ended does not count: one job of a cap of 1, any number of times (G15)."""
    await queue.configure(cap_interactive=1)
    for number in range(3):
        assert "ok" == (await queue.submit(f"j{number}")).word
        await queue.finish(*(await queue.claim()).leases)


@WAITING
@pytest.mark.parametrize(
    ("cls", "ttl_ms", "setting", "expires"),
    [
        ("i", None, "", str(T0 + 60_000)),
        ("i", None, "7000", str(T0 + 7_000)),
        ("i", 0, "7000", "9000000000000000"),
        ("b", None, "7000", "9000000000000000"),
        ("b", 5, "7000", str(T0 + 5)),
    ],
)
async def test_a_job_expires_as_submit_or_setting_says(
    queue: ScriptedQueue, cls: str, ttl_ms: int | None, setting: str, expires: str
) -> None:
    """Interactive jobs wait as long as `queue_ttl` says, 60 s by default; batch and a ttl of 0 wait for ever."""
    await queue.configure(queue_ttl=setting)
    await queue.submit("j1", cls=cls, ttl_ms=ttl_ms)
    assert expires == (await queue.state())["job:j1 expires_at"]


@pytest.mark.parametrize("other", [True, False], ids=["a lane that exists", "a new lane"])
async def test_a_full_server_refuses_before_any_effect(queue: ScriptedQueue, other: bool) -> None:
    """At maxmemory submit fails and leaves nothing behind (G1)."""
    if other:
        await queue.submit("j0")
    before = await queue.state()
    async with queue.at_maxmemory():
        with pytest.raises(OutOfMemoryError):
            await queue.submit("j1")
    assert {} == changes(before, await queue.state())
    await queue.drain()


async def test_a_job_that_came_before_any_worker_runs(queue: ScriptedQueue) -> None:
    """The group begins at 0: a job submitted before the first worker ever started is claimed (F-060)."""
    await queue.submit("j1")
    assert ["j1"] == names(await queue.claim())
    await queue.redis.flushall()


@WAITING
async def test_the_bell_rings_once_a_job_and_no_more_than_64_times(queue: ScriptedQueue) -> None:
    """A bell holds one wake-up at least while jobs wait, never more than 64, and goes by itself."""
    for number in range(3):
        await queue.submit(f"i{number}")
    assert 1 == (await queue.state())["bell:i"]
    await queue.batch("B", 2_000)
    assert 63 == (await queue.state())["bell:b"]


async def test_a_lane_that_is_there_but_not_known_is_known_again(queue: ScriptedQueue) -> None:
    """Somebody deleted what was known of it: the script does not end between entry and record (G1, F-137)."""
    await queue.submit("j1")
    await queue.redis.hdel(queue.keys.lanes, "i:t")
    assert "ok" == (await queue.submit("j2")).word
    assert ["j1", "j2"] == await queue.drain()
