"""Keys and cipher: what goes in comes out, nothing else does, and a key shows nowhere."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmq.scheduler.cipher import PLAIN, Cipher, answer_of, error_of, job_owner, line_owner, request_of
from llmq.scheduler.errors import KeyMissing, SettingsError, TamperedError
from llmq.scheduler.keyring import MARK, OVERHEAD, Keyring, key_id_of, new_key, parse_keys
from llmq.scheduler.records import ResultRecord
from llmq.scheduler.settings import load_settings

OLD, NEW = bytes(range(32)), bytes(range(1, 33))
WHAT = request_of(job_owner("j1"))


def cipher(*keys: bytes, queue: str = "q") -> Cipher:
    """Return the cipher of a process with these keys."""
    return Cipher(Keyring.from_secrets(keys), queue)


@given(st.binary(max_size=5000))
def test_what_was_encrypted_comes_back(data: bytes) -> None:
    """Of any length, by another process that has the key; the payload says with which key it was made."""
    payload = cipher(OLD).encrypt(data, WHAT)
    other = cipher(NEW, OLD)
    assert data == other.decrypt(payload, WHAT)
    assert len(data) + OVERHEAD == len(payload)
    assert cipher(OLD).keyring.first == key_id_of(payload)


@given(st.binary(min_size=1, max_size=60), st.data())
def test_a_payload_of_which_one_bit_was_changed_is_refused(data: bytes, draw: st.DataObject) -> None:
    """Wherever it was changed: with another mark it is a payload that was never encrypted, and no job either."""
    one = cipher(OLD)
    payload = bytearray(one.encrypt(data, WHAT))
    place = draw.draw(st.integers(len(MARK), len(payload) - 1))
    payload[place] ^= 1 << draw.draw(st.integers(0, 7))
    with pytest.raises((TamperedError, KeyMissing)):
        one.decrypt(bytes(payload), WHAT)


@pytest.mark.parametrize("length", [len(MARK), len(MARK) + 4, OVERHEAD - 1, OVERHEAD])
def test_a_payload_that_was_cut_is_refused(length: int) -> None:
    """Where not even a key's id is left, the key is missing."""
    one = cipher(OLD)
    with pytest.raises((TamperedError, KeyMissing)):
        one.decrypt(one.encrypt(b"a long text", WHAT)[:length], WHAT)


@pytest.mark.parametrize(
    ("queue", "what"),
    [
        ("other", WHAT),
        ("q", request_of(job_owner("j2"))),
        ("q", answer_of(job_owner("j1"))),
        ("q", request_of(line_owner("j1", 1))),
    ],
)
def test_a_payload_is_bound_to_its_queue_its_kind_and_its_job(queue: str, what: str) -> None:
    """What is moved to another place is refused like what was changed."""
    payload = cipher(OLD).encrypt(b"text", WHAT)
    with pytest.raises(TamperedError):
        cipher(OLD, queue=queue).decrypt(payload, what)


def test_the_same_text_never_looks_the_same() -> None:
    """Nobody can tell that two prompts are equal."""
    one = cipher(OLD)
    assert 1000 == len({one.encrypt(b"text", WHAT) for _ in range(1000)})


def test_without_the_key_the_message_says_which_one_it_is_and_shows_none() -> None:
    """Which key is told by a hash of it."""
    payload = cipher(OLD).encrypt(b"text", WHAT)
    key_id = key_id_of(payload)
    for other, has in ((PLAIN, "has none"), (cipher(NEW), f"has {cipher(NEW).keyring.first}")):
        with pytest.raises(KeyMissing, match=f"encrypted with key {key_id}, and this process {has}") as caught:
            other.decrypt(payload, WHAT)
        assert key_id == caught.value.key_id


def test_what_was_stored_without_encryption_stays_readable() -> None:
    """Jobs from before a key was set run; and without any key all passes as it is."""
    assert b"\x81\xa1u" == cipher(OLD).decrypt(b"\x81\xa1u", WHAT)
    assert b"text" == PLAIN.encrypt(b"text", WHAT)
    assert "text" == PLAIN.encrypt_text("text", WHAT)


