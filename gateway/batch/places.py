"""The places of the batch storage: one function an object, each with what stands there and how long.

    files/<tenant>/<file>.json      what is known of a file         content/<tenant>/<file>   its bytes
    batches/<tenant>/<batch>/...    the facts about a batch: order, accepted, cancel, ended, sequence
    open/<batch>                    a batch that has not ended      parts/<batch>/...         results collected so far
    expiring/<time>-<id>            a file, or the facts about a batch that has ended, that goes by itself

Names of places are made here and nowhere else. A tenant may be called anything, so its folder is named by a digest,
with as much of the name before it as is harmless on every file system.
"""

from __future__ import annotations

import hashlib
import re

#: Every file or batch id that the gateway has ever given out; anything else is a path that somebody tries.
_ID = re.compile(r"(?:file-|batch_)[0-9a-hjkmnp-tv-z]{26}")

#: Digits of a time in `expiring`: its names sort as the times do, for some thousands of years.
_TIME_DIGITS = 12

OPEN = "open"
EXPIRING = "expiring"


def is_file_id(text: str) -> bool:
    """Whether this may be the id of a file."""
    return text.startswith("file-") and _ID.fullmatch(text) is not None


def is_batch_id(text: str) -> bool:
    """Whether this may be the id of a batch."""
    return text.startswith("batch_") and _ID.fullmatch(text) is not None


def tenant_folder(tenant: str) -> str:
    """Return the name of a tenant's folders: distinct for distinct tenants, also where case does not count."""
    readable = re.sub(r"[^a-z0-9]+", "-", tenant.lower())[:20].strip("-")
    return f"{readable or 'tenant'}-{hashlib.sha256(tenant.encode()).hexdigest()[:24]}"


def files_of(tenant: str) -> str:
    """Folder: the records of a tenant's files."""
    return f"files/{tenant_folder(tenant)}"


def file_record(tenant: str, file_id: str) -> str:
    """JSON: what is known of a file. Written after its content, removed before it."""
    return f"{files_of(tenant)}/{file_id}.json"


def content(tenant: str, file_id: str) -> str:
    """Bytes: a file as it was uploaded, or as a batch has made it."""
    return f"content/{tenant_folder(tenant)}/{file_id}"


def expiring(expires_at: int, name: str) -> str:
    """JSON: whose file or batch goes at this time; goes with it."""
    return f"{EXPIRING}/{expires_at:0{_TIME_DIGITS}d}-{name}.json"


def read_expiring(name: str) -> tuple[int, str] | None:
    """Return time and id of a name in `expiring`; None for a name that is none."""
    moment, _, rest = name.partition("-")
    found = rest.removesuffix(".json")
    return (int(moment), found) if moment.isdigit() and _ID.fullmatch(found) else None


def batches_of(tenant: str) -> str:
    """Folder: one folder a batch of this tenant."""
    return f"batches/{tenant_folder(tenant)}"


def fact(tenant: str, batch_id: str, name: str) -> str:
    """JSON: one fact about a batch (see `facts.py`); kept as long as the batch is (`Ledger.end`)."""
    return f"{facts_of(tenant, batch_id)}/{name}.json"


def sequence(tenant: str, batch_id: str) -> str:
    """Bytes: of which file each result of an ended batch is, in the order in which lines ended."""
    return f"{facts_of(tenant, batch_id)}/sequence"


def facts_of(tenant: str, batch_id: str) -> str:
    """Folder: all that is known of one batch."""
    return f"{batches_of(tenant)}/{batch_id}"


def open_mark(batch_id: str) -> str:
    """JSON: tenant and input file of a batch that has not ended; written before its order, removed after its end."""
    return f"{OPEN}/{batch_id}.json"


def parts_of(batch_id: str) -> str:
    """Folder: the parts of a batch (`parts.py`); gone when it has ended."""
    return f"parts/{batch_id}"


def part(batch_id: str, name: str) -> str:
    """JSON or lines: the head of a part (`.json`), and its results (`.jsonl`)."""
    return f"{parts_of(batch_id)}/{name}"
