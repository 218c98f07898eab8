"""Governing: what a worker's governor lets run, given what its slots and its executor report."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from llmq.scheduler.job import TrafficClass
from llmq.scheduler.lease import Fence, Lease, Why
from llmq.scheduler.live import LiveSettings
from llmq.scheduler.tuned import Tuned
from llmq.workers.governing import STEP_S, Governing, Load
from llmq.workers.governor import IDLE_S, State
from llmq.workers.reading import UNREAD

MOST = 16
TUNED = Tuned(batch=5, prefill_tps=1000.0, alone_s=0.05, chat_rate=1.0, at=0.0, chat=2.0)


@dataclass
class Worker:
    """A worker's slots on a clock that the test moves, with a limit of 8 as tuned."""

    now: float = 100.0
    load: Load = field(default_factory=lambda: Load(batch=0, unread=0, most=MOST))
    moved: int = 0
    stated: dict[bytes, bytes] = field(default_factory=lambda: {b"ttft_p95": b"100"})
    tuned: Tuned | None = TUNED

    def __post_init__(self) -> None:
        self.governing = Governing(
            lambda: LiveSettings.from_hash(self.stated),
            lambda: self.load,
            self._move,
            lambda: self.now,
            tuned=lambda: self.tuned,
        )

    def _move(self) -> None:
        self.moved += 1

    def step(self, passed: float = STEP_S) -> None:
        self.now += passed
        self.governing.step()

    @property
    def cap(self) -> int | None:
        return self.governing.batch_cap(self.load)

    def run(self, batch: int, unread: int = 0) -> None:
        self.load = Load(batch, unread, MOST)


def lease(number: int, cls: TrafficClass = TrafficClass.INTERACTIVE, prompt: int = 100) -> Lease:
    return Lease(
        fence=Fence(cls.letter, f"{number}-0", 1), cls=cls, tenant="default", why=Why.CHAT, data=b"text" * prompt,
        cost=1, key="", reply_to="", queued_at=0.0,
    )  # fmt: skip


def beside_chat() -> Worker:
    """Return a worker whose only chat request makes tokens, with as much batch as it bears."""
    worker = Worker()
    worker.governing.taken(lease(1), 0.0)
    worker.step()
    worker.run(7)
    worker.governing.begun(lease(1))
    worker.step()
    return worker


def test_without_an_objective_only_the_reserve_holds() -> None:
    """And the worker says so."""
    worker = Worker(stated={})
    worker.step()
    assert (None, State.FIXED, "no objective") == (worker.cap, worker.governing.state, worker.governing.reason)


def test_each_chat_request_takes_its_place_from_batch_at_once() -> None:
    """No step, and nobody who was slow, is needed: the limit is on both together."""
    worker = beside_chat()
    assert 7 == worker.cap
    worker.governing.taken(lease(2), 0.0)
    assert 6 == worker.cap
    worker.governing.ended(lease(2))
    assert 7 == worker.cap


def test_what_chat_s_coming_leaves_no_room_for_is_left_to_end() -> None:
    """Aborted requests would have their prompts read again; much more than was ever borne is preempted all the same."""
    worker = beside_chat()
    for number in range(2, 6):
        worker.governing.taken(lease(number), 0.0)
    assert 0 == worker.governing.excess(worker.load)
    worker.run(16)
    assert 13 == worker.governing.excess(worker.load)


def test_chat_that_comes_after_a_pause_is_heeded_before_the_next_step() -> None:
    """Batch had all slots; with the first chat request what is too much is preempted."""
    worker = beside_chat()
    worker.governing.ended(lease(1))
    worker.run(16)
    worker.step(IDLE_S + 1)
    assert (State.IDLE, 16, 0) == (worker.governing.state, worker.cap, worker.governing.excess(worker.load))
    moved = worker.moved
    worker.governing.taken(lease(2), 0.0)
    assert (7, 9) == (worker.cap, worker.governing.excess(worker.load))
    assert worker.moved == moved + 1


def test_a_prompt_that_is_being_read_holds_back_the_next_one_with_chat_here_or_not() -> None:
    """What chat meets after a pause is one long prompt, not one in each slot; before any chat came nothing is held."""
    worker = Worker()
    worker.step()
    worker.run(3, unread=UNREAD)
    assert worker.cap == MOST
    worker = beside_chat()
    worker.governing.ended(lease(1))
    worker.run(3, unread=UNREAD)
    assert 3 == worker.cap
    worker.step(IDLE_S + 1)
    assert 3 == worker.cap
    worker.run(3)
    assert 4 == worker.cap


def test_beside_chat_prompts_are_read_no_faster_than_was_tuned() -> None:
    """1,000 prompt tokens a second: after one of 2,000 the next waits for two seconds."""
    worker = beside_chat()
    worker.run(3)
    worker.governing.taken(lease(9, TrafficClass.BATCH, prompt=2000), 0.0)
    assert 3 == worker.cap
    worker.now += 2.0
    assert 4 == worker.cap


def test_a_prompt_in_the_way_is_what_first_tokens_wait_for() -> None:
    """Its beginning that is read again counts too; without an objective for first tokens, nothing makes way."""
    worker = beside_chat()
    short, long = (lease(n, TrafficClass.BATCH, prompt) for n, prompt in ((8, UNREAD), (9, UNREAD + 1)))
    begun = replace(short, kept=b"Once upon a time")
    interrupts = worker.governing.interrupts
    assert [False, True, True] == [interrupts(line, 0) for line in (short, long, begun)]
    assert not interrupts(long, 1)
    worker.stated = {b"itl_p95": b"100"}
    worker.step()
    assert not interrupts(long, 0)
    assert not Worker(stated={}).governing.interrupts(long, 0)


