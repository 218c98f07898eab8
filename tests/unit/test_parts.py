"""Outputs that are packed, and outputs in parts: valid at any time, continued after any crash, in order on request."""

from __future__ import annotations

import gzip
import io
import itertools
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq.scheduler import part_series, result_file
from llmq.scheduler.compression import Codec
from llmq.scheduler.errors import UsageError
from llmq.scheduler.lines import open_input
from llmq.scheduler.ordering import order_lines
from llmq.scheduler.output import Counts, Output, PartLimit, ResultFile, count_ok_failed, is_complete, open_output
from llmq.scheduler.parts import OutputName
from llmq.scheduler.records import ResultRecord, render
from llmq.scheduler.sidecar import sidecar_path

FORMS = ["out.jsonl.gz", "out.jsonl.zst", "out-{part}.jsonl", "out-{part}.jsonl.gz", "out-{part}.jsonl.zst"]
PARTED = FORMS[2:]

SMALL = PartLimit(bytes=200)


def result(number: int) -> bytes:
    """Return an output line."""
    return render(ResultRecord(number, f"q-{number}", "completed", 200, "r", b'{"text":"%d"}' % (number * 977)), "b1")


RESULTS = [result(number) for number in range(1, 31)]


def limit_of(form: str) -> PartLimit | None:
    """Return a limit that makes several parts of 30 results, where a name has parts."""
    return SMALL if "{part}" in form else None


def opened(path: Path, *, ordered: bool = False, force: bool = False, limit: PartLimit | None = None) -> ResultFile:
    """Open an output of batch b1."""
    output = open_output(path, "b1", source="digest", ordered=ordered, force=force, parts=limit or limit_of(path.name))
    assert isinstance(output, ResultFile)
    return output


def write(output: Output, lines: list[bytes], begin: int = 0) -> None:
    """Append lines as a collector does that syncs after each; its cursor is how many it has synced."""
    for place, line in enumerate(lines[begin:], begin + 1):
        output.append(line)
        output.sync(str(place))


def finish(path: Path, lines: list[bytes], *, ordered: bool = False, force: bool = False) -> None:
    """Write a whole output from wherever it stands."""
    with opened(path, ordered=ordered, force=force) as output:
        if not output.complete:
            write(output, lines, int(output.cursor or 0))
            output.finish(str(len(lines)))


def files_of(path: Path) -> list[Path]:
    """Return the files of an output, by their names, without its sidecar."""
    name = OutputName.parse(path)
    return [name.part(number) for number in name.sizes()]


def unpacked(file: Path) -> bytes:
    """Unpack one file with a decoder that is not ours."""
    data = file.read_bytes()
    if file.name.endswith(".gz"):
        return gzip.decompress(data)
    if file.name.endswith(".zst"):
        return zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True).read()
    return data


def lines_of(path: Path) -> list[bytes]:
    """Return the lines of an output; every file of it must be valid by itself and end with a whole line."""
    contents = [unpacked(file) for file in files_of(path)]
    assert all(content.endswith(b"\n") for content in contents)
    return [line for content in contents for line in content.splitlines()]


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return all files of a folder."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def restore(folder: Path, files: dict[str, bytes]) -> None:
    """Make a folder what it was."""
    for file in folder.iterdir():
        file.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)


