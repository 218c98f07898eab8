"""Reading files of prompts: every form of a line, every fault, and constant memory."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmq.scheduler.duplicates import Duplicates
from llmq.scheduler.errors import InputFileError, LLMQError
from llmq.scheduler.job import ENDPOINTS, Job
from llmq.scheduler.line_form import BadLine, parse_line
from llmq.scheduler.lines import MAX_LINE_BYTES, InputLine, LineFault, UnusableLine, check, open_input, read_lines
from llmq.scheduler.sorted_runs import SortedRuns

EXAMPLES = Path(__file__).parents[2] / "examples"

HELLO = [{"role": "user", "content": "hello"}]


def batch_line(key: str = "a", **changes: Any) -> dict[str, Any]:
    """Return an OpenAI batch line; None takes a key out."""
    line = {"custom_id": key, "method": "POST", "url": "/v1/chat/completions", "body": {"messages": HELLO}, **changes}
    return {name: value for name, value in line.items() if value is not None}


def as_file(*lines: Any) -> bytes:
    """Return lines as a file: bytes as they are, all else as JSON."""
    return b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)


def read(
    content: bytes, *, model: str | None = None, max_line_bytes: int = MAX_LINE_BYTES
) -> list[InputLine | UnusableLine]:
    """Take both passes over a content, and return what the second one gives."""
    with open_input("-", stdin=io.BytesIO(content), max_line_bytes=max_line_bytes) as file:
        return list(read_lines(file, check(file, model=model, skip_bad=True)))


def jobs(content: bytes, model: str | None = None) -> list[tuple[int, str, Job]]:
    """Return number, id and job of each line of a good file."""
    found = []
    for line in read(content, model=model):
        assert isinstance(line, InputLine)
        found.append((line.number, line.key, line.job))
    return found


def fault(line: Any, max_line_bytes: int = MAX_LINE_BYTES) -> str:
    """Return the fault of the one line of a file."""
    (found,) = read(as_file(line), max_line_bytes=max_line_bytes)
    assert isinstance(found, LineFault)
    return str(found)


def refusal(content: bytes) -> str:
    """Return what is said about a file that is refused."""
    with pytest.raises(InputFileError) as refused, open_input("-", stdin=io.BytesIO(content)) as file:
        check(file)
    return str(refused.value)


class TestForms:
    """What a line may look like."""

    def test_an_openai_batch_line_gives_its_url_and_its_body_unchanged(self) -> None:
        """Fields that llmq does not know pass through."""
        body = {"messages": HELLO, "stream": True, "model": "m", "top_k": 5}
        assert jobs(as_file(batch_line("q-1", body=body))) == [(1, "q-1", Job("/v1/chat/completions", body))]

    @pytest.mark.parametrize(("url", "field"), ENDPOINTS.items())
    def test_every_endpoint_is_known(self, url: str, field: str) -> None:
        """Each with the field that it needs."""
        body = {field: HELLO if field == "messages" else "hello"}
        assert jobs(as_file(batch_line(url=url, body=body))) == [(1, "a", Job(url, body))]

    def test_an_anthropic_line_asks_for_messages(self) -> None:
        """`params` is the body of /v1/messages."""
        params = {"max_tokens": 10, "messages": HELLO}
        assert jobs(as_file({"custom_id": "c", "params": params})) == [(1, "c", Job("/v1/messages", params))]

    def test_messages_alone_are_a_chat_and_their_neighbours_are_fields_of_its_body(self) -> None:
        """The id is taken out."""
        line = {"messages": HELLO, "temperature": 0, "custom_id": "x"}
        expected = Job("/v1/chat/completions", {"messages": HELLO, "temperature": 0})
        assert jobs(as_file(line)) == [(1, "x", expected)]

    def test_a_prompt_alone_is_a_completion(self) -> None:
        """A column `url` that names no endpoint is a field like any other."""
        line = {"prompt": "1+1=", "url": "https://example.org/source"}
        assert jobs(as_file(line)) == [(1, "line-1", Job("/v1/completions", line))]

    def test_a_text_is_a_chat_with_one_message(self) -> None:
        """The shortest form."""
        assert jobs(as_file("hello")) == [(1, "line-1", Job("/v1/chat/completions", {"messages": HELLO}))]

    @pytest.mark.parametrize("prompt", ["hi", ["hi", "ho"], [1, 2, 3], [[1, 2], [3]]])
    def test_a_prompt_is_text_or_token_ids_or_a_list_of_either(self, prompt: Any) -> None:
        """As the completions endpoint has it."""
        assert jobs(as_file({"prompt": prompt}))[0][2].body == {"prompt": prompt}

    def test_a_line_without_an_id_is_named_by_its_physical_number(self) -> None:
        """Empty lines count, though they are skipped."""
        assert [(1, "line-1"), (4, "line-4")] == [(n, key) for n, key, _ in jobs(b'"a"\n\n  \t\r\n"b"\n')]

    def test_the_model_that_was_given_takes_the_place_of_the_bodies_own(self) -> None:
        """In every form, also where the body names none."""
        lines = as_file(batch_line("a", body={"messages": HELLO, "model": "old"}), "text", {"prompt": "p"})
        assert ["new"] * 3 == [job.body["model"] for _, _, job in jobs(lines, model="new")]

    @given(
        st.dictionaries(
            st.text(max_size=5),
            st.recursive(
                st.none()
                | st.booleans()
                | st.integers(-(2**63), 2**64 - 1)
                | st.floats(allow_nan=False, allow_infinity=False)
                | st.text(max_size=10),
                lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
                max_leaves=20,
            ),
        ),
        st.booleans(),
    )
    def test_any_json_comes_back_equal_after_reading_and_storing(self, extra: dict[str, Any], ascii_only: bool) -> None:
        """F-132: no value of a body is changed by parsing or encoding, whatever it is."""
        body = extra | {"messages": HELLO}
        raw = json.dumps(batch_line(body=body), ensure_ascii=ascii_only).encode()
        _, job = parse_line(raw, "line-1")
        assert repr(body) == repr(Job.decode(job.encode()).body)


class TestSplitting:
    """Where lines begin and end."""

    @pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c"])
    def test_only_a_line_feed_ends_a_line(self, separator: str) -> None:
        """F-134: what text readers take for line ends is data, escaped or raw."""
        text = f"one{separator}two"
        raw = json.dumps(text, ensure_ascii=separator < " ").encode()
        assert [text, "next"] == [job.body["messages"][0]["content"] for _, _, job in jobs(raw + b'\n"next"\n')]

    def test_a_byte_order_mark_and_carriage_returns_are_accepted(self) -> None:
        """Files that come from Windows."""
        assert [(1, "line-1"), (2, "line-2")] == [(n, key) for n, key, _ in jobs(b'\xef\xbb\xbf"a"\r\n"b"\r\n')]

    def test_the_last_line_needs_no_line_end(self) -> None:
        """Editors leave it out."""
        assert 2 == len(jobs(b'"a"\n"b"'))

    def test_offsets_count_the_bytes_read_so_far(self) -> None:
        """The last one is the size of the file: progress ends at 100 %."""
        content = b'\xef\xbb\xbf"a"\n\n' + b"x" * 100 + b'\r\n"b"'
        assert [7, 110, 113] == [line.offset for line in read(content, max_line_bytes=50)]
        assert 113 == len(content)

    @pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"\n\n"])
    @pytest.mark.parametrize("length", range(6, 13))
    def test_a_line_may_have_exactly_the_bytes_of_the_limit(self, length: int, end: bytes) -> None:
        """Its line end does not count, and the line after an overlong one is read as itself."""
        line = b'"' + b"x" * (length - 2) + b'"'
        whole = end.endswith(b"\n")
        found = read(line + end + (b'"next"' if whole else b""), max_line_bytes=8)
        assert isinstance(found[0], InputLine) is (length <= 8)
        assert [1, 1 + end.count(b"\n")][: 1 + whole] == [one.number for one in found]

    def test_carriage_returns_at_the_limit_do_not_split_a_line(self) -> None:
        """What follows a stray one is still the same line."""
        assert [1, 2] == [line.number for line in read(b'"123456"\r\r\r7\n"next"', max_line_bytes=8)]

    def test_an_overlong_line_says_the_limit_and_how_to_raise_it(self) -> None:
        """The way out is in the message."""
        expected = "line 1: is longer than 1,000 bytes; raise the limit: --max-line-bytes N"
        assert expected == fault("x" * 2000, max_line_bytes=1000)

    def test_a_line_of_many_megabytes_is_passed_over_in_constant_memory(self, tmp_path: Path) -> None:
        """Neither the line nor the rest of the file is ever held as a whole."""
        path = tmp_path / "long.jsonl"
        with path.open("wb") as file:
            file.write(b'"')
            for _ in range(64):
                file.write(b"x" * (1 << 20))
            file.write(b'"\n"good"\n')
        with open_input(path) as opened:
            tracemalloc.start()
            try:
                found = list(read_lines(opened, check(opened, skip_bad=True)))
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
        assert [UnusableLine, InputLine] == [type(line) for line in found]
        assert peak < 8 << 20


class TestFaults:
    """A bad line is named with its number, its field and its fault."""

    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            (b'{"a": 1 "b"}', "line 1: is not JSON: unexpected character, expected ',' or '}' at column 9"),
            ([1], "line 1: expected a JSON object or a text, got a list"),
            (b"12", "line 1: expected a JSON object or a text, got the number 12"),
            (b"null", "line 1: expected a JSON object or a text, got null"),
            ("", "line 1: is empty text; expected a prompt"),
            (
                {"text": "x"},
                'line 1: expected one of the keys "body", "messages", "prompt" or "params", got "text"',
            ),
            (
                {"input": "x"},
                'line 1: input: two endpoints take it, so name one: {"method": "POST", "url": ..., "body": {...}}',
            ),
            (batch_line(custom_id=5), "line 1: custom_id: expected text, got the number 5"),
            (
                batch_line(""),
                "line 1: custom_id: is empty text; leave it out to have the line named by its number",
            ),
            (batch_line("x" * 513), "line 1: custom_id: has 513 characters; at most 512 are allowed"),
            (batch_line(method="GET"), 'line 1: method: expected "POST", got "GET"'),
            (batch_line(method=None), 'line 1: method: is missing; expected "POST"'),
            (batch_line(url="/v1/x"), f'line 1: url: "/v1/x" is not known; expected one of {", ".join(ENDPOINTS)}'),
            (batch_line(url=None), f"line 1: url: is missing; expected one of {', '.join(ENDPOINTS)}"),
            (batch_line(body=[1]), "line 1: body: expected an object, got a list"),
            (batch_line(body=None), "line 1: body: is missing; expected the request as a JSON object"),
            (
                batch_line(body=None, messages=HELLO),
                'line 1: body: is missing; beside "url", "messages" belongs inside "body"',
            ),
            (batch_line(body={}), "line 1: messages: is missing; /v1/chat/completions needs it"),
            (
                batch_line(body={"messages": "hi"}),
                'line 1: messages: expected a non-empty list of objects, got the text "hi"',
            ),
            ({"messages": []}, "line 1: messages: expected a non-empty list of objects, got an empty list"),
            ({"messages": [HELLO[0], None]}, "line 1: messages[1]: expected an object, got null"),
            ({"params": {"messages": {}}}, "line 1: messages: expected a non-empty list of objects, got an object"),
            ({"params": "x"}, 'line 1: params: expected an object, got the text "x"'),
            ({"prompt": ""}, "line 1: prompt: expected text or a non-empty list, got empty text"),
            ({"prompt": ["a", True]}, "line 1: prompt[1]: expected text or token ids, got true"),
            (
                batch_line(url="/v1/embeddings", body={"input": 0.5}),
                "line 1: input: expected text or a non-empty list, got the number 0.5",
            ),
        ],
    )
    def test_the_message_says_what_was_expected_and_what_came(self, line: Any, expected: str) -> None:
        """One row a fault."""
        assert expected == fault(line)

    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            (b"NaN", "seed: is nan, which JSON does not have"),
            (b"[0, -Infinity]", "seed[1]: is -inf, which JSON does not have"),
            (b"1e999", "seed: is inf, which JSON does not have"),
            (b"18446744073709551616", "seed: is an integer of more than 64 bits; send it as text"),
            (b'{"x": -9223372036854775809}', "seed.x: is an integer of more than 64 bits; send it as text"),
            (b"9" * 5000, "seed: is an integer of more than 64 bits; send it as text"),
            (b'"\\ud800"', "seed: holds text that is not valid Unicode (a lone surrogate)"),
            (b"[" * 80 + b"]" * 80, f"seed{'[0]' * 64}: is nested deeper than 64 levels"),
        ],
    )
    @pytest.mark.parametrize(
        "template",
        [
            b'{"messages":[{}],"seed":%s}',
            b'{"method":"POST","url":"/v1/completions","body":{"prompt":"x","seed":%s}}',
        ],
    )
    def test_a_value_that_could_not_be_stored_is_refused_by_its_path(
        self, template: bytes, value: bytes, expected: str
    ) -> None:
        """F-132: never silently turned into something else; the path is the one within the body."""
        found = fault(template.replace(b"%s", value))
        assert found.startswith("line 1: ")
        assert expected.removeprefix("seed") in found
        assert "body" not in found

    @pytest.mark.parametrize("value", [18446744073709551615, -9223372036854775808, 1e300, 0.1234567890123456789012])
    def test_the_largest_numbers_that_fit_are_taken(self, value: float) -> None:
        """And come out as they went in."""
        assert repr(value) == repr(jobs(as_file({"prompt": "x", "seed": value}))[0][2].body["seed"])

    def test_a_line_nested_deeper_than_any_parser_goes_is_a_fault_of_that_line(self) -> None:
        """Recursion is limited, not the interpreter's stack."""
        assert "line 1: is nested deeper than 64 levels" == fault(b"[" * 100_000 + b"]" * 100_000)

    def test_many_brackets_in_a_text_are_no_depth(self) -> None:
        """The quick test on brackets only decides whether to look closely."""
        assert jobs(as_file({"prompt": "[{" * 200}))[0][2].body == {"prompt": "[{" * 200}

    def test_a_line_in_another_encoding_is_named_by_its_byte(self) -> None:
        """One Latin-1 line does not make a file binary."""
        assert "line 1: is not UTF-8: byte 0xe9 at byte 5; save it as UTF-8" == fault(
            b'"caf\xe9 au lait, a longer text"'
        )

    def test_a_bad_line_keeps_its_id_where_it_could_be_read(self) -> None:
        """G16: its error line can be matched to its prompt; else it is named by its number."""
        found = read(as_file(batch_line("mine", method="GET"), b"{", "x" * 500), max_line_bytes=200)
        assert ["mine", "line-2", "line-3"] == [line.key for line in found]

    @given(st.binary(max_size=40))
    def test_no_bytes_at_all_break_the_reader(self, raw: bytes) -> None:
        """G16: any line is a job that can be stored or a fault, and nothing else."""
        try:
            key, job = parse_line(raw, "line-1")
        except BadLine as bad:
            said = bad.fault
        else:
            said = f"{key} {job.encode()!r}"
        assert said


