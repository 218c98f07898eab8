"""The official client, unchanged, against a gateway with a simulated engine: files and batches from end to end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest
from openai.types import Batch

from llmq.gateway.batch.conductor import Limits
from llmq.workers.engines.sim import SimEngine
from tests.gateway.batch_gateway import (
    CHAT,
    Served,
    created,
    each_line_once,
    ended,
    gateway,
    jsonl,
    line,
    lines_of,
    questions,
    until_status,
    uploaded,
)
from tests.redis.serving import serving

#: More tokens than the simulated GPU holds: it answers HTTP 400.
TOO_LONG = 10_000_000


@pytest.fixture
async def served(system_redis_url: str, tmp_path: Path) -> AsyncIterator[Served]:
    """A gateway without workers."""
    async with gateway(system_redis_url, tmp_path / "files") as served:
        yield served


@pytest.fixture
async def worker(system_redis_url: str) -> AsyncIterator[None]:
    """A worker of a simulated engine that answers at once."""
    async with serving(system_redis_url, SimEngine.from_url("sim://?instant=1"), concurrency=4):
        yield


class TestAWholeBatch:
    """From the upload to the output file."""

    async def test_a_batch_ends_with_one_line_for_each_request(self, served: Served, worker: None) -> None:
        """Successes are in the output file, refusals of the engine in the error file, each line once (G16)."""
        client = served.client()
        bad = [line(n, max_tokens=TOO_LONG, ignore_eos=True) for n in (3, 7)]
        lines = [line(n) if n not in (3, 7) else bad.pop(0) for n in range(1, 31)]
        before = int(time.time())
        batch = await ended(client, (await created(client, jsonl(lines), metadata={"run": "7"})).id)
        output, errors = await each_line_once(client, batch, 30)
        assert ("completed", 28, 2) == (batch.status, len(output), len(errors))
        assert {"id", "custom_id", "response", "error"} == set(output[0])
        assert output[0]["id"].startswith("batch_req_")
        assert 200 == output[0]["response"]["status_code"]
        assert {"row-3", "row-7"} == {one["custom_id"] for one in errors}
        assert [400, None] == [errors[0]["response"]["status_code"], errors[0]["error"]]
        self.check_object(batch, before)

    @staticmethod
    def check_object(batch: Batch, before: int) -> None:
        """Every field is there, times are whole seconds in order, what is absent is null, and nothing else is there."""
        shown = batch.model_dump()
        assert set(Batch.model_fields) == set(shown)
        times = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
        assert all(isinstance(moment, int) for moment in times)
        assert times == sorted(times, key=lambda moment: moment or 0)
        assert before - 1 <= batch.created_at <= time.time() + 1
        assert batch.created_at + 86_400 == batch.expires_at
        absent = ("failed_at", "expired_at", "cancelling_at", "cancelled_at", "errors")
        assert [None] * 5 == [shown[name] for name in absent]
        assert ("24h", CHAT, "sim", {"run": "7"}) == (
            batch.completion_window, batch.endpoint, batch.model, batch.metadata,
        )  # fmt: skip
        usage = batch.usage
        assert usage is not None
        assert usage.output_tokens > 0
        assert usage.input_tokens + usage.output_tokens == usage.total_tokens

    async def test_nothing_else_stands_in_the_objects(self, served: Served, worker: None) -> None:
        """The JSON has exactly OpenAI's fields: three counts, no labels, ids with their prefixes."""
        client = served.client()
        batch = await ended(client, (await created(client, questions(1))).id)
        async with httpx.AsyncClient(base_url=served.base_url) as plain:
            raw = (await plain.get(f"{served.base_url}/batches/{batch.id}")).json()
            file = (await plain.get(f"{served.base_url}/files/{batch.output_file_id}")).json()
        assert set(Batch.model_fields) == set(raw)
        assert {"total", "completed", "failed"} == set(raw["request_counts"])
        assert (None, None, None) == (raw["error_file_id"], raw["metadata"], raw["errors"])
        assert set(openai.types.FileObject.model_fields) == set(file)
        assert ("batch_output", "file", None) == (file["purpose"], file["object"], file["expires_at"])
        assert raw["id"].startswith("batch_")
        assert file["id"].startswith("file-")

    async def test_the_client_without_asyncio_works_the_same(self, served: Served, worker: None) -> None:
        """The synchronous client uploads, creates, waits and reads."""

        def run() -> list[str]:
            with served.sync_client() as client:
                file = client.files.create(file=("in.jsonl", questions(3)), purpose="batch")
                batch = client.batches.create(
                    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
                )
                while (batch := client.batches.retrieve(batch.id)).status != "completed":
                    time.sleep(0.05)
                assert batch.output_file_id is not None
                content = client.files.content(batch.output_file_id).read()
                assert [batch.id] == [one.id for one in client.batches.list()]
                assert client.files.delete(file.id).deleted
                return [orjson.loads(one)["custom_id"] for one in content.splitlines()]

        assert ["row-1", "row-2", "row-3"] == sorted(await asyncio.to_thread(run))

    @pytest.mark.parametrize(
        ("endpoint", "body"),
        [
            ("/v1/completions", {"model": "sim", "prompt": "Once", "max_tokens": 3}),
            ("/v1/responses", {"model": "sim", "input": "Why?", "max_output_tokens": 3}),
            ("/v1/embeddings", {"model": "sim", "input": "text"}),
        ],
    )
    async def test_other_endpoints_have_batches_too(
        self, served: Served, worker: None, endpoint: str, body: dict[str, object]
    ) -> None:
        """A batch is of one endpoint, which may be any that single calls have."""
        client = served.client()
        request = {"custom_id": "row-1", "method": "POST", "url": endpoint, "body": body}
        batch = await ended(client, (await created(client, jsonl([request]), endpoint=endpoint)).id)
        assert ("completed", endpoint) == (batch.status, batch.endpoint)
        await each_line_once(client, batch, 1)

    @pytest.mark.parametrize(("window", "seconds"), [("30m", 1800), ("4h", 14_400), ("7d", 604_800)])
    async def test_a_window_is_echoed_as_it_was_given(self, served: Served, window: str, seconds: int) -> None:
        """Other windows than 24h are taken, and are no labels."""
        batch = await created(served.client(), questions(1), window)
        assert (window, seconds) == (batch.completion_window, (batch.expires_at or 0) - batch.created_at)
        await cancelled(served, batch.id)