class TestNames:
    """What `-o` may say."""

    @pytest.mark.parametrize(
        ("name", "told"),
        [
            ("out-{part}-{part}.jsonl", "expected {part} once at most, and no other field, got {part}, {part}"),
            ("out-{n}.jsonl", "expected {part} once at most, and no other field, got {n}"),
            ("out-{part:05}.jsonl", "got {part:05}"),
            ("out-{}.jsonl", "got {}"),
            ("{part}-{tenant}.gz", "got {part}, {tenant}"),
            ("parts/{part}/out.jsonl", "{part} belongs into the file's name, not into that of its folder"),
        ],
    )
    def test_a_pattern_that_cannot_be_meant_is_refused(self, tmp_path: Path, name: str, told: str) -> None:
        """Before anything is written."""
        (tmp_path / "parts" / "{part}").mkdir(parents=True)
        with pytest.raises(UsageError) as refused:
            open_output(f"{tmp_path}/{name.removesuffix('.never')}", "b1")
        assert told in str(refused.value)

    def test_a_part_size_without_parts_is_refused(self, tmp_path: Path) -> None:
        """For a file and for stdout."""
        with pytest.raises(UsageError, match=r"needs a name with the place of the number: -o 'out-\{part\}.jsonl'"):
            open_output(tmp_path / "out.jsonl", "b1", parts=SMALL)
        with pytest.raises(UsageError, match="--part-size needs files"):
            open_output("-", "b1", parts=SMALL)

    @pytest.mark.parametrize(
        ("text", "limit"),
        [
            ("256MiB", PartLimit(256 << 20, None)),
            ("1kB", PartLimit(1000, None)),
            ("50_000 lines", PartLimit(None, 50_000)),
            ("1,000lines", PartLimit(None, 1000)),
            ("1line", PartLimit(None, 1)),
        ],
    )
    def test_a_part_is_limited_by_bytes_or_lines(self, text: str, limit: PartLimit) -> None:
        """As people write either."""
        assert limit == PartLimit.parse(text)

    @pytest.mark.parametrize("text", ["0", "0lines", "many", "", "-1", "lines"])
    def test_a_size_that_cannot_be_meant_is_refused(self, text: str) -> None:
        """With the forms that can."""
        with pytest.raises(UsageError, match="--part-size: expected"):
            PartLimit.parse(text)

    def test_parts_sort_by_name_and_other_files_are_none(self, tmp_path: Path) -> None:
        """Five digits or more, and the whole name."""
        name = OutputName.parse(tmp_path / "o-{part}.jsonl")
        for file in (
            "o-00001.jsonl",
            "o-100000.jsonl",
            "o-1.jsonl",
            "o-00002.jsonl.gz",
            "xo-00003.jsonl",
            "o-0000a.jsonl",
        ):
            (tmp_path / file).write_bytes(b"x")
        assert {1: 1, 100_000: 1} == name.sizes()
        assert "o-00007.jsonl" == name.part(7).name


class TestWriting:
    """Every part is a whole file of its kind, and a line stands in one of them."""

    @pytest.mark.parametrize("form", FORMS)
    def test_the_lines_are_there_in_the_order_of_completion(self, tmp_path: Path, form: str) -> None:
        """Read with a decoder that is not ours; a pattern has several parts, a name one file."""
        path = tmp_path / form
        finish(path, RESULTS)
        assert RESULTS == lines_of(path)
        assert (len(files_of(path)) > 3) == ("{part}" in form)
        assert Counts(30, 0) == count_ok_failed(path)

    @pytest.mark.parametrize("form", PARTED)
    def test_a_number_of_lines_is_kept_exactly(self, tmp_path: Path, form: str) -> None:
        """However the lines came: each by itself, all at once, over two runs."""
        path = tmp_path / form
        with opened(path, limit=PartLimit(None, 7)) as output:
            write(output, RESULTS[:10])
        with opened(path, limit=PartLimit(None, 7)) as output:
            for line in RESULTS[10:]:
                output.append(line)
            output.finish("30")
        assert [7, 7, 7, 7, 2] == [len(unpacked(file).splitlines()) for file in files_of(path)]
        assert RESULTS == lines_of(path)

    def test_a_plain_part_is_passed_by_one_line_at_most(self, tmp_path: Path) -> None:
        """Where the limit is below a block."""
        path = tmp_path / "out-{part}.jsonl"
        with opened(path, limit=PartLimit(1000)) as output:
            for line in RESULTS:
                output.append(line)
            output.finish("30")
        *sizes, _ = [file.stat().st_size for file in files_of(path)]
        assert sizes
        assert all(1000 <= size < 1000 + len(RESULTS[-1]) + 1 for size in sizes)

    @pytest.mark.parametrize("form", FORMS)
    def test_an_output_without_lines_is_a_whole_file_too(self, tmp_path: Path, form: str) -> None:
        """`batch results --failed` of a batch that went well."""
        path = tmp_path / form
        with opened(path) as output:
            output.finish("0-0")
        (file,) = files_of(path)
        assert b"" == unpacked(file)
        assert is_complete(path, "digest")

    def test_many_parts_between_two_syncs_do_not_use_up_the_files_of_a_process(self, tmp_path: Path) -> None:
        """A part for each line, and a collector that syncs rarely."""
        path = tmp_path / "out-{part}.jsonl"
        before = len(os.listdir("/proc/self/fd"))  # what other tests of this process have open
        with opened(path, limit=PartLimit(None, 1)) as output:
            for line in RESULTS * 10:
                output.append(line)
            opened_now = len(os.listdir("/proc/self/fd")) - before
            output.finish("300")
        assert opened_now < 80
        assert 300 == len(files_of(path))

    def test_memory_does_not_grow_with_the_output(self, tmp_path: Path) -> None:
        """Parts and order: lines that take 20 MB are sorted in runs of half a megabyte."""
        path = tmp_path / "out-{part}.jsonl.zst"
        with (
            pytest.MonkeyPatch.context() as patched,
            opened(path, ordered=True, limit=PartLimit(1 << 14)) as output,
        ):
            order = order_lines
            patched.setattr(
                result_file, "order_lines", lambda lines, name, folder: order(lines, name, folder, run_bytes=1 << 19)
            )
            tracemalloc.start()
            try:
                for number in range(20_000, 0, -1):
                    output.append(b'{"id":"batch_req_b1_%d","pad":"%s"}' % (number, b"x" * 1000))
                output.finish("20000")
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
        assert peak < 8 << 20
        numbers = [int(line.split(b"_")[3].split(b'"')[0]) for line in lines_of(path)]
        assert list(range(1, 20_001)) == numbers


