"""Training speed from a checkout: `python benchmarks/train.py --only A1` is `erniekit bench --only A1`."""

from __future__ import annotations

import sys

from erniekit.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