class TestRefusal:
    """A file with bad lines is refused as a whole, or its bad lines are let through as faults."""

    def test_the_message_counts_and_lists_the_bad_lines(self) -> None:
        """With the number of all lines, and each fault on a line of its own."""
        content = as_file("good", b"{", batch_line(method="GET"), "good")
        assert refusal(content).splitlines() == [
            "stdin: 2 of 4 lines cannot be used; nothing was queued (--skip-bad makes error lines of them)",
            "  line 2: is not JSON: unexpected end of data at column 2",
            '  line 3: method: expected "POST", got "GET"',
        ]

    def test_at_most_twenty_faults_are_listed(self) -> None:
        """The others are a number."""
        lines = refusal(as_file(*[b"{"] * 1500)).splitlines()
        assert (1 + 20 + 1, "  ... and 1,480 more") == (len(lines), lines[-1])

    def test_bad_lines_come_in_their_places_when_they_are_skipped(self) -> None:
        """G16: the caller can write one line for each line of the file."""
        found = read(as_file("a", b"{", "b", batch_line("x"), batch_line("x")))
        assert [InputLine, UnusableLine, InputLine, InputLine, UnusableLine] == [type(line) for line in found]

    def test_a_repeated_id_names_both_lines(self) -> None:
        """The first of them is good."""
        assert refusal(as_file(batch_line("a"), "x", batch_line("a"), batch_line("a"))).splitlines()[1:] == [
            '  line 3: custom_id: "a" is also on line 1',
            '  line 4: custom_id: "a" is also on line 1',
        ]

    def test_an_id_that_is_the_number_name_of_another_line_is_a_repetition(self) -> None:
        """Ids are unique, wherever they come from."""
        assert 'line 2: custom_id: "line-2" is also on line 1' in refusal(as_file(batch_line("line-2"), "text"))

    def test_repetitions_and_other_faults_are_listed_in_the_order_of_the_file(self) -> None:
        """Though they are found at different times."""
        content = as_file(batch_line("a"), batch_line("a"), *[b"{"] * 30, batch_line("a"))
        lines = refusal(content).splitlines()
        assert "stdin: 32 of 33 lines cannot" == lines[0][:28]
        assert ["  line 2", "  line 3"] == [line[:8] for line in lines[1:3]]

    def test_a_bad_line_does_not_take_its_id_from_a_good_one(self) -> None:
        """G16: one bad line never harms another."""
        found = read(as_file(batch_line("a", method="GET"), batch_line("a")))
        assert [UnusableLine, InputLine] == [type(line) for line in found]

    def test_the_check_tells_what_the_file_holds(self) -> None:
        """Lines, models and endpoints, and how far it has read."""
        content = as_file(batch_line(body={"messages": HELLO, "model": "m"}), {"prompt": "p", "model": "n"}, b"{")
        with open_input("-", stdin=io.BytesIO(content)) as file:
            checked = check(file, skip_bad=True)
        assert (3, 2, 1) == (checked.lines, checked.good, checked.fault_total)
        assert {"m", "n"} == checked.models
        assert {"/v1/chat/completions", "/v1/completions"} == checked.urls

    def test_the_check_reports_its_progress(self) -> None:
        """In bytes, so that it can be set against the size."""
        told: list[int] = []
        with open_input("-", stdin=io.BytesIO(b'"x"\n' * 25_000)) as file:
            check(file, on_progress=told.append)
        assert [40_000, 80_000] == told

    def test_reading_can_begin_behind_any_line(self) -> None:
        """A batch is resumed at the next line that it accepts; repetitions before it do not matter."""
        content = as_file(*(batch_line(key) for key in ["a", "a", "b", "c", "b"]))
        with open_input("-", stdin=io.BytesIO(content)) as file:
            checked = check(file, skip_bad=True)
            for after in range(6):
                everything = list(read_lines(file, checked))
                assert everything[after:] == list(read_lines(file, checked, after=after))