async def cancelled(served: Served, batch_id: str) -> Batch:
    """Cancel a batch and wait for its end: no key stays in Redis."""
    client = served.client()
    await until_status(client, batch_id, "in_progress", "finalizing")
    await client.batches.cancel(batch_id)
    return await ended(client, batch_id)


class TestInputs:
    """What is not valid makes a failed batch, or a refused request."""

    async def test_a_bad_input_fails_with_each_line_and_fault(self, served: Served) -> None:
        """Nothing of it runs; errors name code, line, parameter and message."""
        client = served.client()
        lines = [line(1), b"{no json", line(1), line(4, url="/v1/embeddings"), {"custom_id": "five"}]
        batch = await ended(client, (await created(client, jsonl(lines))).id)
        assert ("failed", None, None) == (batch.status, batch.output_file_id, batch.error_file_id)
        assert batch.failed_at is not None
        assert batch.errors is not None
        assert "list" == batch.errors.object
        found = [(fault.line, fault.code, fault.param) for fault in batch.errors.data or []]
        assert [
            (2, "invalid_json_line", None),
            (3, "duplicate_custom_id", "custom_id"),
            (4, "url_mismatch", "url"),
            (5, "missing_required_parameter", "body"),
        ] == found
        assert batch.request_counts is not None
        assert 0 == batch.request_counts.total

    @pytest.mark.parametrize("content", [b"", b"\n\n"])
    async def test_an_empty_input_fails(self, served: Served, content: bytes) -> None:
        """A file without requests is no batch."""
        client = served.client()
        batch = await ended(client, (await created(client, content)).id)
        assert batch.errors is not None
        assert ["empty_file"] == [fault.code for fault in batch.errors.data or []]

    async def test_limits_are_the_operators(self, system_redis_url: str, tmp_path: Path) -> None:
        """More requests than allowed fail the batch, more bytes are refused while they come."""
        limits = Limits(file_bytes=20_000, lines=3)
        async with gateway(system_redis_url, tmp_path, limits=limits) as served:
            client = served.client()
            batch = await ended(client, (await created(client, questions(4))).id)
            assert batch.errors is not None
            assert ["too_many_tasks"] == [fault.code for fault in batch.errors.data or []]
            with pytest.raises(openai.APIStatusError) as refused:
                await uploaded(client, b"x" * 20_001)
            assert 413 == refused.value.status_code

    @pytest.mark.parametrize(
        ("changes", "param"),
        [
            ({"completion_window": "soon"}, "completion_window"),
            ({"completion_window": "31d"}, "completion_window"),
            ({"endpoint": "/v1/images"}, "endpoint"),
            ({"input_file_id": "file-../../etc/passwd"}, "input_file_id"),
            ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
            ({"metadata": {"k" * 65: ""}}, "metadata"),
            ({"metadata": {"k": "v" * 513}}, "metadata.k"),
            ({"metadata": {"k": 1}}, "metadata.k"),
            ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after.seconds"),
        ],
    )
    async def test_a_bad_parameter_is_named(self, served: Served, changes: dict[str, object], param: str) -> None:
        """400 in OpenAI's shape, with the parameter that is at fault."""
        client = served.client()
        good = {"input_file_id": await uploaded(client, questions(1)), "endpoint": CHAT, "completion_window": "24h"}
        with pytest.raises(openai.BadRequestError) as refused:
            await client.post("/batches", body=good | changes, cast_to=Batch)
        assert param == refused.value.param

    async def test_an_unknown_input_is_not_found(self, served: Served) -> None:
        """An id that is well formed, and of no file of this tenant."""
        with pytest.raises(openai.NotFoundError) as refused:
            await served.client().batches.create(
                input_file_id="file-" + "0" * 26, endpoint="/v1/chat/completions", completion_window="24h"
            )
        assert "input_file_id" == refused.value.param

    async def test_a_body_that_is_no_object_is_refused(self, served: Served) -> None:
        """Whatever comes, the answer has OpenAI's shape."""
        async with httpx.AsyncClient() as plain:
            for body in (b"", b"[]", b"{", b"null"):
                answer = await plain.post(f"{served.base_url}/batches", content=body)
                assert (400, "invalid_request_error") == (answer.status_code, answer.json()["error"]["type"])


