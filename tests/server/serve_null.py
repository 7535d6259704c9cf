"""Runs a server on the stand-in engine until it is told to stop: python serve_null.py FOLDER '{"server":
{...}, "null": {...}}'.
"""

from __future__ import annotations

import dataclasses
import json
import sys

from minisgl.server.config import ServerConfig
from minisgl.server.launch import serve
from minisgl.server.null import NullEngine, NullOptions


def main() -> int:
    folder, settings = sys.argv[1], json.loads(sys.argv[2])
    with open(f"{folder}/null.json", encoding="utf-8") as file:
        options = NullOptions(**json.load(file))
    options = dataclasses.replace(options, **settings.get("null", {}))
    config = ServerConfig(**{"port": 0, **settings.get("server", {})})
    engine = NullEngine(options, folder)
    return serve(config, "null", engine, folder, on_ready=lambda port: print(f"READY {port}", flush=True))


if __name__ == "__main__":
    sys.exit(main())
