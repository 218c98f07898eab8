"""What goes wrong in a request, as the error that its client is told.

Everything that is raised under a route passes here once (`boundary.py`); how a job ended without an answer is in
`answers.py`. What an error says inside (addresses, names of files) goes to the log, and not to the client.
"""

from __future__ import annotations

from starlette.exceptions import HTTPException

from llmq.gateway.errors import ApiError
from llmq.scheduler.errors import EncodingError, LLMQError, NotFoundError, RedisFull, RedisUnavailable, UsageError
from llmq.scheduler.redis_errors import explain

#: A Redis that is away is back in seconds (a restart, a failover), or somebody has to look after it.
REDIS_RETRY_S = 2.0

#: One that is full has to be emptied first.
FULL_RETRY_S = 30.0

_STATUS_WORDS = {
    404: ("not_found", "there is no such address here; see the API's list: docs/gateway.md"),
    405: ("method_not_allowed", "this address does not take that method"),
}


def api_error(error: BaseException) -> ApiError:
    """Return the answer to an error; what nobody foresaw is a 500 that says nothing of its cause."""
    match error:
        case ApiError():
            return error
        case HTTPException():
            return _of_framework(error)
        case EncodingError():
            return ApiError(400, str(error), code="invalid_body", param=error.path)
        case NotFoundError():
            return ApiError(404, str(error), code="not_found")
        case UsageError():
            return ApiError(400, str(error), code="invalid_request")
        case RedisFull():
            return ApiError(503, "the queue's storage is full; try again later", code="queue_storage_full",
                            retry_after=FULL_RETRY_S)  # fmt: skip
        case RedisUnavailable():
            return queue_away()
        case LLMQError():
            return ApiError(500, "the request could not be served; the gateway's log says why", code="internal_error")
    if explain(error) is not None:  # an error of redis-py that nobody has put into words
        return queue_away()
    return ApiError(500, "internal error; the gateway's log says more", code="internal_error")


def queue_away() -> ApiError:
    """Return the answer while Redis cannot be reached, or does not answer in time."""
    message = "the queue cannot be reached for now; try again in a moment"
    return ApiError(503, message, code="queue_unavailable", retry_after=REDIS_RETRY_S)


def _of_framework(error: HTTPException) -> ApiError:
    code, message = _STATUS_WORDS.get(error.status_code, (None, str(error.detail)))
    return ApiError(error.status_code, message, code=code, headers=error.headers)
