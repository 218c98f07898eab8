"""The scripts of a batch's life: open_batch, submit_lines, seal_batch, pause_batch, delete_batch."""

from __future__ import annotations

import pytest
from redis.exceptions import OutOfMemoryError

from llmq.scheduler import scripts
from llmq.scheduler.scripts import Verdict
from tests.scripted_queue import T0, ScriptedQueue, changes, names

waiting = pytest.mark.leaves("llmq:{q}:*")

WEEK_MS = 7 * 24 * 3600 * 1000


@waiting
async def test_an_open_batch_waits_for_lines(queue: ScriptedQueue) -> None:
    """A record, a lane without a stream, a place in the list."""
    before = await queue.state()
    assert Verdict("ok", "1") == await queue.open("B", tenant="anna", window_ms=5_000)
    assert {
        "b:B completed": (None, "0"),
        "b:B created_at": (None, str(T0)),
        "b:B expires_at": (None, str(T0 + 5_000)),
        "b:B failed": (None, "0"),
        "b:B id": (None, "B"),
        "b:B lane": (None, "batch:B"),
        "b:B lines": (None, "0"),
        "b:B next": (None, "1"),
        "b:B sealed": (None, "0"),
        "b:B status": (None, "in_progress"),
        "b:B tenant": (None, "anna"),
        "batches B": (None, float(T0)),
        "lanes batch:B": (None, f"+b|anna|{T0 + 5_000}"),
    } == changes(before, await queue.state())


@waiting
async def test_a_chunk_is_whole_in_the_keys(queue: ScriptedQueue) -> None:
    """Good lines wait, bad ones have ended, blank ones are only passed; the bell rings for every 8 (G1, G16)."""
    await queue.open("B")
    before = await queue.state()
    assert Verdict("ok", "21") == await queue.append("B", 1, 20, bad=[2])
    assert {
        "b:B failed": ("0", "1"),
        "b:B lines": ("0", "20"),
        "b:B next": ("1", "21"),
        "b:B:results #1": (None, {"n": "2", "k": "k2", "s": "failed", "e": "invalid_line", "m": "messages: missing"}),
        "bell:b": (None, 3),
        "bell:b ttl": (None, True),
        "bucket came:t": (None, str(T0)),
        "bucket since": (None, str(T0)),
        "bucket ttl": (None, True),
        "counts b": (None, "19"),
        "lane:batch:B": (None, 19),
        "order:b t|1314496000000|batch:B": (None, 0.0),
        "ready:b t": (None, 0.0),
    } == changes(before, await queue.state())


@waiting
async def test_a_chunk_that_comes_twice_is_taken_once(queue: ScriptedQueue) -> None:
    """A late reply, or a second producer: the answer is the line that is expected, and nothing changes (F-084)."""
    await queue.open("B")
    await queue.append("B", 1, 5)
    before = await queue.state()
    assert Verdict("skip", "6") == await queue.append("B", 1, 5)
    assert Verdict("skip", "6") == await queue.append("B", 4, 5)
    assert Verdict("skip", "6") == await queue.append("B", 9, 5)
    assert Verdict("exists", "6") == await queue.open("B")
    assert {} == changes(before, await queue.state())


@waiting
async def test_a_full_queue_refuses_a_chunk_whole(queue: ScriptedQueue) -> None:
    """The answer is the room that there is; bad lines need none (G15)."""
    await queue.configure(cap_batch=10)
    await queue.open("B")
    await queue.append("B", 1, 7)
    before = await queue.state()
    assert Verdict("full", "3") == await queue.append("B", 8, 4)
    assert {} == changes(before, await queue.state())
    assert Verdict("ok", "12") == await queue.append("B", 8, 4, bad=[9])
    assert Verdict("full", "0") == await queue.append("B", 12, 1)


@waiting
async def test_a_batch_that_must_have_room_now_is_refused_before_its_first_line(queue: ScriptedQueue) -> None:
    """`--no-wait`: nothing is queued (G15)."""
    await queue.configure(cap_batch=10)
    await queue.batch("A", 4)
    before = await queue.state()
    assert Verdict("full", "10") == await queue.open("B", need=7)
    assert {} == changes(before, await queue.state())
    assert Verdict("ok", "1") == await queue.open("B", need=6)


