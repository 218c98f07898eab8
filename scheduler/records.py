"""The result record: how one line of a batch ended, as it stands in the batch's result stream and in the output file.

The finish script adds one entry a line to `b:<batch>:results`; a collector reads it as a `ResultRecord` and renders
it as one line of JSON. Rendering never fails: whatever an engine answered comes out as valid JSON on one line. This
module touches neither Redis nor files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson

from llmq.scheduler.cipher import Cipher, answer_of, error_of, line_owner, request_of
from llmq.scheduler.errors import EncodingError, TamperedError
from llmq.scheduler.lease import NO_USAGE, ErrorCode, Usage

#: The state of a line that an engine answered, with whatever status.
COMPLETED = "completed"

#: HTTP statuses from here on are refusals.
FIRST_ERROR_STATUS = 400

#: More digits than any count has: a number of that length is no number of ours.
_MOST_DIGITS = 18


@dataclass(frozen=True, slots=True)
class ResultRecord:
    """How one line of a batch ended.

    `line` is its number in the input file and `key` its custom_id. `body` is the engine's JSON as it came, with its
    `status_code` (None: no engine answered; then `error_code` and `error_message` say why). `data` is the encoded
    job, kept with failed lines only, so that they can be queued again.
    """

    line: int
    key: str
    state: str
    status_code: int | None = None
    request_id: str = ""
    body: bytes = b""
    error_code: str = ""
    error_message: str = ""
    usage: Usage = NO_USAGE
    data: bytes = b""

    def decrypted(self, batch_id: str, cipher: Cipher) -> ResultRecord:
        """Return the record with what was stored encrypted as it was. Raises KeyMissing.

        An answer that was changed since becomes an error line, since every line has an end; a job that was changed
        stays as it is, and is refused by whoever would run it again.
        """
        owner = line_owner(batch_id, self.line)
        message = cipher.decrypt_text(self.error_message, error_of(owner))
        data = self.data
        try:
            data = cipher.decrypt(data, request_of(owner))
        except TamperedError:
            pass
        try:
            return replace(self, body=cipher.decrypt(self.body, answer_of(owner)), error_message=message, data=data)
        except TamperedError as fault:
            ended = replace(self, state="failed", status_code=None, body=b"", data=data)
            return replace(ended, error_code=ErrorCode.UNREADABLE.value, error_message=str(fault))

    @property
    def ok(self) -> bool:
        """Whether an engine answered, and with success."""
        return self.state == COMPLETED and self.status_code is not None and self.status_code < FIRST_ERROR_STATUS

    @classmethod
    def from_fields(cls, fields: Mapping[bytes, bytes]) -> ResultRecord:
        """Read an entry of a result stream; fields of a newer llmq are passed over.

        Raises EncodingError when n, k or s is missing, or a value is not what `to_fields` writes.
        """
        for name in (b"n", b"k", b"s"):
            if not fields.get(name):
                raise _broken(name, "is missing")
        return cls(
            line=_number(fields, b"n"),
            key=_text(fields, b"k"),
            state=_text(fields, b"s"),
            status_code=_number(fields, b"h") if fields.get(b"h") else None,
            request_id=_text(fields, b"q"),
            body=fields.get(b"b", b""),
            error_code=_text(fields, b"e"),
            error_message=_text(fields, b"m"),
            usage=_usage(fields),
            data=fields.get(b"d", b""),
        )

    def to_fields(self) -> dict[bytes, bytes]:
        """Return the entry that `from_fields` reads; fields without a value are left out."""
        usage = "" if self.usage == NO_USAGE else f"{self.usage.prompt_tokens}:{self.usage.completion_tokens}"
        fields = {
            b"n": b"%d" % self.line,
            b"k": self.key.encode(),
            b"s": self.state.encode(),
            b"h": b"" if self.status_code is None else b"%d" % self.status_code,
            b"q": self.request_id.encode(),
            b"b": self.body,
            b"e": self.error_code.encode(),
            b"m": self.error_message.encode(),
            b"u": usage.encode(),
            b"d": self.data,
        }
        return {name: value for name, value in fields.items() if value}


def render(record: ResultRecord, batch_id: str) -> bytes:
    """Return the line of an output file, without its newline.

    An answer stands in it as the engine wrote it, byte for byte but for line breaks between its values (spaces stand
    for those); an answer that is not JSON becomes a JSON string. `error` is null where an engine answered, whatever
    the status; `response` is null where none did.
    """
    response: dict[str, Any] | None = None
    error: dict[str, str] | None = None
    if record.status_code is not None:
        response = {
            "status_code": record.status_code,
            "request_id": record.request_id,
            "body": _one_line_json(record.body),
        }
    else:
        error = {"code": record.error_code, "message": record.error_message}
    return orjson.dumps(
        {
            "id": f"batch_req_{batch_id}_{record.line}",
            "custom_id": record.key,
            "response": response,
            "error": error,
        }
    )


def _one_line_json(body: bytes) -> orjson.Fragment | str:
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode(errors="replace")
    # Inside of a JSON string a line break is always escaped: these are white space.
    return orjson.Fragment(body.replace(b"\n", b" ").replace(b"\r", b" "))


def _text(fields: Mapping[bytes, bytes], name: bytes) -> str:
    try:
        return fields.get(name, b"").decode()
    except UnicodeDecodeError:
        raise _broken(name, "is not UTF-8 text") from None


def _number(fields: Mapping[bytes, bytes], name: bytes) -> int:
    return _digits(fields[name], name)


def _usage(fields: Mapping[bytes, bytes]) -> Usage:
    given = fields.get(b"u")
    if not given:
        return NO_USAGE
    prompt, _, completion = given.partition(b":")
    return Usage(_digits(prompt, b"u"), _digits(completion, b"u"))


def _digits(value: bytes, name: bytes) -> int:
    if not value.isdigit() or len(value) > _MOST_DIGITS:
        raise _broken(name, f"is {value[:20]!r}, not a number")
    return int(value)


def _broken(name: bytes, fault: str) -> EncodingError:
    return EncodingError(f"result.{name.decode()}", f"{fault}: this is no result entry of llmq")
