"""The batch record: ids that sort, a hash read strictly, and what a person is shown."""

from __future__ import annotations

import pytest

from llmq.scheduler.batch_record import BatchRecord, BatchStatus, Standing, new_batch_id
from llmq.scheduler.errors import LLMQError
from llmq.scheduler.retrying import retry_id

FIELDS = {
    b"id": b"batch_1",
    b"lane": b"batch:batch_1",
    b"tenant": b"eval",
    b"status": b"in_progress",
    b"name": b"prompts.jsonl",
    b"digest": b"d1",
    b"created_at": b"1700000000500",
    b"next": b"11",
    b"lines": b"10",
    b"completed": b"3",
    b"failed": b"1",
    b"sealed": b"0",
}


NEEDED = ("tenant", "status", "created_at", "next", "lines", "completed", "failed", "sealed")


def record(**fields: str) -> BatchRecord:
    """Read a record with these fields changed."""
    return BatchRecord.from_hash("batch_1", FIELDS | {name.encode(): value.encode() for name, value in fields.items()})


class TestIds:
    """`batch_` and 26 characters."""

    def test_ids_sort_by_the_time_they_were_made_at(self) -> None:
        """`ls` in any tool shows batches in their order."""
        moments = [1.7e9 + step * 1e-4 for step in range(100)] + [2.5e9, 4.0e9]
        ids = [new_batch_id(moment) for moment in moments]
        assert sorted(ids) == ids

    def test_ids_of_one_moment_differ(self) -> None:
        """Two hosts make batches at the same time."""
        assert 1000 == len({new_batch_id(1.7e9) for _ in range(1000)})

    def test_an_id_is_safe_in_keys_file_names_and_urls(self) -> None:
        """Letters and digits only, always of one length."""
        name = new_batch_id().removeprefix("batch_")
        assert (26, True, name.lower()) == (len(name), name.isalnum() and name.isascii(), name)

    def test_a_retry_is_named_after_the_first_batch(self) -> None:
        """The same retry has the same name, so that it cannot be made twice."""
        assert ["batch_9-r1", "batch_9-r2", "batch_9-r3"] == [
            retry_id(name) for name in ("batch_9", "batch_9-r1", "batch_9-r2")
        ]
        assert "nightly-run-r1" == retry_id("nightly-run")


class TestReading:
    """The hash is what the scripts write, or is refused."""

    def test_a_record_has_times_in_seconds_and_numbers_as_numbers(self) -> None:
        """Redis holds text in milliseconds; callers see neither."""
        found = BatchRecord.from_hash("batch_1", FIELDS, Standing(6, 2, "results not collected"))
        assert (1700000000.5, 11, 10, 4, None) == (
            found.created_at,
            found.next_line,
            found.lines,
            found.done,
            found.total,
        )
        assert (4, 2, "results not collected") == (found.waiting, found.running, found.reason)

    @pytest.mark.parametrize(
        "name", ["tenant", "status", "created_at", "next", "lines", "completed", "failed", "sealed"]
    )
    def test_a_record_without_a_field_that_every_batch_has_is_refused(self, name: str) -> None:
        """Half a record is worse than an error."""
        fields = {key: value for key, value in FIELDS.items() if key != name.encode()}
        with pytest.raises(LLMQError, match=f"batch_1: {name} is missing"):
            BatchRecord.from_hash("batch_1", fields)

    @pytest.mark.parametrize(
        ("name", "value"), [("lines", "ten"), ("completed", "-1"), ("ended_at", ""), ("next", "1e3")]
    )
    def test_a_number_that_is_none_is_refused(self, name: str, value: str) -> None:
        """The message names batch, field and value."""
        with pytest.raises(LLMQError, match=f"batch_1: {name} is b'{value}', not a number"):
            record(**{name: value})

    def test_a_status_of_a_newer_llmq_is_refused_by_name(self) -> None:
        """The message says what to do."""
        with pytest.raises(LLMQError, match=r"status is 'resting'.*use the newest llmq"):
            record(status="resting")

    def test_collectors_and_what_the_opener_added_are_told_apart(self) -> None:
        """A caller's field can never take the place of one of ours."""
        found = record(**{"collector:host:/out": "5-0", "x:status": "mine", "x:endpoint": "/v1/embeddings"})
        assert {"host:/out": "5-0"} == found.collectors
        assert {"status": "mine", "endpoint": "/v1/embeddings"} == found.extra
        assert BatchStatus.IN_PROGRESS is found.status


class TestShown:
    """`batch show --json`."""

    def test_a_running_batch_has_the_names_and_types_of_openai(self) -> None:
        """DESIGN section 7: id, status, request_counts, progress, created_at, completed_at."""
        shown = record().to_json()
        assert "batch_1" == shown["id"]
        assert "in_progress" == shown["status"]
        assert {"total": 10, "completed": 3, "failed": 1} == shown["request_counts"]
        assert 0.4 == shown["progress"]
        assert 1700000000 == shown["created_at"]
        assert shown["completed_at"] is None

    @pytest.mark.parametrize("status", ["completed", "cancelled", "expired"])
    def test_the_end_is_told_under_its_own_name_only(self, status: str) -> None:
        """A cancelled batch was not completed."""
        shown = record(status=status, ended_at="1700000009999", sealed="1", total="10").to_json()
        ends = {name: shown[name] for name in ("completed_at", "cancelled_at", "expired_at")}
        expected = dict.fromkeys(ends) | {f"{status}_at": 1700000009}
        assert expected == ends

    def test_a_batch_over_its_window_is_finalizing(self) -> None:
        """OpenAI has no `expiring`."""
        assert "finalizing" == record(status="expiring").to_json()["status"]

    def test_an_empty_batch_that_has_ended_is_all_done(self) -> None:
        """Nothing of nothing is everything."""
        empty = record(lines="0", completed="0", failed="0", total="0", sealed="1", status="completed", ended_at="1")
        assert 1.0 == empty.progress

    def test_a_window_is_over_at_its_end_and_only_for_a_batch_that_runs(self) -> None:
        """The clock is the caller's."""
        late = record(expires_at="1700000100000")
        assert (False, True) == (late.overdue(1700000099.9), late.overdue(1700000100.0))
        assert not record().overdue(9e9)
        assert not record(expires_at="1", status="expired", ended_at="2").overdue(9e9)
