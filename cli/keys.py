"""`llmq keys`: the API keys of the gateways: made, listed, changed, revoked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Annotated, TypeVar

import typer

from llmq.cli.asking import confirm
from llmq.cli.options import Json, Queue, RedisUrl, Yes
from llmq.cli.render import age, command, notice, print_facts, print_json, print_line, print_table
from llmq.cli.running import run_async
from llmq.cli.session import load, open_session, where_options
from llmq.scheduler.api_key import ApiKey, KeyLimits, KeyState
from llmq.scheduler.api_keys import ApiKeys, check_name
from llmq.scheduler.errors import UsageError
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.settings import Settings, check_tenant
from llmq.scheduler.units import format_duration, parse_duration

T = TypeVar("T")

KeyId = Annotated[str, typer.Argument(metavar="ID", help="The key's id, as in sk-llmq-ID-...")]
Tenant = Annotated[str, typer.Option("--tenant", metavar="T", help="Whose jobs are those that come with this key.")]
Name = Annotated[str | None, typer.Option("--name", metavar="N", help="What it is for, for people who read the list.")]
Requests = Annotated[str | None, typer.Option("--rpm", metavar="N|off", help="Requests a minute (default: no limit).")]
Tokens = Annotated[
    str | None,
    typer.Option("--tpm", metavar="N|off", help="LLM tokens a minute, prompt and answer (default: no limit)."),
]
AtOneTime = Annotated[
    str | None, typer.Option("--concurrency", metavar="N|off", help="Requests at one time (default: no limit).")
]
Classes = Annotated[
    list[TrafficClass] | None,
    typer.Option(
        "--class", metavar="CLASS", help="The only class that it may use: interactive or batch (default: both)."
    ),
]
Expires = Annotated[
    str | None,
    typer.Option("--expires", metavar="TIME", help="For how long it is good, as in 30d (default: for ever)."),
]

_MOST = 10**9


def create(
    tenant: Tenant,
    name: Name = None,
    rpm: Requests = None,
    tpm: Tokens = None,
    concurrency: AtOneTime = None,
    classes: Classes = None,
    expires: Expires = None,
    queue: Queue = None,
    redis: RedisUrl = None,
    json: Json = False,
) -> None:
    """Make an API key, and print its secret: once, and only here.

    From the first key on, every gateway of the queue wants one from its callers. Limits hold for the key at all
    gateways together; after a pause, a minute's worth may be taken at once.

    \b
    Examples:
      llmq keys create --tenant chat
      llmq keys create --tenant eval --class batch --expires 30d
      export OPENAI_API_KEY=$(llmq keys create --tenant app --rpm 600)
    """
    loaded = load(queue=queue, redis_url=redis)
    limits = _changed(KeyLimits(), rpm, tpm, concurrency)
    lasts_s = None if expires is None else _duration(expires)

    async def work(keys: ApiKeys) -> tuple[ApiKey, str]:
        return await keys.create(tenant, name=name or "", classes=_classes(classes), limits=limits, lasts_s=lasts_s)

    (key, secret), _ = run_async(lambda: _with_keys(loaded.settings, work))
    if json:
        print_json({"queue": loaded.settings.queue, "key": secret, **key.to_json(key.created_at)})
        return
    print_line(secret)
    revoke_it = command("llmq", "keys", "revoke", key.id, *where_options(loaded))
    notice(f"made key {key.id} of tenant {tenant}: {_limits(key)}; it is not shown again. To end it: {revoke_it}")


def ls(
    all_: Annotated[bool, typer.Option("--all", help="Also those that were revoked or have expired.")] = False,
    queue: Queue = None,
    redis: RedisUrl = None,
    json: Json = False,
) -> None:
    """List the API keys of a queue; the secrets are nowhere.

    \b
    Examples:
      llmq keys ls
      llmq keys ls --all --json
    """
    settings = load(queue=queue, redis_url=redis).settings
    keys, now = run_async(lambda: _with_keys(settings, lambda keys: keys.ls()))
    shown = [key for key in keys if all_ or key.state(now) is KeyState.ACTIVE]
    if json:
        print_json({"queue": settings.queue, "keys": [key.to_json(now) for key in shown]})
        return
    if shown:
        columns = ["id", "tenant", "state", "classes", "limits", "age>", "expires>", "name"]
        print_table(columns, [_row(key, now) for key in shown])
    elif not keys:
        notice(f"queue {settings.queue} has no API keys: its gateways take anybody, and serve this host only")
    if len(shown) < len(keys):
        notice(f"{len(keys) - len(shown):,} revoked or expired: llmq keys ls --all")


def show(key_id: KeyId, queue: Queue = None, redis: RedisUrl = None, json: Json = False) -> None:
    """Show what is known of an API key.

    \b
    Example:
      llmq keys show 3f9a1c0b7d2e
    """
    settings = load(queue=queue, redis_url=redis).settings
    key, now = run_async(lambda: _with_keys(settings, lambda keys: keys.show(key_id)))
    _print_key(key, now, json)


def set_(
    key_id: KeyId,
    tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="T", help="Whose jobs they are from now on.")
    ] = None,
    name: Name = None,
    rpm: Requests = None,
    tpm: Tokens = None,
    concurrency: AtOneTime = None,
    classes: Classes = None,
    expires: Annotated[
        str | None, typer.Option("--expires", metavar="TIME|never", help="For how long from now it is good.")
    ] = None,
    queue: Queue = None,
    redis: RedisUrl = None,
    json: Json = False,
) -> None:
    """Change an API key; what is not given stays. Gateways go by it within two seconds.

    \b
    Examples:
      llmq keys set 3f9a1c0b7d2e --rpm 1200 --tpm off
      llmq keys set 3f9a1c0b7d2e --class interactive --class batch
    """
    settings = load(queue=queue, redis_url=redis).settings
    if all(given is None for given in (tenant, name, rpm, tpm, concurrency, classes, expires)):
        raise UsageError(f"expected something to change, such as --rpm 600; what it is now: llmq keys show {key_id}")
    lasts_s = None if expires is None or expires == "never" else _duration(expires)

    def change(key: ApiKey, now: float) -> ApiKey:
        ends = key.expires_at if expires is None else None if lasts_s is None else now + lasts_s
        return replace(
            key,
            tenant=key.tenant if tenant is None else check_tenant(tenant),
            name=key.name if name is None else check_name(name),
            classes=key.classes if classes is None else _classes(classes),
            limits=_changed(key.limits, rpm, tpm, concurrency),
            expires_at=ends,
        )

    key, now = run_async(lambda: _with_keys(settings, lambda keys: keys.change(key_id, change)))
    _print_key(key, now, json)


def revoke(key_id: KeyId, yes: Yes = False, queue: Queue = None, redis: RedisUrl = None, json: Json = False) -> None:
    """Revoke an API key for good.

    Within two seconds no gateway takes it any more. What its callers have queued still runs.
    After the last key is revoked the gateways stay closed.

    \b
    Example:
      llmq keys revoke 3f9a1c0b7d2e --yes
    """
    loaded = load(queue=queue, redis_url=redis)
    key, now = run_async(lambda: _with_keys(loaded.settings, lambda keys: keys.show(key_id)))
    if key.state(now) is not KeyState.REVOKED:
        again = command("llmq", "keys", "revoke", key_id, *where_options(loaded))
        named = f" ({key.name})" if key.name else ""
        confirm(f"this revokes key {key_id}{named} of tenant {key.tenant} for good", again, yes=yes)
        key, now = run_async(lambda: _with_keys(loaded.settings, lambda keys: keys.revoke(key_id)))
    if json:
        print_json(key.to_json(now))
    else:
        print_line(f"key {key_id} is revoked")


async def _with_keys(settings: Settings, work: Callable[[ApiKeys], Awaitable[T]]) -> tuple[T, float]:
    """Do one thing with the keys of the queue; return what came of it, and the time on Redis' clock."""
    async with open_session(settings) as session:
        return await work(ApiKeys(session.queue)), await session.queue.now_ms() / 1000


