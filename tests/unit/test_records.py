"""Result records: how they are stored, and the output line that each of them becomes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmq.scheduler.errors import EncodingError
from llmq.scheduler.lease import Usage
from llmq.scheduler.records import ResultRecord, render

ANSWER = b'{"choices":[{"message":{"content":"4"}}]}'

numbers = st.integers(0, 10**15)
records = st.builds(
    ResultRecord,
    line=numbers,
    key=st.text(min_size=1),
    state=st.sampled_from(["completed", "failed", "expired", "cancelled"]),
    status_code=st.none() | st.integers(100, 599),
    request_id=st.text(),
    body=st.binary(),
    error_code=st.text(),
    error_message=st.text(),
    usage=st.builds(Usage, numbers, numbers),
    data=st.binary(),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


def answered(body: bytes, status_code: int = 200, state: str = "completed") -> ResultRecord:
    """Return the record of a line that an engine answered."""
    return ResultRecord(7, "q-7", state, status_code, "req-1", body)


def rendered_body(body: bytes) -> Any:
    """Return the engine's answer as a reader of the output line finds it."""
    line = render(answered(body), "b1")
    assert b"\n" not in line
    return json.loads(line)["response"]["body"]


class TestFields:
    """The entry in a result stream."""

    @given(records)
    def test_a_record_comes_back_equal(self, record: ResultRecord) -> None:
        """Whatever is in it."""
        assert record == ResultRecord.from_fields(record.to_fields())

    def test_the_fields_are_the_ones_of_the_finish_script(self) -> None:
        """One letter each; the numbers are text."""
        record = ResultRecord(7, "k", "failed", 500, "r", b"{}", "engine_error", "it broke", Usage(3, 4), b"\x81")
        assert record.to_fields() == {
            b"n": b"7",
            b"k": b"k",
            b"s": b"failed",
            b"h": b"500",
            b"q": b"r",
            b"b": b"{}",
            b"e": b"engine_error",
            b"m": b"it broke",
            b"u": b"3:4",
            b"d": b"\x81",
        }

    def test_fields_that_are_empty_or_missing_or_new_are_all_the_same(self) -> None:
        """A newer writer may add fields, and a script may write empty ones."""
        expected = ResultRecord(7, "k", "expired")
        needed = {b"n": b"7", b"k": b"k", b"s": b"expired"}
        assert needed == expected.to_fields()
        assert expected == ResultRecord.from_fields(needed)
        assert expected == ResultRecord.from_fields(needed | dict.fromkeys([b"h", b"q", b"b", b"u", b"d"], b""))
        assert expected == ResultRecord.from_fields(needed | {b"z": b"new"})

    @pytest.mark.parametrize("missing", [b"n", b"k", b"s"])
    def test_line_id_and_state_are_needed(self, missing: bytes) -> None:
        """Without one of them it is no result."""
        fields = ResultRecord(7, "k", "completed").to_fields()
        del fields[missing]
        with pytest.raises(EncodingError, match=f"result.{missing.decode()}: is missing"):
            ResultRecord.from_fields(fields)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            (b"n", b"seven"),
            (b"n", b"-7"),
            (b"n", b"7.0"),
            (b"n", b"9" * 5000),
            (b"n", "\u0667".encode()),
            (b"h", b"ok"),
            (b"u", b"3"),
            (b"u", b"3:"),
            (b"u", b"3:4:5"),
            (b"k", b"\xff"),
            (b"m", b"\xed\xa0\x80"),
        ],
    )
    def test_a_value_that_llmq_cannot_have_written_is_refused_by_name(self, name: bytes, value: bytes) -> None:
        """Nothing is guessed."""
        with pytest.raises(EncodingError, match=f"^result.{name.decode()}: "):
            ResultRecord.from_fields(ResultRecord(7, "k", "completed").to_fields() | {name: value})

    @pytest.mark.parametrize(
        ("state", "status_code", "ok"),
        [
            ("completed", 200, True),
            ("completed", 399, True),
            ("completed", 400, False),
            ("completed", None, False),
            ("failed", 200, False),
            ("expired", None, False),
        ],
    )
    def test_a_line_is_ok_when_an_engine_answered_with_success(
        self, state: str, status_code: int | None, ok: bool
    ) -> None:
        """An answer of 400 or above is a failed line."""
        assert ok is ResultRecord(1, "k", state, status_code).ok


