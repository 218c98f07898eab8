"""`llmq keys` on a real server: made, listed, changed, revoked; the secret is printed once and is nowhere else."""

from __future__ import annotations

import re

import pytest

from llmq.scheduler.api_key import id_in
from tests.servers import client_of
from tests.system.cli_process import Done, llmq


@pytest.fixture
def url(system_redis_url: str) -> str:
    """The URL of an empty server."""
    return system_redis_url


def made(url: str, *options: str) -> tuple[str, str]:
    """Make a key; return its id and its secret."""
    secret = llmq("keys", "create", "--tenant", "anna", *options, url=url).out.strip()
    key_id = id_in(secret)
    assert key_id is not None
    return key_id, secret


def refused(done: Done) -> str:
    """Return the message of a command that was refused for how it was used."""
    assert 2 == done.code
    return done.error


def test_the_secret_is_the_one_line_on_stdout(url: str) -> None:
    """`OPENAI_API_KEY=$(llmq keys create ...)` works; what to know and to type next is on stderr."""
    done = llmq("keys", "create", "--tenant", "anna", "--rpm", "600", "--queue", "evals", url=url)
    assert 0 == done.code
    assert re.fullmatch(r"sk-llmq-[0-9a-f]{12}-[0-9a-f]{40}\n", done.out)
    assert f"llmq keys revoke {id_in(done.out.strip())} --queue evals" in done.err
    assert "600 requests/m" in done.err
    assert done.out.strip() not in done.err


def test_the_secret_is_shown_once(url: str) -> None:
    """Neither list nor show has it, for people or programs, and Redis has no part of it."""
    key_id, secret = made(url, "--name", "app")
    shown = "".join(
        llmq("keys", *words, url=url).out
        for words in (["ls"], ["ls", "--json"], ["show", key_id], ["show", key_id, "--json"])
    )
    assert key_id in shown
    assert secret.rpartition("-")[2] not in shown
    with client_of(url) as client:
        stored = b"".join(client.hgetall("llmq:{default}:keys").values())
    assert secret.rpartition("-")[2].encode() not in stored


def test_a_key_in_json(url: str) -> None:
    """One object with the secret and everything that was asked for."""
    done = llmq("keys", "create", "--tenant", "anna", "--name", "eval", "--rpm", "60", "--tpm", "1_000",
                "--concurrency", "4", "--class", "batch", "--expires", "30d", "--json", url=url)  # fmt: skip
    key = done.json
    assert (["batch"], 60, 1000, 4, "eval", "active") == tuple(
        key[name] for name in ("classes", "rpm", "tpm", "concurrency", "name", "state")
    )
    assert 30 * 86_400 == pytest.approx(key["expires_at"] - key["created_at"])
    listed = llmq("keys", "ls", "--json", url=url).json["keys"]
    assert [{name: value for name, value in key.items() if name not in ("key", "queue")}] == listed


def test_what_is_not_given_stays(url: str) -> None:
    """`set` changes one thing at a time; off and never take a limit away."""
    key_id, _ = made(url, "--rpm", "60", "--tpm", "1000", "--expires", "30d")
    changed = llmq("keys", "set", key_id, "--rpm", "90", "--name", "app", "--json", url=url).json
    assert (90, 1000, "app", "anna") == tuple(changed[name] for name in ("rpm", "tpm", "name", "tenant"))
    assert changed["expires_at"] is not None
    changed = llmq(
        "keys", "set", key_id, "--tpm", "off", "--expires", "never", "--tenant", "ben", "--json", url=url
    ).json
    assert (90, None, None, "ben") == tuple(changed[name] for name in ("rpm", "tpm", "expires_at", "tenant"))
    assert "90 requests/m" in llmq("keys", "show", key_id, url=url).out


def test_a_key_is_revoked_by_who_says_yes(url: str) -> None:
    """Without, the line to type is named and the key still opens; revoked, it is listed with --all only."""
    key_id, _ = made(url, "--name", "app")
    assert f"llmq keys revoke {key_id} --yes" in refused(llmq("keys", "revoke", key_id, url=url))
    assert "active" == llmq("keys", "show", key_id, "--json", url=url).json["state"]
    assert f"key {key_id} is revoked\n" == llmq("keys", "revoke", key_id, "--yes", url=url).out
    assert "revoked" == llmq("keys", "revoke", key_id, "--json", url=url).json["state"]
    left = llmq("keys", "ls", url=url)
    assert key_id not in left.out
    assert "llmq keys ls --all" in left.err
    assert key_id in llmq("keys", "ls", "--all", url=url).out


def test_a_queue_without_keys_says_what_that_means(url: str) -> None:
    """Nothing on stdout, and one line on stderr."""
    done = llmq("keys", "ls", url=url)
    assert (0, "") == (done.code, done.out)
    assert "anybody" in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show", "nothing"], "llmq keys ls"),
        (["set", "nothing", "--rpm", "5"], "llmq keys ls"),
        (["set", "nothing"], "expected something to change"),
        (["create", "--tenant", "a|b"], "tenant"),
        (["create", "--tenant", "a", "--rpm", "0"], "--rpm: expected a whole number"),
        (["create", "--tenant", "a", "--tpm", "-5"], "--tpm: expected a whole number"),
        (["create", "--tenant", "a", "--concurrency", "many"], "--concurrency: expected a whole number"),
        (["create", "--tenant", "a", "--expires", "0"], "--expires: expected a time"),
        (["create", "--tenant", "a", "--expires", "soon"], "--expires: expected a duration"),
        (["create"], "--tenant"),
    ],
)
def test_what_is_wrong_is_named(url: str, words: list[str], said: str) -> None:
    """Exit 2, one line, and nothing was made."""
    assert said in refused(llmq("keys", *words, url=url))
    with client_of(url) as client:
        assert 0 == client.exists("llmq:{default}:keys")
