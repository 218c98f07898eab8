"""TLS with a CA of one's own, and what goes wrong with it. The embedded Valkey has no TLS: this needs redis-server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmq.scheduler.connection import connect, redis_errors
from llmq.scheduler.errors import RedisUnavailable
from tests.servers import Server, Servers, free_port
from tests.tls_files import TlsFiles, make_tls_files

TlsServer = Callable[..., Server]


@pytest.fixture
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    """Start servers that can speak TLS."""
    servers = Servers(tmp_path_factory.mktemp("tls"))
    yield lambda *options: servers.private("redis", options)
    servers.close()


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    """Certificates of this test."""
    return make_tls_files(tmp_path)


async def test_a_wrong_ca_and_a_missing_certificate_are_said_in_one_line(
    tls_server: TlsServer, files: TlsFiles
) -> None:
    """Which file to give is in the line, and no secret."""
    port = free_port()
    tls_server("--appendonly", "no", *files.server_options(port, clients="yes"))
    place = f"rediss://:geheim@127.0.0.1:{port}/0"
    own = f"&ssl_certfile={files.certificate('client')}&ssl_keyfile={files.key('client')}"
    for query, words in (
        (f"?ssl_ca_certs={files.stranger}{own}", "ssl_ca_certs"),
        (f"?ssl_ca_certs={files.ca}", "ssl_certfile"),
    ):
        client = connect(place + query)
        with pytest.raises(RedisUnavailable, match=words) as caught, redis_errors(place + query):
            await client.ping()
        await client.aclose()
        assert "geheim" not in str(caught.value)


async def test_a_port_that_speaks_tls_is_no_place_for_a_plain_url(tls_server: TlsServer, files: TlsFiles) -> None:
    """The server hangs up; the line names the place, and no time is lost."""
    port = free_port()
    tls_server("--appendonly", "no", *files.server_options(port))
    url = f"redis://127.0.0.1:{port}"
    client = connect(url)
    with pytest.raises(RedisUnavailable, match="cannot be reached"), redis_errors(url):
        await client.ping()
    await client.aclose()
