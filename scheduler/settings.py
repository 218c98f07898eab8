"""What one process of llmq needs to know before it starts, from four places, in one typed value.

A value comes from the first of: an argument (a flag of the command line), the environment (`LLMQ_QUEUE`), a file
(`queue = "..."` in llmq.toml), the default. The name is the same in all of them. Whatever is wrong is reported at once,
and a name that llmq does not know is refused: a misspelt setting that does nothing is worse than an error.

These are the settings of a process. Those of a queue, which act on every worker at once (rate, deadline, reserve,
...), live in Redis: see `llmq set`.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import platformdirs
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError

from llmq.scheduler.errors import SettingsError, UsageError
from llmq.scheduler.keyring import Keyring, parse_keys
from llmq.scheduler.redis_url import parse_redis_url, redact
from llmq.scheduler.units import parse_duration, parse_size

ENVIRONMENT_PREFIX = "LLMQ_"
FILE_NAME = "llmq.toml"

_QUEUE = re.compile(r"[A-Za-z0-9._-]{1,100}")


def check_queue(name: str) -> str:
    """Return the name of a queue; raises UsageError for one that could not stand in a key, a path or a label."""
    if not _QUEUE.fullmatch(name):
        raise UsageError(f"expected a queue's name of 1 to 100 letters, digits, '.', '_' or '-', got {_short(name)}")
    return name


def check_tenant(name: str) -> str:
    """Return the name of a tenant; raises UsageError for one that the order of lanes could not hold."""
    if not 1 <= len(name) <= 100 or "|" in name or any(unicodedata.category(letter) in ("Cc", "Cs") for letter in name):
        raise UsageError(
            f"expected a tenant's name of 1 to 100 characters without '|' and control characters, got {_short(name)}"
        )
    return name


def _check(check: Callable[[str], object]) -> AfterValidator:
    """Validate text by a function that raises UsageError, which pydantic would let pass as a fault of ours."""

    def validate(value: str) -> str:
        try:
            check(value)
        except UsageError as error:
            raise ValueError(str(error)) from None
        return value

    return AfterValidator(validate)


def _read(parse: Callable[[str], float]) -> BeforeValidator:
    """Read a value that people write with a unit; a bare number of llmq.toml is read as if it were text."""

    def validate(value: object) -> object:
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            return value
        try:
            return parse(str(value))
        except UsageError as error:
            raise ValueError(str(error)) from None

    return BeforeValidator(validate)


def _no_bool(value: object) -> object:
    # To Python true is the number 1; nobody who writes it means that.
    if isinstance(value, bool):
        raise ValueError(f"expected a number, got {str(value).lower()}")
    return value


def _check_keys(value: SecretStr) -> SecretStr:
    parse_keys(value.get_secret_value())
    return value


def _split(value: object) -> object:
    """Read a list that was given as one text."""
    return value.replace(",", " ").split() if isinstance(value, str) else value


Seconds = Annotated[float, BeforeValidator(_no_bool), _read(parse_duration)]
Bytes = Annotated[int, BeforeValidator(_no_bool), _read(parse_size), Field(ge=1)]


class Settings(BaseModel):
    """The settings of one process; durations in seconds, sizes in bytes.

    Secrets do not show in its repr, nor do the passwords of its URLs.
    """

    # An invalid value is shown by our own messages, which know what is secret.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    redis_url: Annotated[str, _check(parse_redis_url)] | None = None
    """Where Redis is; None: the embedded server in `home`."""

    home: Annotated[Path, AfterValidator(Path.expanduser)] = Field(
        default_factory=lambda: platformdirs.user_data_path("llmq", appauthor=False)
    )
    """The folder of the embedded server and its data."""

    queue: Annotated[str, _check(check_queue)] = "default"
    tenant: Annotated[str, _check(check_tenant)] = "default"

    engine: str | None = None
    """The inference engine's URL, or one of its other forms; None: look for one on the usual ports."""

    engine_api_key: SecretStr | None = None

    engine_idle_timeout: Annotated[Seconds, Field(gt=0)] = 3600.0
    """How long an engine may say nothing in a request before that is given up: one that hangs would never end it."""

    encryption_key: Annotated[SecretStr, AfterValidator(_check_keys)] | None = None
    """Keys for what holds prompts or answers in Redis, commas between them: the first encrypts, all decrypt."""

    encryption_key_file: Annotated[Path, AfterValidator(Path.expanduser)] | None = None
    """A file with such keys, one a line; they come after those of `encryption_key`."""

    concurrency: Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=100_000)] | None = None
    """How many requests a worker has in flight; None: the engine's slots, where it tells them."""

    grace: Seconds = 30.0
    """How long a worker that ends waits for its running jobs before it hands them back."""

    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """From which level on events are shown by the commands that serve."""

    log_format: Literal["text", "json"] = "text"
    """How: `key=value`, or one JSON object a line."""

    listen_host: str = "127.0.0.1"
    """The address that a gateway listens on, and its port."""

    listen_port: Annotated[int, BeforeValidator(_no_bool), Field(ge=0, le=65_535)] = 8800

    flex_timeout: Seconds = 600.0
    """How long a single call of the batch class may wait in the queue."""

    direct: str | None = None
    """An engine that a gateway asks for chat while Redis is away; None: it answers 503."""

    gateway_files: str | None = None
    """Where gateways keep files and batches: a folder, or a URL of fsspec; None: a folder in `home`."""

    max_file_bytes: Bytes = 200 * 1000**2
    max_batch_lines: Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=100_000_000)] = 50_000
    """The largest file that may be uploaded to a gateway, and the most requests in it."""

    cors_origins: Annotated[tuple[str, ...], BeforeValidator(_split)] = ()
    """Origins whose web pages may call a gateway; none by default."""

    allow_hosts: Annotated[tuple[str, ...], BeforeValidator(_split)] = ()
    """Names beside this host's own by which a gateway is served while no API key has been made; `*` is any."""

    max_connections: Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=1_000_000)] = 10_000
    """Connections of clients that a gateway holds at a time."""

    max_line_bytes: Bytes = 1024**2
    max_body_bytes: Bytes = 16 * 1024**2
    max_answer_bytes: Bytes = 8 * 1024**2

    def keyring(self) -> Keyring:
        """Return the keys that encrypt what is stored; raises SettingsError where they cannot be had."""
        given = self.encryption_key.get_secret_value() if self.encryption_key is not None else None
        return Keyring.load(given, self.encryption_key_file)

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, redact(value) if name in ("redis_url", "engine", "direct") and isinstance(value, str) else value


