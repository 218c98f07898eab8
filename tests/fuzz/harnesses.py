"""The harnesses: each gives bytes to what reads them, and lets only errors of the declared kinds pass.

What comes out of a reader is used as the product uses it: a job is sent, a record is rendered, an answer is stored.
"""

from __future__ import annotations

import asyncio
import functools
import gzip
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import msgpack
import orjson
import zstandard

from llmq.gateway.batch.upload import receive_upload
from llmq.gateway.errors import ApiError
from llmq.scheduler import raw_json
from llmq.scheduler.api_key import ApiKey
from llmq.scheduler.batch_record import BatchRecord
from llmq.scheduler.bucket import bucket_of
from llmq.scheduler.cipher import Cipher
from llmq.scheduler.errors import EncodingError, InputFileError, KeyMissing, LLMQError, UsageError
from llmq.scheduler.fleet import worker_of
from llmq.scheduler.inbox import Delta, decode_deltas, encode_deltas
from llmq.scheduler.job import ENDPOINTS, Job
from llmq.scheduler.job_record import Whereabouts, record_of
from llmq.scheduler.kept import Kept
from llmq.scheduler.keyring import Key, Keyring
from llmq.scheduler.lease import Usage
from llmq.scheduler.line_form import CHAT, BadLine, parse_line, parse_request
from llmq.scheduler.lines import check, open_input, read_lines
from llmq.scheduler.live import LIVE_SETTINGS, LiveSettings, live_values, stored_value
from llmq.scheduler.measures import Measures, merge
from llmq.scheduler.records import ResultRecord, render
from llmq.scheduler.redis_url import parse_redis_url, redact
from llmq.scheduler.result import line_result
from llmq.scheduler.totals import read_totals, sums
from llmq.scheduler.units import format_duration, format_rate, parse_duration, parse_rate, parse_size
from llmq.scheduler.windows import expand, parse_windows, plan_state
from llmq.workers.continuing import continuable, continued, joined, model_of
from llmq.workers.engines.answering import StreamReader, as_chunks, whole_answer
from llmq.workers.engines.asking import behind_chat, request_for
from llmq.workers.engines.assembly import assembler_for
from llmq.workers.engines.base import Continues, EngineAnswer, EngineError, EngineInfo
from llmq.workers.engines.merge import load
from llmq.workers.engines.sorting import seconds_of, sort_status
from llmq.workers.engines.sse import EventParser, EventTooLarge

Harness = Callable[[bytes], None]

#: A Tuesday in November 2026, in ms.
NOW_MS = 1_795_000_000_000

KEY = bytes(range(32))
CIPHER = Cipher(Keyring((Key(KEY),)), "q")
VLLM = EngineInfo("vllm", "http://h", ("m",), 4, continues=next(iter(Continues)), prioritises=True)


def lines(data: bytes) -> None:
    """One line of an input file, in all its forms; what was taken is stored and read back the same."""
    parsers: list[Callable[[], tuple[str, Job]]] = [
        lambda: parse_line(data, "line-1"),
        lambda: parse_request(data, CHAT),
    ]
    for parse in parsers:
        try:
            _, job = parse()
        except BadLine:
            continue
        assert Job.decode(job.encode(proven=True)) == job
        job.cost()


def input_file(data: bytes) -> None:
    """A whole input file, packed or not."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "prompts.jsonl")
        path.write_bytes(data)
        try:
            with open_input(path, max_line_bytes=4096) as file:
                checked = check(file, skip_bad=True)
                assert checked.lines == sum(1 for _ in read_lines(file, checked))
        except InputFileError:
            pass


def stored_job(data: bytes) -> None:
    """What stands in a lane in a job's place; what can be read can be sent."""
    try:
        job = Job.decode(data)
    except EncodingError:
        return
    job.cost()
    continuable(job)
    for asked in (job, behind_chat(job, VLLM)):
        request = request_for(asked, model_of(asked, VLLM))
        assert isinstance(raw_json.read_object(request.body), dict)
    if continuable(job) and (rest := continued(job, Kept("so far", 2, "m"), VLLM)) is not None:
        request_for(rest, None)


