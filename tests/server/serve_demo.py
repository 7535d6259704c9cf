"""Runs a server on the bundled demo model: python serve_demo.py '{"server": {...}, "engine": {...}}'."""

from __future__ import annotations

import json
import sys

from minisgl.config import EngineConfig
from minisgl.server.commands import serve_model
from minisgl.server.config import ServerConfig


def main() -> int:
    settings = json.loads(sys.argv[1])
    engine = EngineConfig.from_kwargs(**{"model": "demo", "device": "cpu", **settings.get("engine", {})})
    config = ServerConfig(**{"port": 0, **settings.get("server", {})})
    return serve_model(engine, config, on_ready=lambda port: print(f"READY {port}", flush=True))


if __name__ == "__main__":
    sys.exit(main())
