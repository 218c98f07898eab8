"""The forms of a line: what one line of an input file may look like, and the job that it asks for.

    {"custom_id": ..., "method": "POST", "url": ..., "body": {...}}   OpenAI batch, `vllm run-batch`
    {"custom_id": ..., "params": {...}}                               Anthropic batch
    {"messages": [...], ...}                                          chat; all other keys are fields of the body
    {"prompt": ..., ...}                                              completion; the same
    "text"                                                            chat with one message of the user

`parse_line` is pure: bytes in, id and job out, or `BadLine` raised. Whether an id is unique is not its affair.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

from llmq.scheduler.errors import EncodingError
from llmq.scheduler.job import ENDPOINTS, MAX_DEPTH, Body, Job, check_storable

#: OpenAI's own limit for `custom_id`; longer ones are pasted text, not names.
MAX_KEY_CHARACTERS = 512

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ANTHROPIC = "/v1/messages"

_DIGITS_TO_ZERO = bytes(ord("0") if ord("0") <= byte <= ord("9") else ord(".") for byte in range(256))

#: Integers of fewer digits fit in 64 bits.
_MANY_DIGITS = b"0" * 19

#: Any integer over 64 bits does in the place of one that is too long to convert.
_OVERSIZED = 10**40


class BadLine(Exception):
    """The line cannot be used: the field ("" for the line as a whole), the fault, and the line's id if it has one."""

    def __init__(self, field: str, fault: str, key: str = "") -> None:
        super().__init__(field, fault)
        self.field = field
        self.fault = fault
        self.key = key


def parse_line(raw: bytes, key: str, model: str | None = None) -> tuple[str, Job]:
    """Return the id of a line (`key` where it names none) and its job; `model` takes the place of the body's.

    Raises BadLine for a line that has none of the forms, or holds a value that could not be stored faithfully.
    """
    value, exact = _load(raw)
    if isinstance(value, dict):
        if "custom_id" in value:
            key = _custom_id(value["custom_id"])
        try:
            url, body = _request(value)
            _check_body(url, body, exact)
        except BadLine as bad:
            bad.key = key
            raise
    elif isinstance(value, str):
        if not value:
            raise BadLine("", "is empty text; expected a prompt")
        url, body = CHAT, {"messages": [{"role": "user", "content": value}]}
    else:
        raise BadLine("", f"expected a JSON object or a text, got {_kind(value)}")
    if model is not None:
        body["model"] = model
    return key, Job(url, body)


def parse_request(raw: bytes, endpoint: str) -> tuple[str, Job]:
    """Return the id and the job of a line that must have OpenAI's form and be for one endpoint. Raises BadLine."""
    value, exact = _load(raw)
    if not isinstance(value, dict):
        raise BadLine("", f"expected a JSON object, got {_kind(value)}")
    if "custom_id" not in value:
        raise BadLine("custom_id", "is missing; every request needs one of its own")
    key = _custom_id(value["custom_id"])
    try:
        if "body" not in value:
            raise BadLine("body", "is missing; expected the request as a JSON object")
        url, body = _batch_request(value)
        if url != endpoint:
            raise BadLine("url", f"expected {shown(endpoint)}, the endpoint of the batch, got {shown(url)}")
        _check_body(url, body, exact)
    except BadLine as bad:
        bad.key = key
        raise
    return key, Job(url, body)