def payloads(data: bytes) -> None:
    """Beginnings of answers, deltas, API keys, and what is encrypted: values that are one field in Redis."""
    if (kept := Kept.decode(data)) is not None:
        joined(EngineAnswer(200, b'{"choices":[{"message":{"content":"x"}}]}', "", Usage()), kept)
    for decode in (decode_deltas, lambda value: ApiKey.decode("k", value).to_json(0.0)):
        try:
            decode(data)
        except EncodingError:
            pass
    sealed = CIPHER.encrypt(data, "request job 1")
    assert data == CIPHER.decrypt(sealed, "request job 1")
    for payload in (data, sealed[: len(sealed) // 2], sealed[:-1] + b"?", sealed[:17] + data):
        try:
            CIPHER.decrypt(payload, "request job 2")
        except (EncodingError, KeyMissing):
            pass
    CIPHER.decrypt_text("llmq-encrypted:" + data.decode(errors="replace"), "error job 1")


def hashes(data: bytes) -> None:
    """Hashes: heartbeats, live settings, bucket, totals, records of batches, jobs and results."""
    fields = _fields(data)
    texts = {name.decode(errors="replace"): value.decode(errors="replace") for name, value in fields.items()}
    worker = worker_of(texts, float(len(data)), NOW_MS, 10.0)
    orjson.dumps(worker.to_json())
    figures = merge([worker.measures])
    figures.latency()
    LiveSettings.from_hash(fields)
    assert len(live_values(fields)) >= len(LIVE_SETTINGS)
    orjson.dumps(bucket_of(fields, fields, NOW_MS).to_json())
    sums(read_totals(fields))
    record = record_of("1", fields, Whereabouts(True, None, 1.0, fields.get(b"past"), NOW_MS), cipher=CIPHER)
    orjson.dumps(record.to_json())
    try:
        orjson.dumps(BatchRecord.from_hash("batch_1", fields).to_json())
    except LLMQError:
        pass
    _result(fields)


def _result(fields: Mapping[bytes, bytes]) -> None:
    try:
        result = ResultRecord.from_fields(fields).decrypted("batch_1", CIPHER)
    except (EncodingError, KeyMissing):
        return
    assert b"\n" not in render(result, "batch_1")
    orjson.loads(render(result, "batch_1"))
    line_result(result)


def events(data: bytes) -> None:
    """Server-sent events: however the network cuts them, they are the same."""
    found = []
    for size in (len(data) or 1, 1, 7):
        parser, seen = EventParser(2000), []
        try:
            for first in range(0, len(data), size):
                seen += parser.feed(data[first : first + size])
            seen += parser.close()
        except EventTooLarge:
            return
        found.append(seen)
    assert found[0] == found[1] == found[2]


def answers(data: bytes) -> None:
    """What an engine sends: streams of all endpoints, whole bodies, refusals. What counts as an answer is JSON."""
    for url in ENDPOINTS:
        _stream(url, data)
    for status in (200, 400, 429, 500):
        try:
            if status == 200:
                answer = whole_answer(status, data, "")
                as_chunks(load(answer.body))
            else:
                sorted_ = sort_status(status, data, "", data[:40].decode(errors="replace"))
                if isinstance(sorted_, EngineError):
                    raise sorted_
                answer = sorted_
            orjson.loads(answer.body)
        except EngineError as error:
            orjson.loads(getattr(error, "body", b"") or b"null")
    seconds_of(data.decode(errors="replace"))


def _stream(url: str, data: bytes) -> None:
    reader = StreamReader(assembler_for(url), 4000, "", lambda text, chunk: None)
    pieces = (data[first : first + 50] for first in range(0, len(data), 50))
    try:
        answer = next((answer for piece in pieces if (answer := reader.feed(piece)) is not None), None)
        answer = answer if answer is not None else reader.close()
        orjson.loads(answer.body)
    except EngineError as error:
        orjson.loads(getattr(error, "body", b"") or b"null")


def settings(data: bytes) -> None:
    """What people write: durations, rates, sizes, windows, live settings, URLs."""
    text = data.decode(errors="surrogateescape")
    parsers: list[Callable[[], object]] = [
        lambda: format_duration(parse_duration(text)),
        lambda: format_rate(parse_rate(text)),
        lambda: parse_size(text),
        lambda: plan_state(expand(parse_windows(text), NOW_MS), NOW_MS),
        lambda: parse_redis_url(text),
        *(functools.partial(stored_value, setting.name, text) for setting in LIVE_SETTINGS),
        lambda: stored_value("weight.ann", text),
        lambda: stored_value(text, "1"),
    ]
    for parse in parsers:
        try:
            parse()
        except UsageError:
            pass
    redact(text)
    plan_state(text, NOW_MS)


def requests(data: bytes) -> None:
    """Bodies that the gateway reads: JSON objects, which stay as they came but for one field, and uploads."""
    try:
        body = raw_json.read_object(data)
    except ValueError:
        pass
    else:
        again = raw_json.read_object(raw_json.changed(data, {"model": b'"other"', "gone": None}))
        assert "other" == again["model"]
        assert again.keys() == body.keys() - {"gone"} | {"model"}
        for url in ENDPOINTS:
            try:
                Job.of_json(url, data).cost()
            except EncodingError:
                pass
    head, _, body_bytes = data.partition(b"\0")
    try:
        asyncio.run(_upload(head.decode("latin-1"), body_bytes))
    except ApiError:
        pass


async def _upload(content_type: str, body: bytes) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for first in range(0, len(body), 37):
            yield body[first : first + 37]

    upload = await receive_upload({"content-type": content_type}, chunks(), _Nowhere(), 1000)  # type: ignore[arg-type]
    assert "/" not in upload.filename
    assert upload.filename.isprintable()


class _Nowhere:
    """A spool that keeps nothing."""

    async def write(self, data: bytes) -> None:
        """Take a piece."""


#: Names of fields that stand in the hashes, in the order in which `_fields` gives them values.
NAMES = (
    b"n k s h q b e m u d state status entry lane client expires_at submitted_at ended_at attempts crashes preemptions "
    b"usage body code message request past tenant digest created_at next lines completed failed sealed total name "
    b"expires_at cancelling_at prompt_tokens completion_tokens trimmed collector:x x:y paused_at retry_of "
    b"id pid slots busy_i busy_b batch_cap reserve started_at claimed_at seen_at models lanes chat_seen engine_url "
    b"host m.window_s m.wait m.first m.total m.batch_wait m.batch_done m.batch_failed m.preempted "
    b"m.kept_tokens m.wasted_tokens "
    b"rate burst unit plan windows deadline lease ttft_p95 keep_batch results_max_bytes results_quarter weight.ann "
    b"tokens at exhausted dry_ms dry jobs_ended|batch|failed"
).split()


def _fields(data: bytes) -> dict[bytes, bytes]:
    """Return a hash: data is `number value` entries, NUL between them; the number chooses the field."""
    found = {}
    for place, part in enumerate(data.split(b"\0")):
        number = part[0] if part else place
        found[NAMES[number % len(NAMES)]] = part[1:]
    return found


def _hash(**values: bytes) -> bytes:
    return b"\0".join(bytes([NAMES.index(name.replace("__", ".").encode())]) + value for name, value in values.items())


def _sse(*chunks: object) -> bytes:
    return b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


HARNESSES: Mapping[str, Harness] = {
    harness.__name__: harness
    for harness in (lines, input_file, stored_job, payloads, hashes, events, answers, settings, requests)
}

_CHAT = b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"messages":[{"role":"user"}],"n":2}}'
_LINES = (
    _CHAT,
    b'{"messages":[{"role":"user","content":"\xe2\x80\xa8"}],"max_tokens":18446744073709551616}',
    b'{"custom_id":"b","params":{"messages":[{}]}}',
    b'{"prompt":["a",[1,2]],"temperature":NaN}',
    b'"text"',
)
_MEASURES = {name.replace(".", "__"): value.encode() for name, value in Measures().snapshot().items()}

