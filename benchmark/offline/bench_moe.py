"""The MoE layer's benchmark under the name that this lineage gives it; see benchmark/moe.py."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parent.parent / "moe.py"), run_name="__main__")
