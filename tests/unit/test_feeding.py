"""Chunks: how a stream of lines is cut, resumed and shrunk. Pure values; what Redis says to them is in tests/redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmq.scheduler.errors import LineFault, UsageError
from llmq.scheduler.feeding import (
    MAX_CHUNK_BYTES,
    MAX_CHUNK_LINES,
    SLICE,
    Chunk,
    cut_chunks,
    encode_line,
    encode_lines,
)
from llmq.scheduler.job import Job
from llmq.scheduler.lines import InputLine, UnusableLine, check, open_input, read_lines
from llmq.scheduler.scripts import SubmitLine

URL = "/v1/chat/completions"


def job(text: str = "hello") -> Job:
    """Make a chat job."""
    return Job(URL, {"messages": [{"role": "user", "content": text}]})


def stored(number: int, size: int = 10, *, bad: bool = False) -> SubmitLine:
    """Make a line in its stored form; a bad one has no data."""
    return SubmitLine(number, f"line-{number}", b"" if bad else b"x" * size, 1, "is bad" if bad else "")


def numbers(chunk: Chunk) -> list[int]:
    """Return the numbers of a chunk's lines."""
    return [line.number for line in chunk.lines]


async def cut(lines: list[SubmitLine], first: int = 1) -> list[Chunk]:
    """Return the chunks of these lines."""

    async def source() -> AsyncIterator[SubmitLine]:
        for line in lines:
            yield line

    return [chunk async for chunk in cut_chunks(source(), first)]


@st.composite
def files(draw: st.DrawFn) -> list[SubmitLine]:
    """Lines of a file with blank lines (gaps), bad lines, and sizes about the limit of a chunk."""
    sizes = st.sampled_from([1, 500, 200_000, MAX_CHUNK_BYTES, 3 * MAX_CHUNK_BYTES])
    parts = draw(st.lists(st.tuples(st.integers(1, 3), sizes, st.booleans()), max_size=40))
    repeats = draw(st.sampled_from([1, 1, 40]))
    number, lines = 0, []
    for step, size, bad in parts:
        for _ in range(repeats if size < 1000 else 1):
            number += step
            lines.append(stored(number, size, bad=bad))
    return lines


class TestCutting:
    """A file is cut into chunks that follow each other without a gap."""

    @given(files())
    async def test_chunks_hold_every_line_once_and_join_without_a_gap(self, lines: list[SubmitLine]) -> None:
        """Each chunk begins where the one before ended, so the batch can tell by one number what it has (G1)."""
        chunks = await cut(lines)
        assert lines == [line for chunk in chunks for line in chunk.lines]
        joints = [1, *(chunk.after for chunk in chunks)]
        assert joints[:-1] == [chunk.first for chunk in chunks]
        assert all(chunk.first <= chunk.lines[0].number and chunk.after == numbers(chunk)[-1] + 1 for chunk in chunks)

    @given(files())
    async def test_chunks_are_bounded_in_lines_and_in_bytes(self, lines: list[SubmitLine]) -> None:
        """No chunk has more than 500 lines, nor more than 1 MiB unless a single line has (F-096)."""
        for chunk in await cut(lines):
            assert 1 <= len(chunk.lines) <= MAX_CHUNK_LINES
            assert len(chunk.lines) == 1 or sum(len(line.data) for line in chunk.lines) <= MAX_CHUNK_BYTES

    async def test_a_chunk_is_full_at_five_hundred_lines(self) -> None:
        """Small lines are grouped by number."""
        assert [500, 500, 1] == [len(chunk.lines) for chunk in await cut([stored(n) for n in range(1, 1002)])]

    async def test_the_first_chunk_begins_where_the_batch_stands(self) -> None:
        """A resumed batch expects a line that may be blank in the file."""
        (chunk,) = await cut([stored(9), stored(10)], first=7)
        assert (7, 11) == (chunk.first, chunk.after)