@waiting
async def test_a_full_server_refuses_before_any_effect(queue: ScriptedQueue) -> None:
    """Open, and chunks that begin with a good or a bad line, or are blank (G1); a seal uses nothing."""
    await queue.open("B")
    before = await queue.state()
    blank = scripts.submit_lines(queue.keys, "B", lane="batch:B", first=1, after=9, lines=[])
    async with queue.at_maxmemory():
        with pytest.raises(OutOfMemoryError):
            await queue.open("C")
        with pytest.raises(OutOfMemoryError):
            await queue.append("B", 1, 3, bad=[2])
        with pytest.raises(OutOfMemoryError):
            await queue.append("B", 1, 3, bad=[1])
        with pytest.raises(OutOfMemoryError):
            await queue.call(blank)
    assert {} == changes(before, await queue.state())


class TestSeal:
    """A batch completes only when it is sealed."""

    @waiting
    async def test_a_batch_whose_lines_have_all_ended_stays_open(self, queue: ScriptedQueue) -> None:
        """More may come, and runs."""
        await queue.open("B")
        await queue.append("B", 1, 2)
        assert ["B/1", "B/2"] == await queue.drain()
        assert "in_progress" == (await queue.state())["b:B status"]
        await queue.append("B", 3, 1)
        assert ["B/3"] == await queue.drain()

    async def test_the_seal_completes_what_has_ended(self, queue: ScriptedQueue) -> None:
        """Nothing else would; a second seal is the first (G11)."""
        await queue.open("B")
        await queue.append("B", 1, 2, bad=[2])
        await queue.drain()
        assert Verdict("ok", "2") == await queue.seal("B", 3)
        assert Verdict("ok", "2") == await queue.seal("B", 3)
        state = await queue.state()
        assert ("completed", "2", "1", "1") == tuple(
            state[f"b:B {field}"] for field in ("status", "total", "completed", "failed")
        )

    @waiting
    async def test_lines_that_are_missing_are_asked_for(self, queue: ScriptedQueue) -> None:
        """A producer that is wrong about the next line may not seal."""
        await queue.open("B")
        await queue.append("B", 1, 2)
        before = await queue.state()
        assert Verdict("open", "3") == await queue.seal("B", 9)
        assert {} == changes(before, await queue.state())

    @waiting
    async def test_nothing_comes_after_it(self, queue: ScriptedQueue) -> None:
        """A sealed, an ended and an unknown batch take no line."""
        await queue.batch("B", 1)
        assert Verdict("closed", "in_progress") == await queue.append("B", 2, 1)
        await queue.drain()
        assert Verdict("closed", "completed") == await queue.append("B", 2, 1)
        assert Verdict("closed", "lost") == await queue.append("C", 1, 1)
        assert Verdict("closed", "lost") == await queue.seal("C", 1)

    async def test_a_batch_of_bad_or_no_lines_completes(self, queue: ScriptedQueue) -> None:
        """Every line has ended already (G16)."""
        await queue.open("A")
        await queue.append("A", 1, 2, bad=[1, 2])
        await queue.seal("A", 3)
        await queue.open("B")
        await queue.seal("B", 1)
        state = await queue.state()
        assert ("completed", "completed") == (state["b:A status"], state["b:B status"])


class TestPause:
    """One batch."""

    async def test_a_paused_batch_does_not_start_and_comes_back_to_its_place(self, queue: ScriptedQueue) -> None:
        """Running lines go on; others are served; resumed, it is in front again."""
        await queue.batch("A", 3)
        await queue.pass_time(1)
        await queue.batch("B", 3)
        (lease,) = (await queue.claim()).leases
        assert Verdict("ok") == await queue.pause_batch("A")
        assert 1 == await queue.finish(lease)
        claimed = await queue.claim()
        assert ["B/1"] == names(claimed)
        assert Verdict("ok") == await queue.pause_batch("A", False)
        await queue.finish(*claimed.leases)
        assert ["A/2", "A/3", "B/2", "B/3"] == await queue.drain()

    async def test_what_comes_meanwhile_waits_too(self, queue: ScriptedQueue) -> None:
        """A chunk, a retry and a hand back do not resume it."""
        await queue.open("B")
        await queue.append("B", 1, 3)
        one, two = (await queue.claim(2)).leases
        await queue.pause_batch("B")
        await queue.append("B", 4, 1)
        await queue.hand_back(one)
        await queue.retry(two, 0.1)
        await queue.pass_time(1_000)
        assert [] == names(await queue.claim(9))
        await queue.seal("B", 5)
        await queue.pause_batch("B", False)
        assert ["B/1", "B/2", "B/3", "B/4"] == await queue.drain()

    async def test_an_ended_batch_stays_ended(self, queue: ScriptedQueue) -> None:
        """The answer is how; an unknown one is unknown."""
        await queue.batch("B", 1)
        await queue.drain()
        assert Verdict("ended", "completed") == await queue.pause_batch("B")
        assert Verdict("unknown") == await queue.pause_batch("C")

    @waiting
    async def test_a_cancelled_batch_is_not_resumed(self, queue: ScriptedQueue) -> None:
        """Pause and resume do not undo a cancel (G14)."""
        await queue.batch("B", 2)
        await queue.cancel_batch("B")
        assert Verdict("ended", "cancelling") == await queue.pause_batch("B", False)
        assert [] == names(await queue.claim())


