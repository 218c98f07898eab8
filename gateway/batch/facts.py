"""The facts about a batch, as they stand in the storage: each is written once, and the batch is what they add up to.

    order      what was asked for                                 by the gateway that took the request
    cancel     that it is to be cancelled, and since when         by the gateway that took that request
    accepted   that its input is valid: lines, digest, model      by the gateway that holds the batch
    ended      the batch object for ever after                    the same

No fact is ever edited, so two gateways cannot undo each other's, and one that writes late writes what is true all the
same. How the lines stand is in Redis; what has come of them so far in parts (`parts.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from llmq.gateway.batch import places
from llmq.gateway.batch.paging import Listing, following
from llmq.gateway.batch.storage import Storage


@dataclass(frozen=True, slots=True)
class Order:
    """What was asked for. Times are whole Unix seconds; `keep_s` is how long its output files are kept."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: Mapping[str, str] | None = None
    keep_s: int | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """A valid input: `total` requests, all of `model` (None: of several), in a file with this digest and name."""

    at: int
    total: int
    digest: str
    filename: str
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """What is known of a batch that has not ended, without reading its order."""

    batch_id: str
    tenant: str
    input_file_id: str


@dataclass(frozen=True, slots=True)
class Facts:
    """All that is known of one batch; `ended` is the whole object, and then nothing else is read."""

    order: Order | None = None
    accepted: Accepted | None = None
    cancel_at: int | None = None
    ended: dict[str, Any] | None = None


class Ledger:
    """The facts about all batches."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    async def enter(self, order: Order) -> None:
        """Take a batch up. The mark comes first: a batch without one would be forgotten."""
        mark = {"tenant": order.tenant, "input_file_id": order.input_file_id}
        await self._storage.write(places.open_mark(order.id), orjson.dumps(mark))
        await self._write(order, "order", asdict(order))

    async def accept(self, order: Order, accepted: Accepted) -> None:
        """Write down that the input is valid."""
        await self._write(order, "accepted", asdict(accepted))

    async def cancel(self, order: Order, at: int) -> None:
        """Write down that the batch is to be cancelled."""
        await self._write(order, "cancel", {"at": at})

    async def uncancel(self, order: Order) -> None:
        """Take that back: the batch had ended before."""
        await self._storage.remove(places.fact(order.tenant, order.id, "cancel"))

    async def end(
        self, order: Order, ended: Mapping[str, Any], sequence: bytes = b"", *, goes_at: int | None = None
    ) -> None:
        """Write down how the batch has ended, and when all that is known of it goes (None: it stays)."""
        if goes_at is not None:  # first, so that no batch escapes the janitor
            await self._storage.write(places.expiring(goes_at, order.id), orjson.dumps({"tenant": order.tenant}))
        if sequence:
            await self._storage.write(places.sequence(order.tenant, order.id), sequence)
        await self._write(order, "ended", ended)

    async def close(self, batch_id: str) -> None:
        """Remove what only a batch that has not ended needs."""
        await self._storage.remove_folder(places.parts_of(batch_id))
        await self._storage.remove(places.open_mark(batch_id))

    async def delete_expired(self, now: float, in_use: set[str]) -> int:
        """Remove what is known of batches whose time is over, except those not cleared away yet; return how many."""
        removed = 0
        for name in await self._storage.names(places.EXPIRING):
            found = places.read_expiring(name)
            if found is None or found[1] in in_use or not places.is_batch_id(found[1]):
                continue
            expires_at, batch_id = found
            if expires_at > now:
                break
            mark = await self._storage.read_if_there(places.expiring(expires_at, batch_id))
            if mark is not None:
                await self._storage.remove_folder(places.facts_of(orjson.loads(mark)["tenant"], batch_id))
                await self._storage.remove(places.expiring(expires_at, batch_id))
                removed += 1
        return removed

    async def marks(self) -> list[Mark]:
        """Return the batches that have not ended, the oldest first."""
        names = [name for name in await self._storage.names(places.OPEN) if places.is_batch_id(name[: -len(".json")])]
        marks = await self._storage.read_many([f"{places.OPEN}/{name}" for name in names])
        found = zip(names, marks, strict=True)
        return [Mark(name[: -len(".json")], **orjson.loads(mark)) for name, mark in found if mark is not None]

    async def facts(self, tenant: str, batch_id: str) -> Facts:
        """Return all that is known of a batch; nothing, where this tenant has none of this id."""
        (facts,) = await self._read(tenant, [batch_id])
        return facts

    async def sequence(self, tenant: str, batch_id: str) -> bytes:
        """Return the sequence of an ended batch (`finishing.py`), packed; b"" where it has none."""
        return await self._storage.read_if_there(places.sequence(tenant, batch_id)) or b""

    async def page(self, tenant: str, listing: Listing) -> tuple[list[Facts], bool]:
        """Return a page of a tenant's batches, and whether more come after it."""
        ids = following(await self._storage.names(places.batches_of(tenant)), listing)
        found: list[Facts] = []
        while ids and len(found) <= listing.limit:  # one whose order is still being written is none yet
            chunk, ids = ids[: listing.limit + 1], ids[listing.limit + 1 :]
            found += [facts for facts in await self._read(tenant, chunk) if facts.order or facts.ended]
        return found[: listing.limit], len(found) > listing.limit

    async def _read(self, tenant: str, batch_ids: list[str]) -> list[Facts]:
        names = ("ended", "order", "accepted", "cancel")
        # Read in this order: what is not there in the first was not there when the others were read.
        ended = await self._load(tenant, [(batch_id, "ended") for batch_id in batch_ids])
        wanted = [(b, n) for b, known in zip(batch_ids, ended, strict=True) if known is None for n in names[1:]]
        loaded = dict(zip(wanted, await self._load(tenant, wanted), strict=True))
        facts = []
        for batch_id, known in zip(batch_ids, ended, strict=True):
            order, accepted, cancel = (loaded.get((batch_id, name)) for name in names[1:])
            facts.append(
                Facts(
                    None if order is None else Order(**order),
                    None if accepted is None else Accepted(**accepted),
                    None if cancel is None else cancel["at"],
                    known,
                )
            )
        return facts

    async def _load(self, tenant: str, wanted: list[tuple[str, str]]) -> list[dict[str, Any] | None]:
        stored = await self._storage.read_many([places.fact(tenant, batch_id, name) for batch_id, name in wanted])
        return [None if fact is None else orjson.loads(fact) for fact in stored]

    async def _write(self, order: Order, name: str, fact: Mapping[str, Any]) -> None:
        await self._storage.write(places.fact(order.tenant, order.id, name), orjson.dumps(fact))
