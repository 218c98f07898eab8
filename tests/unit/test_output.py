"""Output files: whole lines at any time, continued after any crash, never over what is not theirs."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq.scheduler.errors import LLMQError, UsageError
from llmq.scheduler.lines import open_input
from llmq.scheduler.ordering import order_lines
from llmq.scheduler.output import (
    Counts,
    Output,
    ResultStream,
    count_ok_failed,
    is_complete,
    open_output,
    sidecar_path,
)
from llmq.scheduler.records import ResultRecord, render
from llmq.scheduler.sidecar import Sidecar, read_sidecar


def result(number: int, status_code: int | None = 200, text: str = "ok") -> bytes:
    """Return an output line."""
    body = json.dumps({"content": text}, ensure_ascii=False).encode()
    return render(ResultRecord(number, f"q-{number}", "completed", status_code, "r", body), "b1")


RESULTS = [result(1), result(2, text="two\u2028lines"), result(3, 400), result(4, None), result(5)]


def write(output: Output, lines: list[bytes], begin: int = 0) -> None:
    """Append lines as a collector does, whose cursor is how many of them it has synced."""
    for place, line in enumerate(lines[begin:], begin + 1):
        output.append(line)
        output.sync(str(place))


def finish(path: Path, lines: list[bytes], *, ordered: bool = False, force: bool = False) -> None:
    """Write a whole output from wherever it stands."""
    with open_output(path, "b1", source="digest", ordered=ordered, force=force) as output:
        write(output, lines, int(output.cursor or 0))
        output.finish(str(len(lines)))


def content(lines: list[bytes]) -> bytes:
    """Return lines as a file."""
    return b"".join(line + b"\n" for line in lines)


def refusal(path: Path, batch_id: str = "b1") -> str:
    """Return what is said about an output that is refused."""
    before = snapshot(path.parent)
    with pytest.raises(UsageError) as refused:
        open_output(path, batch_id).close()
    assert before == snapshot(path.parent), "a refusal changes nothing"
    return str(refused.value).removeprefix(f"{path}: ")


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return all files of a folder."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()} if folder.is_dir() else {}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Give the path of an output file that does not exist yet."""
    return tmp_path / "out.jsonl"


