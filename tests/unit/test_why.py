"""Why a job or a batch does not run: each cause by itself, and in the words that a person reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmq.scheduler.batch_record import RESULTS_NOT_COLLECTED, BatchRecord, BatchStatus
from llmq.scheduler.bucket import Bucket
from llmq.scheduler.fleet import WorkerStatus, worker_of
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.job_record import JobRecord
from llmq.scheduler.limit import Limit
from llmq.scheduler.state import JobState
from llmq.scheduler.units import Rate
from llmq.scheduler.why import BatchView, JobView, LaneView, QueueView, explain

NOW = 2_000_000_000.0
CHAT, BATCH = TrafficClass.INTERACTIVE, TrafficClass.BATCH


def worker(**fields: object) -> WorkerStatus:
    """Return a worker with four slots, one of them kept for chat, and nothing to do."""
    about = {"id": "w1", "state": "ready", "slots": 4, "busy_i": 0, "busy_b": 0, "batch_cap": 3, "reserve": 1} | fields
    silent_ms = 60_000 if about["state"] == "silent" else 0
    return worker_of({name: str(value) for name, value in about.items()}, NOW * 1000 - silent_ms, int(NOW * 1000), 10.0)


OPEN = Bucket(None, None, 0, None, None)
QUEUE = QueueView("q", NOW, frozenset(), OPEN, 12.0, False, True, False, None, (worker(),))
LANE = LaneView("anna", 1, 1, 0)
JOB = JobRecord("j1", CHAT, "anna", "i:anna", "1-0", "", JobState.WAITING, NOW - 5)
RECORD = BatchRecord(
    id="batch_1", tenant="anna", status=BatchStatus.IN_PROGRESS, name="p", digest="d", created_at=NOW - 9, next_line=11,
    lines=10, completed=0, failed=0, sealed=True, total=10, waiting=10,
)  # fmt: skip


def of_job(queue: dict[str, Any] | None = None, before: int = 0, more: bool = False, **record: Any) -> dict[str, str]:
    """Explain a waiting chat job, changed as given; return the sentences by their words."""
    view = JobView(replace(QUEUE, **(queue or {})), LANE, replace(JOB, **record), before, more)
    return {reason.code: reason.text for reason in explain(view).reasons}


def of_batch(queue: dict[str, Any] | None = None, lane: dict[str, Any] | None = None, **record: Any) -> dict[str, str]:
    """Explain a batch that waits, changed as given; return the sentences by their words."""
    view = BatchView(replace(QUEUE, **(queue or {})), replace(LANE, **(lane or {})), replace(RECORD, **record))
    return {reason.code: reason.text for reason in explain(view).reasons}


class TestJob:
    """A single job."""

    def test_nothing_holds_it_back(self) -> None:
        """Then it is a matter of the next claim, and nothing is marked as blocking."""
        assert ["next"] == list(of_job())
        assert explain(JobView(QUEUE, LANE, JOB)).to_json()["blocked"] is False

    def test_it_runs_or_has_ended(self) -> None:
        """Where, or how; nothing else matters then."""
        assert {"running": "the job runs on worker w7"} == of_job(state=JobState.RUNNING, consumer="w7")
        ended = of_job(state=JobState.EXPIRED, code="request_timeout", message="too late")
        assert {"ended": "the job has ended as expired: request_timeout: too late"} == ended

    def test_it_is_tried_again_later(self) -> None:
        """When, and what came before."""
        found = of_job(state=JobState.DELAYED, due_at=NOW + 3.25, attempts=2, crashes=1)
        assert {
            "attempts": "it was tried before: 2 attempts went wrong, 1 crash",
            "retry": "its next attempt is due in 3.25 s",
        } == found

    def test_its_time_is_limited(self) -> None:
        """An expiry that is near is said; one that is past too."""
        assert "it expires if it has not started in 42 s" == of_job(expires_at=NOW + 42)["expiry"]
        assert "over" in of_job(expires_at=NOW - 1)["expiry"]

    def test_others_come_first(self) -> None:
        """Its place in its lane, as far as it was counted."""
        assert "1 job of tenant anna come first" == of_job(before=1)["place"]
        assert "at least 500 jobs of tenant anna come first" == of_job(before=500, more=True)["place"]

    def test_chat_is_paused(self) -> None:
        """The line says how to go on."""
        assert "llmq resume interactive" in of_job({"paused": frozenset({CHAT})})["class_paused"]
        assert ["next"] == list(of_job({"paused": frozenset({BATCH})}))

    def test_all_slots_run_chat(self) -> None:
        """Those that run batch are not in the way, unless nothing is preempted."""
        busy = {"workers": (worker(busy_i=1, busy_b=3),)}
        assert ["next"] == list(of_job(busy))
        assert "of 4 slots 1 run chat and 3 batch" in of_job(busy | {"preempt": False})["busy"]
        assert "busy" in of_job({"workers": (worker(busy_i=4),)})

    @pytest.mark.parametrize(
        ("states", "code", "text"),
        [
            ((), "no_worker", "(there is none): llmq worker --gpu 0 --queue q"),
            (("silent",), "no_worker", "there is none"),
            (("draining", "silent"), "no_worker", "those there are drain"),
            (("engine_down", "starting", "draining"), "no_engine", "engine_down, starting"),
        ],
    )
    def test_nobody_serves(self, states: tuple[str, ...], code: str, text: str) -> None:
        """No worker, or none with an engine that answers."""
        found = of_job({"workers": tuple(worker(state=state) for state in states)})
        assert [code] == list(found)
        assert text in found[code]

    def test_a_single_job_of_batch_waits_as_batch_does(self) -> None:
        """For chat, and for the bucket."""
        assert "chat" in of_job({"chat_waits": True}, cls=BATCH)
        assert "chat" not in of_job({"chat_waits": True})


class TestBatch:
    """A batch."""

    def test_nothing_holds_it_back(self) -> None:
        """The deadline is of no interest then."""
        assert ["next"] == list(of_batch())

    def test_it_has_ended_or_is_being_ended(self) -> None:
        """Nothing else matters then."""
        done = of_batch(status=BatchStatus.COMPLETED, completed=9, failed=1)
        assert {"ended": "the batch is completed: 10 lines, 1 failed"} == done
        assert "was cancelled" in of_batch(status=BatchStatus.CANCELLING, cancelling_at=NOW)["ending"]
        assert "over its window" in of_batch(expires_at=NOW - 1)["ending"]

    def test_it_is_paused(self) -> None:
        """By itself, or with all batch; the deadline does not start what is paused."""
        assert "llmq batch resume batch_1" in of_batch(paused=True)["batch_paused"]
        assert ["class_paused"] == list(of_batch({"paused": frozenset({BATCH})}))

    def test_the_window_is_closed(self) -> None:
        """Until when; the deadline waits for it too."""
        closed = replace(OPEN, open=False, changes_at_ms=round((NOW + 7200) * 1000))
        found = of_batch({"bucket": closed})
        assert ["window_closed"] == list(found)
        assert "for 2 h" in found["window_closed"]

    def test_the_bucket_is_empty(self) -> None:
        """When it holds one again, and that the deadline comes first where it does (G8, G10)."""
        dry = replace(OPEN, limit=Limit.of(Rate(0.1)), tokens=-0.5)
        found = of_batch({"bucket": dry})
        assert "in 15 s" in found["bucket"]
        assert "in 12 s at the latest" in found["deadline"]
        assert ["next"] == list(of_batch({"bucket": replace(dry, tokens=1.0)}))
        assert "starts a batch line now" in of_batch({"bucket": dry, "deadline_in_s": -1.0})["deadline"]

    def test_chat_goes_first(self) -> None:
        """While chat that can be claimed waits, unless it is paused (G9)."""
        assert {"chat", "deadline"} == of_batch({"chat_waits": True}).keys()
        assert ["next"] == list(of_batch({"chat_waits": True, "paused": frozenset({CHAT})}))

    def test_no_slot_is_free(self) -> None:
        """Busy, kept for chat, or over the worker's cap."""
        found = of_batch({"workers": (worker(busy_i=1, busy_b=2),)})
        assert "of 4 slots 1 run chat and 2 batch, and 1 are kept free for chat" in found["busy"]
        assert "busy" in of_batch({"workers": (worker(busy_b=1, batch_cap=1),)})
        assert ["next"] == list(of_batch({"workers": (worker(busy_i=4), worker())}))

    def test_its_results_are_not_collected(self) -> None:
        """The line says how to take them away."""
        assert "llmq batch results batch_1 -o FILE" in of_batch(reason=RESULTS_NOT_COLLECTED)["not_collected"]

    def test_all_its_lines_are_to_be_tried_again(self) -> None:
        """When the first of them is due."""
        assert "in 2 min" in of_batch(lane={"wakes_in_s": 120.0})["retry"]

    def test_others_take_their_turns(self) -> None:
        """The place of its tenant, and of the batch within it."""
        found = of_batch(lane={"place": 2, "tenants": 3, "lanes_before": 1})
        assert "tenant anna is number 2 of 3" in found["turns"]
        assert "1 batch of tenant anna are due before it" == found["earlier"]

    def test_its_file_is_not_queued_to_the_end(self) -> None:
        """Somebody has to go on, or to wait for room."""
        cut = of_batch(sealed=False, total=None, waiting=0)
        assert ["unsealed"] == list(cut)
        assert "--resume batch_1" in cut["unsealed"]
        assert ["cap", "next"] == list(of_batch({"cap_reached": True}, sealed=False, total=None))

    def test_all_that_is_left_runs(self) -> None:
        """Then nothing waits for anything."""
        assert {"running": "3 lines of it run now"} == of_batch(running=3, waiting=0)


def test_batch_that_yields_to_chat_everywhere_says_so() -> None:
    """The fleet's decision is not to be guessed from free slots that stay free."""
    assert "objective" in of_batch({"yields_for_s": 3.0})
    assert "objective" not in of_job({"yields_for_s": 3.0})