def test_it_says_what_is_asked_what_is_seen_and_what_follows() -> None:
    """For `llmq workers`: an operator sees why batch has the cap that it has."""
    worker = beside_chat()
    worker.step(1.0)
    said = "first token p95 100 ms of 100 ms, 1 chat, at most 8.0 in flight, the limit feels its way"
    assert said == worker.governing.reason


def test_beside_chat_no_more_batch_runs_than_fills_the_engine() -> None:
    """However well the objective holds: four make no more tokens than two here. Without chat they harm nobody."""
    worker = beside_chat()
    worker.governing.ended(lease(1))
    lines = [lease(number, TrafficClass.BATCH) for number in range(10, 14)]
    token = worker.governing.begun(lines[0])
    for beginning in (lines[:2], lines[2:]):
        for line in beginning:
            worker.governing.taken(line, 0.0)
        worker.run(lines.index(beginning[-1]) + 1)
        for _ in range(40):
            worker.governing.taken(lease(2), 0.0)
            worker.governing.begun(lease(2))
            worker.governing.ended(lease(2))
            for _ in range(5):
                token()
                worker.step()
    assert 2 == worker.cap
    assert "full with 2 of batch" in worker.governing.reason
    worker.step(IDLE_S + 1)
    assert worker.cap == 4 + 1  # one prompt at a time is begun
    worker.step(1.0)
    assert "full" not in worker.governing.reason


def test_what_a_request_made_alone_is_not_taken_for_what_two_made() -> None:
    """Each end is noted when it comes, and not with the next step: two make 15 % more here, which is worth it."""
    worker = beside_chat()
    worker.governing.ended(lease(1))
    first, second = (lease(number, TrafficClass.BATCH) for number in (10, 11))
    worker.governing.taken(first, 0.0)
    token = worker.governing.begun(first)

    def make(tokens: int) -> None:
        worker.now += 0.1
        for _ in range(tokens):
            token()

    for _ in range(100):
        make(20)
        worker.step(0.0)
    for _ in range(20):
        worker.governing.taken(lease(2), 0.0)
        worker.governing.begun(lease(2))
        worker.governing.ended(lease(2))
        for _ in range(20):
            worker.governing.taken(second, 0.0)
            make(23)
            worker.governing.ended(second)
            make(20)
            worker.step(0.0)
    assert State.HOLDS is worker.governing.state
    assert "full" not in worker.governing.reason


def test_an_engine_that_dies_with_chat_in_it_does_not_make_the_governor_forget() -> None:
    """Batch would have all slots, just when chat comes back; answers without tokens cannot be measured, and say so."""
    worker = beside_chat()
    worker.governing.ended(lease(1))
    for number in range(2, 12):
        worker.governing.taken(lease(number), 0.0)
        worker.governing.ended(lease(number), answered=False)
    worker.step()
    assert 8 == worker.cap
    for number in range(12, 17):
        worker.governing.taken(lease(number), 0.0)
        worker.governing.ended(lease(number))
    worker.step()
    worker.step(1.0)
    assert "first tokens are not to be seen" == worker.governing.reason
    assert State.FIXED is worker.governing.state


def test_the_evidence_of_a_breach_goes_back_for_twice_the_objective() -> None:
    """With an objective of 6 s, nothing that came within the last five could be slow."""
    worker = beside_chat()
    worker.stated = {b"ttft_p95": b"6000"}
    worker.step()
    worker.run(16)
    for number in range(2, 5):
        worker.governing.taken(lease(number), 0.0)
    worker.step(5.9)
    states = [worker.governing.state]
    worker.step(0.2)
    assert [State.SEARCH, State.CUT] == [*states, worker.governing.state]


def test_chat_that_gives_up_moves_the_limit() -> None:
    """Where each client leaves before its first token, batch makes room all the same."""
    worker = beside_chat()
    for number in range(2, 12):
        worker.governing.taken(lease(number), 0.0)
        worker.now += 1.0
        worker.governing.ended(lease(number), answered=False, given_up=True)
        worker.step(9.0)
    assert worker.cap is not None
    assert worker.cap < 5


def test_a_far_looser_objective_begins_a_search_and_a_little_more_does_not() -> None:
    """At run time, as `llmq set` does it."""
    worker = beside_chat()
    worker.stated = {b"ttft_p95": b"110"}
    worker.step()
    states = [worker.governing.state]
    worker.stated = {b"ttft_p95": b"400"}
    worker.step()
    assert [State.HOLDS, State.SEARCH] == [*states, worker.governing.state]


def test_what_tune_finds_holds_for_workers_that_run() -> None:
    """They begin with it at once, and once; an engine that cannot tell its model for a moment changes nothing."""
    worker = beside_chat()
    worker.tuned = replace(TUNED, batch=2, at=1.0)
    worker.step()
    assert 4 == worker.cap
    worker.tuned = None
    worker.step()
    assert 4 == worker.cap
    worker.tuned = replace(TUNED, batch=2, at=1.0)
    worker.governing.taken(lease(2), 1.0)
    worker.governing.begun(lease(2))
    worker.step()
    assert worker.cap is not None
    assert worker.cap < 4
