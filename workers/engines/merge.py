"""How the pieces of a streamed answer are put together, for fields that are known and fields that are not.

Engines add fields of their own at every level of a chunk, and none may be lost, so the rules are about shapes:

- null never replaces a value, but is kept where nothing else comes;
- inside a delta, strings are pieces of one text (`content`, `arguments`, `reasoning_content`, `refusal`, ...), except
  those that name something (`NAMES`): of these the first that is not empty stays;
- inside a delta, objects in lists with the same `index` are one object (tool calls), others are appended;
- outside a delta, objects are merged, lists are appended (logprobs, token ids), and of all else the last one stays.

Texts grow in a `Fragments` and are joined when the tree is dumped: adding to a str copies it each time. Both reading
and writing of JSON go through here, because engines do write what strict parsers refuse: NaN, half surrogate pairs.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

Tree = dict[str, Any]

#: Strings of a delta that name something; repeated or empty ones add nothing.
NAMES = frozenset({"id", "type", "name", "role", "call_id", "tool_call_id", "format", "object", "status"})


#: The writer of JSON takes 254 levels; a field of an answer adds a few.
MAX_DEPTH = 200


class Fragments:
    """A text that grows."""

    __slots__ = ("parts",)

    def __init__(self, first: str) -> None:
        self.parts = [first]

    def __str__(self) -> str:
        return "".join(self.parts)


def merge_delta(into: Tree, delta: Tree) -> None:
    """Merge one delta of a choice into the message that the choice becomes."""
    for key, new in delta.items():
        old = into.get(key)
        if new is None:
            into.setdefault(key, None)
        elif isinstance(new, str):
            if key in NAMES:
                into[key] = old or new
            elif isinstance(old, Fragments):
                old.parts.append(new)
            else:
                into[key] = Fragments(new)
        elif isinstance(new, dict):
            if not isinstance(old, dict):
                old = into[key] = {}
            merge_delta(old, new)
        elif isinstance(new, list):
            if not isinstance(old, list):
                old = into[key] = []
            _merge_items(old, new)
        else:
            into[key] = new


def merge_fields(into: Tree, new: Tree) -> None:
    """Merge the fields of a choice that are no delta: lists grow, objects merge, of all else the last one stays."""
    for key, value in new.items():
        old = into.get(key)
        if value is None:
            into.setdefault(key, None)
        elif isinstance(value, dict) and isinstance(old, dict):
            merge_fields(old, value)
        elif isinstance(value, list) and isinstance(old, list):
            old.extend(value)
        else:
            into[key] = value


def _merge_items(into: list[Any], new: list[Any]) -> None:
    for item in new:
        if not isinstance(item, dict):
            into.append(item)
            continue
        same = _same_item(into, item)
        if same is None:
            same = {}
            into.append(same)
        merge_delta(same, item)


def _same_item(known: list[Any], item: Tree) -> Tree | None:
    """Find the object that this is a piece of; some engines number all their tool calls 0, but give each an id."""
    index, identity = item.get("index"), item.get("id")
    if index is None:
        return None
    for other in reversed(known):
        if isinstance(other, dict) and other.get("index") == index:
            return other if not identity or other.get("id") in (None, "", identity) else None
    return None


def load(data: bytes) -> Any:
    """Read JSON as engines write it; raises ValueError for what is no JSON at all, or too deep to be written again."""
    try:
        tree = orjson.loads(data)
    except orjson.JSONDecodeError:
        try:
            # Takes NaN, Infinity and lone surrogates (half of a pair, split over two chunks).
            tree = json.loads(data, parse_int=_int)
        except RecursionError:
            raise ValueError("is nested too deep") from None
    # Brackets are counted first: few bodies have so many of them that they could be too deep.
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _is_deeper(tree, MAX_DEPTH):
        raise ValueError("is nested too deep")
    return tree


def dump(tree: Any) -> bytes:
    """Write JSON that every parser takes: halves of a pair that met are one character, NaN is null."""
    try:
        return orjson.dumps(tree, default=_joined)
    except orjson.JSONEncodeError:
        return orjson.dumps(_whole_characters(tree))


def _int(digits: str) -> float:
    """Read an integer as the fast parser does: one of more than 64 bits is a float."""
    number = int(digits) if len(digits) <= 20 else float(digits)
    return number if -(2**63) <= number < 2**64 else float(digits)


def _is_deeper(tree: Any, depth: int) -> bool:
    level = [tree]
    for _ in range(depth + 1):
        level = [
            item
            for value in level
            if isinstance(value, dict | list)
            for item in (value.values() if isinstance(value, dict) else value)
            if isinstance(item, dict | list)
        ]
    return bool(level)


def _joined(value: object) -> str:
    if isinstance(value, Fragments):
        return str(value)
    raise TypeError(f"{type(value).__name__} is no JSON")


def whole_characters(text: str) -> str:
    """Return a text in which halves of a surrogate pair that met are one character, and others are replaced."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _whole_characters(tree: Any) -> Any:
    if isinstance(tree, str | Fragments):
        return whole_characters(str(tree))
    if isinstance(tree, dict):
        return {_whole_characters(key): _whole_characters(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_whole_characters(item) for item in tree]
    return tree
