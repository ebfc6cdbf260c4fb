"""Each Triton kernel of the expert block against its torch twin, run by Triton's interpreter on the CPU.

The interpreter is chosen when triton is first imported, so the checks run in a process of their own: this file as a
script, once for all tests.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.xdist_group("expert kernels")  # one worker runs the script

T, K, E = 26, 2, 4  # the last expert has no rows
ODD, EVEN = (40, 20), (32, 16)  # hidden and width: no multiples of the tiles, and those, which need no masks
CASES = {  # their ranks of gate, up and down; a tile is another above 32
    "all": (ODD, (3, 17, 4)),
    "up": (ODD, (0, 5, 0)),
    "high": (ODD, (2, 33, 40)),
    "even": (EVEN, (16, 16, 32)),
    "none": (EVEN, (0, 0, 0)),
}


def cases() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """(name, what to compute with a module of steps): run with the kernels and with their twins."""
    for name, (shape, ranks) in CASES.items():
        yield from cases_of(name, *shape, ranks)


def cases_of(name: str, H: int, W: int, ranks: tuple[int, int, int]) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    from erniekit.kernels.moe_permute import by_expert

    torch.manual_seed(0)
    row_of, place_of, ends = by_expert(torch.rand(T, E - 1).topk(K).indices, E)
    made, R, (g, u, d) = torch.randn, T * K, ranks
    x, rows, middle, grad, weights = made(T, H), made(R, H), made(R, 2 * W), made(R, W), torch.rand(R)
    z, z_down = made(R, g + u), made(R, d)
    gate, up = ((made(E, W, n).transpose(1, 2), 1.5) if n else None for n in (g, u))
    down = (made(E, d, W), 1.0) if d else None
    lows = [(made(E, n, H), scale) for n, scale in ((g, 0.5), (u, 2.0)) if n]
    tails = [(z[:, a:b], made(E, b - a, H)) for a, b in ((0, g), (g, g + u)) if b > a]
    narrow = [(z[:, a:b], 0.5 + a) for a, b in ((0, g), (g, g + u)) if b > a]
    known = (gate, up, down, weights, row_of, ends)
    for keep in (True, False) if name == "all" else (True,):
        yield f"take/{name}/{keep}", lambda s, keep=keep: s.take(x, row_of, K, ends, lows, keep)
        yield (
            f"activate_backward/{name}/{keep}",
            lambda s, keep=keep: s.activate_backward(grad, z_down, middle, z, *known, keep),
        )
    yield f"activate/{name}", lambda s: s.activate(middle, z, *known)
    yield f"add_low/{name}", lambda s: s.add_low(rows.clone(), tails, 2.0, ends)
    if name == "all":
        fewer = ends - torch.tensor([0, 0, 3, 3], dtype=ends.dtype)  # the last rows are no expert's
        yield f"sum_choices/{name}", lambda s: s.sum_choices(rows, place_of, K, ends)
        yield f"sum_choices/{name}/fewer", lambda s: s.sum_choices(rows, place_of, K, fewer)
        given = (gate, up, down, weights, row_of, fewer)
        yield f"activate_backward/{name}/fewer", lambda s: s.activate_backward(grad, z_down, middle, z, *given)[2]
    if narrow:
        yield f"outer/{name}", lambda s: s.outer(middle[:, W:], narrow, ends, turned=True)
        yield f"outer_of_tokens/{name}", lambda s: s.outer(x, narrow, ends, row_of, K)
    if g and u:
        yield f"outer_of_halves/{name}", lambda s: s.outer_of_halves(middle, z, g, (0.5, 3.0), ends)


def run_all() -> None:
    """As a script: prints name -> the largest difference, or what went wrong."""
    from types import SimpleNamespace

    from erniekit.kernels import expert_reference as twins
    from erniekit.kernels.triton import expert_products, expert_rows
    from support.interpreted import bound_loops_by_numbers_on_the_device, patch_once_per_launch

    bound_loops_by_numbers_on_the_device()
    patch_once_per_launch()
    small = expert_rows.Tile(16, 16, 4, 2)  # so that experts have several blocks, and rows several columns of tiles
    expert_rows.TAKE = expert_rows.ACTIVATE = expert_rows.BACKWARD = expert_rows.SUM = small
    expert_products.OUTER = expert_products.OUTER_OF_TOKENS = expert_products.ADD = small
    expert_products.WALK = 2
    kernels = SimpleNamespace(**{**vars(expert_rows), **vars(expert_products)})
    told: dict[str, Any] = {}
    for name in ("take", "activate", "activate_backward", "sum_choices", "outer", "outer_of_halves", "add_low"):
        mine, theirs = (list(inspect.signature(getattr(m, name)).parameters) for m in (kernels, twins))
        told[f"signature/{name}"] = 0.0 if mine == theirs else f"{mine} {theirs}"
    for name, call in cases():
        try:
            got, want = ([out] if isinstance(out := call(m), torch.Tensor) else list(out) for m in (kernels, twins))
            assert [g.shape for g in got] == [w.shape for w in want]
            errors = [float(((g - w).abs() / (1 + w.abs())).max()) for g, w in zip(got, want) if g.numel()]
            told[name] = max(errors, default=0.0)
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"[-300:]
    print(json.dumps(told))


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    here = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    env = {**os.environ, **here}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


KERNELS = ("signature", "take", "activate", "activate_backward", "sum_choices", "outer", "outer_of_tokens",
           "outer_of_halves", "add_low")  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_kernel_computes_what_its_twin_does(kernel: str, told: dict[str, Any]) -> None:
    mine = {name: error for name, error in told.items() if name.split("/")[0] == kernel}
    assert mine
    # fp32 sums in another order; in backward of terms of 1e3 that cancel
    assert all(isinstance(error, float) and error <= 1e-4 for error in mine.values()), mine


if __name__ == "__main__":
    run_all()
