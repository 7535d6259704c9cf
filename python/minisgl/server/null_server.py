"""A server on the stand-in engine, for tests and measurements: python -m minisgl.server.null_server FOLDER
SETTINGS

FOLDER gets a tokenizer if it has none. SETTINGS is JSON: {"server": {ServerConfig fields}, "null":
{NullOptions fields}}. Prints "READY port" once it takes requests.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

from minisgl.server.config import ServerConfig
from minisgl.server.launch import serve
from minisgl.server.null import NullEngine, NullOptions, write_tokenizer


def options_of(folder: str) -> NullOptions:
    """The options that fit the tokenizer in a folder, which is written if it is not there."""
    file = pathlib.Path(folder, "null.json")
    if not file.exists():
        file.write_text(json.dumps(dataclasses.asdict(write_tokenizer(folder))))
    return NullOptions(**json.loads(file.read_text()))


def main() -> int:
    """Serve until told to stop; returns the exit code."""
    folder, settings = sys.argv[1], json.loads(sys.argv[2])
    options = dataclasses.replace(options_of(folder), **settings.get("null", {}))
    config = ServerConfig(**{"port": 0, **settings.get("server", {})})
    engine = NullEngine(options, folder)
    return serve(config, "null", engine, folder, on_ready=lambda port: print(f"READY {port}", flush=True))


if __name__ == "__main__":
    sys.exit(main())
