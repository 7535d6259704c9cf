"""Options of the server. Frozen; the command line is generated from the fields and their help texts."""

from __future__ import annotations

from dataclasses import dataclass, fields

from minisgl.flags import flag

TOOL_PARSERS = ("auto", "none", "hermes", "llama3", "mistral", "deepseek", "harmony")
REASONING_PARSERS = ("auto", "none", "think", "harmony")


@dataclass(frozen=True)
class ServerConfig:
    """Everything about HTTP and processes; nothing about the model or the device. Raises ValueError on
    nonsense.
    """

    host: str = flag("127.0.0.1", "address to listen on; 0.0.0.0 is every interface")
    port: int = flag(8000, "port to listen on; 0 picks a free one")
    api_key: str | None = flag(None, "clients must send this as a bearer token; default: no check")
    cors_origins: tuple[str, ...] = flag((), "web origins that may call the API; * is all")
    served_model_name: str | None = flag(None, "name in the API; default: the model's path")
    max_open_requests: int = flag(
        1024, "requests running and waiting at most; more are answered 503 with Retry-After"
    )
    max_choices: int = flag(16, "largest n (answers to one prompt) and prompts in one request")
    max_body_bytes: int = flag(32 << 20, "largest request body; larger ones are answered 413")
    request_timeout: float = flag(0.0, "seconds a request may take, 0 is no limit")
    shutdown_timeout: float = flag(
        30.0, "seconds that open requests get to finish after SIGTERM before they are cut"
    )
    tokenizer_threads: int = flag(2, "threads that render chat templates and tokenize")
    chat_template: str | None = flag(None, "file with a Jinja chat template to use instead")
    tool_parser: str = flag(
        "auto", "how the model writes tool calls; auto goes by its chat template", choices=TOOL_PARSERS
    )
    reasoning_parser: str = flag(
        "auto",
        "how reasoning is told from the answer; auto goes by the chat template",
        choices=REASONING_PARSERS,
    )
    log_level: str = flag("info", "how much to log", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port={self.port} is not a port: use 1 to 65535, or 0 for any free one")
        for name in ("max_open_requests", "max_choices", "max_body_bytes", "tokenizer_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("request_timeout", "shutdown_timeout"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be 0 or more seconds")
        for item in fields(self):
            choices = item.metadata["choices"]
            if choices and getattr(self, item.name) not in choices:
                raise ValueError(f"{item.name}={getattr(self, item.name)!r} is unknown: use one of {choices}")
