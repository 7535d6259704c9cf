"""A hub in this process, for tests of downloads: as much of Hugging Face's HTTP interface as its client asks for.

Files are kept by revision. `cut` ends the first download of a file after so many bytes, as a lost connection does.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeHub(ThreadingHTTPServer):
    """files: revision -> path -> content. requests: (method, path, Range header) of all that came."""

    daemon_threads = True

    def __init__(self, model: str, files: Mapping[str, Mapping[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model, self.files = model, files
        self.requests: list[tuple[str, str, str | None]] = []
        self.cut: dict[str, int] = {}
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def commit(self, revision: str) -> str:
        """The commit that a branch or tag stands for."""
        return hashlib.sha1(revision.encode()).hexdigest()

    def at(self, revision: str) -> Mapping[str, bytes] | None:
        """Files of a branch, tag or commit."""
        return next((f for name, f in self.files.items() if revision in (name, self.commit(name))), None)

    def fetched(self) -> list[str]:
        """Files whose content was asked for."""
        paths = (path for method, path, _ in self.requests if method == "GET" and "/resolve/" in path)
        return [path.rsplit("/", 1)[1] for path in paths]


@contextmanager
def running(hub: FakeHub) -> Iterator[FakeHub]:
    thread = threading.Thread(target=hub.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.server, self.path.split("?")[0]
        hub.requests.append((self.command, path, self.headers.get("Range")))
        model = re.escape(hub.model)
        if match := re.fullmatch(rf"/api/models/{model}(?:/revision/([^/]+))?", path):
            files = hub.at(match[1] or "main")
            name = next((name for name, those in hub.files.items() if those is files), "")
            self._json(
                {"id": hub.model, "sha": hub.commit(name)},
                found=files is not None,
                missing="RevisionNotFound",
            )
        elif match := re.fullmatch(rf"/api/models/{model}/tree/([^/]+)", path):
            files = hub.at(match[1]) or {}
            self._json(
                [{"type": "file", "path": p, "size": len(d), "oid": _etag(d)} for p, d in files.items()]
            )
        elif match := re.fullmatch(rf"/{model}/resolve/([^/]+)/(.+)", path):
            files = hub.at(match[1]) or {}
            self._file(match[2], files.get(match[2]), match[1])
        else:
            self._json({}, found=False, missing="RepoNotFound")

    def _json(self, value: Any, found: bool = True, missing: str = "") -> None:
        data = json.dumps(value).encode()
        self.send_response(200 if found else 404)
        if not found:
            self.send_header("X-Error-Code", missing)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def _file(self, name: str, data: bytes | None, commit: str) -> None:
        if data is None:
            self._json({}, found=False, missing="EntryNotFound")
            return
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        start = int(match[1]) if match else 0
        self.send_response(206 if match else 200)
        if match:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("ETag", f'"{_etag(data)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        if (limit := self.server.cut.pop(name, None)) is not None:
            self.wfile.write(data[start : start + limit])
            self.close_connection = True
            return
        self.wfile.write(data[start:])


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