SEEDS: Mapping[str, Sequence[bytes]] = {
    "lines": _LINES,
    "input_file": (
        b"\n".join(_LINES),
        b"\xef\xbb\xbf" + b"\r\n".join(_LINES) + b"\n" + b"x" * 5000,
        gzip.compress(b"\n".join(_LINES)) + gzip.compress(_CHAT) + b"\0\0",
        zstandard.compress(b"\n".join(_LINES * 50)),
        b"\x50\x2a\x4d\x18\x02\0\0\0ab" + zstandard.compress(_CHAT),
    ),
    "stored_job": (
        Job(CHAT, {"messages": [{"role": "user", "content": "hi"}], "n": 2, "stop": None}).encode(),
        Job("/v1/completions", {"prompt": "x", "max_tokens": 5, "stream_options": {}}).encode(),
        Job.of_json("/v1/responses", b'{"input":"x","model":"default","stream":true,"model":1}').encode(),
        msgpack.packb({"u": CHAT, "b": {"messages": [{"role": "assistant", "content": [{"type": "text"}]}]}}),
        msgpack.packb({"u": "http://elsewhere/", "b": {"x": msgpack.ExtType(5, b"x"), "y": b"z"}}),
    ),
    "payloads": (
        Kept("so far", 2, "m").encode(),
        encode_deltas([Delta("1", 1, 0, "x", b"{}")]),
        ApiKey("k", "ann", "0" * 64).encode(),
        CIPHER.encrypt(b"secret", "request job 2"),
    ),
    "hashes": (
        _hash(n=b"3", k=b"three", s=b"completed", h=b"200", b=b'{"a":\n1}', u=b"3:4", q=b"r"),
        _hash(state=b"failed", status=b"500", entry=b"1795000000000-0", lane=b"i:ann", usage=b"1:2", past=b"1 2 3 4 -"),
        _hash(tenant=b"ann", status=b"in_progress", created_at=b"1", next=b"5", lines=b"4", completed=b"0", failed=b"0")
        + _hash(sealed=b"0"),
        _hash(id=b"w", pid=b"1", slots=b"4", models=b'["m"]', lanes=b"[]", engine_url=b"http://u:p@h/", **_MEASURES),
        _hash(rate=b"5", burst=b"10", unit=b"job", plan=b"1795000000000 5 5 job;", windows=b"mon 5/s", tokens=b"1.5"),
        _hash(exhausted=b"1" + b"3" * 31, dry_ms=b"9" * 25),
    ),
    "events": (_sse({"a": 1}), b"event: x\r\ndata: 1\rdata: 2\n\n: ping\nid: 1\n\n", b"\xef\xbb\xbfdata: x"),
    "answers": (
        _sse(
            {"id": "1", "choices": [{"index": 0, "delta": {"role": "assistant", "content": "a"}}]},
            {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "t", "function": {"name": "f"}}]}}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 1}},
        ),
        _sse({"choices": [{"index": 0, "text": "a", "logprobs": None, "finish_reason": "length"}]}),
        _sse({"type": "response.created", "response": {"id": "r"}}, {"type": "response.completed", "response": {}}),
        _sse(
            {"type": "message_start", "message": {"id": "m", "usage": {"input_tokens": 1}}},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "tool_use", "input": {}}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": "{}"}},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 5}},
            {"type": "message_stop"},
        ),
        b'{"id":"x","choices":[{"message":{"content":"a"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1}}',
        b'{"error":{"code":"429","type":"rate_limit","message":"m"}}',
        b"Mon, 01 Jan 2027 00:00:00 GMT",
    ),
    "settings": (
        b"90s", b"1.5GiB", b"2000tok/s", b"mon-fri 08:00-20:00 5/s; sat,sun closed; tz=Europe/Berlin", b"auto", b"on",
        b"redis://user:pass@host:6379/0?protocol=3", b"redis+sentinel://h:1,[::1]:2/service/3?password=x", b"weight.x",
        b"rediss+cluster://h:1?ssl_cert_reqs=none", b"unix:///a/b?db=2", b"1795000000000 5 5 job;", b"off", b"0.5",
    ),
    "requests": (
        b'{"model":"m","messages":[{"role":"user","content":"\\ud83d\\ude00"}],"a":1e400,"a":[{"b":"]"}]}',
        b'{"mod\\u0065l" : 123456789012345678901234567890 , "gone":{"x":[]}}',
        b'multipart/form-data; boundary=B\0--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--B\r\nContent-Disposition: form-data; name="file"; filename="../a.jsonl"\r\n\r\n{}\r\n--B--\r\n',
    ),
}  # fmt: skip