class TestDuplicates:
    """Repeated ids are found in constant memory."""

    @given(st.lists(st.sampled_from("abcdefgh"), max_size=60), st.integers(1, 10))
    def test_hashes_on_disk_find_what_a_dictionary_finds(self, keys: list[str], capacity: int) -> None:
        """However few of them memory may hold."""
        first: dict[str, int] = {}
        expected = [(line, first[key]) for line, key in enumerate(keys, 1) if first.setdefault(key, line) != line]
        duplicates = Duplicates(capacity=capacity)
        try:
            for line, key in enumerate(keys, 1):
                duplicates.add(key, line)
            duplicates.settle()
            assert (len(expected), expected) == (len(duplicates), list(duplicates))
            assert expected == list(duplicates)  # and once more
        finally:
            duplicates.close()

    @given(st.lists(st.binary(min_size=3, max_size=3), max_size=200), st.integers(1, 20))
    def test_sorted_runs_sort(self, records: list[bytes], capacity: int) -> None:
        """On disk as in memory."""
        with SortedRuns(3, capacity=capacity) as runs:
            for record in records:
                runs.add(record)
            assert sorted(records) == list(runs)
            assert runs.on_disk is (len(records) >= capacity)

    def test_a_disk_without_the_folder_is_a_clear_error(self, tmp_path: Path) -> None:
        """The message names the folder."""
        with SortedRuns(3, tmp_path / "gone", capacity=1) as runs, pytest.raises(LLMQError, match="gone: cannot write"):
            runs.add(b"abc")

    def test_many_ids_take_no_more_memory_than_few(self, tmp_path: Path) -> None:
        """What is beyond the limit is on disk."""

        def peak(count: int) -> int:
            duplicates = Duplicates(tmp_path, capacity=1000)
            tracemalloc.start()
            try:
                for line in range(count):
                    duplicates.add(f"key-{line}", line)
                duplicates.settle()
                return tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
                duplicates.close()

        # The merge's read buffers are bounded as a whole, not by run: that is the constant allowed here.
        assert peak(40_000) < peak(4_000) + (2 << 20)


