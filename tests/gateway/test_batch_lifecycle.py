"""A batch at each of its statuses: cancelled there, or over its window there; and files whose time is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from llmq.gateway.batch import clock, keeper
from llmq.gateway.batch.asked import BatchAsked
from llmq.gateway.batch.conductor import Conductor
from llmq.gateway.batch.facts import Ledger, Mark
from llmq.gateway.batch.files import KEEP_INPUT_S
from llmq.gateway.batch.hold import Hold, HoldLost
from llmq.gateway.batch.paging import Listing
from llmq.gateway.errors import ApiError
from llmq.scheduler.errors import NotFoundError
from llmq.scheduler.lease import Ended, ErrorCode
from tests.gateway.batch_desk import START, Desk, folder
from tests.gateway.batch_gateway import CHAT, questions
from tests.line_worker import good_but
from tests.redis.serving import until

GONE = Ended(ErrorCode.CANCELLED, "the batch was cancelled")


@pytest.fixture
async def desk(redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Desk]:
    """A gateway's part, at a time that stands still."""
    monkeypatch.setattr(clock, "_FRESH_S", 0.0)
    monkeypatch.setattr(keeper, "LOOK_S", 0.05)
    desk = Desk(redis, folder(tmp_path))
    await desk.set_clock(0)
    yield desk
    desk.part.close()


class TestCancel:
    """POST /v1/batches/{id}/cancel."""

    async def test_while_it_is_validated(self, desk: Desk) -> None:
        """Nothing of it is queued; there are no files, and nothing is counted."""
        batch_id = await desk.create()
        shown = await desk.service.cancel(desk.tenant, batch_id)
        assert ("cancelling", START) == (shown["status"], shown["cancelling_at"])
        await desk.set_clock(5)
        async with desk.led():
            batch = await desk.ended(batch_id)
        assert ("cancelled", START, START + 5) == (batch["status"], batch["cancelling_at"], batch["cancelled_at"])
        assert (None, None, 0) == (batch["output_file_id"], batch["error_file_id"], batch["request_counts"]["total"])

    async def test_while_it_runs(self, desk: Desk) -> None:
        """What is done stays in the output file; every other line is a `batch_cancelled` (G14, G16)."""
        async with desk.led():
            batch_id = await desk.create(10)
            await desk.queued(batch_id, 10)
            await desk.worker.serve(3)
            running = await desk.worker.claim(2)
            shown = await desk.service.cancel(desk.tenant, batch_id)
            assert "cancelling" == shown["status"]
            assert shown == await desk.service.cancel(desk.tenant, batch_id) | {
                "request_counts": shown["request_counts"]
            }
            await desk.worker.end(running, lambda _: GONE)
            batch = await desk.ended(batch_id)
        assert "cancelled" == batch["status"]
        assert None is batch["finalizing_at"] is batch["completed_at"]
        assert (["row-1", "row-2", "row-3"], {"batch_cancelled": 7}) == await desk.outcome(batch)
        assert batch == await desk.service.cancel(desk.tenant, batch_id)

    async def test_while_its_files_are_made(self, desk: Desk) -> None:
        """Too late: all lines have ended, and the batch completes."""
        async with desk.led():
            batch_id = await desk.create(3)
            await desk.sealed(batch_id, 3)
        await desk.worker.serve_all()
        assert "finalizing" == await desk.status(batch_id)
        with pytest.raises(ApiError, match="'finalizing'") as refused:
            await desk.service.cancel(desk.tenant, batch_id)
        assert 400 == refused.value.status
        async with desk.led():
            batch = await desk.ended(batch_id)
        assert "completed" == batch["status"]
        with pytest.raises(ApiError, match="'completed'"):
            await desk.service.cancel(desk.tenant, batch_id)

    async def test_after_it_failed(self, desk: Desk) -> None:
        """It is refused, and the batch stays as it is."""
        batch_id = await desk.create(content=b"{")
        async with desk.led():
            batch = await desk.ended(batch_id)
        with pytest.raises(ApiError, match="'failed'"):
            await desk.service.cancel(desk.tenant, batch_id)
        assert batch == await desk.service.batch(desk.tenant, batch_id)

    async def test_by_an_operator(self, desk: Desk) -> None:
        """`llmq batch cancel` does the same: the batch has one id in both worlds."""
        async with desk.led():
            batch_id = await desk.create(5)
            await desk.queued(batch_id, 5)
            await desk.batches.cancel(batch_id)
            batch = await desk.ended(batch_id)
        assert ("cancelled", START) == (batch["status"], batch["cancelling_at"])
        assert ([], {"batch_cancelled": 5}) == await desk.outcome(batch)


