"""The cipher: encrypts what holds a prompt or an answer before it goes to Redis, and decrypts it on its way back.

    cipher = Cipher(settings.keyring(), "default")
    stored = cipher.encrypt(job.encode(), request_of(job_owner(job_id)))
    cipher.decrypt(stored, request_of(job_owner(job_id)))

Clients and workers stand on both sides of it, so that neither Redis' memory, its files, its replicas nor the network
hold a text. Scripts move payloads as they are: what they decide by (ids, tenants, custom_ids, costs, times, states,
sizes) is not encrypted. A payload is bound to its queue, to what it is and to whose it is: one that was moved to
another job is refused like one that was changed. Knows nothing of Redis.
"""

from __future__ import annotations

import base64

from llmq.scheduler.errors import KeyMissing, TamperedError
from llmq.scheduler.keyring import NO_KEYS, Keyring, key_id_of
from llmq.scheduler.lease import Lease

#: What an encrypted text begins with: error messages are stored as text.
TEXT_MARK = "llmq-encrypted:"


class Cipher:
    """Encrypts and decrypts the payloads of one queue."""

    def __init__(self, keyring: Keyring, queue: str) -> None:
        self.keyring = keyring
        self._queue = queue

    @property
    def active(self) -> bool:
        """Whether new payloads are encrypted."""
        return bool(self.keyring.keys)

    def encrypt(self, data: bytes, what: str, key_id: str | None = None) -> bytes:
        """Return the stored form of a payload. `key_id` names the key; None is the first, "" is not to encrypt."""
        key = self.keyring.get(key_id or self.keyring.first or "") if key_id != "" else None
        return data if key is None else key.encrypt(data, self._bound_to(what))

    def decrypt(self, payload: bytes, what: str) -> bytes:
        """Return a payload as it was; one that was stored without encryption is itself.

        Raises KeyMissing, and TamperedError where it is not what was stored for this `what`.
        """
        key_id = key_id_of(payload)
        if key_id is None:
            return payload
        key = self.keyring.get(key_id)
        if key is None:
            raise self.keyring.missing(key_id, self._queue)
        data = key.decrypt(payload, self._bound_to(what))
        if data is None:
            raise TamperedError(what)
        return data

    def encrypt_text(self, text: str, what: str, key_id: str | None = None) -> str:
        """Return the stored form of a text, which is a text."""
        if not text or not self.active or key_id == "":
            return text
        return TEXT_MARK + base64.b64encode(self.encrypt(text.encode(), what, key_id)).decode()

    def decrypt_text(self, text: str, what: str) -> str:
        """Return a text as it was; of one that cannot be read, why, since a person reads it beside other facts."""
        if not text.startswith(TEXT_MARK):
            return text
        try:
            payload = base64.b64decode(text.removeprefix(TEXT_MARK), validate=True)
            if key_id_of(payload) is None:
                raise TamperedError(what)
            return self.decrypt(payload, what).decode(errors="replace")
        except KeyMissing as fault:
            return f"(encrypted with key {fault.key_id}, which is not here: set LLMQ_ENCRYPTION_KEY)"
        except (TamperedError, ValueError):
            return "(encrypted, and changed since: it cannot be read)"

    def _bound_to(self, what: str) -> bytes:
        return f"{self._queue}\0{what}".encode(errors="replace")


#: Reads and writes what is not encrypted.
PLAIN = Cipher(NO_KEYS, "")


def job_owner(job_id: str) -> str:
    """Name a single job."""
    return f"job {job_id}"


def line_owner(batch_id: str, line: int) -> str:
    """Name a line of a batch."""
    return f"line {line} {batch_id}"


def owner_of(lease: Lease) -> str:
    """Name the job of a lease."""
    return line_owner(lease.batch_id, lease.line) if lease.batch_id else job_owner(lease.key)


def request_of(owner: str) -> str:
    """Name the encoded job of an owner."""
    return f"request {owner}"


def answer_of(owner: str) -> str:
    """Name the engine's answer to an owner's request."""
    return f"answer {owner}"


def beginning_of(owner: str) -> str:
    """Name what is kept of an owner's answer that was cut off."""
    return f"beginning {owner}"


def error_of(owner: str) -> str:
    """Name the text that says why there is no answer: engines quote prompts in it."""
    return f"error {owner}"


def deltas_of(client_id: str) -> str:
    """Name a parcel of deltas for a client."""
    return f"deltas {client_id}"
