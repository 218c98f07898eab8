"""Where a request goes is the operator's choice: a job names one of five endpoints, and nothing else of its way."""

from __future__ import annotations

import msgpack
import orjson
import pytest

from llmq.scheduler.errors import EncodingError
from llmq.scheduler.job import ENDPOINTS, Job
from llmq.scheduler.line_form import BadLine, parse_line
from llmq.workers.engines.asking import request_for

#: What might lead elsewhere: other hosts, other paths, other schemes, and spellings of them.
ELSEWHERE = [
    "http://elsewhere.example/v1/chat/completions",
    "https://127.0.0.1:8000/v1/chat/completions",
    "//elsewhere.example/v1/chat/completions",
    "@elsewhere.example/v1/chat/completions",
    "/v1/chat/completions/../../metrics",
    "/v1/chat/completions?key=value",
    "/v1/chat/completions#fragment",
    "/v1/chat/completions\r\nHost: elsewhere.example",
    "/v1/chat/completions ",
    "/V1/CHAT/COMPLETIONS",
    "/v1/chat/completions/",
    "v1/chat/completions",
    "/v1/chat%2Fcompletions",
    "file:///etc/passwd",
    "",
    "/",
]


@pytest.mark.parametrize("url", ELSEWHERE)
def test_no_url_leads_elsewhere(url: str) -> None:
    """Neither a stored job nor a line of a file may name anything but an endpoint, letter by letter."""
    with pytest.raises(EncodingError):
        Job.decode(msgpack.packb({"u": url, "b": {"messages": []}}))
    with pytest.raises(EncodingError):
        Job.decode(msgpack.packb({"u": url, "j": b'{"messages":[]}'}))
    line = {"custom_id": "a", "method": "POST", "url": url, "body": {"messages": [{"role": "user", "content": "x"}]}}
    with pytest.raises(BadLine):
        parse_line(orjson.dumps(line), "line-1")


@pytest.mark.parametrize("url", ENDPOINTS)
def test_fields_of_a_body_do_not_change_the_way(url: str) -> None:
    """A body may hold what it likes (`base_url`, `host`, `api_key`, ...): its path is the endpoint's."""
    body = {
        "url": "http://elsewhere.example",
        "base_url": "x",
        "host": "x",
        "api_key": "x",
        "extra_headers": {"a": "b"},
    }
    assert url == request_for(Job(url, body), "m").path