class TestResuming:
    """An output is continued from its last sync."""

    def test_lines_are_written_in_the_order_of_completion(self, out: Path) -> None:
        """Each with its newline, and nothing else."""
        finish(out, RESULTS)
        assert content(RESULTS) == out.read_bytes()

    def test_sync_returns_the_bytes_that_are_certain(self, out: Path) -> None:
        """They are in the file, and in the sidecar with the cursor."""
        with open_output(out, "b1", source="s") as output:
            output.append(RESULTS[0])
            assert len(RESULTS[0]) + 1 == output.sync("c1")
            assert "c1" == output.cursor
        assert content(RESULTS[:1]) == out.read_bytes()
        assert Sidecar("b1", "s", "c1", len(RESULTS[0]) + 1, complete=False, lines=1) == read_sidecar(out)

    def test_a_write_that_was_torn_at_any_byte_is_repaired(self, out: Path) -> None:
        """G16: cut anywhere behind the last sync, the finished file is the same, line for line."""
        lines = [b'{"n":1}', '"\u2028"'.encode(), b"{}", b'{"n":4}']
        expected = content(lines)
        for synced in range(len(lines)):
            with open_output(out, "b1", force=True) as output:
                write(output, lines[:synced])
            sidecar = sidecar_path(out).read_bytes()
            for cut in range(len(content(lines[:synced])), len(expected) + 1):
                out.write_bytes(expected[:cut])
                sidecar_path(out).write_bytes(sidecar)
                with open_output(out, "b1") as output:
                    assert str(synced or "") == output.cursor
                    for line in lines[synced:]:
                        output.append(line)
                    output.finish("end")
                assert expected == out.read_bytes()

    @settings(max_examples=30, deadline=None)
    @given(st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.integers(0, 200)), max_size=6))
    def test_any_sequence_of_crashes_gives_each_line_once(self, crashes: list[tuple[int, bool, int]]) -> None:
        """G16: lines without a sync, with one, and junk behind them, in any order."""
        lines = [result(number) for number in range(20)]
        with TemporaryDirectory() as folder:
            out = Path(folder) / "out.jsonl"
            for count, synced, junk in crashes:
                with open_output(out, "b1") as output:
                    begin = int(output.cursor or 0)
                    for line in lines[begin : begin + count]:
                        output.append(line)
                    if synced:
                        output.sync(str(min(begin + count, len(lines))))
                with out.open("ab") as torn:
                    torn.write(lines[0][:junk])
            finish(out, lines)
            assert content(lines) == out.read_bytes()

    def test_a_writer_that_is_killed_leaves_a_file_that_is_continued(self, out: Path) -> None:
        """G16: a real process and SIGKILL, in the middle of writing without end."""
        code = """if True:
            import itertools, sys
            from llmq.scheduler.output import open_output
            with open_output(sys.argv[1], "b1") as output:
                for number in itertools.count(1):
                    output.append(b'{"id":"batch_req_b1_%d","pad":"' % number + b"x" * 10_000 + b'"}')
                    if number % 50 == 0:
                        output.sync(str(number))
                        print(number, flush=True)
        """
        with subprocess.Popen([sys.executable, "-c", code, str(out)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in range(3):
                process.stdout.readline()
            process.kill()
        with open_output(out, "b1") as output:
            synced = int(output.cursor)
        lines = out.read_bytes().splitlines()
        assert synced >= 150
        assert list(range(1, synced + 1)) == [int(json.loads(line)["id"].rpartition("_")[2]) for line in lines]

    def test_lines_that_were_not_synced_are_given_up(self, out: Path) -> None:
        """The collector gets them again, as its cursor is before them."""
        with open_output(out, "b1") as output:
            write(output, RESULTS[:2])
            output.append(RESULTS[2])
        finish(out, RESULTS)
        assert content(RESULTS) == out.read_bytes()

    def test_many_lines_are_held_in_constant_memory(self, out: Path) -> None:
        """A collector that syncs rarely does not fill the memory."""
        line = b"x" * 1000
        with open_output(out, "b1") as output:
            tracemalloc.start()
            try:
                for _ in range(20_000):
                    output.append(line)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert 20_000 * 1001 == output.sync("end")
        assert peak < 2 << 20


class TestWhatIsThere:
    """An output that exists is continued, recognised, or refused."""

    def test_a_finished_output_is_recognised_by_its_batch(self, out: Path) -> None:
        """There is nothing left to run, and nothing is written."""
        finish(out, RESULTS)
        before = snapshot(out.parent)
        with open_output(out, "b1") as output:
            assert output.complete
        assert before == snapshot(out.parent)

    def test_a_finished_output_is_recognised_by_what_it_was_made_of(self, out: Path) -> None:
        """`llmq run FILE -o OUT` again: before there is a batch."""
        assert not is_complete(out, "digest")
        with open_output(out, "b1", source="digest") as output:
            write(output, RESULTS)
            assert not is_complete(out, "digest")
            output.finish("5")
        assert is_complete(out, "digest")
        assert not is_complete(out, "another file")
        out.write_bytes(b"changed\n")
        assert not is_complete(out, "digest")

    def test_deleting_a_finished_output_is_how_to_run_again(self, out: Path) -> None:
        """Its sidecar alone counts for nothing."""
        finish(out, RESULTS)
        out.unlink()
        assert not is_complete(out, "digest")
        finish(out, RESULTS[:2])
        assert content(RESULTS[:2]) == out.read_bytes()

    def test_an_empty_file_is_taken(self, out: Path) -> None:
        """There is nothing in it to lose."""
        out.touch()
        finish(out, RESULTS)
        assert content(RESULTS) == out.read_bytes()

    def test_a_file_of_somebody_else_is_refused(self, out: Path) -> None:
        """And left as it was."""
        out.write_bytes(b"my thesis\n")
        assert "exists; name another file, or overwrite it: --force" == refusal(out)

    def test_the_results_of_another_batch_are_refused(self, out: Path) -> None:
        """The message names that batch."""
        finish(out, RESULTS)
        assert refusal(out, "b2").startswith("exists and holds results of batch b1;")

    def test_a_file_that_was_cut_or_deleted_in_mid_run_is_refused(self, out: Path) -> None:
        """What was collected may be gone from Redis: it is not quietly left out."""
        with open_output(out, "b1") as output:
            write(output, RESULTS[:3])
        out.write_bytes(out.read_bytes()[:10])
        assert refusal(out).startswith(f"has 10 bytes, but {len(content(RESULTS[:3]))} were written;")
        out.unlink()
        assert refusal(out).startswith("has 0 bytes")

    def test_a_finished_output_that_was_changed_is_refused(self, out: Path) -> None:
        """Somebody's edits are not thrown away."""
        finish(out, RESULTS)
        with out.open("ab") as file:
            file.write(b"a note\n")
        assert refusal(out).startswith("was changed since it was complete;")

    @pytest.mark.parametrize(
        "broken", [b"", b"{", b"[]", b'{"format":2}', b'{"format":1,"batch_id":"b1","length":true}']
    )
    def test_a_broken_sidecar_is_refused(self, out: Path, broken: bytes) -> None:
        """Also one of a newer format."""
        out.write_bytes(b"something\n")
        sidecar_path(out).write_bytes(broken)
        assert "is not a sidecar file of this llmq" in refusal(out)

    def test_force_overwrites_whatever_is_there(self, out: Path) -> None:
        """Another file, another batch, a broken sidecar."""
        out.write_bytes(b"my thesis\n" * 100)
        sidecar_path(out).write_bytes(b"{")
        finish(out, RESULTS, force=True)
        assert content(RESULTS) == out.read_bytes()

    def test_a_forced_start_that_died_at_once_is_continued_as_a_start(self, out: Path) -> None:
        """The sidecar is written first: old content under it is cut away, not continued."""
        with open_output(out, "b1", force=True):
            out.write_bytes(b"old content of somebody\n")
        finish(out, RESULTS)
        assert content(RESULTS) == out.read_bytes()

    def test_a_file_that_another_process_writes_is_refused(self, out: Path) -> None:
        """Even by force; and taken when that process has gone."""
        code = "import sys; from llmq.scheduler.output import open_output; open_output(sys.argv[1], 'b1', force=True)"
        with open_output(out, "b1") as output:
            output.append(RESULTS[0])
            output.sync("1")
            assert refusal(out).startswith("another process is writing it;")
            second = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True, check=False)
            assert f"UsageError: {out}: another process is writing it;" in second.stderr
        finish(out, RESULTS)
        assert content(RESULTS) == out.read_bytes()

    def test_the_input_is_refused_as_output_under_any_name(self, tmp_path: Path) -> None:
        """Prompts are not overwritten, force or not."""
        prompts, link = tmp_path / "prompts.jsonl", tmp_path / "link.jsonl"
        prompts.write_bytes(b'"a"\n')
        link.symlink_to(prompts)
        with open_input(prompts) as file:
            for name in (prompts, link):
                with pytest.raises(UsageError, match="is the input file"):
                    open_output(name, "b1", input_file=file, force=True)
        assert b'"a"\n' == prompts.read_bytes()

    def test_a_folder_and_a_file_in_no_folder_are_refused(self, tmp_path: Path) -> None:
        """With what to do."""
        assert "is a folder; name a file in it" == refusal(tmp_path)
        with pytest.raises(UsageError, match="is a folder; name a file in it"):
            open_output(f"{tmp_path}/new/", "b1")
        missing = tmp_path / "no" / "out.jsonl"
        assert f"its folder does not exist; make it first: mkdir -p {tmp_path}/no" == refusal(missing)
        (tmp_path / "file").write_bytes(b"")
        assert refusal(tmp_path / "file" / "out.jsonl").startswith("its folder does not exist")
        assert "cannot be written (File name too long); name another place: -o OUT" == refusal(tmp_path / ("x" * 300))

    def test_a_folder_without_permission_is_refused(self, tmp_path: Path) -> None:
        """Said in one line."""
        tmp_path.chmod(0o500)
        user = os.geteuid()
        try:
            if user == 0:  # root may write everywhere
                os.seteuid(65534)
            with pytest.raises(UsageError, match="may not be written by this user"):
                open_output(tmp_path / "out.jsonl", "b1")
        finally:
            os.seteuid(user)
            tmp_path.chmod(0o700)

    def test_a_link_is_followed(self, tmp_path: Path) -> None:
        """The file that it leads to gets the results, in order too, and the sidecar; the link stays."""
        (tmp_path / "data").mkdir()
        target, link = tmp_path / "data" / "real.jsonl", tmp_path / "out.jsonl"
        link.symlink_to(target)
        finish(link, RESULTS[::-1], ordered=True)
        assert link.is_symlink()
        assert content(RESULTS) == target.read_bytes()
        assert is_complete(link, "digest")


class TestFullDisk:
    """A full disk costs no line."""

    def test_a_disk_that_fills_up_leaves_whole_lines_and_a_file_to_continue(self, out: Path) -> None:
        """G16: a real limit of the kernel, which writes a part of the block and then refuses."""
        code = """if True:
            import resource, sys
            from llmq.scheduler.errors import LLMQError
            from llmq.scheduler.output import open_output
            with open_output(sys.argv[1], "b1") as output:
                output.append(b"a" * 99)
                output.sync("1")
                resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
                for _ in range(100):
                    output.append(b"b" * 99)
                for _ in range(2):
                    try:
                        output.sync("2")
                    except LLMQError as error:
                        print(error)
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                if sys.argv[2] == "again":
                    output.sync("2")
        """
        for again, lines in (("", 1), ("again", 101)):
            run = subprocess.run(
                [sys.executable, "-c", code, str(out), again], capture_output=True, text=True, check=True
            )
            message = f"{out}: cannot be written (File too large); it holds 100 bytes of whole lines. "
            assert [True, True] == [line.startswith(message) for line in run.stdout.splitlines()]
            assert lines == len(out.read_bytes().splitlines())
            assert out.read_bytes().endswith(b"\n")
            with open_output(out, "b1") as output:
                assert str(1 if not again else 2) == output.cursor
            out.unlink()
            sidecar_path(out).unlink()

    def test_a_line_whose_append_failed_was_not_taken(self, out: Path) -> None:
        """So a caller that appends it again does not write it twice."""
        code = """if True:
            import resource, sys
            from llmq.scheduler.errors import LLMQError
            from llmq.scheduler.output import open_output
            with open_output(sys.argv[1], "b1") as output:
                output.append(b"a" * 300_000)
                resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
                try:
                    output.append(b"b")
                except LLMQError:
                    print("refused")
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                output.append(b"b")
                output.sync("1")
        """
        run = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, check=True)
        assert b"refused\n" == run.stdout
        assert b"a" * 300_000 + b"\nb\n" == out.read_bytes()

    def test_a_full_disk_behind_stdout_is_one_clear_error(self) -> None:
        """The kernel's own full device."""
        with open_output(Path("/dev/full"), "b1") as output:
            assert isinstance(output, ResultStream)
            with pytest.raises(LLMQError, match=r"/dev/full: cannot be written \(No space left on device\)"):
                output.append(b"{}")