class TestWindow:
    """The window of a batch is over."""

    async def test_what_is_done_stays(self, desk: Desk) -> None:
        """Lines that did not start are `batch_expired`, those that ran end as they end (G16)."""
        async with desk.led():
            batch_id = await desk.create(10, window=60)
            await desk.sealed(batch_id, 10)
            await desk.worker.serve(2)
            running = await desk.worker.claim(1)
            await desk.set_clock(61)
            await desk.batches.reap(batch_id)
            assert "finalizing" == await desk.status(batch_id)
            await desk.worker.end(running)
            batch = await desk.ended(batch_id)
        assert ("expired", START + 60) == (batch["status"], batch["expires_at"])
        assert batch["expired_at"] >= START + 61
        assert (["row-1", "row-2", "row-3"], {"batch_expired": 7}) == await desk.outcome(batch)

    async def test_no_worker_and_no_sweeper_is_needed(self, desk: Desk) -> None:
        """The gateway ends it by itself (G13)."""
        async with desk.led():
            batch_id = await desk.create(4, window=60)
            await desk.queued(batch_id, 4)
            await desk.set_clock(61)
            batch = await desk.ended(batch_id)
        assert ([], {"batch_expired": 4}) == await desk.outcome(batch)

    async def test_no_gateway_was_there_in_time(self, desk: Desk) -> None:
        """Its input is examined all the same, and every line has its error line."""
        batch_id = await desk.create(4, window=60)
        await desk.set_clock(100)
        async with desk.led():
            batch = await desk.ended(batch_id)
        assert "expired" == batch["status"]
        assert ([], {"batch_expired": 4}) == await desk.outcome(batch)

    async def test_lines_that_found_no_room_in_redis_expire_too(self, desk: Desk) -> None:
        """Those that were never queued are in the error file like those that were (G15, G16)."""
        await desk.queue.set("cap_batch", "5")
        async with desk.led():
            batch_id = await desk.create(20, window=60)
            await desk.queued(batch_id, 5)
            await desk.worker.serve(2)
            await desk.queued(batch_id, 7)
            await desk.set_clock(61)
            batch = await desk.ended(batch_id)
        assert (["row-1", "row-2"], {"batch_expired": 18}) == await desk.outcome(batch)


class TestRoom:
    """Redis has less room than the batch has lines, or results."""

    async def test_a_large_file_is_fed_as_space_frees(self, desk: Desk) -> None:
        """It is not refused; its lines come in their order (G15, G17)."""
        await desk.queue.set("cap_batch", "5")
        async with desk.led():
            batch_id = await desk.create(33)
            await desk.queued(batch_id, 5)
            async with asyncio.timeout(20):
                while await desk.status(batch_id) == "in_progress":
                    await desk.worker.serve_all(good_but("row-7"))
                    await asyncio.sleep(0.01)
            batch = await desk.ended(batch_id)
        output, codes = await desk.outcome(batch)
        assert ([f"row-{n}" for n in range(1, 34) if n != 7], {"400": 1}) == (output, codes)

    async def test_results_make_room_when_they_are_in_the_storage(self, desk: Desk) -> None:
        """Above the limit a batch sleeps until its results are gathered; the gateway does so at once."""
        await desk.configure(results_max_bytes="2000")
        async with desk.led():
            batch_id = await desk.create(200)
            await desk.queued(batch_id, 200)
            async with asyncio.timeout(20):
                while await desk.status(batch_id) == "in_progress":
                    await desk.worker.serve(20)
                    await asyncio.sleep(0.01)
            batch = await desk.ended(batch_id)
        assert 200 == batch["request_counts"]["completed"]
        await desk.outcome(batch)


