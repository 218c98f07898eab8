"""Settings: four layers, one name, all faults at once, no secrets shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmq.scheduler.errors import SettingsError, UsageError
from llmq.scheduler.settings import Settings, check_queue, check_tenant, load_settings


@pytest.fixture(autouse=True)
def _no_file_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder, with no configuration folder."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def test_the_defaults_are_those_of_the_documentation() -> None:
    """Nothing given: the embedded server, the queue and tenant `default`, the documented limits."""
    settings = load_settings({}, {}).settings
    given = settings.model_dump(exclude={"home"})
    assert given == {
        "redis_url": None,
        "queue": "default",
        "tenant": "default",
        "engine": None,
        "engine_api_key": None,
        "engine_idle_timeout": 3600.0,
        "encryption_key": None,
        "encryption_key_file": None,
        "concurrency": None,
        "grace": 30.0,
        "log_level": "warning",
        "log_format": "text",
        "listen_host": "127.0.0.1",
        "listen_port": 8800,
        "flex_timeout": 600.0,
        "direct": None,
        "cors_origins": (),
        "allow_hosts": (),
        "gateway_files": None,
        "max_file_bytes": 200_000_000,
        "max_batch_lines": 50_000,
        "max_connections": 10_000,
        "max_line_bytes": 1_048_576,
        "max_body_bytes": 16_777_216,
        "max_answer_bytes": 8_388_608,
    }
    assert settings.home.name == "llmq"


def test_an_argument_wins_over_the_environment_and_the_environment_over_the_file(tmp_path: Path) -> None:
    """Each layer holds only what was given, and a value tells where it is from."""
    file = tmp_path / "my.toml"
    file.write_text('queue = "file"\ntenant = "file"\ngrace = "2m"\n')
    loaded = load_settings({"queue": "argument", "tenant": None}, {"LLMQ_QUEUE": "env", "LLMQ_TENANT": "env"}, file)
    assert (loaded.settings.queue, loaded.settings.tenant, loaded.settings.grace) == ("argument", "env", 120.0)
    assert [loaded.source(name) for name in ("queue", "tenant", "grace", "engine")] == [
        "argument",
        "LLMQ_TENANT",
        str(file),
        "default",
    ]


def test_the_file_of_the_working_folder_wins_over_that_of_the_user(tmp_path: Path) -> None:
    """A project's llmq.toml is taken whole; without one, the user's."""
    user = tmp_path / "config" / "llmq"
    user.mkdir(parents=True)
    (user / "llmq.toml").write_text('queue = "user"\n')
    assert load_settings({}, {}).settings.queue == "user"
    (tmp_path / "work" / "llmq.toml").write_text('queue = "project"\n')
    assert load_settings({}, {}).settings.queue == "project"


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a given environment, that of the process is read."""
    monkeypatch.setenv("LLMQ_HOME", str(tmp_path / "elsewhere"))
    assert load_settings({}).settings.home == tmp_path / "elsewhere"


def test_a_tilde_in_home_is_expanded(tmp_path: Path) -> None:
    """In a file or a compose file no shell does it."""
    assert load_settings({}, {"LLMQ_HOME": "~/llmq"}).settings.home == tmp_path / "llmq"


def test_durations_and_sizes_are_read_in_text_form() -> None:
    """The same forms everywhere, with and without a unit."""
    settings = load_settings({"grace": 5}, {"LLMQ_MAX_LINE_BYTES": "64k", "LLMQ_MAX_BODY_BYTES": "2000"}).settings
    assert (settings.grace, settings.max_line_bytes, settings.max_body_bytes) == (5.0, 65_536, 2000)


def test_an_empty_variable_is_not_set() -> None:
    """`LLMQ_REDIS_URL=` is how a compose file leaves a variable out."""
    assert load_settings({}, {"LLMQ_REDIS_URL": "", "LLMQ_QUEU": ""}).settings.redis_url is None


def test_all_faults_are_reported_at_once() -> None:
    """Nobody repairs one setting to be told of the next."""
    with pytest.raises(SettingsError) as caught:
        load_settings({"grace": "soon"}, {"LLMQ_CONCURRENCY": "0", "LLMQ_QUEUE": "a b", "LLMQ_QEUE": "x"})
    assert str(caught.value).splitlines() == [
        "settings are wrong:",
        "LLMQ_QEUE: there is no such setting; did you mean LLMQ_QUEUE?",
        "LLMQ_QUEUE: expected a queue's name of 1 to 100 letters, digits, '.', '_' or '-', got 'a b'",
        "LLMQ_CONCURRENCY: expected 1 or more",
        "--grace: expected a duration like 90, 90s, 15m, 4h, 7d or 500ms, got 'soon'",
    ]


