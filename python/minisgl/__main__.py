"""`python -m minisgl`."""

from minisgl.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
