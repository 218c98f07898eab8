"""The keyring: the keys with which a process encrypts what it stores (`cipher.py`), from LLMQ_ENCRYPTION_KEY.

The first key encrypts and all of them decrypt, so that a key is replaced without a stop: give every process the new one
behind the old, then in front of it, then alone. A key shows nowhere; its id, a hash, may.

An encrypted payload is AES-256-GCM under a key that the process derives for itself (HMAC-SHA256 of a random salt),
because random nonces are safe for some 2^32 messages a key, which one queue writes in months.

    offset  bytes  what
    0       4      MARK: begins neither msgpack nor UTF-8
    4       4      id of the key
    8       16     salt of the derived key
    24      12     nonce
    36      ..     ciphertext, and a tag of 16 bytes
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import hmac
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from llmq.scheduler.errors import KeyMissing, SettingsError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MARK = b"\xc1lq\x01"

KEY_BYTES = 32
_ID_BYTES, _SALT_BYTES, _NONCE_BYTES, _TAG_BYTES = 4, 16, 12, 16
_HEAD_BYTES = len(MARK) + _ID_BYTES + _SALT_BYTES

#: Bytes that encryption adds to a payload.
OVERHEAD = _HEAD_BYTES + _NONCE_BYTES + _TAG_BYTES

#: Payloads under one derived key: far below the number for which random nonces are safe.
_PAYLOADS_A_SALT = 2**28

#: Derived keys of other processes that are remembered: about as many as processes that write to a queue.
_SALTS_REMEMBERED = 1024


def new_key() -> str:
    """Return a new random key in the form that LLMQ_ENCRYPTION_KEY takes."""
    return base64.urlsafe_b64encode(os.urandom(KEY_BYTES)).decode()


def parse_keys(text: str) -> list[bytes]:
    """Return the keys of a list, commas or white space between them. Raises ValueError, which never quotes a key."""
    keys = [_parse_key(word, number) for number, word in enumerate(text.replace(",", " ").split(), 1)]
    if not keys:
        raise ValueError("expected one or more keys; make one: llmq config --new-key")
    return keys


def _parse_key(word: str, number: int) -> bytes:
    try:
        key = base64.b64decode(word.replace("-", "+").replace("_", "/"), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY_BYTES:
        raise ValueError(
            f"key {number}: expected {KEY_BYTES} random bytes in base64 (44 characters), got {len(word)} characters "
            "that are none; make one: llmq config --new-key"
        )
    return key


def key_id_of(payload: bytes) -> str | None:
    """Return the id of the key that a payload was encrypted with; None for one that was not encrypted."""
    if not payload.startswith(MARK):
        return None
    return payload[len(MARK) : len(MARK) + _ID_BYTES].hex()


class Key:
    """One key: encrypts under a derived key of this process, and decrypts what any process encrypted."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.id = hashlib.sha256(b"llmq key id\0" + secret).digest()[:_ID_BYTES].hex()
        self._used = 0
        self._own: tuple[bytes, AESGCM] | None = None
        self._derived = functools.lru_cache(_SALTS_REMEMBERED)(self._derive)

    def encrypt(self, data: bytes, bound_to: bytes) -> bytes:
        """Return the payload that holds `data`; any number of threads may call this."""
        own = self._own
        if own is None or self._used >= _PAYLOADS_A_SALT:
            salt = os.urandom(_SALT_BYTES)
            own = self._own = MARK + bytes.fromhex(self.id) + salt, self._derive(salt)
            self._used = 0
        self._used += 1
        head, derived = own
        nonce = os.urandom(_NONCE_BYTES)
        return head + nonce + derived.encrypt(nonce, data, bound_to)

    def decrypt(self, payload: bytes, bound_to: bytes) -> bytes | None:
        """Return what was encrypted; None where the payload is not what this key made of it."""
        from cryptography.exceptions import InvalidTag

        if len(payload) < OVERHEAD:
            return None
        salt = payload[_HEAD_BYTES - _SALT_BYTES : _HEAD_BYTES]
        nonce, sealed = payload[_HEAD_BYTES : _HEAD_BYTES + _NONCE_BYTES], payload[_HEAD_BYTES + _NONCE_BYTES :]
        try:
            return self._derived(salt).decrypt(nonce, sealed, bound_to)
        except InvalidTag:
            return None

    def _derive(self, salt: bytes) -> AESGCM:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(hmac.digest(self._secret, b"llmq payload\0" + salt, "sha256"))


@dataclass(frozen=True, slots=True)
class Keyring:
    """The keys of one process: the first encrypts, all of them decrypt. Without any, nothing is encrypted."""

    keys: tuple[Key, ...] = field(default=(), repr=False)

    @classmethod
    def load(cls, given: str | None, file: Path | None) -> Keyring:
        """Return the keys of a list, and of a file behind them. Raises SettingsError."""
        secrets = parse_keys(given) if given else []
        if file is not None:
            try:
                secrets += parse_keys(file.read_text(encoding="ascii"))
            except OSError as fault:
                raise SettingsError(f"cannot read the encryption keys of {file}: {fault.strerror}") from fault
            except UnicodeDecodeError:
                raise SettingsError(f"{file}: expected keys in base64, one a line, got no text") from None
            except ValueError as fault:
                raise SettingsError(f"{file}: {fault}") from None
        return cls.from_secrets(secrets)

    @classmethod
    def from_secrets(cls, secrets: Iterable[bytes]) -> Keyring:
        """Return the keyring of these keys. Raises SettingsError where the package that encrypts is missing."""
        keys = tuple(Key(secret) for secret in dict.fromkeys(secrets))
        if keys:
            try:
                import cryptography.hazmat.primitives.ciphers.aead  # noqa: F401
            except ImportError:
                raise SettingsError(
                    "an encryption key is set, and the package that encrypts is not installed: "
                    "pip install 'llmq-streams[encryption]'"
                ) from None
        return cls(keys)

    @property
    def first(self) -> str | None:
        """The id of the key that encrypts; None: nothing is encrypted."""
        return self.keys[0].id if self.keys else None

    def holds(self, key_id: str) -> bool:
        """Whether one of the keys has this id."""
        return self.get(key_id) is not None

    def get(self, key_id: str) -> Key | None:
        """Return the key of this id."""
        return next((key for key in self.keys if key.id == key_id), None)

    def missing(self, key_id: str, queue: str) -> KeyMissing:
        """Return the error for what was encrypted with a key that is not here."""
        have = f"this process has {', '.join(key.id for key in self.keys)}" if self.keys else "this process has none"
        return KeyMissing(
            f"queue {queue!r} is encrypted with key {key_id}, and {have}: set LLMQ_ENCRYPTION_KEY to that key "
            "(a second key goes behind a comma)",
            key_id,
        )


#: Nothing is encrypted, and nothing encrypted can be read.
NO_KEYS = Keyring()