class TestStreams:
    """Stdout and pipes."""

    @pytest.mark.parametrize("path", [None, "-"])
    def test_stdout_gets_the_lines(self, path: str | None) -> None:
        """Nothing is known of earlier ones."""
        stdout = io.BytesIO()
        with open_output(path, "b1", stdout=stdout) as output:
            assert ("", False) == (output.cursor, output.complete)
            output.append(b"{}")
            assert 3 == output.sync("c")
            output.finish("d")
            assert ("d", True) == (output.cursor, output.complete)
        assert b"{}\n" == stdout.getvalue()

    def test_a_device_gets_no_sidecar(self) -> None:
        """`-o /dev/null` for who wants the counts alone."""
        with open_output("/dev/null", "b1") as output:
            output.append(b"{}")
            output.finish("c")
        assert not Path("/dev/null.llmq").exists()

    def test_a_reader_that_has_gone_is_told_as_such(self) -> None:
        """`llmq ... | head` is no error of ours; the command line ends quietly."""
        reader, writer = os.pipe()
        os.close(reader)
        with open(writer, "wb", buffering=0) as stdout, pytest.raises(BrokenPipeError):
            open_output("-", "b1", stdout=stdout).append(b"{}")

    def test_a_stream_cannot_be_ordered(self) -> None:
        """Said before anything runs."""
        with pytest.raises(UsageError, match="--ordered needs a file"):
            open_output("-", "b1", ordered=True, stdout=io.BytesIO())


