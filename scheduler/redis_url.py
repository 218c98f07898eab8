"""Where Redis is: the URL forms that llmq takes, read into one value, and shown without their secrets.

    redis://[user:password@]host[:port][/db]              one server
    rediss://...                                          the same over TLS
    unix://[user:password@]/path/to/socket[?db=N]         one server of this host
    redis+sentinel://host[:port][,host...]/service[/db]   the primary that Sentinel names
    redis+cluster://host[:port][,host...]                 a cluster, found through any of these nodes

`rediss+sentinel` and `rediss+cluster` are the TLS forms. Options stand behind a `?`: user name and password (also those
of the sentinels), files of TLS, and `protocol=3` for what understands RESP3 only. Timeouts, pools and retries are not
in the URL: llmq depends on them, so `connection.py` alone sets them, and an option that would change them is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from llmq.scheduler.errors import SettingsError

URL_FORMS = (
    "redis://host:6379, rediss://host:6379, unix:///path/to/socket, "
    "redis+sentinel://host:26379,host:26379/service or redis+cluster://host:6379,host:6379"
)

_PORTS = {"server": 6379, "cluster": 6379, "sentinel": 26379}
_TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
_OPTIONS = ("db", "username", "password", "sentinel_username", "sentinel_password", "protocol", *_TLS_OPTIONS)
_SECRET = re.compile(r"([?&][a-z_]*(?:password|secret|token)[a-z_]*=)[^&]*", re.IGNORECASE)


class Topology(StrEnum):
    """How the primary is found: it is the server, a member of a cluster, or named by Sentinel."""

    SERVER = "server"
    CLUSTER = "cluster"
    SENTINEL = "sentinel"


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A URL, read. `hosts` are nodes or sentinels, none where `path` names a unix socket; `tls` holds ssl_* options."""

    topology: Topology
    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    db: int = 0
    service: str = ""
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    tls: Mapping[str, object] | None = None
    protocol: int = 2


def parse_redis_url(url: str) -> RedisAddress:
    """Read a URL. Raises SettingsError, which names the part that is wrong and never shows a password."""
    try:
        parts = urlsplit(url)
    except ValueError:  # brackets that are no IPv6 address, and letters that Unicode makes a '/' of
        raise SettingsError(f"expected a Redis URL like {URL_FORMS}; got {redact(url)!r}") from None
    base, _, form = parts.scheme.partition("+")
    if base not in ("redis", "rediss", "unix") or form not in ("", "sentinel", "cluster") or (base == "unix" and form):
        raise SettingsError(f"expected a Redis URL like {URL_FORMS}; got {redact(url)!r}")
    topology = Topology(form or "server")
    options = _options(url, parts)
    userinfo, _, netloc = parts.netloc.rpartition("@")
    user, _, password = userinfo.partition(":")
    path = unquote(parts.path)
    if base == "unix" and (netloc or not path):
        raise SettingsError(f"expected unix:///path/to/socket, with three slashes; got {redact(url)!r}")
    service, db = _service_and_db(url, topology, "" if base == "unix" else path, options.get("db"))
    return RedisAddress(
        topology=topology,
        hosts=() if base == "unix" else _hosts(url, netloc, _PORTS[topology]),
        path=path if base == "unix" else "",
        db=db,
        service=service,
        username=unquote(user) or options.get("username"),
        password=unquote(password) or options.get("password"),
        sentinel_username=options.get("sentinel_username"),
        sentinel_password=options.get("sentinel_password"),
        tls=_tls(url, options) if base == "rediss" else None,
        protocol=_protocol(url, options.get("protocol", "2")),
    )


def redact(url: str) -> str:
    """Return the URL with every secret in it replaced by `***`; also for text that is no valid URL."""
    scheme, mark, rest = url.rpartition("://") if url.count("://") == 1 else ("", "", url)
    # The last @ ends the user information even where somebody forgot to quote one in the password.
    userinfo, at, place = ("", "", rest) if rest.startswith("/") else rest.rpartition("@")
    if at:
        user, colon, _ = userinfo.partition(":")
        place = f"{user}:***@{place}" if colon else f"***@{place}"
    return scheme + mark + _SECRET.sub(r"\1***", place)


def _options(url: str, parts: SplitResult) -> dict[str, str]:
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := [name for name in options if name not in _OPTIONS]:
        raise SettingsError(
            f"{redact(url)!r} has the option {unknown[0]!r}, which llmq does not take; it takes {', '.join(_OPTIONS)}"
        )
    if parts.fragment:
        raise SettingsError(f"{redact(url)!r} has a '#': in a password, write it as %23")
    return options


def _hosts(url: str, netloc: str, port: int) -> tuple[tuple[str, int], ...]:
    hosts = []
    for text in netloc.split(","):
        match = re.fullmatch(r"(\[[^\]]+\]|[^:\[\]/]+)(?::([0-9]{1,5}))?", text)
        if match is None or not 0 < int(match[2] or port) < 65_536:
            raise SettingsError(f"expected host or host:port, got {text!r} in {redact(url)!r}")
        hosts.append((unquote(match[1].strip("[]")), int(match[2] or port)))
    return tuple(hosts)


def _service_and_db(url: str, topology: Topology, path: str, option: str | None) -> tuple[str, int]:
    """Read what follows the hosts: `/db`, or `/service/db` for Sentinel."""
    segments = [segment for segment in path.split("/") if segment]
    service = segments.pop(0) if topology is Topology.SENTINEL and segments else ""
    if topology is Topology.SENTINEL and not service:
        raise SettingsError(f"expected the service's name after the sentinels (.../mymaster), got {redact(url)!r}")
    db = option if option is not None else "/".join(segments) or "0"
    if not re.fullmatch(r"[0-9]{1,5}", db) or (topology is Topology.CLUSTER and int(db)):
        wanted = "no database number: a cluster has only 0" if topology is Topology.CLUSTER else "a database number"
        raise SettingsError(f"expected {wanted}, got {db!r} in {redact(url)!r}")
    return service, int(db)


def _protocol(url: str, text: str) -> int:
    if text not in ("2", "3"):
        raise SettingsError(f"expected protocol to be 2 or 3, got {text!r} in {redact(url)!r}")
    return int(text)


def _tls(url: str, options: Mapping[str, str]) -> dict[str, object]:
    """Return the ssl_* options; host names are checked unless the URL says otherwise (redis-py 5 did not)."""
    required = options.get("ssl_cert_reqs", "required")
    if required not in ("required", "optional", "none"):
        raise SettingsError(f"expected ssl_cert_reqs to be required, optional or none in {redact(url)!r}")
    check = options.get("ssl_check_hostname", "no" if required == "none" else "yes").lower()
    if check not in ("yes", "no", "true", "false"):
        raise SettingsError(f"expected ssl_check_hostname to be yes or no in {redact(url)!r}")
    given: dict[str, object] = {name: options[name] for name in _TLS_OPTIONS if name in options}
    return {**given, "ssl_cert_reqs": required, "ssl_check_hostname": check in ("yes", "true")}