class TestRender:
    """The line of an output file."""

    def test_an_answer_stands_in_the_line_byte_for_byte(self) -> None:
        """Its numbers and the order of its keys are the engine's own."""
        body = b'{"b": 1.0, "a": 123456789012345678901234567890, "c": 1E5}'
        assert render(answered(body), "b1") == (
            b'{"id":"batch_req_b1_7","custom_id":"q-7","response":'
            b'{"status_code":200,"request_id":"req-1","body":' + body + b'},"error":null}'
        )

    @pytest.mark.parametrize("status_code", [400, 404, 500])
    def test_a_refusal_of_the_engine_is_a_response_and_no_error(self, status_code: int) -> None:
        """DESIGN section 7: `error` is null when an engine answered."""
        line = json.loads(render(answered(b'{"error":{}}', status_code, "failed"), "b1"))
        assert (status_code, {"error": {}}, None) == (
            line["response"]["status_code"],
            line["response"]["body"],
            line["error"],
        )

    def test_a_line_that_no_engine_answered_has_an_error_and_no_response(self) -> None:
        """DESIGN section 7: `response` is null only where none did."""
        record = ResultRecord(7, "q-7", "expired", error_code="batch_expired", error_message='waited "too" long')
        assert json.loads(render(record, "b1")) == {
            "id": "batch_req_b1_7",
            "custom_id": "q-7",
            "response": None,
            "error": {"code": "batch_expired", "message": 'waited "too" long'},
        }

    @given(json_values, st.sampled_from([None, 2, "\t"]), st.booleans())
    def test_any_json_of_an_engine_comes_out_equal_on_one_line(
        self, value: Any, indent: int | str | None, ascii_only: bool
    ) -> None:
        """F-135: also pretty-printed, also with U+2028 and its kind raw in its texts."""
        body = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()
        assert repr(value) == repr(rendered_body(body))

    @pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085"])
    def test_unicode_line_separators_of_an_answer_are_kept(self, separator: str) -> None:
        """F-135: they are data; a reader that splits at LF only gets the line whole."""
        body = json.dumps({"content": f"a{separator}b"}, ensure_ascii=False).encode()
        assert separator.encode() in render(answered(body), "b1")
        assert {"content": f"a{separator}b"} == rendered_body(body)

    @pytest.mark.parametrize(
        ("body", "expected"),
        [
            (b"Internal Server Error", "Internal Server Error"),
            (b"two\nlines", "two\nlines"),
            (b"", ""),
            (b'{"torn": ', '{"torn": '),
            (b"NaN", "NaN"),
            (b"caf\xe9", "caf\ufffd"),
            (b'{"a":1}{"b":2}', '{"a":1}{"b":2}'),
        ],
    )
    def test_an_answer_that_is_not_json_becomes_a_text(self, body: bytes, expected: str) -> None:
        """G16: one bad answer never breaks its line, or another."""
        assert expected == rendered_body(body)

    @given(records, st.text(alphabet="abcdef0123456789_-", min_size=1))
    def test_every_record_becomes_one_line_of_json(self, record: ResultRecord, batch_id: str) -> None:
        """G16: with either a response or an error."""
        line = render(record, batch_id)
        assert b"\n" not in line
        parsed = json.loads(line)
        assert ["id", "custom_id", "response", "error"] == list(parsed)
        assert (f"batch_req_{batch_id}_{record.line}", record.key) == (parsed["id"], parsed["custom_id"])
        assert (parsed["response"] is None) is not (parsed["error"] is None)

    def test_a_large_answer_with_the_text_of_another_line_in_it_stays_one_line(self) -> None:
        """An answer cannot forge a result."""
        text = '"},"error":null}\n{"id":"batch_req_b1_8","custom_id":"q-8"'
        body = json.dumps({"content": text * 1000}).encode()
        assert {"content": text * 1000} == rendered_body(body)
        assert text == rendered_body(text.encode())
