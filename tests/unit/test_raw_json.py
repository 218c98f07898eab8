"""JSON objects that are changed in their bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmq.scheduler.raw_json import changed, read_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=5), children, max_size=4),
    max_leaves=20,
)
OBJECTS = st.dictionaries(st.text(max_size=6), VALUES, max_size=6)


class TestChanged:
    """Fields that are put in, replaced, and taken out."""

    @pytest.mark.parametrize(
        ("raw", "changes", "expected"),
        [
            (b"{}", {}, b"{}"),
            (b"{}", {"a": b"1"}, b'{"a":1}'),
            (b' { "a" : 1 , "b":[1, {"a":2}] } ', {"a": b"true"}, b'{"a" : true,"b":[1, {"a":2}]}'),
            (b'{"a":1,"b":2,"c":3}', {"b": None}, b'{"a":1,"c":3}'),
            (b'{"a":1,"a":2}', {"a": None}, b"{}"),
            (b'{"a":1,"b":0,"a":2}', {"a": b"3"}, b'{"a":3,"b":0}'),
            (b'{"a":1,"a":2}', {"z": b"0"}, b'{"a":1,"a":2,"z":0}'),
            (b'{"str\\u0065am":true}', {"stream": None}, b"{}"),
            (b'{"s":"}{][,\\"\\\\","stream":false}', {"stream": b"true"}, b'{"s":"}{][,\\"\\\\","stream":true}'),
            (b'{"n":-1.50E+400,"stream":1}', {"stream": None}, b'{"n":-1.50E+400}'),
            (b'{"deep":[[["]"]],{"}":"{"}],"x":null}', {"x": None}, b'{"deep":[[["]"]],{"}":"{"}]}'),
            ('{"ü":"\u2028","x":1}'.encode(), {"x": None}, '{"ü":"\u2028"}'.encode()),
        ],
    )
    def test_all_else_stays_byte_for_byte(self, raw: bytes, changes: dict[str, bytes | None], expected: bytes) -> None:
        """Order, spaces inside, numbers, escapes, fields that come twice."""
        assert expected == changed(raw, changes)

    @given(OBJECTS, OBJECTS, st.sampled_from([None, 2]), st.booleans())
    def test_it_means_what_a_change_of_the_object_means(
        self, given: dict[str, Any], new: dict[str, Any], indent: int | None, ascii_only: bool
    ) -> None:
        """Whatever the object and however it is written."""
        raw = json.dumps(given, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
        changes = {name: json.dumps(value).encode() for name, value in new.items()} | dict.fromkeys(list(given)[:1])
        expected = {name: value for name, value in {**given, **new}.items() if changes.get(name, b"") is not None}
        assert expected == json.loads(changed(raw, changes))


class TestReadObject:
    """What is taken for an object, and what is said of what is none."""

    @pytest.mark.parametrize(
        ("raw", "value"),
        [
            (b'{"a":1}', 1),
            (b'{"a":18446744073709551616}', 18446744073709551616),
            (b'{"a":1e400}', float("inf")),
            (b'{"a":' + b"9" * 5000 + b"}", float("inf")),
            (b'{"a":"\\ud800"}', "\ud800"),
        ],
        ids=["plain", "65 bits", "huge float", "5000 digits", "half a pair"],
    )
    def test_numbers_and_texts_of_every_kind_are_read(self, raw: bytes, value: object) -> None:
        """What an engine makes of them is its affair."""
        read = read_object(raw)["a"]
        assert value == read or (isinstance(read, int | float) and read >= 2**64)

    @pytest.mark.parametrize(
        ("raw", "told"),
        [
            (b"", "no JSON"),
            (b"{", "no JSON"),
            (b"[1]", "an array"),
            (b"3", "a number"),
            (b"null", "null"),
            (b'"x"', "text"),
            (b'{"a":NaN}', "no JSON"),
            (b'{"a":Infinity}', "no JSON"),
            (b'{"a":"\xff"}', "UTF-8"),
            (b"[" * 100_000, "too deep"),
            (b"\xef\xbb\xbf{}", "no JSON"),
        ],
        ids=range(11),
    )
    def test_what_is_no_object_is_named(self, raw: bytes, told: str) -> None:
        """In words that a caller can act on."""
        with pytest.raises(ValueError, match=told):
            read_object(raw)
