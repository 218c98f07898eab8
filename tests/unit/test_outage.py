"""The outage: what is ridden out, what passes through, and for how long."""

from __future__ import annotations

import pytest
from redis import exceptions

from llmq.scheduler.errors import RedisUnavailable
from llmq.scheduler.outage import Outage, is_away, is_full

AWAY = [
    exceptions.ConnectionError("Error 111 connecting to 127.0.0.1:1. Connection refused."),
    exceptions.TimeoutError("Timeout reading from socket"),
    exceptions.BusyLoadingError("Redis is loading the dataset in memory"),
    exceptions.ReadOnlyError("You can't write against a read only replica."),
    exceptions.ClusterDownError("The cluster is down"),
    exceptions.ResponseError("NOREPLICAS Not enough good replicas to write."),
]
NOT_AWAY = [
    exceptions.AuthenticationError("Authentication required."),
    exceptions.NoPermissionError("this user has no permissions"),
    exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
    exceptions.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"),
]


class Step:
    """Fails with these errors, one a call, then returns."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    async def __call__(self) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "done"


class TestOutage:
    """A step is repeated while Redis is away."""

    @pytest.mark.parametrize("error", AWAY, ids=lambda error: type(error).__name__)
    async def test_what_passes_by_itself_is_ridden_out(self, error: Exception) -> None:
        """A restart, a failover, a late reply (F-076, F-087)."""
        waits = []
        outage = Outage("try again", on_wait=lambda: waits.append(1))
        assert "done" == await outage.ride_out(Step(error, error))
        assert 2 == len(waits)

    @pytest.mark.parametrize("error", NOT_AWAY, ids=lambda error: type(error).__name__)
    async def test_what_needs_a_person_passes_through_at_once(self, error: Exception) -> None:
        """Waiting would hide it."""
        step = Step(error)
        with pytest.raises(type(error)):
            await Outage("try again").ride_out(step)
        assert [] == step.errors

    async def test_patience_ends_with_what_happened_and_how_to_go_on(self) -> None:
        """Bounded, with one line for a person (G13)."""
        with pytest.raises(RedisUnavailable, match=r"Redis cannot be reached, for 0 s by now; say it again") as caught:
            await Outage("say it again", patience_s=0.0).ride_out(Step(AWAY[0]))
        assert AWAY[0] is caught.value.__cause__

    def test_full_is_not_away(self) -> None:
        """Whoever feeds waits for both, and says which."""
        assert [False] * 4 == [is_away(error) for error in NOT_AWAY]
        assert is_full(NOT_AWAY[2])
        assert is_full(exceptions.ResponseError("OOM command not allowed when used memory > 'maxmemory'. script: 12"))