class TestOrder:
    """`--ordered`: the order of the input."""

    @settings(max_examples=30, deadline=None)
    @given(st.permutations(range(1, 30)), st.integers(1, 5000))
    def test_any_order_becomes_the_order_of_the_input(self, numbers: list[int], run_bytes: int) -> None:
        """However little of it memory may hold."""
        with TemporaryDirectory() as folder:
            lines = [result(number, text="x" * number) + b"\n" for number in numbers]
            ordered = list(order_lines(lines, Path("out"), Path(folder), run_bytes=run_bytes))
            assert [result(number, text="x" * number) + b"\n" for number in range(1, 30)] == ordered
            assert [] == os.listdir(folder)

    def test_lines_of_errors_and_of_odd_batches_are_ordered_too(self, tmp_path: Path) -> None:
        """The number is the last part of the id; what an answer says does not matter."""
        forged = result(3, text='{"id":"batch_req_b1_1"') + b"\n"
        lines = [render(ResultRecord(number, "k", "expired"), "b_1-2") + b"\n" for number in (1, 2)]
        assert [*lines, forged] == list(order_lines([forged, lines[1], lines[0]], Path("out"), tmp_path))

    def test_a_finished_output_is_ordered_and_recognised(self, out: Path) -> None:
        """And a crash between the two is repaired by the same command."""
        finish(out, RESULTS[::-1], ordered=True)
        assert content(RESULTS) == out.read_bytes()
        assert is_complete(out, "digest")
        sidecar_path(out).write_bytes(sidecar_path(out).read_bytes().replace(b"true", b"false"))
        finish(out, RESULTS[::-1], ordered=True)
        assert content(RESULTS) == out.read_bytes()
        assert is_complete(out, "digest")

    @pytest.mark.parametrize("line", [b"not ours\n", result(1)])
    def test_a_file_that_llmq_did_not_write_is_left_alone(self, tmp_path: Path, line: bytes) -> None:
        """A foreign line, or a torn one."""
        with pytest.raises(UsageError, match="out: line 2 was not written by llmq"):
            list(order_lines([result(2) + b"\n", line], Path("out"), tmp_path))

    def test_the_permissions_of_the_file_are_kept(self, out: Path) -> None:
        """The new file takes the old one's place."""
        with open_output(out, "b1", ordered=True) as output:
            write(output, RESULTS)
            out.chmod(0o640)
            output.finish("5")
        assert 0o640 == out.stat().st_mode & 0o777


class TestCounts:
    """How many lines went well."""

    def test_only_answers_with_success_are_ok(self, out: Path) -> None:
        """A 400 and a line without an answer are failed ones."""
        finish(out, RESULTS)
        assert Counts(ok=3, failed=2) == count_ok_failed(out)

    @pytest.mark.parametrize("line", [b"{", b"[]", b"{}", b'{"response":{}}', b'{"response":1}'])
    def test_a_line_that_is_no_result_is_named(self, out: Path, line: bytes) -> None:
        """By its number."""
        out.write_bytes(content([RESULTS[0], line]))
        with pytest.raises(UsageError, match="line 2 is not a result line"):
            count_ok_failed(out)
