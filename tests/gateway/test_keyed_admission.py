"""Admission by API key: who is let in, how soon a change holds, and what happens while Redis is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from llmq.gateway import keyed_admission, known_keys
from llmq.gateway.admission import Caller
from llmq.gateway.contact import Contact
from llmq.gateway.errors import ApiError
from llmq.gateway.keyed_admission import KeyedAdmission
from llmq.gateway.known_keys import KnownKeys
from llmq.gateway.translation import api_error
from llmq.scheduler.api_key import KeyLimits
from llmq.scheduler.api_keys import ApiKeys
from llmq.scheduler.connection import connect
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.outage import REDIS_ERRORS
from llmq.scheduler.queue import Queue
from tests.conftest import OwnServer
from tests.servers import Server

CHAT, BATCH = TrafficClass.INTERACTIVE, TrafficClass.BATCH


@pytest.fixture
def queue(redis: Redis) -> Queue:
    """An empty queue."""
    return Queue(redis, "q")


@pytest.fixture
def keys(queue: Queue) -> ApiKeys:
    """The keys of the queue, as `llmq keys` has them."""
    return ApiKeys(queue)


@pytest.fixture
def admission(queue: Queue) -> KeyedAdmission:
    """A gateway's admission."""
    return KeyedAdmission(queue, Contact())


async def refused(doing: Any) -> ApiError:
    """Return the error that something is refused with."""
    with pytest.raises(ApiError) as caught:
        await doing
    return caught.value


def bearer(secret: str) -> str:
    """Return the Authorization header of a secret."""
    return f"Bearer {secret}"


async def soon(condition: Callable[[], Any], within: float = 2.5) -> None:
    """Wait until a change has come through: a gateway asks once a second."""
    async with asyncio.timeout(within):
        while True:  # there is no event: another process may have made the change
            if await condition():
                return
            await asyncio.sleep(0.02)


class TestWhoCalls:
    """`identify`."""

    async def test_while_no_key_was_made_anybody_is_the_default_tenant(self, admission: KeyedAdmission) -> None:
        """With any key or none; and a gateway that may not be open refuses, naming the command."""
        for given in (None, "Bearer sk-anything", "nonsense"):
            assert Caller() == await admission.identify(given)
        assert Caller("team") == await KeyedAdmission(admission._queue, Contact(), tenant="team").identify(None)
        assert not await admission.any_keys()
        closed = KeyedAdmission(admission._queue, Contact(), open_without_keys=False)
        error = await refused(closed.identify("Bearer sk-anything"))
        assert (401, "invalid_api_key") == (error.status, error.code)
        assert "llmq keys create" in error.message

    async def test_a_key_says_who_calls(self, admission: KeyedAdmission, keys: ApiKeys) -> None:
        """Tenant, class rights and limits are the key's; the scheme is read in any case."""
        limits = KeyLimits(requests=5)
        key, secret = await keys.create("anna", classes=frozenset({CHAT}), limits=limits)
        expected = Caller("anna", key.id, frozenset({CHAT}), limits)
        assert expected == await admission.identify(bearer(secret))
        assert expected == await admission.identify(f"bearer  {secret} ")

    @pytest.mark.parametrize(
        "wrong",
        [
            None,
            "",
            "Bearer",
            "Bearer ",
            "Basic abc",
            "Bearer sk-other",
            "Bearer sk-llmq-0123456789ab-" + "0" * 40,
            "Bearer sk-llmq-stamp-" + "0" * 40,
            "Bearer \udcff\x00",
        ],
    )
    async def test_all_else_is_401_and_names_no_secret(
        self, admission: KeyedAdmission, keys: ApiKeys, wrong: str | None
    ) -> None:
        """OpenAI's shape; what was sent is not in the answer."""
        await keys.create("anna")
        error = await refused(admission.identify(wrong))
        assert (401, "invalid_api_key", "Bearer") == (error.status, error.code, error.headers["www-authenticate"])
        secret = (wrong or "").partition(" ")[2]
        assert not secret or secret not in error.message

    async def test_one_wrong_letter_is_wrong(self, admission: KeyedAdmission, keys: ApiKeys) -> None:
        """The id alone opens nothing."""
        _, secret = await keys.create("anna")
        wrong = secret[:-1] + ("a" if secret[-1] != "a" else "b")
        assert "Incorrect" in (await refused(admission.identify(bearer(wrong)))).message

    async def test_a_new_key_opens_at_once(self, admission: KeyedAdmission, keys: ApiKeys) -> None:
        """A key that is not known is looked for again: nobody waits for a second after `keys create`."""
        _, first = await keys.create("anna")
        await admission.identify(bearer(first))
        _, second = await keys.create("ben")
        await asyncio.sleep(known_keys.LOOK_AGAIN_S)
        assert "ben" == (await admission.identify(bearer(second))).tenant

    async def test_the_last_key_that_is_revoked_closes_the_gateway(self, queue: Queue, keys: ApiKeys) -> None:
        """On every gateway, within two seconds; it says what became of the key, to whoever holds it, and stays shut."""
        key, secret = await keys.create("anna")
        gateways = [KeyedAdmission(queue, Contact()), KeyedAdmission(queue, Contact())]
        for gateway in gateways:
            await gateway.identify(bearer(secret))
        await keys.revoke(key.id)

        for gateway in gateways:
            await soon(partial(_refused_as, gateway, secret, "revoked"))
            assert 401 == (await refused(gateway.identify(None))).status
            assert await gateway.any_keys()

    async def test_an_expired_key_is_refused(self, admission: KeyedAdmission, keys: ApiKeys) -> None:
        """By its own time, without anybody's doing."""
        key, secret = await keys.create("anna", lasts_s=3600)
        await admission.identify(bearer(secret))
        await keys.change(key.id, lambda key, now: replace(key, expires_at=now - 1))
        await soon(lambda: _refused_as(admission, secret, "expired"))

    async def test_a_redis_that_came_back_empty_opens_nothing(
        self, admission: KeyedAdmission, keys: ApiKeys, redis: Redis
    ) -> None:
        """A gateway that has known keys wants one, whatever Redis has lost (G12)."""
        _, secret = await keys.create("anna")
        await admission.identify(bearer(secret))
        await redis.flushall()
        await soon(lambda: _refused_as(admission, secret, "Incorrect"))
        assert 401 == (await refused(admission.identify(None))).status


