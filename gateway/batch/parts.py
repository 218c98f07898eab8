"""The parts: results of a running batch that are in the storage already, as a chain that any gateway can go on with.

Object stores cannot append, so results are written some megabytes or some seconds at a time. A part is its lines and a
head, which is written after them, names the part before and holds all that a successor must know: which lines it has,
how far in the result stream of Redis that is, the sums so far. A part's name holds the token of the hold under which it
was written, so no two gateways ever write the same one. One that slept and writes late begins a side branch of the
chain, with every line in it once, too; the end of the chain is the part up to which most lines are certain.

A *life* is the batch in one Redis: where that comes back empty, the lines that no part holds are queued again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace

import orjson

from llmq.gateway.batch import places
from llmq.gateway.batch.storage import Storage
from llmq.scheduler.line_set import LineSet
from llmq.scheduler.records import ResultRecord
from llmq.scheduler.result_reader import BEGINNING


@dataclass(frozen=True, slots=True)
class Sums:
    """What results add up to: lines, and LLM tokens as OpenAI counts them."""

    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(a + b for a, b in zip(_values(self), _values(other), strict=True)))

    def usage(self) -> dict[str, object]:
        """Return the usage of a batch."""
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


def sums_of(result: ResultRecord) -> Sums:
    """Return what one result adds."""
    cached, reasoning = _details(result.body)
    usage = result.usage
    return Sums(int(result.ok), int(not result.ok), usage.prompt_tokens, usage.completion_tokens, cached, reasoning)


@dataclass(frozen=True, slots=True)
class Head:
    """What is known of a part.

    `cursor` is the place in the result stream of the life `life` behind the part's last result. `lines` are the
    numbers of its lines in their order, `failed` the positions among them of those for the error file. `taken` and
    `sums` are of the whole chain up to here.
    """

    previous: str = ""
    life: int = 0
    cursor: str = BEGINNING
    lines: Sequence[int] = ()
    failed: Sequence[int] = ()
    taken: int = 0
    sums: Sums = field(default_factory=Sums)


@dataclass(frozen=True, slots=True)
class Line:
    """A result on its way into a part: rendered, and what the head says of it."""

    number: int
    ok: bool
    text: bytes
    sums: Sums


class Chain:
    """The parts of one batch in their order; `token` names who writes the next ones."""

    def __init__(self, storage: Storage, batch_id: str, token: str, parts: Iterable[tuple[str, Head]]) -> None:
        self._storage = storage
        self._batch_id = batch_id
        self._token = token
        self.parts = list(parts)
        self.taken = LineSet()
        for _, head in self.parts:
            for number in head.lines:
                self.taken.add(number)

    @property
    def head(self) -> Head:
        """What is known at the end of the chain."""
        return self.parts[-1][1] if self.parts else Head()

    def cursor(self, life: int) -> str:
        """Return how far the results of a life are in the chain."""
        return self.head.cursor if self.head.life == life else BEGINNING

    async def begin_life(self) -> int:
        """Begin a new life, with all lines that the chain holds; return its number."""
        await self._write(replace(self.head, life=self.head.life + 1, cursor=BEGINNING, lines=(), failed=()), b"")
        return self.head.life

    async def append(self, life: int, lines: Sequence[Line], cursor: str) -> None:
        """Make results certain. Each must be of a line that the chain does not hold yet."""
        head = Head(
            life=life,
            cursor=cursor,
            lines=[line.number for line in lines],
            failed=[place for place, line in enumerate(lines) if not line.ok],
            taken=self.head.taken + len(lines),
            sums=sum((line.sums for line in lines), self.head.sums),
        )
        await self._write(head, b"".join(line.text + b"\n" for line in lines))
        for line in lines:
            self.taken.add(line.number)

    def place_of(self, name: str) -> str:
        """Return the place of a part's lines."""
        return places.part(self._batch_id, f"{name}.jsonl")

    async def _write(self, head: Head, lines: bytes) -> None:
        head = replace(head, previous=self.parts[-1][0] if self.parts else "")
        name = f"{len(self.parts) + 1:06d}-{self._token}"
        if lines:
            await self._storage.write(self.place_of(name), lines)
        await self._storage.write(places.part(self._batch_id, f"{name}.json"), orjson.dumps(asdict(head)))
        self.parts.append((name, head))


async def load_chain(storage: Storage, batch_id: str, token: str = "") -> Chain:
    """Return the chain of a batch as it stands in the storage."""
    names = [name for name in await storage.names(places.parts_of(batch_id)) if name.endswith(".json")]
    stored = await storage.read_many([places.part(batch_id, name) for name in names])
    heads = {
        name.removesuffix(".json"): _read(head) for name, head in zip(names, stored, strict=True) if head is not None
    }
    return Chain(storage, batch_id, token, _longest(heads))


def _longest(heads: dict[str, Head]) -> list[tuple[str, Head]]:
    """Return the chain that ends where most lines, of the latest life, are certain."""
    if not heads:
        return []
    name = max(heads, key=lambda name: (heads[name].taken, heads[name].life, name))
    chain = []
    while name:
        chain.append((name, heads[name]))
        name = heads[name].previous
    return chain[::-1]


def _read(stored: bytes) -> Head:
    fields = orjson.loads(stored)
    return Head(**(fields | {"sums": Sums(**fields["sums"])}))


def _values(sums: Sums) -> tuple[int, ...]:
    return (
        sums.completed, sums.failed, sums.input_tokens, sums.output_tokens, sums.cached_tokens, sums.reasoning_tokens,
    )  # fmt: skip


def _details(body: bytes) -> tuple[int, int]:
    """Return cached and reasoning tokens of an answer. Most answers tell neither, and are not parsed for it."""
    if b"_tokens_details" not in body:
        return 0, 0
    try:
        usage = orjson.loads(body)["usage"]
        given = [
            (usage.get(f"{one}_tokens_details") or usage.get(f"{other}_tokens_details") or {}).get(name) or 0
            for one, other, name in (
                ("prompt", "input", "cached_tokens"),
                ("completion", "output", "reasoning_tokens"),
            )
        ]
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return 0, 0
    cached, reasoning = (value if isinstance(value, int) and 0 <= value < 10**9 else 0 for value in given)
    return cached, reasoning
