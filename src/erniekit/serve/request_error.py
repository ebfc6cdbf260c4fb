"""A request that cannot be answered: the status, and the error in OpenAI's shape. Raised on the way of api.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}

# Begins the message where weights give NaN. By it a client knows that no other request would help.
NO_NUMBER = "the model gave no usable number"


class RequestError(Exception):
    """message: for the client, never with a trace in it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, KINDS[400])
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def as_json(value: Any) -> bytes:
    """Half a surrogate pair is legal in JSON and in Python and in no encoding: it becomes a question mark."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