class TestWhatItCosts:
    """How often Redis is asked who calls."""

    class Counting(ApiKeys):
        """Keys that count how often they are read."""

        reads = 0
        stamps = 0

        async def stamp(self) -> int:
            self.stamps += 1
            return await super().stamp()

        async def ring(self) -> Any:
            self.reads += 1
            return await super().ring()

    async def test_many_callers_ask_once(self, queue: Queue) -> None:
        """A thousand calls at once, half with keys that there are not: one reading, and one look again."""
        keys = self.Counting(queue)
        key, _ = await keys.create("anna")
        keys.reads = 0
        now = [100.0]
        known = KnownKeys(keys, Contact(), lambda: now[0])
        await known.required()
        found = await asyncio.gather(*(known.find(key.id if n % 2 else "000000000000") for n in range(1000)))
        assert 500 == sum(1 for one in found if one is not None)
        assert (1, 0) == (keys.reads, keys.stamps)
        now[0] += 2 * known_keys.LOOK_AGAIN_S
        await asyncio.gather(*(known.find("000000000000") for _ in range(1000)))
        now[0] += known_keys.FRESH_S
        await asyncio.gather(*(known.find(key.id) for _ in range(1000)))
        assert (1, 2) == (keys.reads, keys.stamps)


class TestRedisAway:
    """While Redis is away."""

    @pytest.fixture
    async def server(self, own_server: OwnServer) -> Server:
        """A server of its own."""
        return own_server()

    @pytest.fixture
    async def away(self, server: Server) -> AsyncIterator[Queue]:
        """A queue on a server that the test may kill."""
        redis = connect(server.url)
        yield Queue(redis, "q")
        await redis.aclose()

    async def test_known_callers_go_on_for_a_while(self, away: Queue, server: Server) -> None:
        """Half a minute by what is known, then 503; nobody waits long for either."""
        keys = ApiKeys(away)
        key, secret = await keys.create("anna")
        now = [100.0]
        known = KnownKeys(keys, Contact(), lambda: now[0])
        await known.find(key.id)
        server.kill()
        now[0] += known_keys.STALE_S
        async with asyncio.timeout(2):
            found = await known.find(key.id)
        assert found is not None
        assert found.opened_by(secret)
        now[0] += 1
        admission = KeyedAdmission(away, Contact())
        admission._known = known
        error = await refused(admission.identify(bearer(secret)))
        assert (503, "queue_unavailable", "2") == (error.status, error.code, error.headers["retry-after"])

    async def test_a_gateway_that_never_saw_redis_answers_503(self, away: Queue, server: Server) -> None:
        """It does not know whether keys are needed, and lets nobody in."""
        server.kill()
        async with asyncio.timeout(2):
            assert 503 == (await refused(KeyedAdmission(away, Contact()).identify(None))).status

    async def test_a_call_with_limits_is_answered_503(self, away: Queue, server: Server) -> None:
        """And one that was let in before ends without an error."""
        admission = KeyedAdmission(away, Contact())
        caller = Caller("anna", "k1", limits=KeyLimits(requests=5, concurrency=5))
        inside = await admission.enter(caller, CHAT, 1)
        server.kill()
        async with asyncio.timeout(3):
            with pytest.raises((ApiError, *REDIS_ERRORS)) as caught:
                await admission.enter(caller, CHAT, 1)
            await inside.leave(5)
        error = api_error(caught.value)  # as the boundary does
        assert (503, "2") == (error.status, error.headers["retry-after"])