class TestDelete:
    """Record and results go; nothing else does."""

    async def delete(self, queue: ScriptedQueue, batch: str) -> Verdict:
        """Delete a batch."""
        return await queue.call(scripts.delete_batch(queue.keys, batch, lane=f"batch:{batch}"))

    async def test_nothing_is_left_of_an_ended_batch(self, queue: ScriptedQueue) -> None:
        """Nor of the bytes that its results were."""
        before = await queue.state()
        await queue.batch("B", 2)
        await queue.drain()
        assert Verdict("ok") == await self.delete(queue, "B")
        left = changes(before, await queue.state())
        assert {"bell:b", "bell:b ttl", "bucket start", "bucket ttl"} == left.keys()
        assert Verdict("unknown") == await self.delete(queue, "B")

    @waiting
    async def test_an_unfinished_batch_stays(self, queue: ScriptedQueue) -> None:
        """It is to be cancelled first."""
        await queue.batch("B", 2)
        before = await queue.state()
        assert Verdict("open", "in_progress") == await self.delete(queue, "B")
        assert {} == changes(before, await queue.state())

    async def test_the_bytes_of_others_stay_counted(self, queue: ScriptedQueue) -> None:
        """`held` is what is left."""
        for batch in "AB":
            await queue.batch(batch, 1)
            await queue.finish(*(await queue.claim()).leases, body=b"x" * 10)
        await self.delete(queue, "A")
        assert "10" == (await queue.state())["held"]


async def test_the_list_of_batches_goes_with_the_last_lane(queue: ScriptedQueue) -> None:
    """Also where the last lane is one of single jobs; a batch that is opened makes it stay again (G11)."""
    await queue.configure(keep_batch=WEEK_MS // 2)
    await queue.submit("j1")
    await queue.batch("A", 1)
    job, line = (await queue.claim(2)).leases
    await queue.finish(line)
    assert -1 == await queue.redis.pttl(queue.keys.batches)
    await queue.finish(job)
    assert 0 < await queue.redis.pttl(queue.keys.batches) <= WEEK_MS // 2
    await queue.open("B")
    assert -1 == await queue.redis.pttl(queue.keys.batches)
    await queue.seal("B", 1)


async def test_a_drained_queue_holds_only_what_may_stay(queue: ScriptedQueue) -> None:
    """Chat and batch of several tenants, with retries, crashes and cancels: config, dead letters, TTLs (G11, F-065)."""
    await queue.configure(rate=1_000, burst=1_000)
    for tenant in ("anna", "ben"):
        await queue.batch(f"B-{tenant}", 20, tenant=tenant)
        for cls in "ib":
            await queue.submit(f"{cls}-{tenant}", cls=cls, tenant=tenant)
    one, two, three, *_ = leases = (await queue.claim(9)).leases
    await queue.hand_back(one)
    await queue.retry(two, 1.0)
    await queue.crash(three)
    await queue.finish(*leases[3:])
    await queue.cancel_batch("B-ben")
    await queue.reap("B-ben")
    await queue.pass_time(2_000)
    await queue.drain()
    left = {key.decode().removeprefix(queue.keys.prefix) for key in await queue.redis.keys("*")}
    with_ttl = {key for key in left if await queue.redis.pttl(queue.keys.prefix + key) > 0}
    assert {"config"} == left - with_ttl
    assert {"batches", "bell:b", "bell:i", "bucket", "held", "inbox:c"} <= with_ttl
