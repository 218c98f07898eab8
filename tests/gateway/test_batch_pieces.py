"""Pieces of the batch part by themselves: the hold, the clock, slices, and the examination of inputs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from llmq.gateway.batch import clock, hold
from llmq.gateway.batch.clock import QueueClock
from llmq.gateway.batch.examination import MOST_FAULTS, Examined, examine
from llmq.gateway.batch.hold import Hold, HoldLost
from llmq.gateway.batch.slices import in_slices
from llmq.scheduler.input_file import open_input
from llmq.scheduler.queue import Queue
from tests.conftest import OwnServer
from tests.gateway.batch_gateway import CHAT, jsonl, line


class TestHold:
    """What lets one gateway of many work on a batch."""

    async def test_one_of_many_has_it(self, redis: Redis) -> None:
        """The others have it when it is let go."""
        holds = [Hold(Queue(redis), "batch_1") for _ in range(5)]
        taken = [await one.take() for one in holds]
        assert [True, False, False, False, False] == taken
        assert [True, False] == [holds[0].valid, holds[1].valid]
        await holds[1].let_go()
        assert not await holds[2].take()
        await holds[0].let_go()
        assert await holds[2].take()
        await holds[2].let_go()

    async def test_it_is_kept_as_long_as_the_work_takes(self, redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is renewed; nobody else gets it meanwhile (G4)."""
        quick(monkeypatch)
        queue = Queue(redis)
        mine, other = Hold(queue, "x"), Hold(queue, "x")
        tries: list[bool] = []

        async def work() -> None:
            for _ in range(8):
                await asyncio.sleep(0.1)
                tries.append(await other.take())

        assert await mine.take()
        await mine.keep(work())
        assert [False] * 8 == tries
        await mine.let_go()

    async def test_whoever_loses_it_stops(self, redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
        """The work is cancelled within one renewal."""
        quick(monkeypatch)
        queue = Queue(redis)
        mine, other = Hold(queue, "x"), Hold(queue, "x")
        assert await mine.take()
        await redis.delete(queue.keys.hold("x"))
        assert await other.take()
        with pytest.raises(HoldLost):
            await mine.keep(asyncio.sleep(30))
        assert not mine.valid
        await other.let_go()

    async def test_a_holder_that_cannot_reach_redis_stops_in_time(
        self, own_server: OwnServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Before anybody else can have it."""
        from llmq.scheduler.connection import connect

        quick(monkeypatch)
        server = own_server()
        redis = connect(server.url)
        mine = Hold(Queue(redis), "x")
        assert await mine.take()
        server.kill()
        started = time.monotonic()
        with pytest.raises(HoldLost):
            await mine.keep(asyncio.sleep(30))
        assert time.monotonic() - started < 5
        await mine.let_go()
        await redis.aclose()

    async def test_one_that_slept_does_not_get_it_again(self, redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also where nobody holds it any more: somebody may have, and be done (G3)."""
        quick(monkeypatch)
        queue = Queue(redis)
        mine = Hold(queue, "x")
        assert await mine.take()
        await redis.delete(queue.keys.hold("x"))
        with pytest.raises(HoldLost):
            await mine.keep(asyncio.sleep(30))

    async def test_what_the_work_raises_is_raised(self, redis: Redis) -> None:
        """As if there were no hold around it."""

        async def work() -> None:
            raise LookupError

        mine = Hold(Queue(redis), "x")
        assert await mine.take()
        with pytest.raises(LookupError):
            await mine.keep(work())
        await mine.let_go()


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let holds last half a second."""
    monkeypatch.setattr(hold, "TTL_S", 0.5)
    monkeypatch.setattr(hold, "RENEW_S", 0.1)


class TestClock:
    """Redis' time, with or without Redis."""

    async def test_it_is_redis_time(self) -> None:
        """Whatever this host's clock says."""
        asked = []

        async def now_ms() -> int:
            asked.append(1)
            return 5_000_000

        clock_ = QueueClock(now_ms)
        times = [await clock_.now() for _ in range(3)]
        assert times == sorted(times)
        assert 5000 <= times[0] <= times[2] < 5001
        assert 1 == len(asked)

    async def test_it_goes_on_without_redis(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From where Redis' clock stood; before it was ever reached, by the host's."""
        monkeypatch.setattr(clock, "_FRESH_S", 0.0)
        answers: Iterator[int] = iter([5_000_000])

        async def now_ms() -> int:
            for answer in answers:
                return answer
            raise RedisConnectionError

        clock_ = QueueClock(now_ms)
        assert 5000 <= await clock_.now() < 5001
        assert 5000 <= await clock_.now() < 5001
        assert abs(await QueueClock(now_ms).now() - time.time()) < 1


@given(st.lists(st.integers(), max_size=1000))
def test_slices_are_the_whole_in_order(things: list[int]) -> None:
    """None is empty, and none is long."""

    async def all_of() -> list[list[int]]:
        return [slice_ async for slice_ in in_slices(iter(things))]

    slices = asyncio.run(all_of())
    assert things == [thing for slice_ in slices for thing in slice_]
    assert all(0 < len(slice_) <= 256 for slice_ in slices)


async def examined(path: Path, content: bytes, *, lines: int = 1000, longest: int = 500) -> Examined:
    """Examine an input."""
    await asyncio.to_thread(path.write_bytes, content)
    with open_input(path, max_line_bytes=longest) as file:
        return await examine(file, CHAT, lines)


class TestExamination:
    """Whether an input is valid, in OpenAI's words."""

    @pytest.mark.parametrize(
        ("bad", "code", "param"),
        [
            (b"{", "invalid_json_line", None),
            (b"[1]", "invalid_json_line", None),
            (b'"text"', "invalid_json_line", None),
            (b"\xff", "invalid_json_line", None),
            ({"messages": [{}]}, "missing_required_parameter", "custom_id"),
            ({**line(1), "custom_id": ""}, "invalid_custom_id", "custom_id"),
            ({**line(1), "custom_id": 5}, "invalid_custom_id", "custom_id"),
            ({**line(1), "method": None}, "missing_required_parameter", "method"),
            ({**line(1), "method": "GET"}, "invalid_method", "method"),
            ({**line(1), "url": None}, "missing_required_parameter", "url"),
            ({**line(1), "url": "/v1/images"}, "invalid_url", "url"),
            ({**line(1), "url": "/v1/embeddings"}, "url_mismatch", "url"),
            ({**line(1), "body": [1]}, "invalid_request", "body"),
            ({**line(1), "body": {}}, "missing_required_parameter", "body.messages"),
            ({**line(1), "body": {"messages": []}}, "invalid_request", "body.messages"),
            (line(1, pad="x" * 600), "line_too_large", None),
        ],
    )
    async def test_each_fault_has_its_code(self, tmp_path: Path, bad: Any, code: str, param: str | None) -> None:
        """With the parameter and the line; blank lines count, as editors count them."""
        found = await examined(tmp_path / "in", jsonl([line(7), b"", bad, line(9)]))
        assert [(3, code, param)] == [(fault.line, fault.code, fault.param) for fault in found.faults]
        assert found.faults[0].message.endswith(".")

    async def test_a_good_input_has_no_faults(self, tmp_path: Path) -> None:
        """The model is that of all lines, or none."""
        same, mixed = [line(n) for n in range(5)], [line(1), line(2, model="other")]
        assert Examined(5, "sim") == await examined(tmp_path / "in", jsonl(same))
        assert Examined(2, None) == await examined(tmp_path / "in", jsonl(mixed))

    async def test_many_faults_are_told_in_part(self, tmp_path: Path) -> None:
        """The first of them, and not for ever."""
        found = await examined(tmp_path / "in", b"{\n" * 500)
        assert MOST_FAULTS == len(found.faults)
        found = await examined(tmp_path / "in", jsonl([line(1)] * 500))
        assert list(range(2, 2 + MOST_FAULTS)) == [fault.line for fault in found.faults]

    async def test_too_many_lines_are_one_fault(self, tmp_path: Path) -> None:
        """Whatever else is wrong."""
        found = await examined(tmp_path / "in", jsonl([line(n) for n in range(11)]), lines=10)
        assert ["too_many_tasks"] == [fault.code for fault in found.faults]
        assert () == (await examined(tmp_path / "in", jsonl([line(n) for n in range(10)]), lines=10)).faults

    def test_any_line_is_good_or_has_a_fault(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        """Nothing that a file may hold ends the gateway's work on it."""
        path = tmp_path_factory.mktemp("lines") / "in"
        values = st.recursive(
            st.none() | st.booleans() | st.integers() | st.text() | st.floats(),
            lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["messages", "role", "x"]), inner),
            max_leaves=5,
        )
        keys = st.sampled_from(["custom_id", "method", "url", "body"])
        lines = st.dictionaries(keys, values | st.sampled_from(["POST", CHAT])) | values

        @settings(deadline=None, max_examples=50)
        @given(st.lists(lines, min_size=1, max_size=4), st.binary(max_size=30))
        def check(some: list[Any], raw: bytes) -> None:
            content = jsonl([line(1)] * 4) + b"".join(dumped(one) + b"\n" for one in some) + raw.replace(b"\0", b"")
            found = asyncio.run(examined(path, content))
            assert all(orjson.dumps(fault.to_openai()) for fault in found.faults)

        check()


def dumped(value: Any) -> bytes:
    """Return a value as JSON, or as what comes nearest."""
    try:
        return orjson.dumps(value)
    except (TypeError, ValueError):
        return repr(value).encode(errors="replace").replace(b"\n", b" ")
