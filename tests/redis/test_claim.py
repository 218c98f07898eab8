"""The script claim: who is next. Each rule of the policy on its own; the random walk has them all at once."""

from __future__ import annotations

import pytest
from redis.exceptions import OutOfMemoryError

from llmq.scheduler import scripts
from llmq.scheduler.lease import ErrorCode, Reason, Usage, Why
from tests.scripted_queue import T0, ScriptedQueue, changes, names

pytestmark = pytest.mark.leaves("llmq:{q}:*")


def whys(claimed: scripts.Claimed) -> list[Why]:
    """Return why each job was started."""
    return [lease.why for lease in claimed.leases]


class TestNothingToGive:
    """A claim that gives nothing says why, and when to look again."""

    async def test_an_empty_queue_is_left_as_it_was(self, queue: ScriptedQueue) -> None:
        """A claim with nothing waiting writes nothing, and asks to be repeated within a second."""
        before = await queue.state()
        claimed = await queue.claim(4)
        assert ([], "empty", 1.0) == (claimed.leases, claimed.reason, claimed.wait)
        assert {} == changes(before, await queue.state())

    @pytest.mark.parametrize(
        ("settings", "free", "reason"),
        [
            ({"paused_b": 1}, 4, "paused"),
            ({"plan": f"{T0 - 5} closed - -;"}, 4, "window"),
            ({}, 0, "busy"),
            ({"rate": 0.5, "burst": 1}, 4, "bucket"),
            ({"yields_b": T0 + 5000}, 4, "objective"),
        ],
    )
    async def test_batch_that_may_not_start_has_a_reason(
        self, queue: ScriptedQueue, settings: dict[str, str | float], free: int, reason: str
    ) -> None:
        """Each thing that holds batch up has a word of its own."""
        await queue.batch("B", 3)
        await queue.configure(**settings)
        await queue.claim(4, free=free)
        assert reason == (await queue.claim(4, free=free)).reason

    async def test_the_wait_ends_when_something_may_change(self, queue: ScriptedQueue) -> None:
        """A job that is due, the plan's next change, a token: whichever comes first, and a second at most (F-104)."""
        await queue.batch("B", 3)
        (lease,) = (await queue.claim()).leases
        await queue.configure(paused_b=1)
        assert 1.0 == (await queue.claim()).wait
        await queue.configure(plan=f"{T0 + 800} closed - -;")
        assert 0.8 == (await queue.claim()).wait
        await queue.configure(paused_b="", rate=2, burst=1)
        await queue.claim()
        assert 0.5 == (await queue.claim()).wait
        await queue.submit("j1")
        await queue.retry((await queue.claim()).leases[0], 0.3)
        assert 0.3 == (await queue.claim()).wait
        await queue.hand_back(lease)


class TestChatFirst:
    """Interactive jobs go before batch."""

    async def test_no_batch_starts_while_chat_waits(self, queue: ScriptedQueue) -> None:
        """Chat takes the whole room before batch gets a slot (G9)."""
        await queue.batch("B", 5)
        for number in range(3):
            await queue.submit(f"j{number}")
        assert ["j0", "j1"] == names(await queue.claim(2))
        assert ["j2", "B/1"] == names(await queue.claim(2))

    async def test_chat_may_take_room_that_is_not_free(self, queue: ScriptedQueue) -> None:
        """Room beyond the free slots (preemptable batch) is for chat alone."""
        await queue.batch("B", 5)
        await queue.submit("j1")
        assert ["j1"] == names(await queue.claim(3, free=0))
        assert [] == names(await queue.claim(3, free=0))

    async def test_the_reserve_stays_free(self, queue: ScriptedQueue) -> None:
        """Batch starts only while more slots than the reserve are free; chat takes those as well."""
        await queue.batch("B", 9)
        assert ["B/1", "B/2"] == names(await queue.claim(4, reserve=2))
        await queue.submit("j1")
        assert ["j1"] == names(await queue.claim(2, reserve=2))

    async def test_paused_chat_does_not_hold_batch_up(self, queue: ScriptedQueue) -> None:
        """While interactive is paused it is not claimable (G9)."""
        await queue.submit("j1")
        await queue.batch("B", 1)
        await queue.configure(paused_i=1)
        assert ["B/1"] == names(await queue.claim(4))
        await queue.configure(paused_i="")
        assert ["j1"] == names(await queue.claim(4))

    async def test_an_empty_bucket_does_not_delay_chat(self, queue: ScriptedQueue) -> None:
        """The bucket is for batch alone (F-107)."""
        await queue.configure(rate=0.01, burst=1)
        await queue.batch("B", 5)
        await queue.claim(1)
        for number in range(3):
            await queue.submit(f"j{number}")
        assert ["j0", "j1", "j2"] == names(await queue.claim(4))

    async def test_chat_that_expired_hides_no_other_chat(self, queue: ScriptedQueue) -> None:
        """With more expired jobs than a claim ends, batch still waits for the chat behind them (G9)."""
        for number in range(70):
            await queue.submit(f"old{number}", ttl_ms=100)
        await queue.submit("young")
        await queue.batch("B", 1)
        await queue.pass_time(200)
        first = await queue.call(
            scripts.claim(queue.keys, "w", room=2, free=2, reserve=0, suspects=0, candidates=["i:t", "batch:B"])
        )
        assert ([], 64, "more", 0.0) == (names(first), len(first.doomed), first.reason, first.wait)
        second = await queue.claim(2)
        assert (["young", "B/1"], 6) == (names(second), len(second.doomed))

    async def test_expired_jobs_in_back_are_bounded_too(self, queue: ScriptedQueue) -> None:
        """Many retries that expired while they were delayed do not come out in one claim."""
        for number in range(100):
            await queue.submit(f"j{number}", ttl_ms=100)
        for lease in (await queue.claim(100)).leases:
            await queue.retry(lease, 1.0)
        await queue.pass_time(2_000)
        first = await queue.call(
            scripts.claim(queue.keys, "w", room=5, free=5, reserve=0, suspects=0, candidates=["i:t"])
        )
        assert (64, "more") == (len(first.doomed), first.reason)