def test_an_answer_is_encrypted_with_the_key_of_its_request() -> None:
    """Who asked has that key, whichever the worker's first one is; a request that was not encrypted: no key."""
    worker = cipher(NEW, OLD)
    old = cipher(OLD)
    assert b"answer" == old.decrypt(worker.encrypt(b"answer", WHAT, old.keyring.first), WHAT)
    assert b"answer" == worker.encrypt(b"answer", WHAT, "")


def test_a_text_that_cannot_be_read_says_why_in_its_place() -> None:
    """A person reads it beside other facts, which must show all the same."""
    what = error_of(job_owner("j1"))
    stored = cipher(OLD).encrypt_text("engine said: naïve", what)
    assert "engine said: naïve" == cipher(NEW, OLD).decrypt_text(stored, what)
    assert "set LLMQ_ENCRYPTION_KEY" in cipher(NEW).decrypt_text(stored, what)
    assert "cannot be read" in cipher(OLD).decrypt_text(stored, error_of(job_owner("j2")))
    assert "cannot be read" in cipher(OLD).decrypt_text("llmq-encrypted:no base64", what)


def test_an_answer_of_a_line_that_was_changed_becomes_an_error_line() -> None:
    """G16: the line ends in one line, and harms no other; its job is still there to run again."""
    one, owner = cipher(OLD), line_owner("b", 7)
    answer, job = one.encrypt(b"{}", answer_of(owner)), one.encrypt(b"job", request_of(owner))
    record = ResultRecord(7, "k", "completed", 200, body=answer[:-1] + b"?", data=job)
    read = record.decrypted("b", one)
    assert (False, None, b"", "unreadable", b"job") == (
        read.ok, read.status_code, read.body, read.error_code, read.data
    )  # fmt: skip


class TestKeys:
    """The setting `encryption_key` and the file of keys."""

    def test_several_keys_stand_in_a_row(self) -> None:
        """Commas or white space between them; both alphabets of base64."""
        keys = [os.urandom(32) for _ in range(3)]
        text = f"{base64.b64encode(keys[0]).decode()}, {base64.urlsafe_b64encode(keys[1]).decode()}\n{new_key()}"
        assert keys[:2] == parse_keys(text)[:2]
        assert 3 == len(parse_keys(text))

    @pytest.mark.parametrize("text", ["hunter2", "a" * 44 + "=", base64.b64encode(b"x" * 31).decode(), ","])
    def test_what_is_no_key_is_refused_without_being_shown(self, text: str) -> None:
        """Somebody may have typed another secret; the line to type next is in the message."""
        with pytest.raises(SettingsError, match="llmq config --new-key") as caught:
            load_settings({}, {"LLMQ_ENCRYPTION_KEY": text})
        assert "," == text or text not in str(caught.value)

    def test_keys_of_a_file_come_after_those_of_the_variable(self, tmp_path: Path) -> None:
        """One a line; the first of all encrypts."""
        file = tmp_path / "keys"
        file.write_text(f"{base64.b64encode(OLD).decode()}\n{new_key()}\n")
        given = {"LLMQ_ENCRYPTION_KEY": base64.b64encode(NEW).decode(), "LLMQ_ENCRYPTION_KEY_FILE": str(file)}
        keyring = load_settings({}, given).settings.keyring()
        assert (cipher(NEW).keyring.first, 3) == (keyring.first, len(keyring.keys))
        del given["LLMQ_ENCRYPTION_KEY"]
        assert cipher(OLD).keyring.first == load_settings({}, given).settings.keyring().first

    @pytest.mark.parametrize("held", [None, b"\xff\xfe", b"hunter2"])
    def test_a_file_that_holds_no_keys_is_refused(self, tmp_path: Path, held: bytes | None) -> None:
        """Named, without what is in it."""
        file = tmp_path / "keys"
        if held is not None:
            file.write_bytes(held)
        settings = load_settings({}, {"LLMQ_ENCRYPTION_KEY_FILE": str(file)}).settings
        with pytest.raises(SettingsError, match=str(file)) as caught:
            settings.keyring()
        assert "hunter2" not in str(caught.value)

    def test_a_key_shows_in_no_repr(self) -> None:
        """Settings, keyring and key may land in a log."""
        text = new_key()
        settings = load_settings({}, {"LLMQ_ENCRYPTION_KEY": text}).settings
        keyring = settings.keyring()
        assert text not in repr(settings) + repr(keyring) + repr(keyring.keys) + repr(Cipher(keyring, "q"))