class TestTenants:
    """What belongs to another tenant does not exist."""

    async def test_nothing_of_another_tenant_is_found(self, desk: Desk, redis: Redis) -> None:
        """Neither by its id, nor in a list, nor as an input; nor by a name that looks like a path."""
        batch_id = await desk.create(content=b"{")
        async with desk.led():
            batch = await desk.ended(batch_id)
        for stranger in ("bob", "ANN", "ann/", "../ann", "ann\u0301"):
            other = Desk(redis, desk.storage, stranger)
            assert [] == (await other.service.list_files(stranger, Listing(20), None))["data"]
            assert [] == (await other.service.list_batches(stranger, Listing(20)))["data"]
            asked = BatchAsked(batch["input_file_id"], CHAT, "24h", 86_400, None, None)
            for refused in (
                other.service.batch(stranger, batch_id),
                other.service.cancel(stranger, batch_id),
                other.service.results(stranger, batch_id, after=0, follow=False),
                other.service.file(stranger, batch["input_file_id"]),
                other.service.delete_file(stranger, batch["input_file_id"]),
                other.service.create(stranger, asked),
            ):
                with pytest.raises(ApiError) as error:
                    await refused
                assert error.value.status in (400, 404)

    async def test_the_tenant_of_the_batch_is_the_callers(self, desk: Desk) -> None:
        """Its lines have their tenant's share."""
        async with desk.led():
            batch_id = await desk.create(1)
            await desk.queued(batch_id, 1)
            assert "ann" == (await desk.batches.show(batch_id)).tenant
            await desk.worker.serve_all()
            await desk.ended(batch_id)


