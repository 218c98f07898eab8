"""Kinds of faults that other queues shipped, where no other test has their case: each names its rows of the list."""

from __future__ import annotations

import re

import pytest

from llmq.scheduler.lease import Reason
from tests.contract.project import ROOT
from tests.scripted_queue import T0, ScriptedQueue, names

pytestmark = pytest.mark.leaves("llmq:{q}:*")


async def places_of(queue: ScriptedQueue, lane: str) -> dict[str, list[str]]:
    """Return where each entry of a lane is known: stored, waiting again, running."""
    redis, keys = queue.redis, queue.keys
    stored = [entry.decode() for entry, _ in await redis.xrange(keys.lane(lane))]
    back = {entry.decode() for entry in await redis.zrange(keys.back(lane), 0, -1)}
    pending = await redis.xpending_range(keys.lane(lane), "workers", "-", "+", 100)
    running = {row["message_id"].decode() for row in pending}
    return {entry: [name for name, held in (("back", back), ("running", running)) if entry in held] for entry in stored}


@pytest.mark.parametrize("how", ["retry", "delay", "hand back", "crash"])
async def test_what_comes_back_is_in_one_place(queue: ScriptedQueue, how: str) -> None:
    """A job that waits again is not also claimable as it was: one entry, in one place (F-004, F-024, F-052, F-053)."""
    await queue.batch("B", 2)
    first, second = (await queue.claim(2)).leases
    match how:
        case "retry":
            await queue.retry(first)
        case "delay":
            await queue.retry(first, delay=5.0)
        case "hand back":
            await queue.hand_back(first, reason=Reason.SHUTDOWN)
        case "crash":
            await queue.crash(first)
    assert {"1-0": ["back"], "2-0": ["running"]} == await places_of(queue, "batch:B")
    await queue.pass_time(5_000)
    assert ["B/1"] == names(await queue.claim(5))
    assert {"1-0": ["running"], "2-0": ["running"]} == await places_of(queue, "batch:B")
    assert await queue.finish(second)


async def test_a_worker_takes_what_it_has_room_for_and_no_more(queue: ScriptedQueue) -> None:
    """Nothing is claimed ahead: what one worker does not run, the next one takes (F-007, F-054)."""
    await queue.batch("B", 6)
    assert 2 == len((await queue.claim(2, worker="a")).leases)
    assert 4 == len((await queue.claim(10, worker="b")).leases)


async def test_a_delayed_job_is_in_nobody_s_hands(queue: ScriptedQueue) -> None:
    """Until it is due by Redis' clock it waits in a sorted set, whoever claims (F-008, F-100, F-113)."""
    await queue.batch("B", 1)
    await queue.retry((await queue.claim()).leases[0], delay=3600.0)
    assert {"1-0": ["back"]} == await places_of(queue, "batch:B")
    assert T0 + 3_600_000 == await queue.redis.zscore(queue.keys.back("batch:B"), "1-0")
    await queue.pass_time(3_599_999)
    assert [] == names(await queue.claim())
    await queue.pass_time(1)
    assert ["B/1"] == names(await queue.claim())


async def test_the_same_job_submitted_again_is_one_job(queue: ScriptedQueue) -> None:
    """Whoever submits a successor twice, because it ran twice, makes one: the id says so (F-020)."""
    assert "ok" == (await queue.submit("next")).word
    assert "exists" == (await queue.submit("next")).word
    assert ["next"] == await queue.drain()


async def test_an_end_takes_every_trace(queue: ScriptedQueue) -> None:
    """After its end no list, set or hash knows the job but its own record, so nobody can fail it later (F-025)."""
    await queue.submit("j1")
    (lease,) = (await queue.claim()).leases
    await queue.retry(lease)
    (again,) = (await queue.claim()).leases
    assert await queue.finish(again)
    left = {name.decode().rpartition("}:")[2] for name in await queue.redis.keys("llmq:*")}
    assert {"job:j1"} == {name for name in left if "j1" in name or "lane" in name or name in ("tries", "starts")}
    assert not await queue.finish(again)


async def test_a_lane_has_one_group_and_a_consumer_for_each_worker(queue: ScriptedQueue) -> None:
    """Groups and consumers do not grow with claims (F-062, F-063)."""
    await queue.batch("B", 20)
    for worker in "abab" * 4:
        await queue.claim(1, worker=worker)
    groups = await queue.redis.xinfo_groups(queue.keys.lane("batch:B"))
    assert [(b"workers", 2)] == [(group["name"], group["consumers"]) for group in groups]


async def test_no_lease_is_taken_before_its_time(queue: ScriptedQueue) -> None:
    """A sweep takes what was idle for a whole lease, and nothing younger (F-070)."""
    await queue.batch("B", 2)
    old, young = (await queue.claim(2)).leases
    await queue.lapse(old)
    assert 1 == (await queue.sweep("batch:B")).reclaimed
    assert {"1-0": ["back"], "2-0": ["running"]} == await places_of(queue, "batch:B")
    assert await queue.finish(young)


async def test_what_the_bucket_holds_back_keeps_its_place(queue: ScriptedQueue) -> None:
    """A line that may not start yet was never claimed, so it is never put back at a wrong end (F-106)."""
    await queue.configure(rate=1, burst=1)
    await queue.batch("B", 3)
    assert ["B/1"] == names(await queue.claim(3))
    assert {"1-0": ["running"], "2-0": [], "3-0": []} == await places_of(queue, "batch:B")
    await queue.pass_time(1_000)
    assert ["B/2"] == names(await queue.claim(3))


def test_no_script_trims_a_lane_or_asks_how_idle_a_consumer_is() -> None:
    """Lanes are not trimmed, and life is told by heartbeats: the scripts have no such command (F-064, F-066, F-141)."""
    lua = "".join(path.read_text() for path in sorted((ROOT / "scheduler" / "lua").glob("*.lua")))
    calls = set(re.findall(r"call\('([A-Z ]+)'(?:, '([A-Z]+)')?", lua))
    assert "XTRIM" not in {name for name, _ in calls}
    assert ("XINFO", "CONSUMERS") not in calls
    trimmed = re.findall(r"'XADD', (\w+), 'MAXLEN'", lua)
    assert {"inbox"} == set(trimmed)
