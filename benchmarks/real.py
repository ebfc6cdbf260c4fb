"""Whole `erniekit train` commands, timed from outside; the same as `erniekit bench --real`.

python benchmarks/real.py --only sft,sft-packed --again
"""

from __future__ import annotations

import sys

from erniekit.bench.command import bench_command

if __name__ == "__main__":
    sys.exit(bench_command(["--real", *sys.argv[1:]]))
