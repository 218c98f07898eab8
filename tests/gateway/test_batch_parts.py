"""The chain of parts, under gateways that die, sleep and write late; and paging, by properties."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq.gateway.batch.paging import Listing, following, page_of, read_listing
from llmq.gateway.batch.parts import Chain, Line, Sums, load_chain, sums_of
from llmq.gateway.batch.places import is_batch_id, is_file_id, tenant_folder
from llmq.gateway.batch.storage import Storage, open_storage
from llmq.gateway.errors import ApiError
from llmq.scheduler.batch_record import new_batch_id, sortable_name
from llmq.scheduler.lease import Usage
from llmq.scheduler.records import ResultRecord

BATCH = "batch_1"


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    """An empty storage."""
    return open_storage(str(tmp_path), "q", tmp_path)


def results(*numbers: int, failed: tuple[int, ...] = ()) -> list[Line]:
    """Return results of lines; each counts one token."""
    return [Line(n, n not in failed, b"%d" % n, Sums(n not in failed, n in failed, 1)) for n in numbers]


async def texts(storage: Storage, chain: Chain) -> list[int]:
    """Return the lines that the parts of a chain hold, in their order."""
    found = []
    for name, head in chain.parts:
        if head.lines:
            found += [int(line) async for some in storage.lines(chain.place_of(name)) for line in some]
    return found


class TestChain:
    """Parts that follow one another."""

    async def test_another_gateway_finds_all_of_it(self, storage: Storage) -> None:
        """Lines, sums, place in the stream and life."""
        one = await load_chain(storage, BATCH, "one")
        assert 1 == await one.begin_life()
        await one.append(1, results(1, 3, failed=(3,)), "5-0")
        await one.append(1, results(2), "6-0")
        other = await load_chain(storage, BATCH, "other")
        assert ("6-0", "0-0", 3) == (other.cursor(1), other.cursor(2), other.head.taken)
        assert Sums(2, 1, 3) == other.head.sums
        assert [1, 3, 2] == await texts(storage, other)
        assert [True, True, True, False] == [n in other.taken for n in (1, 2, 3, 4)]

    async def test_a_part_without_its_head_does_not_exist(self, storage: Storage) -> None:
        """A gateway that dies between the two has written nothing; its successor reads those results again."""
        one = await load_chain(storage, BATCH, "one")
        await one.append(1, results(1), "1-0")
        await storage.write(one.place_of("000002-one"), b"2\n")
        other = await load_chain(storage, BATCH, "other")
        assert ([1], "1-0") == (await texts(storage, other), other.cursor(1))

    async def test_one_that_slept_begins_a_side_branch(self, storage: Storage) -> None:
        """What it writes late neither replaces nor doubles anything; the longer branch counts (G3)."""
        slept = await load_chain(storage, BATCH, "slept")
        await slept.append(1, results(1), "1-0")
        other = await load_chain(storage, BATCH, "other")
        await other.append(1, results(2, 3), "3-0")
        await slept.append(1, results(2), "2-0")
        await other.append(1, results(4), "4-0")
        chain = await load_chain(storage, BATCH, "third")
        assert ([1, 2, 3, 4], "4-0") == (await texts(storage, chain), chain.cursor(1))

    async def test_a_new_life_begins_at_the_beginning(self, storage: Storage) -> None:
        """With the lines that are certain, in a result stream of its own."""
        chain = await load_chain(storage, BATCH, "one")
        await chain.begin_life()
        await chain.append(1, results(1, 2), "2-0")
        assert 2 == await chain.begin_life()
        other = await load_chain(storage, BATCH, "other")
        assert (2, "0-0", 2) == (other.head.life, other.cursor(2), other.head.taken)
        await other.append(2, results(3), "1-0")
        assert [1, 2, 3] == await texts(storage, other)


def test_any_end_of_any_writer_leaves_each_line_once() -> None:
    """However gateways follow and overlap, the chain holds every line at most once, in whole parts (G16)."""
    numbers = itertools.count()

    @settings(deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 2), st.sets(st.integers(1, 12), max_size=4), st.booleans()), max_size=12))
    def check(steps: list[tuple[int, set[int], bool]]) -> None:
        asyncio.run(play(steps))

    async def play(steps: list[tuple[int, set[int], bool]]) -> None:
        storage = open_storage(f"memory://chain-{next(numbers)}", "q", Path())
        writers = [await load_chain(storage, BATCH, f"w{n}") for n in range(3)]
        most = 0
        for who, lines, reload in steps:
            if reload:
                writers[who] = await load_chain(storage, BATCH, f"w{who}-{len(writers[who].parts)}-{most}")
            new = [n for n in sorted(lines) if n not in writers[who].taken]
            await writers[who].append(1, results(*new), "1-0")
            most = max(most, writers[who].head.taken)
        chain = await load_chain(storage, BATCH)
        held = await texts(storage, chain)
        assert sorted(set(held)) == sorted(held)
        assert (most, most) == (len(held), chain.head.taken)
        storage.close()

    check()


@pytest.mark.parametrize(
    ("body", "cached", "reasoning"),
    [
        (b'{"usage": {"prompt_tokens_details": {"cached_tokens": 5}}}', 5, 0),
        (b'{"usage": {"output_tokens_details": {"reasoning_tokens": 6}, "input_tokens_details": null}}', 0, 6),
        (b'{"usage": {"prompt_tokens_details": {"cached_tokens": "5"}}}', 0, 0),
        (b'{"usage": [], "x": "_tokens_details"}', 0, 0),
        (b'no json "_tokens_details"', 0, 0),
        (b"{}", 0, 0),
    ],
)
def test_details_of_usage_are_those_that_the_engine_told(body: bytes, cached: int, reasoning: int) -> None:
    """Whatever an engine writes there."""
    sums = sums_of(ResultRecord(1, "k", "completed", 200, body=body, usage=Usage(10, 20)))
    assert Sums(1, 0, 10, 20, cached, reasoning) == sums


IDS = st.lists(st.integers(0, 10**6).map(lambda n: f"file-{n:07d}"), unique=True).map(sorted)


class TestPaging:
    """Lists in pages."""

    @given(IDS, st.integers(1, 7), st.booleans())
    def test_pages_in_a_row_are_the_whole_list(self, ids: list[str], limit: int, newest_first: bool) -> None:
        """Each id once, in order, and `has_more` is false on the last page only."""
        seen: list[str] = []
        after = None
        while True:
            rest = following(ids, Listing(limit, after, newest_first))
            page = page_of([{"id": one} for one in rest[:limit]], len(rest) > limit)
            seen += [one["id"] for one in page["data"]]
            if not page["has_more"]:
                break
            after = page["last_id"]
        assert (list(reversed(ids)) if newest_first else ids) == seen

    @given(IDS, st.data(), st.booleans())
    def test_a_cursor_outlives_what_it_names(self, ids: list[str], data: st.DataObject, newest_first: bool) -> None:
        """A page after a deleted thing begins where that stood."""
        cursor = data.draw(st.sampled_from(ids or ["file-0"]))
        rest = following(ids, Listing(100, cursor, newest_first))
        assert rest == following([one for one in ids if one != cursor], Listing(100, cursor, newest_first))

    @given(st.dictionaries(st.sampled_from(["limit", "after", "order"]), st.text()))
    def test_any_query_is_read_or_refused(self, query: dict[str, str]) -> None:
        """With 400, and nothing else."""
        status = 400
        try:
            listing = read_listing(query, default=20, most=100, is_id=is_file_id)
        except ApiError as error:
            status = error.status
        else:
            assert 1 <= listing.limit <= 100
        assert 400 == status

    def test_an_empty_page_names_nothing(self) -> None:
        """Its first and last ids are null."""
        assert {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False} == page_of(
            [], False
        )


class TestIds:
    """Ids and the places made of them."""

    @given(st.floats(0, 1e10), st.floats(0, 1e10))
    def test_ids_sort_by_their_time(self, one: float, other: float) -> None:
        """To the microsecond."""
        if abs(one - other) > 1e-5:
            assert (one < other) == (sortable_name(one) < sortable_name(other))

    def test_ids_are_told_from_paths(self) -> None:
        """Only what the gateway may have given out is looked for."""
        name = sortable_name(1.8e9)
        assert is_file_id(f"file-{name}")
        assert is_batch_id(new_batch_id())
        for wrong in (
            "file-../x",
            f"file-{name}/",
            f"batch_{name}",
            f"file-{name}\n",
            f"file-{name.upper()}",
            "",
            "file-",
        ):
            assert not is_file_id(wrong)

    @given(st.text(min_size=1, max_size=100), st.text(min_size=1, max_size=100))
    def test_tenants_have_folders_of_their_own(self, one: str, other: str) -> None:
        """Also where case does not count, and whatever they are called."""
        try:
            folders = [tenant_folder(one).lower(), tenant_folder(other).lower()]
        except UnicodeEncodeError:
            return  # no tenant may be called so
        assert (one == other) == (folders[0] == folders[1])
        assert not set(folders[0]) - set("abcdefghijklmnopqrstuvwxyz0123456789-")
