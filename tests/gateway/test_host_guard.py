"""A gateway without keys serves this host, and not whatever page a browser of this host shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from llmq.cli.gateway import _hosts
from llmq.gateway.errors import ApiError
from llmq.gateway.host_guard import HostGuard
from llmq.scheduler.api_keys import ApiKeys
from llmq.scheduler.queue import Queue
from llmq.scheduler.settings import Settings
from tests.gateway.serving import Gateway, closed, error_of
from tests.redis.serving import KEYS


def refused(guard: HostGuard, host: str, origin: str = "") -> str | None:
    """Return the code that a request is refused with; None for one that is served."""
    try:
        guard.check({b"host": host.encode(), b"origin": origin.encode()})
    except ApiError as error:
        return error.code
    return None


class TestHost:
    """By which names it is served."""

    @pytest.mark.parametrize(
        "host",
        [
            "127.0.0.1:8800",
            "127.9.9.9",
            "localhost:8800",
            "LocalHost.",
            "chat.localhost",
            "[::1]:8800",
            "gpu7:8800",
            "",
        ],
    )
    def test_names_of_this_host_and_named_ones_are_served(self, host: str) -> None:
        """Case, port, brackets and a last dot make no other name; who says none is no browser."""
        assert refused(HostGuard(lambda: True, ("gpu7",)), host) is None

    @pytest.mark.parametrize("host", ["evil.example", "evil.example:8800", "127.0.0.1.evil.example", "0.0.0.0:8800"])
    def test_a_name_that_was_led_here_is_refused(self, host: str) -> None:
        """DNS rebinding: the browser says the name of the page."""
        assert "host_not_allowed" == refused(HostGuard(lambda: True, ("gpu7",)), host)

    def test_any_name_is_served_where_nobody_knows_them(self) -> None:
        """On an address that other hosts reach, or where the operator says so."""
        assert refused(HostGuard(lambda: True, None), "evil.example") is None
        assert refused(HostGuard(lambda: True, ("*",)), "evil.example") is None


class TestOrigin:
    """Web pages of which places may call it."""

    @pytest.mark.parametrize(
        "origin", ["http://localhost:3000", "http://127.0.0.1:8800", "https://gpu7", "https://Chat.example/"]
    )
    def test_pages_of_this_host_and_allowed_ones_may_call(self, origin: str) -> None:
        """And those of names that it is served as."""
        assert refused(HostGuard(lambda: True, ("gpu7",), ("https://chat.example",)), "localhost", origin) is None

    @pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://[", "file://", "http://localhost.evil"])
    def test_pages_of_strangers_may_not(self, origin: str) -> None:
        """A page may post here without asking first."""
        assert "origin_not_allowed" == refused(HostGuard(lambda: True, ()), "127.0.0.1:8800", origin)
        assert "origin_not_allowed" == refused(HostGuard(lambda: True, None), "gpu7", origin)
        assert "origin_not_allowed" == refused(HostGuard(lambda: True, ()), "", origin)

    def test_its_own_pages_may_call(self) -> None:
        """Wherever it is reached."""
        assert refused(HostGuard(lambda: True, None), "gpu7:8800", "http://gpu7:8800") is None
        assert refused(HostGuard(lambda: True, (), ("*",)), "localhost", "https://any.example") is None


@pytest.mark.parametrize(
    ("settings", "hosts"),
    [
        ({}, ("127.0.0.1",)),
        ({"listen_host": "127.0.0.2", "allow_hosts": ("gpu7",)}, ("127.0.0.2", "gpu7")),
        ({"listen_host": "0.0.0.0"}, None),
        ({"listen_host": "0.0.0.0", "allow_hosts": ("gpu7",)}, ("0.0.0.0", "gpu7")),
    ],
)
def test_names_follow_from_the_address(settings: dict[str, Any], hosts: tuple[str, ...] | None) -> None:
    """Where other hosts come, only who gives names has them looked at."""
    assert hosts == _hosts(Settings(home=Path("/h"), **settings))


async def test_a_strangers_page_gets_openais_error(front: Gateway) -> None:
    """Before anything else is done with the request."""
    async with front.chat(headers={"Host": "evil.example"}) as response:
        assert (403, "host_not_allowed") == (response.status, (await error_of(response))["code"])
    async with front.chat(headers={"Origin": "https://evil.example"}) as response:
        assert (403, "origin_not_allowed") == (response.status, (await error_of(response))["code"])
    async with front.get("/v1/models") as response:
        assert 200 == response.status


async def test_a_key_is_guard_enough(front: Gateway, redis: Redis) -> None:
    """From the first key on names count no more: a gateway behind a proxy on this host needs no other option."""
    _, secret = await ApiKeys(Queue(redis, KEYS.queue)).create("anna")
    await closed(front)
    headers = {"Host": "api.example", "Origin": "https://chat.example", "Authorization": f"Bearer {secret}"}
    async with front.http.get(f"{front.base}/v1/models", headers=headers) as response:
        assert 200 == response.status
