"""The API key: who may call a gateway as which tenant, and how much of it.

A key is a secret that is shown once, `sk-llmq-<id>-<random>`, and a record that is kept: the id names it, the digest
proves it. The random part has 160 bits, so a plain SHA-256 of it cannot be guessed back: slow password hashes are for
secrets that people think up, and would cost every request their time. This module knows nothing of Redis.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import orjson

from llmq.scheduler.errors import EncodingError
from llmq.scheduler.job import TrafficClass

PREFIX = "sk-llmq-"

#: 48 bits name a key, 160 bits prove it.
_ID_BYTES, _SECRET_BYTES = 6, 20
_SECRET = re.compile(rf"{PREFIX}([0-9a-f]{{{2 * _ID_BYTES}}})-[0-9a-f]{{{2 * _SECRET_BYTES}}}")


class KeyState(StrEnum):
    """Whether a key opens the gateway."""

    ACTIVE = "active"
    EXPIRED = "expired"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What the calls of one key may take together, at all gateways; None is no limit.

    `requests` and `tokens` (LLM tokens) are a minute's worth, and also what may be taken at once after a pause;
    `concurrency` counts the calls that run or wait at one time.
    """

    requests: int | None = None
    tokens: int | None = None
    concurrency: int | None = None

    def __bool__(self) -> bool:
        return (self.requests, self.tokens, self.concurrency) != (None, None, None)


NO_LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True)
class ApiKey:
    """The record of a key. Times are seconds since the epoch, on Redis' clock; None: never."""

    id: str
    tenant: str
    digest: str = field(repr=False)
    name: str = ""
    classes: frozenset[TrafficClass] = frozenset(TrafficClass)
    limits: KeyLimits = NO_LIMITS
    created_at: float = 0.0
    expires_at: float | None = None
    revoked_at: float | None = None

    def opened_by(self, secret: str) -> bool:
        """Whether this is the key's secret; takes the same time whatever of it is right."""
        return hmac.compare_digest(self.digest, digest_of(secret))

    def state(self, now: float) -> KeyState:
        """Return whether the key opens the gateway at `now` (seconds since the epoch)."""
        if self.revoked_at is not None:
            return KeyState.REVOKED
        return KeyState.EXPIRED if self.expires_at is not None and self.expires_at <= now else KeyState.ACTIVE

    def encode(self) -> bytes:
        """Return the stored form."""
        return orjson.dumps(
            {
                "tenant": self.tenant,
                "digest": self.digest,
                "name": self.name,
                "classes": sorted(self.classes),
                "rpm": self.limits.requests,
                "tpm": self.limits.tokens,
                "concurrency": self.limits.concurrency,
                "created_at": self.created_at,
                "expires_at": self.expires_at,
                "revoked_at": self.revoked_at,
            }
        )

    @classmethod
    def decode(cls, key_id: str, data: bytes) -> ApiKey:
        """Read the stored form; raises EncodingError for what `encode` cannot have written."""
        try:
            record: Mapping[str, Any] = orjson.loads(data)
            _check(record)
            return cls(
                key_id,
                record["tenant"],
                record["digest"],
                record["name"],
                frozenset(map(TrafficClass, record["classes"])),
                KeyLimits(record["rpm"], record["tpm"], record["concurrency"]),
                record["created_at"],
                record["expires_at"],
                record["revoked_at"],
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise EncodingError(f"key {key_id}", f"is not a stored API key ({type(error).__name__})") from None

    def to_json(self, now: float) -> dict[str, Any]:
        """Return what `keys ls --json` prints of a key: everything but what proves it."""
        return {
            "id": self.id,
            "tenant": self.tenant,
            "name": self.name,
            "state": self.state(now),
            "classes": sorted(self.classes),
            "rpm": self.limits.requests,
            "tpm": self.limits.tokens,
            "concurrency": self.limits.concurrency,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "revoked_at": self.revoked_at,
        }


def _check(record: Mapping[str, Any]) -> None:
    """Raise TypeError where a field is of a type that would stop whoever compares keys."""
    texts = (record["tenant"], record["digest"], record["name"])
    limits = (record["rpm"], record["tpm"], record["concurrency"])
    times = (record["expires_at"], record["revoked_at"])
    if not (
        all(isinstance(text, str) for text in texts)
        and record["digest"].isascii()
        and all(limit is None or type(limit) is int for limit in limits)
        and all(at is None or type(at) in (int, float) for at in times)
        and type(record["created_at"]) in (int, float)
    ):
        raise TypeError("a field of another type")


def new_secret() -> str:
    """Return the secret of a new key; its id is in it."""
    return f"{PREFIX}{secrets.token_hex(_ID_BYTES)}-{secrets.token_hex(_SECRET_BYTES)}"


def id_in(secret: str) -> str | None:
    """Return the id of the key that a secret claims to be of; None for what no key looks like."""
    found = _SECRET.fullmatch(secret)
    return found[1] if found else None


def digest_of(secret: str) -> str:
    """Return what is kept of a secret."""
    return hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()
