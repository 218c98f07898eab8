"""Encryption at rest on a real server: nothing to read in Redis, keys that change, keys that are missing."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from llmq import AsyncClient
from llmq.scheduler import scripts
from llmq.scheduler.batches import Batches
from llmq.scheduler.cipher import Cipher, job_owner, request_of
from llmq.scheduler.dead import DeadLetters
from llmq.scheduler.errors import JobFailed, KeyMissing, TamperedError
from llmq.scheduler.inspect import read_status
from llmq.scheduler.job import Job, TrafficClass
from llmq.scheduler.keyring import Keyring, new_key, parse_keys
from llmq.scheduler.lease import Usage
from llmq.scheduler.queue import KEY_ID, Queue
from llmq.workers.engines.base import AnswerTooLarge, EngineAnswer, EngineInfo, EngineLoad, EngineUnclear, OnDelta
from tests.conftest import OwnServer
from tests.redis.serving import CHAT_LANE, KEYS, job_ended, serving, tries, until
from tests.servers import client_of

pytestmark = pytest.mark.leaves("llmq:*")

#: What may be found nowhere: a piece of each prompt and of each answer. No compression would hide it.
MARKER = "xyzzy-Marker-42"

OLD, NEW = new_key(), new_key()


class Parrot:
    """An engine that repeats the prompt: in deltas and answers, and in what it says when it refuses or breaks."""

    async def probe(self) -> EngineInfo:
        """Return what this is."""
        return EngineInfo("parrot", "parrot://", ("model",), 4)

    async def run(self, job: Job, on_delta: OnDelta | None = None) -> EngineAnswer:
        """Do what the prompt says."""
        prompt = str(job.body["messages"][0]["content"])
        match prompt.split()[0]:
            case "refuse":
                return EngineAnswer(400, json.dumps({"error": {"message": prompt}}).encode(), "r1", Usage())
            case "break":
                raise EngineUnclear(f"cannot say {prompt}")
            case "burst":
                raise AnswerTooLarge(f"too large: {prompt}")
        answer = {"choices": [{"message": {"role": "assistant", "content": prompt}, "finish_reason": "stop"}]}
        if on_delta is not None:
            for word in prompt.split():
                chunk = {"choices": [{"delta": {"content": f"{word} "}}]}
                on_delta(f"{word} ", json.dumps(chunk).encode())
        return EngineAnswer(200, json.dumps(answer).encode(), "r1", Usage(3, 4))

    async def load(self) -> EngineLoad:
        """Return that it is idle."""
        return EngineLoad()

    async def close(self) -> None:
        """Nothing to close."""


def keyring(*keys: str) -> Keyring:
    """Return the keyring of a process that was given these keys."""
    return Keyring.from_secrets(parse_keys(",".join(keys)) if keys else [])


@asynccontextmanager
async def client(url: str, *keys: str) -> AsyncIterator[AsyncClient]:
    """Return a client of a process that was given these keys."""
    with pytest.MonkeyPatch.context() as patch:
        if keys:
            patch.setenv("LLMQ_ENCRYPTION_KEY", ",".join(keys))
        opened = AsyncClient(url)
    async with opened:
        yield opened


def prompt(text: str) -> dict[str, Any]:
    """Return a chat body that holds the marker."""
    return {"messages": [{"role": "user", "content": f"{text} {MARKER}"}]}


def write_lines(path: Path, *texts: str) -> Path:
    """Write a file of prompts, and a bad line that quotes its own."""
    lines = [json.dumps({"custom_id": text, "method": "POST", "url": "/v1/chat/completions", "body": prompt(text)})
             for text in texts]  # fmt: skip
    path.write_text("\n".join([*lines, json.dumps({"messages": f"bad {MARKER}"})]) + "\n")
    return path


def values_of(redis: Any, key: bytes) -> list[bytes]:
    """Return everything that a key holds, as one reads it and as Redis stores it."""
    match redis.type(key):
        case b"string":
            found = [redis.get(key)]
        case b"hash":
            found = [part for pair in redis.hgetall(key).items() for part in pair]
        case b"list":
            found = redis.lrange(key, 0, -1)
        case b"stream":
            found = [part for _, fields in redis.xrange(key) for pair in fields.items() for part in pair]
        case b"zset":
            found = redis.zrange(key, 0, -1)
        case kind:
            raise AssertionError(f"llmq has no keys of type {kind!r}")
    return [*found, redis.dump(key)]


def holds_marker(url: str, folder: Path | None = None) -> list[str]:
    """Return the keys, and the files of the server, in which the marker stands."""
    marker = MARKER.encode()
    with client_of(url) as redis:
        found = [key.decode() for key in redis.scan_iter() if any(marker in part for part in values_of(redis, key))]
    files = [file for file in folder.rglob("*") if file.is_file()] if folder else []
    return found + [file.name for file in files if marker in file.read_bytes()]


class TestNothingToRead:
    """What a look into Redis, its memory or its files, shows."""

    async def test_no_prompt_and_no_answer_stands_anywhere(self, own_server: OwnServer, tmp_path: Path) -> None:
        """Through client, batch, deltas, refusals, errors and dead letters: neither in a key nor in the AOF."""
        server = own_server()
        file = write_lines(tmp_path / "in.jsonl", "say", "refuse", "break", "burst")
        async with client(server.url, OLD) as llmq:
            queue = await llmq.queue()
            await queue.set("attempts_batch", "1")
            await queue.set("attempts_interactive", "1")
            batch = await llmq.submit_batch(file, skip_bad=True)
            job, refused, broken = [await llmq.submit(prompt(text)) for text in ("say", "refuse", "break")]
            assert [] == holds_marker(server.url, server.folder)
            async with serving(server.url, Parrot(), keyring=keyring(OLD)):
                assert ["say ", f"{MARKER} "] == [delta.text async for delta in job.stream()]
                assert f"say {MARKER}" == (await job.result(10)).text
                with pytest.raises(JobFailed, match=MARKER):
                    await refused.result(10)
                with pytest.raises(JobFailed, match=MARKER):
                    await broken.result(10)
                lines = {line.custom_id: line async for line in batch.results()}
                assert [] == holds_marker(server.url, server.folder)
            letters = DeadLetters(queue)
            dead = await letters.ls()
        assert [] == holds_marker(server.url, server.folder)
        assert f"say {MARKER}" == lines["say"].text
        assert MARKER in lines["refuse"].body["error"]["message"]
        assert {"break", "burst", "line-5"} == {key for key, line in lines.items() if MARKER in line.error_message}
        assert [True, True] == [MARKER in letter.error for letter in dead]

    async def test_without_a_key_all_of_it_stands_there(self, redis: Redis, redis_url: str, tmp_path: Path) -> None:
        """The same look finds it, so the look is good."""
        async with client(redis_url) as llmq:
            job = await llmq.submit(prompt("say"))
            await llmq.submit_batch(write_lines(tmp_path / "in.jsonl", "say"), skip_bad=True)
            assert 3 == len(holds_marker(redis_url))
            async with serving(redis_url, Parrot()):
                assert f"say {MARKER}" == (await job.result(10)).text
            assert KEYS.job(job.id) in holds_marker(redis_url)

    async def test_the_bytes_of_results_are_those_that_are_stored(
        self, redis: Redis, redis_url: str, tmp_path: Path
    ) -> None:
        """What `results_max_bytes` bounds is memory, so what encryption adds counts."""
        async with client(redis_url, OLD) as llmq, serving(redis_url, Parrot(), keyring=keyring(OLD)):
            batch = await llmq.submit_batch(write_lines(tmp_path / "in.jsonl", "say", "refuse"), skip_bad=True)
            await batch.wait(20)
        rows: Any = await redis.xrange(KEYS.results(batch.id))
        stored = sum(len(fields.get(b"b", b"")) + len(fields.get(b"d", b"")) for _, fields in rows)
        assert stored == int(await redis.get(KEYS.held) or 0)


class TestRotation:
    """A key is replaced without a stop."""

    async def test_old_jobs_run_and_new_ones_are_encrypted_with_the_new_key(self, redis: Redis, redis_url: str) -> None:
        """Who has only the old key can read the answer that it asked for, and puts in nothing more."""
        async with client(redis_url, OLD) as before, client(redis_url, NEW, OLD) as after:
            first = await before.submit(prompt("say"))
            second = await after.submit(prompt("say"))
            assert (keyring(NEW).first or "").encode() == await redis.hget(KEYS.config, KEY_ID)
            async with serving(redis_url, Parrot(), keyring=keyring(NEW, OLD)):
                assert f"say {MARKER}" == (await first.result(10)).text
                assert f"say {MARKER}" == (await second.result(10)).text
        async with client(redis_url, OLD) as late:
            with pytest.raises(KeyMissing, match=f"encrypted with key {keyring(NEW).first}"):
                await late.submit(prompt("say"))

    async def test_jobs_from_before_a_key_was_set_run_and_their_owner_reads_them(self, redis_url: str) -> None:
        """Workers get the key first: what came in without one goes out without one."""
        async with client(redis_url) as plain, client(redis_url, OLD) as llmq:
            job = await plain.submit(prompt("say"))
            async with serving(redis_url, Parrot(), keyring=keyring(OLD)):
                assert f"say {MARKER}" == (await job.result(10)).text
            assert f"say {MARKER}" == (await (await llmq.job(job.id)).result(10)).text


class TestMissing:
    """Processes without the key."""

    async def test_who_puts_in_or_reads_is_told_which_key_it_needs(
        self, redis: Redis, redis_url: str, tmp_path: Path
    ) -> None:
        """Nothing is queued that not everybody could read; what needs no text works without the key."""
        async with client(redis_url, OLD) as llmq, client(redis_url) as keyless:
            job = await llmq.submit(prompt("say"))
            failing = await llmq.submit(prompt("break"))
            batch = await llmq.submit_batch(write_lines(tmp_path / "in.jsonl", "say"), skip_bad=True)
            async with serving(redis_url, Parrot(), keyring=keyring(OLD)):
                await batch.wait(20)
                for one in (job, failing):
                    await job_ended(redis, one.id)
            wanted = f"encrypted with key {keyring(OLD).first}, and this process has none"
            with pytest.raises(KeyMissing, match=wanted):
                await keyless.submit(prompt("say"))
            with pytest.raises(KeyMissing, match=wanted):
                await keyless.submit_batch([prompt("say")])
            with pytest.raises(KeyMissing, match=wanted):
                await (await keyless.job(job.id)).result(10)
            with pytest.raises(KeyMissing, match=wanted):
                _ = [line async for line in (await keyless.batch(batch.id)).results()]
            queue = await keyless.queue()
            assert "completed" == (await queue.job(job.id)).state
            assert "set LLMQ_ENCRYPTION_KEY" in (await queue.job(failing.id)).message
            (letter,) = await DeadLetters(queue).ls()
            assert "set LLMQ_ENCRYPTION_KEY" in letter.error
            with pytest.raises(KeyMissing, match=wanted):
                await DeadLetters(queue).retry([letter])
            assert 1 == await DeadLetters(queue).count()
            assert "default" == (await read_status(queue)).queue
            assert 1 == len(await Batches(queue).ls())

    async def test_a_worker_does_not_start(self, redis_url: str) -> None:
        """It says so at once, instead of taking jobs that it cannot run."""
        async with client(redis_url, OLD) as llmq:
            await llmq.submit(prompt("say"))
            with pytest.raises(KeyMissing, match="and this process has none"):
                async with serving(redis_url, Parrot()):
                    pass
            with pytest.raises(KeyMissing, match=f"this process has {keyring(NEW).first}"):
                async with serving(redis_url, Parrot(), keyring=keyring(NEW)):
                    pass

    async def test_a_worker_whose_queue_gets_another_key_claims_nothing_until_it_has_it(
        self, redis: Redis, redis_url: str
    ) -> None:
        """It shows as `key_missing`, spends no attempt, and goes on when the key is back."""
        async with client(redis_url, OLD) as llmq, serving(redis_url, Parrot(), keyring=keyring(OLD)) as running:
            await redis.hset(KEYS.config, KEY_ID, "00c0ffee")

            async def shown(state: str) -> bool:
                return (await redis.hget(KEYS.worker(running.worker.id), "state")) == state.encode()

            await until(lambda: shown("key_missing"))
            data = Cipher(keyring(OLD), "default").encrypt(Job("/v1/chat/completions", prompt("say")).encode(), "x")
            await submit_stored(redis, "j1", data)
            assert {} == await tries(redis)
            await redis.hset(KEYS.config, KEY_ID, keyring(OLD).first or "")
            await until(lambda: shown("ready"))
            job = await llmq.submit(prompt("say"))
            assert f"say {MARKER}" == (await job.result(10)).text

    async def test_one_job_with_another_key_waits_and_costs_nobody_anything(self, redis: Redis, redis_url: str) -> None:
        """It is handed back without an attempt, is no dead letter, and others run meanwhile."""
        data = Cipher(keyring(NEW), "default").encrypt(
            Job("/v1/chat/completions", prompt("say")).encode(), request_of(job_owner("j1"))
        )
        await submit_stored(redis, "j1", data)
        async with client(redis_url, OLD) as llmq, serving(redis_url, Parrot(), keyring=keyring(OLD)):
            await until(lambda: redis.zcard(KEYS.back(CHAT_LANE)))
            job = await llmq.submit(prompt("say"))
            assert f"say {MARKER}" == (await job.result(10)).text
            assert "delayed" == (await (await llmq.queue()).job("j1")).state
            assert [(0, 0, 0)] == list((await tries(redis)).values())
        assert 0 == await redis.xlen(KEYS.dead)
        await redis.delete(KEYS.back(CHAT_LANE))


class TestTampered:
    """What somebody who can write to Redis changes."""

    async def test_a_job_that_was_changed_or_moved_is_never_run(self, redis: Redis, redis_url: str) -> None:
        """It ends as a dead letter that says so, in its first attempt; others run."""
        cipher = Cipher(keyring(OLD), "default")
        stored = cipher.encrypt(Job("/v1/chat/completions", prompt("say")).encode(), request_of(job_owner("j1")))
        await submit_stored(redis, "j1", stored[:-1] + bytes([stored[-1] ^ 1]))
        await submit_stored(redis, "j2", stored)
        async with client(redis_url, OLD) as llmq, serving(redis_url, Parrot(), keyring=keyring(OLD)):
            for job_id in ("j1", "j2"):
                with pytest.raises(JobFailed, match=f"request job {job_id}: was changed after it was encrypted"):
                    await (await llmq.job(job_id)).result(10)
            job = await llmq.submit(prompt("say"))
            assert f"say {MARKER}" == (await job.result(10)).text
            letters = DeadLetters(await llmq.queue())
            dead = await letters.ls()
            assert ["malformed_job"] * 2 == [letter.code for letter in dead]
            assert 2 == len((await letters.retry(dead)).unreadable)

    async def test_an_answer_that_was_changed_is_refused(self, redis: Redis, redis_url: str) -> None:
        """Whoever waits for it gets an error that says so."""
        async with client(redis_url, OLD) as llmq:
            job = await llmq.submit(prompt("say"))
            async with serving(redis_url, Parrot(), keyring=keyring(OLD)):
                await job_ended(redis, job.id)
            body: Any = await redis.hget(KEYS.job(job.id), "body")
            await redis.hset(KEYS.job(job.id), "body", body[:-1] + bytes([body[-1] ^ 1]))
            with pytest.raises(TamperedError, match="was changed after it was encrypted"):
                await (await llmq.job(job.id)).result(10)


async def test_what_runs_again_is_encrypted_for_its_new_place(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    """Dead letters and failed lines become jobs of another name, to which their payloads are bound anew."""
    async with client(redis_url, OLD) as llmq, serving(redis_url, Parrot(), keyring=keyring(OLD)):
        queue = await llmq.queue()
        await queue.set("attempts_batch", "1")
        await queue.set("attempts_interactive", "1")
        single = await llmq.submit(prompt("break"))
        batch = await llmq.submit_batch(write_lines(tmp_path / "in.jsonl", "break", "refuse"), skip_bad=True)
        await batch.wait(20)
        await job_ended(redis, single.id)
        letters = DeadLetters(queue)
        done = await letters.retry(await letters.ls())
        again = await Batches(queue).retry(batch.id)
        assert (1, [1]) == (len(done.jobs), [one.lines for one in done.batches])
        for one in (*done.batches, again):
            results = [line async for line in (await llmq.batch(one.id)).results()]
            assert [True] * one.lines == [MARKER in line.error_message + str(line.body) for line in results]
        with pytest.raises(JobFailed, match=MARKER):
            await (await llmq.job(done.jobs[0])).result(10)
        assert [] == holds_marker(redis_url)


async def test_two_who_begin_with_different_keys_cannot_both(redis: Redis) -> None:
    """The first one's key is the queue's; the other is told, and has queued nothing."""
    first, second = Queue(redis, keyring=keyring(OLD)), Queue(redis, keyring=keyring(NEW))
    await first.agree_on_key()
    with pytest.raises(KeyMissing, match=f"encrypted with key {keyring(OLD).first}"):
        await second.submit(Job("/v1/chat/completions", prompt("say")))
    assert [] == [key async for key in redis.scan_iter("*lane*")]


async def submit_stored(redis: Redis, job_id: str, data: bytes) -> None:
    """Queue a chat job of the team as it is stored."""
    call = scripts.submit_job(
        KEYS,
        job_id,
        lane=CHAT_LANE,
        cls=TrafficClass.INTERACTIVE,
        tenant="team",
        data=data,
        cost=1,
        ttl_ms=None,
        client="me",
    )
    await scripts.run(redis, call)