def shown(value: object) -> str:
    """Return a value as JSON for a message, cut to a length that leaves the message readable."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:56]}..."


def _load(raw: bytes) -> tuple[Any, bool]:
    """Parse a line; also say whether every value in it is certain to be stored as it was written.

    The fast parser reads an integer over 64 bits as a float: lines with that many digits anywhere are parsed again by
    the slow one. Depth is at most the number of brackets. Both tests together cost a tenth of walking the body.
    """
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _not_json(raw, error) from None
    if _MANY_DIGITS in raw.translate(_DIGITS_TO_ZERO):
        return _load_exactly(raw.decode()), False
    return value, raw.count(b"{") + raw.count(b"[") <= MAX_DEPTH


def _load_exactly(text: str) -> Any:
    """Parse with integers of any size, and with what JSON does not have, so that a message can name its place."""
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) <= 40 else _OVERSIZED)


def _not_json(raw: bytes, error: orjson.JSONDecodeError) -> BadLine:
    try:
        text = raw.decode()
    except UnicodeDecodeError as wrong:
        return BadLine("", f"is not UTF-8: byte 0x{raw[wrong.start]:02x} at byte {wrong.start + 1}; save it as UTF-8")
    try:
        check_storable(_load_exactly(text), "")
    except RecursionError:
        return BadLine("", f"is nested deeper than {MAX_DEPTH} levels")
    except EncodingError as wrong:  # NaN, Infinity, a lone surrogate
        return BadLine(_field(wrong.path), wrong.fault)
    except ValueError:
        pass
    # Not its column: an end of data is one of the next line to it, behind the line feed.
    column = min(error.pos, len(text.rstrip())) + 1
    return BadLine("", f"is not JSON: {error.msg} at column {column}")


def _custom_id(value: object) -> str:
    if not isinstance(value, str):
        raise BadLine("custom_id", f"expected text, got {_kind(value)}")
    if not value:
        raise BadLine("custom_id", "is empty text; leave it out to have the line named by its number")
    if len(value) > MAX_KEY_CHARACTERS:
        raise BadLine("custom_id", f"has {len(value):,} characters; at most {MAX_KEY_CHARACTERS} are allowed")
    return value


def _request(line: dict[str, Any]) -> tuple[str, Body]:
    """Tell the form by the keys, and return endpoint and body."""
    if "body" in line:
        return _batch_request(line)
    for field, url in (("messages", CHAT), ("prompt", COMPLETIONS)):
        if field in line:
            if _names_endpoint(line):
                raise BadLine("body", f'is missing; beside "url", "{field}" belongs inside "body"')
            return url, {name: value for name, value in line.items() if name != "custom_id"}
    if "params" in line:
        return ANTHROPIC, _object("params", line["params"])
    if "url" in line or "method" in line:
        raise BadLine("body", "is missing; expected the request as a JSON object")
    if "input" in line:
        raise BadLine("input", 'two endpoints take it, so name one: {"method": "POST", "url": ..., "body": {...}}')
    raise BadLine("", f'expected one of the keys "body", "messages", "prompt" or "params", got {_keys(line)}')


def _names_endpoint(line: dict[str, Any]) -> bool:
    """Whether the line has an endpoint beside its prompt: a body that was forgotten, and no column of a data set."""
    url = line.get("url")
    return isinstance(url, str) and url in ENDPOINTS


def _batch_request(line: dict[str, Any]) -> tuple[str, Body]:
    method, url = line.get("method"), line.get("url")
    if method != "POST":
        raise BadLine(
            "method", 'is missing; expected "POST"' if method is None else f'expected "POST", got {shown(method)}'
        )
    if not isinstance(url, str) or url not in ENDPOINTS:
        found = "is missing" if url is None else f"{shown(url)} is not known"
        raise BadLine("url", f"{found}; expected one of {', '.join(ENDPOINTS)}")
    return url, _object("body", line["body"])


def _object(field: str, value: object) -> Body:
    if not isinstance(value, dict):
        raise BadLine(field, f"expected an object, got {_kind(value)}")
    return value


def _check_body(url: str, body: Body, exact: bool) -> None:
    field = ENDPOINTS[url]
    if field not in body:
        raise BadLine(field, f"is missing; {url} needs it")
    if field == "messages":
        _check_messages(body[field])
    else:
        _check_prompt(field, body[field])
    if not exact:
        try:
            check_storable(body, "body")
        except EncodingError as error:
            raise BadLine(_field(error.path), error.fault) from None


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list) or not messages:
        raise BadLine("messages", f"expected a non-empty list of objects, got {_kind(messages)}")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadLine(f"messages[{index}]", f"expected an object, got {_kind(message)}")


def _check_prompt(field: str, prompt: object) -> None:
    """Accept text, or a list of texts, token ids, lists of token ids or (responses) objects; none of them empty."""
    if not prompt or not isinstance(prompt, str | list):
        raise BadLine(field, f"expected text or a non-empty list, got {_kind(prompt)}")
    if isinstance(prompt, list):
        for index, item in enumerate(prompt):
            if isinstance(item, bool) or not isinstance(item, str | int | list | dict):
                raise BadLine(f"{field}[{index}]", f"expected text or token ids, got {_kind(item)}")


def _field(path: str) -> str:
    """Return a path as a message names it: within the body, whatever form the line has."""
    return path.removeprefix(".").removeprefix("body.")


def _keys(line: dict[str, Any]) -> str:
    return ", ".join(shown(name) for name in list(line)[:5]) + (", ..." if len(line) > 5 else "") if line else "none"


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return f"the number {shown(value)}"
        case str():
            return f"the text {shown(value)}" if value else "empty text"
        case list():
            return "a list" if value else "an empty list"
        case _:
            return "an object"