@contextmanager
def nobody() -> Iterator[None]:
    """Give up root's rights for a moment, where the suite runs as root."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


class TestOpening:
    """What is no file of prompts is refused before anything is read."""

    def opening(self, path: Path | str) -> str:
        """Return the refusal of a path."""
        with pytest.raises(InputFileError) as refused:
            open_input(path).close()
        assert refused.value.exit_code == 2
        return str(refused.value).removeprefix(f"{path}: ")

    def test_a_missing_file(self, tmp_path: Path) -> None:
        """Says so."""
        assert "no such file" == self.opening(tmp_path / "no.jsonl")

    def test_a_folder(self, tmp_path: Path) -> None:
        """Says so."""
        assert self.opening(tmp_path).startswith("is a folder")

    def test_a_file_that_may_not_be_read(self, tmp_path: Path) -> None:
        """Says so."""
        path = tmp_path / "secret.jsonl"
        path.write_bytes(b'"x"\n')
        path.chmod(0)
        with nobody():
            assert self.opening(path).startswith("may not be read by this user")

    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            (b"", "is empty; expected one JSON object a line"),
            (b'"a"\n\0\0\0', "is binary (it holds NUL bytes)"),
            (bytes(range(128, 256)) * 4, "is not UTF-8 text"),
            (b"\x1f\x8b\x08\x00rest", "its gzip data is cut short"),
            (gzip.compress(gzip.compress(b"{}", mtime=0), mtime=0), "is gzip data inside of compressed data"),
            (b"BZh91AY", "is bzip2 data; unpack it first: bzcat"),
            (b"x" * 257 + b"ustar  \0", "is a tar archive; unpack it first: tar -xOf"),
            ("\ufeffhello".encode("utf-16-le"), "is UTF-16 text; save it as UTF-8"),
            (b"PAR1....", "is a Parquet file"),
        ],
    )
    def test_a_content_that_is_no_text(self, tmp_path: Path, content: bytes, expected: str) -> None:
        """Says what it is."""
        path = tmp_path / "prompts.jsonl"
        path.write_bytes(content)
        assert self.opening(path).startswith(expected)

    @pytest.mark.parametrize("content", [b"\n \r\n\t\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
    def test_a_file_of_empty_lines_is_refused_by_the_check(self, content: bytes) -> None:
        """There is nothing to queue."""
        assert "stdin: holds no lines; expected one JSON object a line" == refusal(content)

    def test_the_digest_is_that_of_the_whole_content(self, tmp_path: Path) -> None:
        """Whether a pass found it or it was asked for first; overlong and empty lines are part of it."""
        path = tmp_path / "prompts.jsonl"
        path.write_bytes(b'\xef\xbb\xbf"a"\r\n\n' + b"x" * 5000 + b'\n"b"')
        expected = (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size)
        with open_input(path, max_line_bytes=100) as file:
            assert expected == (file.digest, file.size)
        with open_input(path, max_line_bytes=100) as file:
            check(file, skip_bad=True)
            assert expected == (file.digest, file.size)

    def test_a_pipe_is_spooled_so_that_it_can_be_read_twice(self, tmp_path: Path) -> None:
        """`llmq run <(jq ...)` works as `llmq run FILE` does."""
        path = tmp_path / "pipe"
        os.mkfifo(path)
        writer = threading.Thread(target=path.write_bytes, args=[b'"a"\n"b"\n'])
        writer.start()
        with open_input(path) as file:
            writer.join()
            checked = check(file)
            assert (2, 2, 8) == (checked.lines, len(list(read_lines(file, checked))), file.size)

    def test_two_readers_do_not_disturb_each_other(self) -> None:
        """Each pass has a position of its own."""
        with open_input("-", stdin=io.BytesIO(b'"a"\n"b"\n"c"\n')) as file:
            checked = check(file)
            pairs = list(zip(read_lines(file, checked), read_lines(file, checked), strict=True))
        assert [1, 2, 3] == [one.number for one, other in pairs if isinstance(one, InputLine) and one == other]

    def test_a_file_that_changes_between_the_passes_is_refused(self, tmp_path: Path) -> None:
        """What was checked is not what would be queued."""
        path = tmp_path / "prompts.jsonl"
        path.write_bytes(b'"a"\n"b"\n')
        with open_input(path) as file:
            checked = check(file)
            with path.open("ab") as changed:
                changed.write(b'"c"\n')
            with pytest.raises(InputFileError, match="was changed while it was read"):
                list(read_lines(file, checked))

    def test_a_file_that_is_replaced_between_the_passes_is_read_as_it_was(self, tmp_path: Path) -> None:
        """The open file is the one that was checked, whatever has its name now."""
        path, other = tmp_path / "prompts.jsonl", tmp_path / "other.jsonl"
        path.write_bytes(b'"a"\n')
        other.write_bytes(b'"b"\n"c"\n')
        with open_input(path) as file:
            checked = check(file)
            other.rename(path)
            assert 1 == len(list(read_lines(file, checked)))

    def test_the_same_file_is_recognised_under_another_name(self, tmp_path: Path) -> None:
        """Results are never written over their prompts."""
        path, link = tmp_path / "prompts.jsonl", tmp_path / "link.jsonl"
        path.write_bytes(b'"a"\n')
        link.symlink_to(path)
        with open_input(path) as file:
            assert [True, True, False] == [file.is_same_file(p) for p in (path, link, tmp_path / "other")]


class TestExamples:
    """The examples that ship with llmq are good."""

    @pytest.mark.parametrize("name", ["gsm8k-50.jsonl", "mixed.jsonl"])
    def test_every_line_of_an_example_can_be_queued(self, name: str) -> None:
        """As the README says."""
        with open_input(EXAMPLES / name) as file:
            for line in read_lines(file, check(file)):
                assert isinstance(line, InputLine)
                assert line.job == Job.decode(line.job.encode())

    def test_the_mixed_example_shows_every_endpoint(self) -> None:
        """One line at least for each."""
        with open_input(EXAMPLES / "mixed.jsonl") as file:
            assert set(ENDPOINTS) == check(file).urls