class TestFiles:
    """Uploads, their records, and their end."""

    async def test_a_file_comes_back_as_it_was(self, served: Served) -> None:
        """Record and bytes; an input expires after 30 days unless it says otherwise."""
        client = served.client()
        content = questions(5)
        made = await client.files.create(file=("röw.jsonl", content), purpose="batch")
        assert (len(content), "röw.jsonl", "batch", "processed") == (
            made.bytes, made.filename, made.purpose, made.status,
        )  # fmt: skip
        assert made.created_at + 30 * 86_400 == made.expires_at
        assert made == await client.files.retrieve(made.id)
        assert content == (await client.files.content(made.id)).content

    async def test_an_expiry_is_kept_to(self, served: Served) -> None:
        """`expires_after` of an upload is in its record; one that is out of bounds is refused."""
        client = served.client()
        made = await client.files.create(
            file=b"{}", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert made.created_at + 3600 == made.expires_at
        with pytest.raises(openai.BadRequestError, match="seconds"):
            await client.files.create(file=b"{}", purpose="batch", expires_after={"anchor": "created_at", "seconds": 5})

    async def test_other_purposes_are_refused(self, served: Served) -> None:
        """llmq has no use for other files, and would only fill its storage with them."""
        with pytest.raises(openai.BadRequestError) as refused:
            await served.client().files.create(file=b"{}", purpose="fine-tune")
        assert "purpose" == refused.value.param

    async def test_a_deleted_file_is_gone(self, served: Served) -> None:
        """Record, content and list forget it; a second deletion is 404."""
        client = served.client()
        file_id = await uploaded(client, questions(1))
        assert (await client.files.delete(file_id)).deleted
        for ask in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                await ask(file_id)
        assert [] == (await client.files.list()).data

    async def test_the_input_of_a_running_batch_stays(self, served: Served) -> None:
        """It is refused while a batch may still read it, and deleted afterwards."""
        client = served.client()
        batch = await created(client, questions(2))
        with pytest.raises(openai.BadRequestError, match=batch.id):
            await client.files.delete(batch.input_file_id)
        await cancelled(served, batch.id)
        assert (await client.files.delete(batch.input_file_id)).deleted

    async def test_lists_have_pages(self, served: Served) -> None:
        """The client walks over all of them by itself, by purpose and in either order."""
        client = served.client()
        ids = [await uploaded(client, b"{}") for _ in range(5)]
        assert ids[::-1] == [file.id async for file in await client.files.list(limit=2)]
        assert ids == [file.id async for file in await client.files.list(limit=2, order="asc")]
        first = await client.files.list(limit=2)
        assert (True, ids[4], ids[3]) == (first.has_more, *(getattr(first, name) for name in ("first_id", "last_id")))
        assert [] == (await client.files.list(purpose="batch_output")).data
        wrongs: list[dict[str, Any]] = [{"limit": 0}, {"limit": 10_001}, {"after": "nonsense"}, {"order": "up"}]
        for wrong in wrongs:
            with pytest.raises(openai.BadRequestError):
                await client.files.list(**wrong)


class TestBatchList:
    """The list of batches."""

    async def test_batches_are_listed_newest_first(self, served: Served) -> None:
        """With cursors, and limits from 1 to 100."""
        client = served.client()
        ids = [(await created(client, b"x")).id for _ in range(3)]
        assert ids[::-1] == [batch.id async for batch in await client.batches.list(limit=1)]
        assert ids[:1] == [batch.id for batch in (await client.batches.list(after=ids[1])).data]
        with pytest.raises(openai.BadRequestError):
            await client.batches.list(limit=101)
        for batch_id in ids:
            await ended(client, batch_id)


async def test_results_can_be_read_while_the_batch_runs(served: Served, system_redis_url: str) -> None:
    """llmq's own route streams lines as they end; `after` goes on where a client was, also when all has ended."""
    client = served.client()
    batch = await created(client, questions(12))
    address = f"{served.base_url}/batches/{batch.id}/results"
    async with httpx.AsyncClient(timeout=60) as plain:
        assert (200, b"") == await status_and_content(plain, address)
        async with (
            plain.stream("GET", address, params={"follow": "true"}) as answer,
            serving(system_redis_url, SimEngine.from_url("sim://?instant=1"), concurrency=2),
        ):
            followed = [one async for one in answer.aiter_lines() if one]
        assert 12 == len(followed)
        done = await ended(client, batch.id)
        files = [*await lines_of(client, done.output_file_id), *await lines_of(client, done.error_file_id)]
        assert sorted(one["custom_id"] for one in files) == sorted(orjson.loads(one)["custom_id"] for one in followed)
        _, later = await status_and_content(plain, f"{address}?after=5")
        assert followed[5:] == later.decode().splitlines()
        assert 400 == (await plain.get(f"{address}?after=x")).status_code


async def status_and_content(plain: httpx.AsyncClient, address: str) -> tuple[int, bytes]:
    """Ask, and return what counts of the answer."""
    answer = await plain.get(address)
    return answer.status_code, answer.content
