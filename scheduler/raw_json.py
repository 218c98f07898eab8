"""A JSON object as its writer wrote it: read for what llmq needs, changed in single fields, else left byte for byte.

What passes through llmq must come out as it went in: the order of fields, numbers of any size, fields that come twice,
escapes. A parsed object has lost all of that, so a chat request is stored and sent on as bytes, and what llmq has to
change in it (the model, the stream) is changed in the bytes. Only the object's own fields are looked at; nothing inside
them is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

_STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_FIELD = re.compile(rb"[\s,{]*(" + _STRING + rb")\s*:\s*", re.DOTALL)
_SCALAR = re.compile(_STRING + rb"|[^\s,}]+", re.DOTALL)
_BRACKETS = re.compile(_STRING + rb"|[\[\]{}]", re.DOTALL)

#: An integer of more digits says nothing to anybody here; it is sent on as it is.
_MANY_DIGITS = 400


@dataclass(frozen=True, slots=True)
class _Field:
    """One field of the object, and where in the text it begins, its value begins, and it ends."""

    name: str
    begin: int
    value: int
    end: int


def read_object(raw: bytes) -> dict[str, Any]:
    """Return the object, for looking at; raises ValueError that says what came instead.

    Numbers that no parser of 64 bits takes, and halves of surrogate pairs, are read as well as Python can.
    """
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        value = _read_patiently(raw, error)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {_kind(value)}")
    return value


def changed(raw: bytes, changes: Mapping[str, bytes | None]) -> bytes:
    """Return the object with other values (as JSON) for some of its fields; None takes a field out.

    `raw` must be an object that `read_object` reads. A field that was there keeps its place, a new one comes last.
    """
    left = {name: value for name, value in changes.items() if value is not None}
    pieces: list[bytes] = []
    for field in _fields(raw):
        if field.name not in changes:
            pieces.append(raw[field.begin : field.end])
        elif (value := left.pop(field.name, None)) is not None:
            pieces.append(raw[field.begin : field.value] + value)
    pieces += [orjson.dumps(name) + b":" + value for name, value in left.items()]
    return b"{" + b",".join(pieces) + b"}"


def _fields(raw: bytes) -> Iterator[_Field]:
    at = raw.index(b"{") + 1
    while (found := _FIELD.match(raw, at)) is not None:
        at = _end_of_value(raw, found.end())
        yield _Field(_name(found[1]), found.start(1), found.end(), at)


def _end_of_value(raw: bytes, begin: int) -> int:
    if raw[begin] not in b"[{":
        scalar = _SCALAR.match(raw, begin)
        assert scalar is not None, "the object was read before"
        return scalar.end()
    depth = 0
    for found in _BRACKETS.finditer(raw, begin):
        first = raw[found.start()]
        depth += 1 if first in b"[{" else -1 if first in b"]}" else 0
        if depth == 0:
            return found.end()
    raise AssertionError("the object was read before")


def _name(literal: bytes) -> str:
    return str(json.loads(literal)) if b"\\" in literal else literal[1:-1].decode()


def _read_patiently(raw: bytes, error: orjson.JSONDecodeError) -> Any:
    try:
        return json.loads(raw.decode(), parse_int=_int, parse_constant=_refuse)
    except UnicodeDecodeError:
        raise ValueError("expected JSON in UTF-8, got bytes that are none") from None
    except RecursionError:
        raise ValueError("expected JSON, got what is nested too deep") from None
    except ValueError:
        raise ValueError(f"expected a JSON object, got what is no JSON: {error}") from None


def _int(digits: str) -> float:
    return int(digits) if len(digits) < _MANY_DIGITS else float(digits)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _kind(value: object) -> str:
    names = {list: "an array", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
