"""What an error of Redis means to a person, and what to do about it.

Code that talks to Redis on somebody's behalf does so within `redis_errors(url)`: what means that Redis is away, full or
unusable becomes a RedisUnavailable of one line, with the URL (its password hidden) and the next step. Everything else,
such as an error that a script returned, passes through: that is a fault of llmq, and hiding it would hide the fault.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from redis import exceptions

from llmq.scheduler.errors import RedisFull, RedisUnavailable
from llmq.scheduler.redis_url import redact


@dataclass(frozen=True, slots=True)
class Meaning:
    """What happened, as the end of a sentence that begins with "Redis at URL", and the next step."""

    what: str
    step: str
    error: type[RedisUnavailable] = RedisUnavailable


_REACH = "check that it runs and that LLMQ_REDIS_URL is right"
_CREDENTIALS = "put the right ones into LLMQ_REDIS_URL: redis://user:password@host"
_PRIMARY = "point LLMQ_REDIS_URL at the primary, or use redis+sentinel:// or redis+cluster://, which follow it"
_WAIT = "wait for it, then try again"

#: By the code that an error of the server begins with.
MEANINGS = {
    "NOAUTH": Meaning("wants a user name or password", _CREDENTIALS),
    "WRONGPASS": Meaning("refused the user name or password", _CREDENTIALS),
    "NOPERM": Meaning(
        "does not permit this user a command or key that llmq needs",
        "allow it: ACL SETUSER name ~llmq:* +@all -@dangerous +info",
    ),
    "READONLY": Meaning("is a replica, and takes no writes", _PRIMARY),
    "OOM": Meaning(
        "is full: it uses all its maxmemory",
        "delete batches that are done (llmq batch delete ID), or give it more: CONFIG SET maxmemory SIZE",
        RedisFull,
    ),
    "MISCONF": Meaning("cannot write to its disk and refuses writes", "free space on its disk, and read its log"),
    "LOADING": Meaning("is still loading its data", _WAIT),
    "BUSY": Meaning("is held up by a script that runs too long", f"{_WAIT}, or end it: SCRIPT KILL"),
    "CLUSTERDOWN": Meaning("is a cluster that is down, or has slots without a node", "check it: CLUSTER INFO"),
    "MASTERDOWN": Meaning("is a replica whose primary is away", _PRIMARY),
    "MOVED": Meaning("is a cluster that does not agree yet which node holds this queue", _WAIT),
    "UNBLOCKED": Meaning("has just become a replica", _PRIMARY),
    "TRYAGAIN": Meaning("is a cluster that is moving this queue to another node", _WAIT),
    "NOREPLICAS": Meaning("has too few replicas to accept writes", "start them, or lower min-replicas-to-write"),
}

_UNREACHABLE = Meaning("cannot be reached", _REACH)
_SLOW = Meaning("did not answer in time", _REACH)
_USED_UP = Meaning("has no free connection in this process's pool", "do less at a time, or start another process")
_NOT_REDIS = Meaning("is no Redis: what answers does not speak its protocol", "check host and port of LLMQ_REDIS_URL")
_NOT_A_SENTINEL = Meaning("is no Sentinel", "use redis:// instead of redis+sentinel:// in LLMQ_REDIS_URL")
_NO_DATABASE = Meaning("has no database of that number", "use one that it has, as in redis://host:6379/0")
_NOT_A_CLUSTER = Meaning("is no cluster", "use redis:// instead of redis+cluster:// in LLMQ_REDIS_URL")

_NO_MORE_CLIENTS = Meaning(
    "takes no more connections: it has its maxclients",
    "see whose they are (CLIENT LIST), or allow more: CONFIG SET maxclients N",
)
_UNTRUSTED = Meaning(
    "shows a certificate that is not trusted here, or is not for that host",
    "name the CA that signed it (rediss://host?ssl_ca_certs=/path/ca.pem), and the host as the certificate has it",
)
_WANTS_CERTIFICATE = Meaning(
    "wants a certificate of its clients",
    "name one: rediss://host?ssl_certfile=/path/client.pem&ssl_keyfile=/path/client.key",
)

#: Errors that have no code of their own: of wrong URLs, and of connections that were refused.
_SAID = (
    ("DB index is out of range", _NO_DATABASE),
    ("unknown command 'SENTINEL'", _NOT_A_SENTINEL),
    ("cluster support disabled", _NOT_A_CLUSTER),
    ("max number of clients", _NO_MORE_CLIENTS),
    ("CERTIFICATE_VERIFY_FAILED", _UNTRUSTED),
    ("CERTIFICATE_REQUIRED", _WANTS_CERTIFICATE),
)

# redis-py takes the code off where it has a class for it. More special classes come first.
_CODES: tuple[tuple[type[Exception], str], ...] = (
    (exceptions.AuthenticationWrongNumberOfArgsError, "WRONGPASS"),
    (exceptions.NoPermissionError, "NOPERM"),
    (exceptions.ReadOnlyError, "READONLY"),
    (exceptions.OutOfMemoryError, "OOM"),
    (exceptions.BusyLoadingError, "LOADING"),
    (exceptions.MasterDownError, "MASTERDOWN"),
    (exceptions.ClusterDownError, "CLUSTERDOWN"),
    (exceptions.SlotNotCoveredError, "CLUSTERDOWN"),
    (exceptions.TryAgainError, "TRYAGAIN"),
    (exceptions.AskError, "MOVED"),  # and MovedError
)


@contextlib.contextmanager
def redis_errors(url: str) -> Iterator[None]:
    """Turn errors that mean "Redis cannot be used" into RedisUnavailable; a plain `with`, also around awaits.

    A group of exceptions is opened: it becomes one RedisUnavailable when all of it means that (F-076).
    """
    try:
        yield
    except (exceptions.RedisError, exceptions.RedisClusterException, BaseExceptionGroup) as error:
        causes = _leaves(error)
        meanings = [explain(cause) for cause in causes]
        if None in meanings:
            raise
        assert meanings[0] is not None
        raise unavailable(url, _at(url, meanings[0], str(causes[0])), str(causes[0])) from error


def _at(url: str, meaning: Meaning, said: str) -> Meaning:
    """Add what an error may mean there: in TLS 1.3 the refusal of a client without a certificate is often lost."""
    if meaning is _UNREACHABLE and url.startswith("rediss") and "ssl_certfile" not in url and "reset" in said.lower():
        return replace(meaning, step=f"{meaning.step}; if it {_WANTS_CERTIFICATE.what}, {_WANTS_CERTIFICATE.step}")
    return meaning


def unavailable(url: str, meaning: Meaning, detail: str = "") -> RedisUnavailable:
    """Return the error for a meaning; `detail` is what the client or the server said, shortened to fit the line."""
    said = " ".join(detail.split())
    said = f" ({said if len(said) <= 160 else said[:157] + '...'})" if said else ""
    return meaning.error(f"Redis at {redact(url)} {meaning.what}{said}; {meaning.step}")


def explain(error: BaseException) -> Meaning | None:
    """Return what an error of redis-py means; None for one that does not say that Redis cannot be used."""
    text = str(error)
    code = text.partition(" ")[0]
    if isinstance(error, exceptions.AuthenticationError):
        return MEANINGS["NOAUTH" if "required" in text else "WRONGPASS"]
    for kind, code_of_kind in _CODES:
        if isinstance(error, kind):
            return MEANINGS[code_of_kind]
    for said, meaning in _SAID:
        if said in text:
            return meaning
    if isinstance(error, exceptions.ConnectionError) and code != "READONLY":
        return _USED_UP if "No connection available" in text else _UNREACHABLE
    if isinstance(error, exceptions.TimeoutError):
        return _SLOW
    if isinstance(error, exceptions.InvalidResponse):
        return _NOT_REDIS
    # From here on a server's error: the code in front is all there is (also of one that a script passed on).
    return MEANINGS.get(code) if isinstance(error, exceptions.RedisError) else None


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
