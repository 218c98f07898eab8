"""Admission: who calls, what they may do, and whether there is room for one more call of theirs.

Every request under `/v1` is first asked for its `Caller`; a request that makes work then takes a `Pass`, and gives it
back when it has ended. `OpenAdmission` is what holds while no API key has been made: everybody is the default tenant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from llmq.scheduler.api_key import NO_LIMITS, KeyLimits
from llmq.scheduler.job import TrafficClass


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a request: the tenant whose jobs are shared fairly, and the key that says so ("": none is asked)."""

    tenant: str = "default"
    key_id: str = ""
    classes: frozenset[TrafficClass] = frozenset(TrafficClass)
    limits: KeyLimits = NO_LIMITS


class Pass(Protocol):
    """One call that was let in."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The `x-ratelimit-*` headers of the answer; empty where there is no limit."""
        ...

    async def leave(self, used_tokens: int | None) -> None:
        """Give the place back; `used_tokens` are the LLM tokens that the call really cost, None where nobody knows.

        Called exactly once, also for calls that failed; never raises.
        """
        ...


class Admission(Protocol):
    """Knows the callers and their limits."""

    async def identify(self, authorization: str | None) -> Caller:
        """Return who calls, by the Authorization header. Raises ApiError (401)."""
        ...

    async def enter(self, caller: Caller, cls: TrafficClass, tokens: int) -> Pass:
        """Let one call of estimated `tokens` LLM tokens in. Raises ApiError (403: class not allowed, 429: a limit)."""
        ...


class _FreePass:
    """A call that no limit holds for."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Nothing is told of limits that there are not."""
        return {}

    async def leave(self, used_tokens: int | None) -> None:
        """Do nothing: nothing was taken."""


def free_pass() -> Pass:
    """Return the pass of a call that no limit holds for."""
    return _FreePass()


class OpenAdmission:
    """Lets everybody in, as the tenant that it is given."""

    def __init__(self, tenant: str = "default") -> None:
        self._caller = Caller(tenant)

    async def identify(self, authorization: str | None) -> Caller:
        """Return the one caller there is."""
        return self._caller

    async def enter(self, caller: Caller, cls: TrafficClass, tokens: int) -> Pass:
        """Let the call in."""
        return free_pass()