class TestCrashes:
    """G16: after any crash the same command ends with each line once."""

    @pytest.mark.parametrize("form", FORMS)
    @settings(max_examples=10, deadline=None)
    @given(st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.integers(0, 60)), max_size=5), st.booleans())
    def test_any_sequence_of_crashes_gives_each_line_once(
        self, form: str, crashes: list[tuple[int, bool, int]], ordered: bool
    ) -> None:
        """Lines without a sync, with one, parts that were begun, and junk behind what is certain, in any order."""
        with TemporaryDirectory() as folder:
            path = Path(folder) / form
            lines = RESULTS[::-1] if ordered else RESULTS
            for count, synced, junk in crashes:
                with opened(path, ordered=ordered) as output:
                    begin = int(output.cursor or 0)
                    for line in lines[begin : begin + count]:
                        output.append(line)
                    if synced:
                        output.sync(str(min(begin + count, len(lines))))
                with files_of(path)[-1].open("ab") as torn:
                    torn.write(b"\x1f\x8b junk" * junk)
            finish(path, lines, ordered=ordered)
            assert RESULTS == lines_of(path)
            assert is_complete(path, "digest")
            assert len(files_of(path)) + 1 == len(os.listdir(folder)), "nothing is left over"

    @pytest.mark.parametrize("form", FORMS)
    def test_a_writer_that_dies_at_any_write_is_continued(self, tmp_path: Path, form: str) -> None:
        """Every call that changes the disk is the last one once, before it is done and after, order included."""
        path, lines = tmp_path / form, RESULTS[5::-1]

        def work() -> None:
            """Six lines and three syncs, from wherever the output stands."""
            with opened(path, ordered=ordered) as output:
                for place, line in enumerate(lines, 1):
                    if not output.complete and place > int(output.cursor or 0):
                        output.append(line)
                        if place % 2 == 0:
                            output.sync(str(place))
                if not output.complete:
                    output.finish("6")

        for ordered in (False, True):
            for step in itertools.count():
                died = die_at(step, work)
                work()
                assert (lines[::-1] if ordered else lines) == lines_of(path), f"died at step {step}"
                assert is_complete(path, "digest")
                assert len(files_of(path)) + 1 == len(os.listdir(tmp_path)), "nothing is left over"
                restore(tmp_path, {})
                if not died:
                    break
            assert step > 30

    @pytest.mark.parametrize("form", PARTED)
    def test_parts_that_were_begun_and_are_not_certain_do_not_stay(self, tmp_path: Path, form: str) -> None:
        """Also where the next run makes fewer of them."""
        path = tmp_path / form
        with opened(path, limit=PartLimit(None, 1)) as output:
            write(output, RESULTS[:2])
            for line in RESULTS[2:10]:
                output.append(line)
        assert len(files_of(path)) > 3
        with opened(path, limit=PartLimit(None, 100)) as output:
            write(output, RESULTS, int(output.cursor))
            output.finish("30")
        assert RESULTS == lines_of(path)
        assert 2 == len(files_of(path)), "the second one goes on"

    @pytest.mark.parametrize("form", PARTED[1:])
    def test_a_writer_that_is_killed_leaves_parts_that_are_continued(self, tmp_path: Path, form: str) -> None:
        """A real process and SIGKILL, in the middle of writing without end."""
        code = """if True:
            import itertools, sys
            from llmq.scheduler.output import PartLimit, open_output
            with open_output(sys.argv[1], "b1", parts=PartLimit(2000)) as output:
                for number in itertools.count(1):
                    output.append(b'{"id":"batch_req_b1_%d","pad":"' % number + b"x" * 10_000 + b'"}')
                    if number % 50 == 0:
                        output.sync(str(number))
                        print(number, flush=True)
        """
        path = tmp_path / form
        with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in range(3):
                process.stdout.readline()
            process.kill()
        with opened(path) as output:
            synced = int(output.cursor)
            held = [int(line.split(b"_")[3].split(b'"')[0]) for line in output.lines()]
        assert synced >= 150
        assert list(range(1, synced + 1)) == held


class Died(BaseException):
    """The process is gone: nothing handles this."""