def _changed(limits: KeyLimits, rpm: str | None, tpm: str | None, concurrency: str | None) -> KeyLimits:
    return KeyLimits(
        limits.requests if rpm is None else _limit("--rpm", rpm),
        limits.tokens if tpm is None else _limit("--tpm", tpm),
        limits.concurrency if concurrency is None else _limit("--concurrency", concurrency),
    )


def _limit(option: str, text: str) -> int | None:
    digits = text.strip().replace("_", "").replace(",", "")
    if digits.lower() == "off":
        return None
    if not (digits.isascii() and digits.isdigit() and 1 <= int(digits) <= _MOST):
        raise UsageError(f"{option}: expected a whole number from 1 to {_MOST:,}, or off; got {text!r}")
    return int(digits)


def _classes(classes: list[TrafficClass] | None) -> frozenset[TrafficClass]:
    return frozenset(classes or TrafficClass)


def _duration(text: str) -> float:
    try:
        seconds = parse_duration(text)
    except UsageError as error:
        raise UsageError(f"--expires: {error}") from None
    if seconds <= 0:
        raise UsageError(f"--expires: expected a time that is not over yet, like 30d; got {text!r}")
    return seconds


def _limits(key: ApiKey) -> str:
    limits = key.limits
    named = ((limits.requests, "requests/m"), (limits.tokens, "tokens/m"), (limits.concurrency, "at one time"))
    return ", ".join(f"{limit:,} {name}" for limit, name in named if limit is not None) or "no limits"


def _expiry(key: ApiKey, now: float) -> str:
    return "never" if key.expires_at is None else f"in {format_duration(max(0.0, round(key.expires_at - now)))}"


def _row(key: ApiKey, now: float) -> list[str]:
    state, classes = key.state(now), ", ".join(sorted(key.classes))
    expires = _expiry(key, now) if state is KeyState.ACTIVE else "-"
    return [key.id, key.tenant, state, classes, _limits(key), age(key.created_at, now), expires, key.name]


def _print_key(key: ApiKey, now: float, json: bool) -> None:
    if json:
        print_json(key.to_json(now))
        return
    state = key.state(now)
    print_facts(
        {
            "id": key.id,
            "name": key.name,
            "tenant": key.tenant,
            "state": f"revoked {age(key.revoked_at, now)} ago" if key.revoked_at else state,
            "classes": ", ".join(sorted(key.classes)),
            "limits": _limits(key),
            "made": f"{age(key.created_at, now)} ago",
            "expires": _expiry(key, now) if state is KeyState.ACTIVE else "",
        }
    )


def register(app: typer.Typer) -> None:
    """Add the verbs to the noun's app."""
    for verb in (create, ls, show, revoke):
        app.command()(verb)
    app.command("set")(set_)