class TestEntering:
    """`enter` and `leave`."""

    async def test_a_class_that_the_key_may_not_use_is_403(self, admission: KeyedAdmission) -> None:
        """Before any limit is asked."""
        caller = Caller("anna", "k1", frozenset({BATCH}), KeyLimits(requests=1))
        error = await refused(admission.enter(caller, CHAT, 1))
        assert (403, "permission_error", "class_not_allowed") == (error.status, error.kind, error.code)
        await admission.enter(caller, BATCH, 1)

    async def test_a_key_without_limits_costs_no_trip(self, redis: Redis, admission: KeyedAdmission) -> None:
        """Nothing is written for it, and nothing told."""
        entered = await admission.enter(Caller("anna", "k1"), CHAT, 10**9)
        await entered.leave(None)
        assert {} == dict(entered.headers)
        assert [] == await redis.keys("*")

    async def test_limits_hold_across_gateways_and_come_back(self, queue: Queue, redis: Redis) -> None:
        """Two gateways, one key: headers, then 429, then place and LLM tokens are back."""
        await cast(Any, redis).hset(queue.keys.config, "virtual", await queue.now_ms())  # no bucket fills meanwhile
        one, two = KeyedAdmission(queue, Contact()), KeyedAdmission(queue, Contact())
        caller = Caller("anna", "k1", limits=KeyLimits(requests=100, tokens=1000, concurrency=2))
        first, second = await one.enter(caller, CHAT, 400), await two.enter(caller, BATCH, 400)
        assert ("99", "600") == tuple(first.headers[f"x-ratelimit-remaining-{what}"] for what in ("requests", "tokens"))
        assert "200" == second.headers["x-ratelimit-remaining-tokens"]
        assert "at one time" in (await refused(two.enter(caller, CHAT, 1))).message
        await first.leave(150)
        await first.leave(150)
        third = await two.enter(caller, CHAT, 1)
        assert "449" == third.headers["x-ratelimit-remaining-tokens"]
        await second.leave(None)
        await third.leave(1)

    async def test_a_long_call_keeps_its_place(
        self, queue: Queue, redis: Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A place is renewed while its call goes on, and free when the gateway's loop has died (F-042)."""
        monkeypatch.setattr(keyed_admission, "LEASE_S", 0.6)
        monkeypatch.setattr(keyed_admission, "RENEW_S", 0.1)
        admission = KeyedAdmission(queue, Contact())
        caller = Caller("anna", "k1", limits=KeyLimits(concurrency=1))
        await admission.enter(caller, CHAT, 1)
        renewing = asyncio.create_task(admission.run())
        ends = float(await redis.zscore(queue.keys.passes("k1"), next(iter(admission._inside))) or 0)
        while await queue.now_ms() < ends + 200:
            assert 429 == (await refused(admission.enter(caller, CHAT, 1))).status
            await asyncio.sleep(0.05)
        renewing.cancel()
        await soon(lambda: _may_enter(admission, caller))

    async def test_a_call_that_leaves_while_it_is_renewed_is_gone(self, queue: Queue, redis: Redis) -> None:
        """Whichever of the two Redis hears of first, no place is left behind."""
        admission = KeyedAdmission(queue, Contact())
        caller = Caller("anna", "k1", limits=KeyLimits(concurrency=50))
        for _ in range(20):
            inside = [await admission.enter(caller, CHAT, 1) for _ in range(5)]
            await asyncio.gather(admission.renew(), *(one.leave(1) for one in inside))
            assert 0 == await redis.zcard(queue.keys.passes("k1"))


async def _refused_as(admission: KeyedAdmission, secret: str, word: str) -> bool:
    try:
        await admission.identify(bearer(secret))
    except ApiError as error:
        return word in error.message
    return False


async def _may_enter(admission: KeyedAdmission, caller: Caller) -> bool:
    try:
        await admission.enter(caller, CHAT, 1)
    except ApiError:
        return False
    return True