def test_an_unknown_name_is_refused_in_every_layer(tmp_path: Path) -> None:
    """A misspelt setting that does nothing is worse than an error; the nearest name is suggested."""
    file = tmp_path / "my.toml"
    file.write_text("max-line-bytes = 1\n")
    with pytest.raises(SettingsError) as caught:
        load_settings({"tenent": "x"}, {"LLMQ_REDISURL": "x", "LLMQ_XYZZY": "1", "OTHER": "1"}, file)
    assert str(caught.value).splitlines()[1:] == [
        "--tenent: there is no such setting; did you mean --tenant?",
        "LLMQ_REDISURL: there is no such setting; did you mean LLMQ_REDIS_URL?",
        f"LLMQ_XYZZY: there is no such setting; known: {', '.join(Settings.model_fields)}",
        f"max-line-bytes in {file}: there is no such setting; did you mean max_line_bytes in {file}?",
    ]


@pytest.mark.parametrize("line", ["concurrency = true", "grace = true", "max_line_bytes = false", "queue = 1"])
def test_a_value_of_the_wrong_type_is_refused(tmp_path: Path, line: str) -> None:
    """True is not the number 1."""
    file = tmp_path / "my.toml"
    file.write_text(line)
    with pytest.raises(SettingsError, match=rf"^{line.split()[0]} in .*my\.toml: "):
        load_settings({}, {}, file)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A file that was asked for must be there, and be TOML."""
    with pytest.raises(SettingsError, match=r"cannot read the settings of .*absent\.toml: No such file"):
        load_settings({}, {}, tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("queue = \n")
    with pytest.raises(SettingsError, match=r"bad\.toml is not valid TOML: .*line 1"):
        load_settings({}, {}, tmp_path / "bad.toml")


def test_no_secret_is_shown() -> None:
    """Neither in a repr, nor in a string, nor in a message about a wrong value."""
    environ = {
        "LLMQ_REDIS_URL": "redis://u:hush@h",
        "LLMQ_ENGINE": "http://u:hush@h/v1",
        "LLMQ_ENGINE_API_KEY": "hush",
    }
    loaded = load_settings({}, environ)
    assert "hush" not in f"{loaded!r} {loaded.settings} {loaded.settings!r}"
    assert loaded.settings.engine_api_key is not None
    assert loaded.settings.engine_api_key.get_secret_value() == "hush"
    assert loaded.settings.redis_url == "redis://u:hush@h"
    with pytest.raises(SettingsError) as caught:
        load_settings({"redis_url": "http://u:hush@h"}, {})
    assert "hush" not in str(caught.value)


def test_settings_do_not_change() -> None:
    """What a process was started with stays; live settings are in Redis."""
    with pytest.raises(ValueError, match="frozen"):
        load_settings({}, {}).settings.queue = "other"


@pytest.mark.parametrize("name", ["default", "a", "x" * 100, "llama-3.1_8b", "..."])
def test_a_queue_may_be_named_so(name: str) -> None:
    """Letters, digits, dot, underscore and hyphen."""
    assert check_queue(name) == name


@pytest.mark.parametrize("name", ["", "x" * 101, "a b", "a{b}", "a:b", "ä", "a\n", "a/b"])
def test_a_queue_may_not_be_named_so(name: str) -> None:
    """A brace would change the hash tag, a newline at the end is a slip."""
    with pytest.raises(UsageError, match="expected a queue's name"):
        check_queue(name)


@pytest.mark.parametrize("name", ["default", "Team Blå", "x" * 100, "a:b", "ünï"])
def test_a_tenant_may_be_named_so(name: str) -> None:
    """Any text that people call a team."""
    assert check_tenant(name) == name


@pytest.mark.parametrize("name", ["", "x" * 101, "a|b", "a\nb", "a\x00", "\x85", "\ud800"])
def test_a_tenant_may_not_be_named_so(name: str) -> None:
    """`|` separates the fields of the order of lanes; control characters spoil tables and logs."""
    with pytest.raises(UsageError, match="expected a tenant's name"):
        check_tenant(name)


def test_an_unknown_source_is_a_mistake_of_the_caller() -> None:
    """`source` knows the names of the model only."""
    with pytest.raises(KeyError):
        load_settings({}, {}).source("queu")


def test_origins_are_a_list_in_every_place(tmp_path: Path) -> None:
    """Separated by commas or spaces where there is only text; a list in the file."""
    file = tmp_path / "my.toml"
    file.write_text('cors_origins = ["https://a", "https://b"]\n')
    assert ("https://a", "https://b") == load_settings({}, {}, file).settings.cors_origins
    assert ("https://a", "https://b") == load_settings(
        {}, {"LLMQ_CORS_ORIGINS": "https://a, https://b"}
    ).settings.cors_origins
