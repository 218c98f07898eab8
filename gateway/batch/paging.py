"""The page: which part of a list a request gets, by OpenAI's rules.

Ids sort by the time at which they were made, so a cursor is good for ever: also when what it names was deleted, the
page after it begins where that stood. Pure functions.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmq.gateway.errors import ApiError


@dataclass(frozen=True, slots=True)
class Listing:
    """What is asked for: at most `limit` things, those that come after the id `after` (None: from the beginning)."""

    limit: int
    after: str | None = None
    newest_first: bool = True


def read_listing(query: Mapping[str, str], *, default: int, most: int, is_id: Callable[[str], bool]) -> Listing:
    """Read limit, after and order of a query. Raises ApiError (400)."""
    text = query.get("limit", str(default))
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if not 1 <= limit <= most:
        raise ApiError(400, f"limit: expected a whole number from 1 to {most:,}, got {text[:40]!r}", param="limit")
    after = query.get("after") or None
    if after is not None and not is_id(after):
        raise ApiError(400, f"after: expected the id of something in this list, got {after[:80]!r}", param="after")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order: expected asc or desc, got {order[:40]!r}", param="order")
    return Listing(limit, after, order == "desc")


def following(ids: Sequence[str], listing: Listing) -> list[str]:
    """Return those of the sorted ids that come after the cursor, in the order of the list."""
    if listing.after is None:
        return list(reversed(ids)) if listing.newest_first else list(ids)
    if listing.newest_first:
        return list(reversed(ids[: bisect_left(ids, listing.after)]))
    return list(ids[bisect_right(ids, listing.after) :])


def page_of(things: Sequence[Mapping[str, Any]], has_more: bool) -> dict[str, Any]:
    """Return a page as OpenAI writes it."""
    return {
        "object": "list",
        "data": list(things),
        "first_id": things[0]["id"] if things else None,
        "last_id": things[-1]["id"] if things else None,
        "has_more": has_more,
    }