#: What pydantic calls a number that cannot be taken, in our words.
_LIMITS = {
    "greater_than_equal": "expected {ge} or more",
    "less_than_equal": "expected {le} or less",
    "int_parsing": "expected a whole number",
    "int_from_float": "expected a whole number",
    "int_type": "expected a whole number",
    "literal_error": "expected {expected}",
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings, and where each one is from."""

    settings: Settings
    sources: Mapping[str, str]

    def source(self, name: str) -> str:
        """Say where a setting is from: "argument", "LLMQ_QUEUE", the path of a file, or "default"."""
        if name not in Settings.model_fields:
            raise KeyError(name)
        return self.sources.get(name, "default")


@dataclass(frozen=True, slots=True)
class _Layer:
    """What one place gave: each value with what to call it in a message (`LLMQ_QUEUE`, `queue in llmq.toml`)."""

    values: Mapping[str, object]
    source: Callable[[str], str]
    label: Callable[[str], str]


def load_settings(
    arguments: Mapping[str, object], environ: Mapping[str, str] | None = None, file: Path | None = None
) -> Loaded:
    """Return the settings from arguments (None means: not given), environment and file.

    `file` is one that must exist; without it, ./llmq.toml and then the one in the user's configuration folder is
    taken, if there is one. Raises SettingsError with everything that is wrong.
    """
    layers = (
        _Layer(
            {name: value for name, value in arguments.items() if value is not None},
            lambda _: "argument",
            lambda name: f"--{name.replace('_', '-')}",
        ),
        _environment_layer(os.environ if environ is None else environ),
        _file_layer(file or _find_file()),
    )
    faults = [fault for layer in layers for fault in _unknown_names(layer)]
    chosen = {name: layer for layer in reversed(layers) for name in layer.values if name in Settings.model_fields}
    try:
        settings = Settings.model_validate({name: layer.values[name] for name, layer in chosen.items()})
    except ValidationError as error:
        faults += [_describe(detail, chosen) for detail in error.errors()]
    if faults:
        raise SettingsError(faults[0] if len(faults) == 1 else "\n".join(["settings are wrong:", *faults]))
    return Loaded(settings, {name: layer.source(name) for name, layer in chosen.items()})


def _environment_layer(environ: Mapping[str, str]) -> _Layer:
    def variable(name: str) -> str:
        return f"{ENVIRONMENT_PREFIX}{name.upper()}"

    # An empty variable is one that is not set: `LLMQ_REDIS_URL=` is how compose files and shells unset one.
    values: dict[str, object] = {
        variable.removeprefix(ENVIRONMENT_PREFIX).lower(): value
        for variable, value in environ.items()
        if variable.startswith(ENVIRONMENT_PREFIX) and value
    }
    return _Layer(values, source=variable, label=variable)


def _file_layer(file: Path | None) -> _Layer:
    values: dict[str, Any] = {}
    if file is not None:
        try:
            values = tomllib.loads(file.read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise SettingsError(f"cannot read the settings of {file}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SettingsError(f"{file} is not valid TOML: {error}") from error
    return _Layer(values, source=lambda _: str(file), label=lambda name: f"{name} in {file}")


def _find_file() -> Path | None:
    folders = (Path.cwd(), platformdirs.user_config_path("llmq", appauthor=False))
    return next((folder / FILE_NAME for folder in folders if (folder / FILE_NAME).is_file()), None)


def _unknown_names(layer: _Layer) -> list[str]:
    faults = []
    for name in layer.values:
        if name not in Settings.model_fields:
            near = difflib.get_close_matches(name.replace("-", "_").lower(), Settings.model_fields, n=1)
            hint = f"did you mean {layer.label(near[0])}?" if near else f"known: {', '.join(Settings.model_fields)}"
            faults.append(f"{layer.label(name)}: there is no such setting; {hint}")
    return faults


def _describe(detail: Mapping[str, Any], chosen: Mapping[str, _Layer]) -> str:
    name = str(detail["loc"][0])
    message = str(detail["msg"]).removeprefix("Value error, ")
    if (limit := _LIMITS.get(str(detail["type"]))) is not None:
        message = limit.format(**detail.get("ctx", {}))
    return f"{chosen[name].label(name) if name in chosen else name}: {message[:1].lower()}{message[1:]}"


def _short(value: str) -> str:
    return repr(value) if len(value) <= 60 else f"{value[:60]!r}... ({len(value)} characters)"
