"""The errors that the gateway answers with, in OpenAI's shape.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

Whatever goes wrong in a request becomes an `ApiError` at the boundary (`app.py`); nothing else makes error bodies, and
no stack trace ever leaves the process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson

#: OpenAI's word for what is wrong, by HTTP status; 5xx and what is not listed is `server_error`.
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}


class ApiError(Exception):
    """An answer that is an error: its HTTP status, what is wrong, and which field (`param`) or rule (`code`) says so.

    `retry_after` is in seconds, and sent rounded up: the official clients wait for it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        kind: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.kind = kind or _TYPES.get(status, "server_error")
        self.retry_after = retry_after
        self._headers = dict(headers or {})

    @property
    def headers(self) -> dict[str, str]:
        """The headers that go with the answer."""
        if self.retry_after is None:
            return self._headers
        return self._headers | {"retry-after": str(max(1, math.ceil(self.retry_after)))}

    def body(self) -> bytes:
        """Return the JSON of the answer."""
        return orjson.dumps({"error": self.to_json()})

    def to_json(self) -> dict[str, Any]:
        """Return the `error` object, also for a stream that ends by it."""
        return {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