class TestExpiry:
    """Files whose time is over."""

    async def test_a_file_is_gone_when_its_time_is_over(self, desk: Desk, tmp_path: Path) -> None:
        """To everybody at that moment; the janitor then frees its room."""
        file_id = await desk.upload(b"{}", keep_s=3600)
        await desk.set_clock(3599)
        assert file_id == (await desk.service.file(desk.tenant, file_id)).id
        await desk.set_clock(3600)
        with pytest.raises(ApiError):
            await desk.service.file(desk.tenant, file_id)
        assert [] == (await desk.service.list_files(desk.tenant, Listing(20), None))["data"]
        assert 1 == await desk.files.delete_expired(set())
        assert [] == await asyncio.to_thread(all_files, tmp_path)

    async def test_the_input_of_a_running_batch_outlives_its_time(self, desk: Desk) -> None:
        """It is not found any more, and read all the same."""
        file_id = await desk.upload(questions(3), keep_s=3600)
        asked = BatchAsked(file_id, CHAT, "4h", 14_400, None, None)
        batch_id = str((await desk.service.create(desk.tenant, asked))["id"])
        await desk.set_clock(4000)
        async with desk.led():
            await desk.queued(batch_id, 3)
            await until(lambda: "janitor" not in desk.part.keeper._led)  # it goes round at the start
            await desk.worker.serve_all()
            batch = await desk.ended(batch_id)
        assert (["row-1", "row-2", "row-3"], {}) == await desk.outcome(batch)
        assert 1 == await desk.files.delete_expired(set())

    async def test_the_input_of_an_ended_batch_is_deleted_before_the_batch_is_cleared_away(
        self, desk: Desk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Who has seen the end need not try again: nobody reads the input any more."""
        clearing = asyncio.Event()

        async def never(conductor: Conductor, batch_id: str) -> None:
            clearing.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(Conductor, "_clear_away", never)
        batch_id = await desk.create(content=b"{")
        async with desk.led():
            await clearing.wait()
            batch = await desk.ended(batch_id)
            await desk.service.delete_file(desk.tenant, batch["input_file_id"])
        with pytest.raises(ApiError):
            await desk.service.file(desk.tenant, batch["input_file_id"])

    async def test_output_files_are_kept_as_long_as_was_asked(self, desk: Desk) -> None:
        """`output_expires_after` counts from the file's own time."""
        file_id = await desk.upload(questions(1))
        asked = BatchAsked(file_id, CHAT, "24h", 86_400, None, 7200)
        batch_id = str((await desk.service.create(desk.tenant, asked))["id"])
        async with desk.led():
            await desk.queued(batch_id, 1)
            await desk.worker.serve_all()
            batch = await desk.ended(batch_id)
        record = await desk.service.file(desk.tenant, batch["output_file_id"])
        assert record.created_at + 7200 == record.expires_at
        assert 0 == await Ledger(desk.storage).delete_expired(START + 7199, set())
        assert 1 == await Ledger(desk.storage).delete_expired(START + 7200, set())
        assert [] == (await desk.service.list_batches(desk.tenant, Listing(20)))["data"]

    async def test_a_batch_that_has_made_no_file_goes_after_30_days(self, desk: Desk, tmp_path: Path) -> None:
        """It failed, or was cancelled before it began; one that has files stays as long as they do."""
        failed, cancelled = await desk.create(content=b"no request\n"), await desk.create(2)
        await desk.service.cancel(desk.tenant, cancelled)
        async with desk.led():
            assert ("failed", "cancelled") == tuple([(await desk.ended(id))["status"] for id in (failed, cancelled)])
            done = await desk.create(1)
            await desk.queued(done, 1)
            await desk.worker.serve_all()
            await desk.ended(done)
            await until(lambda: not desk.part.keeper._led)  # all of them are cleared away
        ledger, month = Ledger(desk.storage), START + KEEP_INPUT_S
        assert 0 == await ledger.delete_expired(month - 1, set())
        assert 1 == await ledger.delete_expired(month, {failed})  # what was not cleared away yet stays
        assert 1 == await ledger.delete_expired(month, set())
        assert [done] == [batch["id"] for batch in (await desk.service.list_batches(desk.tenant, Listing(20)))["data"]]
        left = [path for path in await asyncio.to_thread(all_files, tmp_path) if failed in str(path)]
        assert [] == left

    async def test_the_janitor_takes_batches_along(self, desk: Desk) -> None:
        """With the files, each time that it goes round."""
        failed = await desk.create(content=b"no request\n")
        keeper = desk.part.keeper
        async with desk.led():
            await desk.ended(failed)
            await until(lambda: not keeper._led)  # it is cleared away, and the janitor's first round is over
        await desk.set_clock(KEEP_INPUT_S)
        keeper._tidy_at = 0.0

        async def is_gone() -> bool:
            return not (await desk.service.list_batches(desk.tenant, Listing(20)))["data"]

        async with desk.led():
            await until(is_gone)


def all_files(folder: Path) -> list[Path]:
    """Return all files of a folder, however deep."""
    return [path for path in folder.rglob("*") if path.is_file()]


async def test_a_gateway_that_slept_does_not_open_an_ended_batch_again(desk: Desk) -> None:
    """It finds the batch gone from Redis, and its own hold over: another gateway has ended it meanwhile (G3)."""
    batch_id = await desk.create(3)
    hold = Hold(desk.queue, batch_id)
    with pytest.raises(HoldLost):
        await desk.part.keeper.conductor.conduct(Mark(batch_id, desk.tenant, ""), hold)  # never taken: as if over
    with pytest.raises(NotFoundError):
        await desk.batches.show(batch_id)


async def test_a_lost_input_fails_its_batch(desk: Desk) -> None:
    """A storage that has lost a file cannot make a batch wait for ever (G13)."""
    batch_id = await desk.create(2)
    shown = await desk.service.batch(desk.tenant, batch_id)
    await desk.files.delete(desk.tenant, await desk.service.file(desk.tenant, shown["input_file_id"]))
    async with desk.led():
        batch = await desk.ended(batch_id)
    assert ["input_file_not_found"] == [fault["code"] for fault in batch["errors"]["data"]]