class TestParts:
    """What is left of a chunk, and what fits."""

    @given(files(), st.integers(0, 200))
    async def test_what_is_past_a_line_is_the_rest(self, lines: list[SubmitLine], expected: int) -> None:
        """A second producer skips forward: nothing is sent twice, nothing left out."""
        for chunk in await cut(lines):
            left = chunk.past(expected)
            assert [n for n in numbers(chunk) if n >= expected] == numbers(left)
            assert max(expected, chunk.first) == left.first
            assert left.after == max(chunk.after, left.first)

    @given(files(), st.integers(0, 50))
    async def test_the_part_within_the_room_and_the_rest_are_the_whole(
        self, lines: list[SubmitLine], room: int
    ) -> None:
        """A queue that is nearly full takes as many good lines as it has room for (G15); bad ones need none."""
        for chunk in await cut(lines):
            part = chunk.within(room)
            assert sum(bool(line.data) for line in part.lines) <= room
            rest = chunk.past(part.after)
            assert numbers(chunk) == numbers(part) + numbers(rest)
            assert not rest.lines or sum(bool(line.data) for line in part.lines) == room

    def test_without_room_bad_lines_before_the_first_good_one_still_go(self) -> None:
        """They end at once and need no room."""
        chunk = Chunk(1, 5, (stored(1, bad=True), stored(2, bad=True), stored(3), stored(4)))
        assert (1, 3, [1, 2]) == (chunk.within(0).first, chunk.within(0).after, numbers(chunk.within(0)))
        assert () == Chunk(3, 5, chunk.lines[2:]).within(0).lines


class TestEncoding:
    """Lines in their stored form."""

    def test_a_good_line_is_its_job_with_its_cost(self) -> None:
        """The worker decodes what was encoded here."""
        line = encode_line(InputLine(7, "row-7", job("what?"), 0))
        assert (7, "row-7", job("what?").cost(), "") == (line.number, line.key, line.cost, line.fault)
        assert job("what?") == Job.decode(line.data)

    def test_a_bad_line_has_its_fault_and_no_data(self) -> None:
        """`--skip-bad`: it becomes an error line that names line, field and fault (G16)."""
        line = encode_line(UnusableLine(2, "messages", "is missing", "row-2", 99))
        assert SubmitLine(2, "row-2", b"", fault="line 2: messages: is missing") == line

    def test_a_bad_line_without_an_id_is_named_by_its_number(self) -> None:
        """Every line has an id in the results."""
        assert SubmitLine(3, "line-3", b"", fault="line 3: is not JSON") == encode_line(LineFault(3, "", "is not JSON"))

    def test_a_job_that_cannot_be_stored_names_its_line(self) -> None:
        """A job that was made in Python may hold what no file can."""
        broken = InputLine(4, "row-4", Job(URL, {"messages": [float("nan")]}), 0)
        with pytest.raises(UsageError, match=r"line 4: body\.messages\[0\]"):
            encode_line(broken)

    async def test_encoding_starts_at_the_line_that_the_batch_expects(self) -> None:
        """What is queued already is not encoded again."""
        lines = [InputLine(n, f"row-{n}", job(), 0) for n in range(1, 6)] + [LineFault(6, "", "is bad")]
        assert [4, 5, 6] == [line.number async for line in encode_lines(lines, 4)]

    async def test_others_get_their_turn_while_lines_are_encoded(self) -> None:
        """A gateway that queues a file must not keep chat waiting meanwhile."""
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(other())
        lines = [InputLine(n, f"row-{n}", job(), 0) for n in range(1, 10 * SLICE + 1)]
        assert 10 * SLICE == len([line async for line in encode_lines(lines, 1)])
        beside.cancel()
        assert turns >= 10


def test_a_model_that_cannot_be_stored_is_named() -> None:
    """Bodies are proven when they are read; a model that takes the place of theirs is the caller's, and is not."""
    body = {"messages": [{"role": "user", "content": "hello"}], "model": "half of a pair: \ud800"}
    with pytest.raises(UsageError, match=r"line 7: .*body\.model"):
        encode_line(InputLine(7, "a", Job(URL, body), 0, proven=True))


def test_a_line_of_a_file_is_stored_as_any_other(tmp_path: Path) -> None:
    """What was proven is encoded without another look, to the same bytes."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"messages": [{"role": "user", "content": "Grüße"}], "seed": 18446744073709551615, "top_p": 0.1}\n'
    )
    with open_input(path) as file:
        (line,) = read_lines(file, check(file))
    assert isinstance(line, InputLine)
    assert line.proven
    assert line.job.encode() == encode_line(line).data
