"""Errors as OpenAI's API words them: {"error": {message, type, param, code}}, with the right HTTP status.

Whatever goes wrong, a client gets one of these: never a stack trace, and never FastAPI's own 422.
"""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A request cannot be answered. status: the HTTP status; param: the field at fault; code: a word for
    programs.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = {"Retry-After": "1"} if status == 503 else {}

    @property
    def kind(self) -> str:
        """The error's `type` in the body."""
        return _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        """The JSON body. The outer "type" is what Anthropic's clients look for; OpenAI's ignore it."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"type": "error", "error": error}


_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request is wrong, and the message says what to change."""
    return ApiError(400, message, param, code)


def context_length_exceeded(num_prompt: int, max_model_len: int, at_least: bool = False) -> ApiError:
    """400: the prompt alone fills the context. at_least: the prompt was too large to be worth counting
    exactly.
    """
    count = f"at least {num_prompt}" if at_least else str(num_prompt)
    message = (
        f"This model's maximum context length is {max_model_len} tokens, but the prompt has {count} tokens. "
        f"Shorten the prompt so that at least one token is left for the answer."
    )
    return bad_request(message, "messages", "context_length_exceeded")


def engine_failed(message: str) -> ApiError:
    """500: the engine, or this request inside it, failed."""
    return ApiError(500, message, code="engine_error")
