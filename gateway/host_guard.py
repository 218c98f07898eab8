"""The host guard: keeps web pages of strangers away from a gateway that asks for no key.

A gateway on this host that lets anybody in trusts whoever can connect to it, and a browser can: a page may post to
`http://127.0.0.1:8800` (it says so in `Origin`), or let its own name lead here and read the answers too (DNS rebinding:
then `Host` is that name). So while no API key has been made, requests are served for names of this host and those that
the operator has named, and for web pages of these and of the allowed origins. A key that a page does not know is
guard enough afterwards.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

from llmq.gateway.errors import ApiError

#: Any name, or any origin.
ANY = "*"


class HostGuard:
    """Looks at `Host` and `Origin` while `open_to_all` says that nobody needs a key.

    `hosts` are the names served beside those of this host (None: any, on an address that other hosts reach), `origins`
    those of web pages.
    """

    def __init__(
        self, open_to_all: Callable[[], bool], hosts: Sequence[str] | None, origins: Sequence[str] = ()
    ) -> None:
        self._open_to_all = open_to_all
        self._hosts = None if hosts is None or ANY in hosts else frozenset(map(_plain, hosts))
        self._origins = frozenset(origin.lower().rstrip("/") for origin in origins)

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise ApiError (403) for a request that a stranger's web page may have made."""
        if not self._open_to_all():
            return
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._serves(host_of(host)):
            raise ApiError(
                403,
                f"Host: while no API key has been made, this gateway serves as this host only, not as {host[:80]!r}; "
                "use its address, allow the name (llmq gateway --allow-host NAME), or make a key (llmq keys create)",
                code="host_not_allowed",
            )
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and not self._trusts(origin, host):
            raise ApiError(
                403,
                f"Origin: while no API key has been made, web pages of {origin[:80]!r} may not call this gateway; "
                "allow them (llmq gateway --cors-origin URL), or make a key (llmq keys create)",
                code="origin_not_allowed",
            )

    def _serves(self, name: str) -> bool:
        # Browsers always say where they go; what says nothing is no browser.
        return not name or self._hosts is None or is_of_this_host(name) or name in self._hosts

    def _trusts(self, origin: str, host: str) -> bool:
        if ANY in self._origins or origin.lower().rstrip("/") in self._origins:
            return True
        try:
            place = urlsplit(origin).netloc.lower()
        except ValueError:
            return False
        if place and place == host.lower():
            return True  # its own page, by a name that is served
        name = host_of(place)
        return bool(name) and (is_of_this_host(name) or (self._hosts is not None and name in self._hosts))


def is_of_this_host(name: str) -> bool:
    """Whether a name or an address leads to this host, whoever resolves it."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def host_of(netloc: str) -> str:
    """Return the name in `name:port`, as it is compared; brackets of IPv6 and a last dot are no part of it."""
    if netloc.startswith("["):
        return _plain(netloc[1:].partition("]")[0])
    return _plain(netloc.partition(":")[0])


def _plain(name: str) -> str:
    return name.strip().strip("[]").rstrip(".").lower()