class TestOrder:
    """Within a lane, and between a tenant's lanes."""

    async def test_lines_start_in_the_order_of_the_file(self, queue: ScriptedQueue) -> None:
        """Line by line, whoever claims (G17)."""
        await queue.batch("B", 4)
        claims = [names(await queue.claim(1, worker=worker))[0] for worker in ("w1", "w2", "w1", "w2")]
        assert ["B/1", "B/2", "B/3", "B/4"] == claims

    async def test_what_comes_back_goes_before_what_never_started(self, queue: ScriptedQueue) -> None:
        """Handed back, reclaimed, preempted and retried lines keep their place (G17, G6)."""
        await queue.batch("B", 9)
        one, two, three, four = (await queue.claim(4)).leases
        await queue.hand_back(four, reason=Reason.PREEMPTED)
        await queue.crash(two)
        await queue.hand_back(one)
        await queue.retry(three, 0.5)
        assert ["B/1", "B/2", "B/4", "B/5"] == names(await queue.claim(4))
        await queue.pass_time(500)
        assert ["B/3", "B/6"] == names(await queue.claim(2))

    async def test_single_jobs_come_back_in_the_order_of_their_ids(self, queue: ScriptedQueue) -> None:
        """Also where the clock was set back since they came: none of them is taken for delayed (G17)."""
        for number in range(3):
            await queue.submit(f"j{number}")
        one, two, _ = (await queue.claim(3)).leases
        await queue.set_clock(T0 // 2)
        await queue.hand_back(two, one)
        assert ["j0", "j1"] == names(await queue.claim(3))

    async def test_the_batch_that_is_due_first_goes_first(self, queue: ScriptedQueue) -> None:
        """Within a tenant: single jobs, then windows by their end, then batches without one as they came."""
        await queue.batch("A", 1)
        await queue.pass_time(1)
        await queue.batch("B", 1)
        await queue.batch("C", 1, window_ms=50_000)
        await queue.batch("D", 1, window_ms=10_000)
        await queue.submit("single", cls="b")
        assert ["single", "D/1", "C/1", "A/1", "B/1"] == names(await queue.claim(9))

    async def test_a_batch_whose_window_is_over_does_not_start(self, queue: ScriptedQueue) -> None:
        """Its lines are left to the reaper, and the next lane is served."""
        await queue.batch("A", 2, window_ms=1_000)
        await queue.batch("B", 1)
        await queue.pass_time(1_000)
        assert ["B/1"] == names(await queue.claim(3))
        state = await queue.state()
        assert ("!b|t|1000000001000", float(T0 + 1_000)) == (state["lanes batch:A"], state["ending batch:A"])

    async def test_a_job_that_waited_too_long_is_for_the_worker_to_end(self, queue: ScriptedQueue) -> None:
        """It takes no room, and no token (F-103)."""
        await queue.configure(rate=0.001, burst=2)
        await queue.submit("old", cls="b", ttl_ms=100)
        await queue.pass_time(200)
        await queue.submit("new", cls="b")
        claimed = await queue.claim(1)
        assert (["new"], ["expired"]) == (names(claimed), [doomed.verdict for doomed in claimed.doomed])
        assert 1.0 == float(str((await queue.state())["bucket tokens"]))
        assert await queue.end(claimed.doomed[0].lease, ErrorCode.TIMEOUT)
        assert "expired" == (await queue.state())["job:old state"]


class TestFairness:
    """Between tenants."""

    async def test_chat_takes_turns(self, queue: ScriptedQueue) -> None:
        """Tenants in turn, one job each."""
        for tenant in ("anna", "ben"):
            for number in range(3):
                await queue.submit(f"{tenant}{number}", tenant=tenant)
        assert ["anna0", "ben0", "anna1", "ben1", "anna2", "ben2"] == names(await queue.claim(9))

    async def test_batch_is_shared_by_weight_in_llm_tokens(self, queue: ScriptedQueue) -> None:
        """Three times the weight is three times the tokens, whatever a job costs."""
        await queue.configure(**{"weight.anna": 3})
        await queue.batch("A", 400, tenant="anna", cost=1000)
        await queue.batch("B", 400, tenant="ben", cost=3000)
        started = names(await queue.claim(100))
        tokens = {
            letter: sum(job[0] == letter for job in started) * cost for letter, cost in (("A", 1000), ("B", 3000))
        }
        assert 3.0 == pytest.approx(tokens["A"] / tokens["B"], rel=0.1)

    async def test_real_usage_corrects_the_estimate(self, queue: ScriptedQueue) -> None:
        """A tenant whose answers are longer than estimated waits for the others to catch up."""
        await queue.batch("A", 9, tenant="anna", cost=1000)
        await queue.batch("B", 9, tenant="ben", cost=1000)
        anna, ben = (await queue.claim(2)).leases
        await queue.finish(anna, usage=Usage(1000, 3000))
        await queue.finish(ben, usage=Usage(500, 500))
        state = await queue.state()
        assert (4000.0, 1250.0) == (state["ready:b anna"], state["ready:b ben"])
        assert ["B/2", "B/3", "B/4", "A/2"] == names(await queue.claim(4))

    async def test_a_start_that_made_way_is_charged_once(self, queue: ScriptedQueue) -> None:
        """Whose lines are preempted again and again does not wait for what they have not used."""
        await queue.batch("A", 9, tenant="anna", cost=4_000)
        await queue.batch("B", 99, tenant="ben", cost=300)
        for _ in range(5):
            claimed = (await queue.claim(2)).leases
            assert ["anna", "ben"] == [lease.tenant for lease in claimed]
            await queue.hand_back(*claimed, reason=Reason.PREEMPTED)
        state = await queue.state()
        assert (0.0, 250.0) == (state["ready:b anna"], state["ready:b ben"])

    async def test_who_is_always_refused_is_not_always_next(self, queue: ScriptedQueue) -> None:
        """A start that an engine refused stays charged: others have their turns between (F-111)."""
        await queue.batch("A", 9, tenant="anna", cost=1_000)
        await queue.batch("B", 99, tenant="ben", cost=500)
        started = []
        for _ in range(9):
            (lease,) = (await queue.claim()).leases
            started.append(lease.tenant)
            if lease.tenant == "anna":
                await queue.hand_back(lease, reason=Reason.OVERLOAD)
            else:
                await queue.finish(lease)
        assert 6 == started.count("ben")

    async def test_who_was_away_is_not_paid_for_what_was_charged_before(self, queue: ScriptedQueue) -> None:
        """Long answers were feared for a tenant's lines, short ones came: what it has since begun with owes nothing."""
        await queue.batch("B", 99, tenant="ben", cost=300)
        await queue.batch("A", 8, tenant="anna", cost=4_000)
        last = [lease for lease in (await queue.claim(98)).leases if lease.tenant == "anna"]
        while len(last) < 8:
            last += [lease for lease in (await queue.claim()).leases if lease.tenant == "anna"]
        await queue.batch("B2", 99, tenant="ben", cost=300)
        await queue.pass_time(1_000)
        await queue.batch("A2", 99, tenant="anna", cost=300)
        await queue.finish(*last, usage=Usage(100, 200))
        assert 9 <= sum(lease.tenant == "anna" for lease in (await queue.claim(20)).leases) <= 11

    async def test_who_arrives_is_almost_a_turn_behind_the_least_service(self, queue: ScriptedQueue) -> None:
        """Neither owed nor owing for the time before; alone, from nothing."""
        await queue.batch("A", 9, tenant="anna", cost=1000)
        await queue.batch("B", 9, tenant="ben", cost=1000)
        await queue.claim(5)
        await queue.batch("C", 9, tenant="cleo", cost=1000)
        state = await queue.state()
        assert (3000.0, 2250.0, 2500.0) == tuple(state[f"ready:b {name}"] for name in ("anna", "ben", "cleo"))

    @pytest.mark.parametrize("cls", ["i", "b"])
    async def test_who_comes_and_goes_with_each_job_shares_with_who_waits(self, queue: ScriptedQueue, cls: str) -> None:
        """A tenant that never has two jobs waiting is neither always first nor never, whatever its name (G10)."""
        for number in range(9):
            await queue.submit(f"mia{number}", cls=cls, tenant="mia", cost=256)
        started: list[str] = []
        for _ in range(12):
            for tenant in ("anna", "zoe"):
                gone = sum(name.startswith(tenant) for name in started)
                await queue.submit(
                    f"{tenant}{gone}", cls=cls, tenant=tenant, cost=256
                )  # one that waits is the same job
            started += names(await queue.claim())
        shares = [sum(name.startswith(tenant) for name in started) for tenant in ("anna", "mia", "zoe")]
        assert (4, 4, 4) == tuple(shares)


class TestDeadline:
    """Batch always makes progress (G10)."""

    async def busy(self, queue: ScriptedQueue, lines: int = 9) -> None:
        """Let batch wait, the bucket be empty, and chat wait."""
        await queue.configure(rate=0.001, burst=1)
        await queue.batch("B", lines)
        await queue.claim(1)
        for number in range(20):
            await queue.submit(f"j{number}", ttl_ms=0)

    async def test_it_starts_one_batch_job_in_time(self, queue: ScriptedQueue) -> None:
        """With chat waiting, the bucket empty and no slot free: after 30 s, not before, and one only (G9, G10)."""
        await self.busy(queue)
        await queue.pass_time(29_999)
        assert [Why.CHAT] == whys(await queue.claim(1, free=0))
        await queue.pass_time(1)
        claimed = await queue.claim(3, free=0)
        assert ([Why.DEADLINE, Why.CHAT, Why.CHAT], "B/2") == (whys(claimed), names(claimed)[0])
        assert claimed.leases[0].protected()
        await queue.pass_time(29_999)
        assert [Why.CHAT] == whys(await queue.claim(1))

    async def test_yielding_to_chat_does_not_hold_it_up(self, queue: ScriptedQueue) -> None:
        """G10: batch that yields all over the fleet still starts by the deadline, and only so."""
        await queue.batch("B", 9)
        await queue.claim(1)
        await queue.configure(yields_b=T0 + 60_000)
        yielding = await queue.claim(4)
        assert ([], "objective") == (yielding.leases, yielding.reason)
        await queue.pass_time(30_000)
        assert [Why.DEADLINE] == whys(await queue.claim(4))

    async def test_the_reserve_does_not_hold_it_up(self, queue: ScriptedQueue) -> None:
        """A reserved slot is good enough; without any room nothing starts."""
        await queue.batch("B", 1)
        await queue.pass_time(30_000)
        assert [] == names(await queue.claim(0, free=0, reserve=1))
        assert [Why.DEADLINE] == whys(await queue.claim(1, free=1, reserve=1))

    @pytest.mark.parametrize("last", ["waits", "running", "finished"])
    async def test_a_clock_that_is_set_back_does_not_put_it_off(self, queue: ScriptedQueue, last: str) -> None:
        """An hour back, it is due after 30 s all the same, whatever it counts from: a start, or that batch waits."""
        await queue.configure(deadline=1_000)
        await queue.batch("B", 9)
        await queue.submit("j1", ttl_ms=0)
        await queue.submit("j2", ttl_ms=0)
        if last != "waits":
            await queue.pass_time(1_000)
            (lease, _) = (await queue.claim(2)).leases
            await queue.submit("j3", ttl_ms=0)
            if last == "finished":
                await queue.finish(lease)
        await queue.configure(deadline=30_000)
        await queue.pass_time(-3_600_000)
        assert Why.CHAT in whys(await queue.claim(1, free=0))
        await queue.pass_time(29_999)
        assert Why.DEADLINE not in whys(await queue.claim(1, free=0))
        await queue.pass_time(1)
        assert [Why.DEADLINE] == whys(await queue.claim(1, free=0))

    async def test_it_starts_nothing_where_the_engine_refuses_work(self, queue: ScriptedQueue) -> None:
        """Another worker may start it; chat is given as ever."""
        await self.busy(queue)
        await queue.pass_time(30_000)
        assert [Why.CHAT] * 2 == whys(await queue.claim(2, reserve=None))
        assert [Why.DEADLINE, Why.CHAT] == whys(await queue.claim(2))

    async def test_the_wait_says_when_it_is_due(self, queue: ScriptedQueue) -> None:
        """A worker that looks when it is told is there in time."""
        await self.busy(queue)
        await queue.pass_time(29_500)
        assert 0.5 == (await queue.claim(1, free=0)).wait

    @pytest.mark.parametrize("left", [Reason.PREEMPTED, Reason.SHUTDOWN, "crash", "cancel"])
    async def test_a_start_that_is_not_left_to_finish_does_not_count(self, queue: ScriptedQueue, left: str) -> None:
        """Preempted, handed back, crashed or cancelled: the deadline counts from the start before it."""
        await queue.batch("B", 9)
        (kept,) = (await queue.claim(1)).leases
        await queue.pass_time(20_000)
        (lease,) = (await queue.claim(1)).leases
        match left:
            case "crash":
                await queue.crash(lease)
            case "cancel":
                await queue.end(lease, ErrorCode.CANCELLED)
            case reason:
                await queue.hand_back(lease, reason=Reason(reason))
        await queue.finish(kept)
        await queue.pass_time(10_000)
        assert [Why.DEADLINE] == whys(await queue.claim(1, free=0))

    async def test_a_start_that_may_still_be_preempted_does_not_count(self, queue: ScriptedQueue) -> None:
        """Else preempted starts, each in time, could push the deadline on for ever."""
        await queue.batch("B", 9)
        await queue.pass_time(20_000)
        await queue.claim(1)
        await queue.pass_time(10_000)
        assert [Why.DEADLINE] == whys(await queue.claim(1, free=0))

    async def test_a_line_that_was_begun_in_time_is_protected_instead(self, queue: ScriptedQueue) -> None:
        """Nothing else starts then, it takes no room any more, and the deadline counts from its start."""
        await queue.batch("B", 9)
        await queue.submit("j1", ttl_ms=0)
        await queue.claim(1)
        await queue.pass_time(20_000)
        (line,) = (await queue.claim(1)).leases
        await queue.pass_time(10_000)
        await queue.submit("j2", ttl_ms=0)
        claimed = await queue.claim(1, free=0, youngest=line)
        assert ([], True) == (names(claimed), claimed.protects)
        assert float(T0 + 20_000) == (await queue.state())["starts batch:B|1-0"]
        await queue.pass_time(19_999)
        assert ["j2"] == names(await queue.claim(1, free=0))
        await queue.pass_time(1)
        assert [Why.DEADLINE] == whys(await queue.claim(1, free=0))

    async def test_a_line_that_was_begun_long_ago_is_protected_and_another_started(self, queue: ScriptedQueue) -> None:
        """It is not thrown away for the other; where there is no room beside it, nothing starts."""
        await queue.batch("B", 9)
        await queue.pass_time(1_000)
        (line,) = (await queue.claim(1)).leases
        await queue.pass_time(30_000)
        alone = await queue.claim(1, free=0, youngest=line)
        assert ([], True) == (whys(alone), alone.protects)
        (other,) = (await queue.claim(1)).leases
        assert Why.DEADLINE is other.why

    async def test_a_line_that_was_preempted_three_times_counts_at_once(self, queue: ScriptedQueue) -> None:
        """It is left to finish from its start on."""
        await queue.batch("B", 9)
        for _ in range(3):
            await queue.hand_back(*(await queue.claim(1)).leases, reason=Reason.PREEMPTED)
        await queue.pass_time(20_000)
        assert [Why.BUCKET] == whys(await queue.claim(1))
        await queue.pass_time(29_999)
        assert [] == whys(await queue.claim(1, free=0))

    async def test_a_finished_start_counts_from_when_it_started(self, queue: ScriptedQueue) -> None:
        """Not from when it ended, and also when others end out of order."""
        await queue.batch("B", 9)
        (first,) = (await queue.claim(1)).leases
        await queue.pass_time(10_000)
        (second,) = (await queue.claim(1)).leases
        await queue.pass_time(5_000)
        await queue.finish(second)
        await queue.finish(first)
        await queue.pass_time(24_999)
        assert [] == whys(await queue.claim(1, free=0))
        await queue.pass_time(1)
        assert [Why.DEADLINE] == whys(await queue.claim(1, free=0))

    @pytest.mark.parametrize("how", ["claimed", "from back", "cancelled", "expired", "alone in flight"])
    async def test_it_counts_from_when_batch_began_to_wait(self, queue: ScriptedQueue, how: str) -> None:
        """A lane that was emptied, however, leaves nothing from which the next batch's wait is counted."""
        await queue.submit("b1", cls="b", ttl_ms=1_000)
        match how:
            case "from back":
                await queue.hand_back(*(await queue.claim()).leases)
                await queue.finish(*(await queue.claim()).leases)
            case "cancelled":
                await queue.cancel("b1", cls="b")
            case "expired":
                await queue.pass_time(1_000)
                await queue.cancel("b1", cls="b", state="expired")
            case "alone in flight":
                await queue.claim()
                await queue.submit("b2", cls="b")
                await queue.cancel("b2", cls="b")
                assert "bucket since" not in await queue.state()
                await queue.redis.delete(queue.keys.starts)
            case _:
                await queue.finish(*(await queue.claim()).leases)
        await queue.redis.hdel(queue.keys.bucket, "start")
        await queue.pass_time(100_000)
        await queue.batch("B", 9)
        await queue.pass_time(29_999)
        assert [] == whys(await queue.claim(1, free=0))
        await queue.pass_time(1)
        assert [Why.DEADLINE] == whys(await queue.claim(1, free=0))

    async def test_it_stands_still_while_batch_is_paused(self, queue: ScriptedQueue) -> None:
        """Paused, nothing starts; resumed, the wait begins anew."""
        await queue.batch("B", 9)
        await queue.configure(paused_b=1)
        await queue.pass_time(100_000)
        assert [] == whys(await queue.claim(1))
        await queue.configure(paused_b="")
        await queue.pass_time(29_999)
        assert [] == whys(await queue.claim(1, free=0))
        await queue.pass_time(1)
        assert [Why.DEADLINE] == whys(await queue.claim(1, free=0))

    async def test_a_batch_that_is_resumed_begins_to_wait(self, queue: ScriptedQueue) -> None:
        """Pause and resume of the only batch is the same."""
        await queue.batch("B", 9)
        await queue.pause_batch("B")
        await queue.pass_time(100_000)
        assert [] == whys(await queue.claim(1))
        await queue.pause_batch("B", False)
        await queue.pass_time(29_999)
        assert [] == whys(await queue.claim(1, free=0))
        await queue.pass_time(1)
        assert [Why.DEADLINE] == whys(await queue.claim(1, free=0))

    async def test_it_counts_from_the_opening_of_the_window(self, queue: ScriptedQueue) -> None:
        """Closed, nothing starts; the first start may be `deadline` after the opening."""
        await queue.batch("B", 9)
        await queue.configure(plan=f"{T0} closed - -;{T0 + 100_000} - - -;")
        await queue.pass_time(99_999)
        claimed = await queue.claim(1)
        assert ([], "window", 0.001) == (names(claimed), claimed.reason, claimed.wait)
        await queue.pass_time(30_000)
        assert [] == whys(await queue.claim(1, free=0))
        await queue.pass_time(1)
        assert [Why.DEADLINE] == whys(await queue.claim(1, free=0))

    async def test_a_change_acts_on_the_next_claim(self, queue: ScriptedQueue) -> None:
        """The deadline is a live setting."""
        await self.busy(queue)
        await queue.configure(deadline=2_000)
        await queue.pass_time(2_000)
        assert [Why.DEADLINE] == whys(await queue.claim(1, free=0))


class TestSuspects:
    """Jobs that were in flight at a death run alone (G7)."""

    async def suspects(self, queue: ScriptedQueue, count: int) -> None:
        """Let the first lines of a batch come back after a crash."""
        await queue.batch("B", 9)
        await queue.crash(*(await queue.claim(count)).leases)

    async def test_a_worker_takes_one_at_a_time(self, queue: ScriptedQueue) -> None:
        """One suspect, and around it what is none."""
        await self.suspects(queue, 2)
        claimed = await queue.claim(3)
        assert (["B/1", "B/3", "B/4"], [1, 0, 0]) == (names(claimed), [lease.crashes for lease in claimed.leases])
        assert ["B/5"] == names(await queue.claim(1, suspects=1))
        assert ["B/2"] == names(await queue.claim(1, worker="w2"))

    async def test_a_lane_of_suspects_is_passed_over(self, queue: ScriptedQueue) -> None:
        """The next lane is served, and the lane stays in its place for others."""
        await queue.batch("A", 2)
        await queue.crash(*(await queue.claim(2)).leases)
        await queue.pass_time(1)
        await queue.batch("B", 1)
        assert ["B/1"] == names(await queue.claim(2, suspects=1))
        assert ["A/1"] == names(await queue.claim(2, worker="w2"))

    async def test_many_lanes_of_suspects_hide_no_other_lane(self, queue: ScriptedQueue) -> None:
        """With suspects of nine tenants waiting, a worker that runs one still serves the tenth's chat and batch."""
        for number in range(9):
            await queue.submit(f"bad{number}", tenant=f"t{number}")
        await queue.crash(*(await queue.claim(9)).leases)
        await queue.submit("good", tenant="u")
        await queue.batch("B", 1, tenant="u")
        assert ["good", "B/1"] == names(await queue.claim(2, suspects=1))

    async def test_more_of_them_than_fit_make_nobody_spin(self, queue: ScriptedQueue) -> None:
        """Where the candidates cannot hold all lanes, the claim says busy; it does not ask for the same lanes again."""
        for number in range(20):
            await queue.submit(f"bad{number:02}", tenant=f"t{number:02}")
        await queue.crash(*(await queue.claim(20)).leases)
        claimed = await queue.claim(1, suspects=1)
        assert ([], "busy") == (names(claimed), claimed.reason)


class TestCandidates:
    """A worker gives the lanes; the script says which are right."""

    async def test_other_lanes_are_asked_for_only_when_they_are_needed(self, queue: ScriptedQueue) -> None:
        """One extra trip where the next lane is not given, none after it."""
        await queue.batch("B", 9)
        await queue.claim(1)
        assert 2 == queue.trips
        await queue.claim(1)
        assert 1 == queue.trips

    async def test_nothing_of_a_lower_rank_starts_for_want_of_a_lane(self, queue: ScriptedQueue) -> None:
        """Batch does not take the slot of chat whose lane is not given (G9)."""
        await queue.batch("B", 9)
        await queue.claim(1)
        await queue.submit("j1")
        one = await queue.call(
            scripts.claim(queue.keys, "w", room=1, free=1, reserve=0, suspects=0, candidates=["batch:B"])
        )
        assert ([], "lanes", ["i:t", "batch:B"]) == (names(one), one.reason, one.candidates)

    async def test_lanes_of_both_classes_have_a_place(self, queue: ScriptedQueue) -> None:
        """Many tenants' chat does not push batch out: the deadline must find its lane."""
        for number in range(8):
            await queue.submit(f"j{number}", tenant=f"t{number}")
            await queue.batch(f"B{number}", 1, tenant=f"t{number}")
        one = await queue.call(scripts.claim(queue.keys, "w", room=1, free=1, reserve=0, suspects=0, candidates=[]))
        assert ["i:t0", "i:t1", "i:t2", "i:t3", "i:t4", "batch:B0", "batch:B1", "batch:B2"] == one.candidates


class TestForeignHands:
    """What somebody else does to the keys stops nothing else."""

    @pytest.mark.parametrize("deleted", ["entry", "back", "stream", "lanes", "order", "ready"])
    async def test_a_deletion_does_not_stop_the_claim(self, queue: ScriptedQueue, deleted: str) -> None:
        """A lane that was damaged by hand is passed over; others are served."""
        await queue.batch("A", 2)
        await queue.hand_back(*(await queue.claim(1)).leases)
        match deleted:
            case "entry":
                await queue.redis.xdel(queue.keys.lane("batch:A"), "1-0", "2-0")
            case "back":
                await queue.redis.delete(queue.keys.back("batch:A"))
            case "stream":
                await queue.redis.delete(queue.keys.lane("batch:A"))
            case "lanes":
                await queue.redis.delete(queue.keys.lanes)
            case "order":
                await queue.redis.delete(queue.keys.order("b"))
            case "ready":
                await queue.redis.delete(queue.keys.ready("b"))
        await queue.claim(9)
        await queue.pass_time(1)
        await queue.batch("B", 1)
        await queue.submit("j1")
        assert {"j1", "B/1"} <= {*names(await queue.claim(9))}
        assert "empty" == (await queue.claim(9)).reason

    async def test_a_group_that_was_deleted_is_made_again(self, queue: ScriptedQueue) -> None:
        """Of new entries and of those that wait again none is lost, and each has one accepted end (F-056, F-058)."""
        await queue.batch("B", 4)
        await queue.hand_back(*(await queue.claim(2)).leases)
        await queue.redis.xgroup_destroy(queue.keys.lane("batch:B"), "workers")
        started = await queue.drain()
        assert {"B/1", "B/2", "B/3", "B/4"} == {*started}
        state = await queue.state()
        assert ("completed", "4") == (state["b:B status"], state["b:B completed"])

    async def test_an_emptied_redis_is_served(self, queue: ScriptedQueue) -> None:
        """After FLUSHALL a worker claims with the candidates that it had (G12)."""
        await queue.batch("B", 4)
        await queue.claim(1)
        await queue.redis.flushall()
        assert [] == names(await queue.claim(1))
        await queue.batch("B", 4)
        assert ["B/1"] == names(await queue.claim(1))


class TestTheWholeState:
    """Before and after one act."""

    async def test_a_chat_start(self, queue: ScriptedQueue) -> None:
        """The entry is pending, and a lane without more leaves."""
        await queue.submit("j1")
        before = await queue.state()
        await queue.claim(2)
        assert {
            "lane:i:t running j1": (None, "w x1"),
            "order:i t|0000000000000|i:t": (0.0, None),
            "ready:i t": (0.0, None),
        } == changes(before, await queue.state())

    async def test_a_batch_start(self, queue: ScriptedQueue) -> None:
        """The start is noted, paid for, and added to the tenant's service."""
        await queue.configure(rate=1, burst=5)
        await queue.batch("B", 9, cost=40)
        before = await queue.state()
        await queue.claim(2)
        assert {
            "bucket at": (None, str(T0)),
            "bucket tokens": (None, "3"),
            "bucket unit": (None, "job"),
            "lane:batch:B running 1-0": (None, "w x1"),
            "lane:batch:B running 2-0": (None, "w x1"),
            "ready:b t": (0.0, 80.0),
            "starts batch:B|1-0": (None, -float(T0)),
            "starts batch:B|2-0": (None, -float(T0)),
        } == changes(before, await queue.state())

    async def test_a_start_from_back(self, queue: ScriptedQueue) -> None:
        """The same entry, one delivery more, and no record of it in `back`."""
        await queue.batch("B", 1)
        await queue.hand_back(*(await queue.claim()).leases)
        before = await queue.state()
        await queue.claim(worker="w2")
        assert {
            "bucket came:t": (str(T0), None),
            "bucket since": (str(T0), None),
            "bucket ttl": (True, None),
            "lane:batch:B running 1-0": (None, "w2 x2"),
            "lane:batch:B:back 1-0": (1.0, None),
            "order:b t|1314496000000|batch:B": (0.0, None),
            "ready:b t": (0.0, None),
            "starts batch:B|1-0": (None, -float(T0)),
        } == changes(before, await queue.state())

    async def test_a_running_job_is_never_stolen_through_back(self, queue: ScriptedQueue) -> None:
        """An id in `back` that is pending stays with whoever runs it."""
        await queue.batch("B", 2)
        (lease,) = (await queue.claim()).leases
        await queue.redis.zadd(queue.keys.back("batch:B"), {lease.fence.entry: 1})
        assert ["B/2"] == names(await queue.claim(2, worker="w2"))
        assert [] == (await queue.renew(lease)).lost


async def test_a_claim_works_on_a_full_server(queue: ScriptedQueue) -> None:
    """At maxmemory new, returned, woken and overdue jobs are claimed, with the bells and the bucket's figures."""
    await queue.configure(rate=1, burst=2)
    await queue.batch("A", 1, window_ms=10)
    await queue.batch("B", 3)
    await queue.submit("j1")
    chat, *_ = (await queue.claim(1)).leases
    await queue.retry(chat, 1.0)
    await queue.pass_time(1_500)
    async with queue.at_maxmemory():
        with pytest.raises(OutOfMemoryError):
            await queue.submit("j2")
        assert ["j1", "B/1", "B/2"] == names(await queue.claim(4))
        assert "bucket" == (await queue.claim(4)).reason


async def test_a_filled_room_passes_the_ring_on(queue: ScriptedQueue) -> None:
    """A worker that could not take all that waits wakes the next one."""
    for number in range(3):
        await queue.submit(f"j{number}")
    await queue.batch("B", 3)
    await queue.redis.delete(queue.keys.bell("i"), queue.keys.bell("b"))
    await queue.claim(2)
    state = await queue.state()
    assert (1, None) == (state.get("bell:i"), state.get("bell:b"))
    await queue.redis.delete(queue.keys.bell("i"))
    await queue.claim(2)
    state = await queue.state()
    assert (None, 1) == (state.get("bell:i"), state.get("bell:b"))


async def test_an_entry_that_llmq_did_not_write_is_handed_out_all_the_same(queue: ScriptedQueue) -> None:
    """Its worker ends it as malformed; it stops neither the lane nor the claim, whatever its fields say."""
    await queue.submit("j1")
    await queue.batch("B", 1)
    await queue.configure(rate=100, burst=100, unit="tok")
    await queue.redis.xadd(queue.keys.lane("i:t"), {"evil": b"\xff\xfe"})
    await queue.redis.xadd(queue.keys.lane("batch:B"), {"k": b"\xff", "d": "x", "c": "lots", "x": "soon"}, id="7-0")
    claimed = await queue.claim(9)
    given = [*claimed.leases, *(doomed.lease for doomed in claimed.doomed)]
    assert {b"", b"x"} < {lease.data for lease in given}
    assert 4 == len(given)


async def test_a_job_with_three_crashes_is_not_started_again(queue: ScriptedQueue) -> None:
    """It comes back when the reply that gave it to be ended was lost; it is given to be ended again (G7)."""
    await queue.batch("B", 2)
    for _ in range(2):
        lease = (await queue.claim(1)).leases[0]
        assert [] == await queue.crash(lease)
    lease = (await queue.claim(1)).leases[0]
    (doomed,) = await queue.crash(lease)
    assert "dead" == doomed.verdict
    await queue.hand_back(doomed.lease, worker="s")
    claimed = await queue.claim(1)
    assert (["dead"], ["B/2"]) == ([one.verdict for one in claimed.doomed], names(claimed))
