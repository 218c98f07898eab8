"""The URL forms of Redis: what each says, what is refused, and that no secret is ever shown."""

from __future__ import annotations

from typing import Any

import pytest

from llmq.scheduler.errors import SettingsError
from llmq.scheduler.redis_url import RedisAddress, Topology, parse_redis_url, redact


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://h", RedisAddress(Topology.SERVER, (("h", 6379),))),
        ("redis://h:1/3", RedisAddress(Topology.SERVER, (("h", 1),), db=3)),
        ("redis://h?db=2", RedisAddress(Topology.SERVER, (("h", 6379),), db=2)),
        ("redis://[::1]:7", RedisAddress(Topology.SERVER, (("::1", 7),))),
        ("redis://u:p%40%2F@h", RedisAddress(Topology.SERVER, (("h", 6379),), username="u", password="p@/")),
        ("redis://:p@h", RedisAddress(Topology.SERVER, (("h", 6379),), password="p")),
        ("unix:///run/a%20b.sock", RedisAddress(Topology.SERVER, path="/run/a b.sock")),
        ("unix:///s?db=1&password=p", RedisAddress(Topology.SERVER, path="/s", db=1, password="p")),
        ("redis+cluster://a,b:7", RedisAddress(Topology.CLUSTER, (("a", 6379), ("b", 7)))),
        (
            "redis+sentinel://u:p@a,b:7/main/2?sentinel_password=q",
            RedisAddress(
                Topology.SENTINEL,
                (("a", 26379), ("b", 7)),
                db=2,
                service="main",
                username="u",
                password="p",
                sentinel_password="q",
            ),
        ),
    ],
)
def test_every_form_is_read(url: str, address: RedisAddress) -> None:
    """Servers, sockets, Sentinel and clusters, with their defaults."""
    assert parse_redis_url(url) == address


@pytest.mark.parametrize(
    ("url", "tls"),
    [
        ("redis://h", None),
        ("rediss://h", {"ssl_cert_reqs": "required", "ssl_check_hostname": True}),
        ("rediss+cluster://h?ssl_cert_reqs=none", {"ssl_cert_reqs": "none", "ssl_check_hostname": False}),
        (
            "rediss://h?ssl_ca_certs=/ca.pem&ssl_check_hostname=no",
            {"ssl_ca_certs": "/ca.pem", "ssl_cert_reqs": "required", "ssl_check_hostname": False},
        ),
    ],
)
def test_tls_checks_the_host_name_unless_told_otherwise(url: str, tls: dict[str, Any] | None) -> None:
    """redis-py 5 did not check it; the same URL means the same with every version."""
    assert parse_redis_url(url).tls == tls


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("localhost:6379", r"expected a Redis URL like redis://host:6379"),
        ("http://h", r"expected a Redis URL like redis://host:6379"),
        ("redis+magic://h", r"expected a Redis URL like"),
        ("unix+cluster:///s", r"expected a Redis URL like"),
        ("unix://run/s.sock", r"with three slashes"),
        ("redis://", r"expected host or host:port, got ''"),
        ("redis://h:99999", r"expected host or host:port, got 'h:99999'"),
        ("redis+cluster://a,,b", r"expected host or host:port, got ''"),
        ("redis+sentinel://a:1", r"expected the service's name"),
        ("redis+cluster://a/1", r"a cluster has only 0"),
        ("redis://h/jobs", r"expected a database number, got 'jobs'"),
        ("redis://h?decode_responses=true", r"has the option 'decode_responses', which llmq does not take; it takes"),
        ("redis://h?socket_timeout=1", r"has the option 'socket_timeout'"),
        ("redis://:a#b@h", r"in a password, write it as %23"),
        ("rediss://h?ssl_cert_reqs=maybe", r"required, optional or none"),
        ("rediss://h?ssl_check_hostname=maybe", r"to be yes or no"),
    ],
)
def test_a_wrong_url_is_refused_with_the_part_that_is_wrong(url: str, message: str) -> None:
    """Also options that would change the timeouts and reply types that llmq depends on."""
    with pytest.raises(SettingsError, match=message):
        parse_redis_url(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:1/0", "redis://h:1/0"),
        ("redis://u:secret@h:1/0", "redis://u:***@h:1/0"),
        ("redis://:secret@h", "redis://:***@h"),
        ("redis://secret@h", "redis://***@h"),
        ("redis://u:secret@secret@h", "redis://u:***@h"),
        ("redis://u:sec/ret@h", "redis://u:***@h"),
        ("unix:///run/s@1.sock?db=1&password=secret", "unix:///run/s@1.sock?db=1&password=***"),
        (
            "redis+sentinel://u:secret@a,b/m?sentinel_password=secret&db=1",
            "redis+sentinel://u:***@a,b/m?sentinel_password=***&db=1",
        ),
        ("u:secret@h", "u:***@h"),
        ("", ""),
    ],
)
def test_a_shown_url_has_no_secret(url: str, shown: str) -> None:
    """Also where somebody forgot to quote the password, or the scheme."""
    assert redact(url) == shown


@pytest.mark.parametrize(
    "url", ["http://u:secret@h", "redis://u:secret@h:0", "redis://u:secret@h?x=1", "redis://u:secret#@h"]
)
def test_no_message_shows_a_password(url: str) -> None:
    """A settings error is often pasted into a chat."""
    with pytest.raises(SettingsError) as caught:
        parse_redis_url(url)
    assert "secret" not in str(caught.value)


def test_an_address_does_not_show_its_passwords() -> None:
    """Its repr may stand in a traceback."""
    address = parse_redis_url("redis+sentinel://u:secret@a/m?sentinel_password=secret")
    assert "secret" not in repr(address)