def die_at(step: int, work: object) -> bool:
    """Do some work that dies at a step: an even one before a change of the disk, an odd one after it."""
    steps = itertools.count()

    def dying(change: object) -> object:
        def changed(*arguments: object, **options: object) -> object:
            if next(steps) == step:
                raise Died
            done = change(*arguments, **options)  # type: ignore[operator]
            if next(steps) == step:
                raise Died
            return done

        return changed

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: None)  # a step like others, but a quick one
        for owner, name in ((os, "pwrite"), (os, "fsync"), (os, "replace"), (os, "ftruncate"), (Path, "unlink")):
            patched.setattr(owner, name, dying(getattr(owner, name)))
        # What handles an error on its way out does not run in a process that is gone.
        patched.setattr(result_file.ResultFile, "_discard_asides", lambda self: None)
        try:
            work()  # type: ignore[operator]
        except Died:
            return True
    return False


class TestWhatIsThere:
    """Parts that exist are continued, recognised, or refused."""

    def refusal(self, path: Path) -> str:
        """Return what is said about an output that is refused; nothing is changed."""
        before = snapshot(path.parent)
        with pytest.raises(UsageError) as refused:
            opened(path).close()
        assert before == snapshot(path.parent)
        return str(refused.value).removeprefix(f"{path.parent}/")

    @pytest.fixture
    def path(self, tmp_path: Path) -> Iterator[Path]:
        """Give a finished output in parts."""
        path = tmp_path / "out-{part}.jsonl.gz"
        finish(path, RESULTS)
        return path  # type: ignore[return-value]

    def test_a_finished_output_is_recognised(self, path: Path) -> None:
        """By its batch and by what it was made of; nothing is written."""
        before = snapshot(path.parent)
        with opened(path) as output:
            assert output.complete
        assert is_complete(path, "digest")
        assert not is_complete(path, "another")
        assert before == snapshot(path.parent)

    def test_a_part_that_is_missing_changed_or_too_many_is_no_finished_output(self, path: Path) -> None:
        """Each is refused, and named."""
        files = files_of(path)
        before = snapshot(path.parent)
        files[1].unlink()
        assert not is_complete(path, "digest")
        assert self.refusal(path).startswith("out-00002.jsonl.gz: has 0 bytes, but ")
        restore(path.parent, before)
        with files[1].open("ab") as file:
            file.write(b"note")
        assert not is_complete(path, "digest")
        assert self.refusal(path).startswith("out-00002.jsonl.gz: was changed since")
        restore(path.parent, before)
        (path.parent / "out-00099.jsonl.gz").write_bytes(b"x")
        assert not is_complete(path, "digest")
        assert self.refusal(path).startswith("out-00099.jsonl.gz: was put there since")

    def test_parts_of_somebody_else_are_refused_and_overwritten_by_force(self, path: Path) -> None:
        """Stale parts of a longer run do not stay among the new ones."""
        sidecar_path(path).unlink()
        assert self.refusal(path).startswith("out-00001.jsonl.gz: exists; name another file")
        finish(path, RESULTS[:3], force=True)
        assert RESULTS[:3] == lines_of(path)

    def test_one_process_writes_parts_at_a_time(self, tmp_path: Path) -> None:
        """The lock is on the first part."""
        path = tmp_path / "out-{part}.jsonl"
        with opened(path) as output:
            write(output, RESULTS)
            assert "another process is writing it" in self.refusal(path)

    def test_the_input_is_no_part_of_the_output(self, tmp_path: Path) -> None:
        """Whatever number it would have."""
        prompts = tmp_path / "out-00003.jsonl"
        prompts.write_bytes(b'"a"\n')
        with open_input(prompts) as file, pytest.raises(UsageError, match="is the input file"):
            open_output(tmp_path / "out-{part}.jsonl", "b1", input_file=file, force=True)

    def test_a_packed_output_that_was_damaged_is_named(self, path: Path) -> None:
        """When its lines are counted."""
        file = files_of(path)[0]
        file.write_bytes(file.read_bytes()[:-3])
        with pytest.raises(UsageError, match=r"out-00001.jsonl.gz: its gzip data is cut short; was it changed since"):
            count_ok_failed(path)

    def test_a_block_is_packed_well_enough(self, tmp_path: Path) -> None:
        """Blocks cost a few percent beside one stream over all."""
        path, lines = tmp_path / "out.jsonl.gz", [result(number) for number in range(20_000)]
        with opened(path) as output:
            for line in lines:
                output.append(line)
            output.finish("end")
        assert path.stat().st_size < 1.05 * len(gzip.compress(b"\n".join(lines), 5))
        assert part_series._BLOCK >= 1 << 18
        assert Codec.GZIP is output.name.codec
