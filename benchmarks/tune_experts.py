"""The tile with which each kernel of the expert block is fastest at the 21B-A3B shapes, on an NVIDIA card.

    python benchmarks/tune_experts.py [TAKE ACTIVATE ...]

Builds every candidate in worker processes (Triton keeps what it has built on disk), times them here one after another,
compares their answers with those of the constants as they are, and prints what these could be. Two and a half minutes
at most.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from experts import RANK, E, H, K, W, random, routing
from timing import milliseconds

from erniekit.kernels import fp8_product, grouped_gemm, quantised_rows
from erniekit.kernels.selection import force
from erniekit.kernels.triton import expert_products as products
from erniekit.kernels.triton import expert_rows as rows_
from erniekit.kernels.triton import four_bit, fp8_rows, grouped_products

TOKENS, SECONDS, RUNS = 8192, 150.0, 20

# (rows, columns, warps, stages, most registers), if not said otherwise; of ADD also how many tiles a program walks
CANDIDATES: dict[str, list[tuple[Any, ...]]] = {
    "TAKE": [  # one stage, see there
        (128, 128, 8, 1), (64, 128, 4, 1), (64, 128, 8, 1), (64, 256, 4, 1), (64, 256, 8, 1), (128, 64, 8, 1),
        (128, 256, 8, 1), (64, 64, 4, 1),
    ],
    "LOW": [
        (128, 128, 8, 2), (128, 128, 8, 3), (64, 128, 4, 2), (64, 128, 4, 3), (64, 64, 4, 3), (64, 64, 4, 4),
        (128, 64, 8, 3), (64, 256, 8, 2), (128, 128, 8, 1),
    ],
    "ACTIVATE": [
        (64, 32, 4, 3, 128), (64, 32, 4, 2, 128), (64, 32, 4, 3, 96), (64, 32, 4, 4, 128), (64, 64, 4, 2, 128),
        (64, 64, 4, 2, 168), (64, 64, 4, 3), (128, 32, 8, 3, 128), (128, 32, 8, 2, 80), (128, 64, 8, 2, 128),
    ],
    "BACKWARD": [
        (64, 32, 4, 3, 128), (64, 32, 4, 2, 128), (64, 32, 4, 3, 168), (64, 32, 4, 4, 168), (64, 32, 4, 2, 168),
        (64, 64, 4, 2), (64, 64, 4, 3), (128, 32, 8, 2, 128), (128, 32, 8, 3, 128), (128, 64, 8, 2),
    ],
    "OUTER": [
        (64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 2), (32, 128, 4, 4), (32, 128, 4, 6), (64, 64, 4, 4),
        (128, 64, 4, 3), (128, 128, 4, 2), (64, 256, 8, 3), (32, 256, 8, 4),
    ],
    "OUTER_OF_TOKENS": [
        (32, 128, 4, 5), (32, 128, 4, 3), (32, 128, 4, 7), (64, 128, 4, 3), (64, 128, 4, 5), (64, 64, 4, 5),
        (64, 256, 8, 3), (32, 256, 8, 5), (64, 128, 4, 2),
    ],
    "ADD": [
        (64, 64, 4, 3, None, 10), (64, 64, 4, 3, None, 40), (64, 64, 4, 3, 96, 20), (64, 64, 4, 4, None, 20),
        (64, 128, 4, 2, None, 5), (64, 128, 4, 3, None, 10), (64, 128, 4, 3, 128, 20), (128, 64, 8, 3, None, 10),
        (128, 128, 8, 2, 96, 10), (64, 128, 4, 1, None, 1),
    ],
    # (rows, rows at a time, numbers a thread, stages)
    "PLAIN": [
        (2, 2, 96, 1), (2, 1, 24, 1), (1, 1, 24, 1), (4, 1, 24, 2), (8, 1, 24, 3), (8, 2, 48, 2), (8, 2, 48, 3),
        (4, 2, 48, 2), (8, 2, 24, 2), (2, 2, 48, 1),
    ],
    "BY_EXPERT": [
        (16, 1, 24, 3), (16, 2, 48, 3), (16, 2, 48, 2), (32, 2, 48, 3), (16, 2, 24, 3), (16, 1, 12, 3), (16, 1, 24, 1),
        (8, 2, 48, 2), (16, 4, 48, 2), (16, 4, 96, 2), (4, 2, 48, 1), (16, 1, 24, 4),
    ],
    # (rows, columns, depth, warps, stages); torch's own product of each is printed beside
    "PRODUCT": [
        (128, 256, 128, 8, 4), (128, 256, 128, 8, 3), (128, 128, 128, 4, 3), (128, 128, 128, 8, 3),
        (256, 128, 128, 8, 4), (128, 256, 64, 8, 6), (64, 256, 128, 4, 4), (128, 128, 128, 8, 6),
    ],
    "PRODUCT_16": [
        (128, 256, 64, 8, 4), (128, 256, 64, 8, 3), (128, 128, 64, 4, 4), (128, 128, 64, 8, 4), (256, 128, 64, 8, 4),
        (128, 256, 32, 8, 6), (128, 128, 64, 4, 3),
    ],
    "UNPACK": [
        (32, 512, 8, 1), (32, 512, 4, 1), (16, 512, 4, 1), (32, 256, 4, 1), (16, 1024, 4, 1), (32, 1024, 8, 1),
        (64, 512, 8, 1), (8, 1024, 4, 1),
    ],
    "UNPACK_TURNED": [
        (32, 512, 4, 1), (32, 512, 8, 1), (16, 512, 4, 1), (64, 256, 4, 1), (64, 256, 8, 1), (64, 512, 8, 1),
        (128, 128, 4, 1), (128, 256, 8, 1), (32, 1024, 8, 1), (16, 1024, 4, 1),
    ],
}  # fmt: skip


class Use(NamedTuple):
    kernel: str  # whose constant it reads
    name: str
    call: Callable[[], Any]
    gigabytes: float
    answer: Callable[[], Any]  # the same where calling it twice changes nothing
    other: Callable[[], Any] | None = None  # what it is instead of


def by_torch(*given: Any) -> torch.Tensor:
    *sides, tails, scale = given
    ends = sides[-1]
    return products.add_low(fp8_product.grouped(*sides), tails, scale, ends)


def in_two_passes(
    rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, tails: list[Any], scale: float
) -> torch.Tensor:
    return products.add_low(grouped_gemm.grouped_product(rows, weight, ends), tails, scale, ends)


def uses(tokens: int) -> list[Use]:
    """Each launch of a LoRA step's expert layer."""
    force({"experts' fp8 products": "torch"})  # of `by_torch`; what is tuned is launched by itself
    torch.manual_seed(0)
    (row_of, _, ends), weights = routing(tokens, "even")
    R, flat, giga = tokens * K, weights.reshape(-1), 2e-9
    x, rows, middle, act = random(tokens, H), random(R, H), random(R, 2 * W), random(R, W)
    z, z_down = random(R, 2 * RANK), random(R, RANK)
    gate_a, up_a, down_a = (random(E, RANK, n, std=0.02) for n in (H, H, W))
    gate_b, up_b, down_b = (random(E, n, RANK, std=0.02).transpose(1, 2) for n in (W, W, H))
    three = (gate_b, 2.0), (up_b, 2.0), (down_a, 1.0)
    pair = [(z[:, :RANK], 1.0), (z[:, RANK:], 1.0)]
    two, one = [(z[:, :RANK], gate_a), (z[:, RANK:], up_a)], [(z_down, down_b)]
    known = (flat, row_of, ends)
    small, factor, wide = (
        quantised_rows.quantised(x),
        torch.rand(E, H, device="cuda"),
        torch.rand(E, 2 * W, device="cuda"),
    )
    codes = torch.randint(0, 256, (E, 2 * W, H // 2), dtype=torch.uint8, device="cuda")
    fp8 = torch.float8_e4m3fn

    def image(out: int, width: int) -> torch.Tensor:
        return random(E, out, width).to(fp8)

    def scales(out: int) -> torch.Tensor:
        return torch.rand(E, out, 1, device="cuda")

    images = E * 2 * W * H * 3 // 4  # a code and its image in fp8 are 1.5 bytes

    def use(kernel: str, name: str, numbers: int, call: Callable[[], Any], *answer: Callable[[], Any]) -> Use:
        return Use(kernel, name, call, numbers * giga, *(answer or (call,)))

    return [
        use("TAKE", "A of gate, up", 2 * R * H, lambda: rows_.take(x, row_of, K, ends, [(gate_a, 1.0), (up_a, 1.0)])),
        use("TAKE", "B of down", 2 * R * H, lambda: rows_.take(x, row_of, K, ends, [(down_b, 2.0)])),
        use("LOW", "A of gate, up, in fp8", R * H,
            lambda: rows_.take_fp8(x, small, row_of, K, ends, [(gate_a, 1.0), (up_a, 1.0)])),
        use("LOW", "B of down, not kept", R * H, lambda: rows_.take(x, row_of, K, ends, [(down_b, 2.0)], False)),
        use("PLAIN", "tokens", 3 * tokens * H // 2, lambda: fp8_rows.quantise(x)),
        use("PLAIN", "activations", 3 * R * W // 2, lambda: fp8_rows.quantise(act)),
        use("BY_EXPERT", "taken", R * H, lambda: fp8_rows.quantise_by_expert(x, factor, ends, row_of, K)),
        use("BY_EXPERT", "of gate, up", 3 * R * W, lambda: fp8_rows.quantise_by_expert(middle, wide, ends)),
        *(
            use("PRODUCT", name, R * n // 2, lambda g=g: grouped_products.in_fp8(*g),
                lambda g=g: grouped_products.in_fp8(*g), lambda g=g: by_torch(*g))
            for name, n, g in (
                ("gate, up", H + 4 * W, (*fp8_rows.quantise(rows), image(2 * W, H), scales(2 * W), ends, [], 1.0)),
                ("down", W + 2 * H, (*fp8_rows.quantise(act), image(H, W), scales(H), ends, one, 2.0)),
                ("down turned", H + 2 * W, (*fp8_rows.quantise(rows), image(W, H), None, ends, [], 1.0)),
                ("gate, up turned", 2 * W + 2 * H,
                 (*fp8_rows.quantise(middle), image(H, 2 * W), None, ends, two, 1.0)),
            )
        ),
        *(
            use("PRODUCT_16", name, R * n, lambda g=g: grouped_products.in_bf16(*g),
                lambda g=g: grouped_products.in_bf16(*g), lambda g=g: in_two_passes(*g))
            for name, n, g in (
                ("down", W + H, (act, random(E, H, W).transpose(1, 2), ends, one, 2.0)),
                ("gate, up turned", 2 * W + H, (middle, random(E, 2 * W, H), ends, two, 1.0)),
            )
        ),
        use("UNPACK", "to fp8", images, lambda: four_bit.unpacked(codes, "int4", None, fp8)),
        use("UNPACK_TURNED", "to fp8", images, lambda: four_bit.unpacked(codes, "int4", None, fp8, turned=True)),
        use("ACTIVATE", "forward", 3 * R * W, lambda: rows_.activate(middle, z, *three, *known)),
        use("BACKWARD", "backward", 6 * R * W, lambda: rows_.activate_backward(act, z_down, middle, z, *three, *known)),
        use("OUTER_OF_TOKENS", "dA of gate, up", R * H, lambda: products.outer(x, pair, ends, row_of, K)),
        use("OUTER", "dB of gate, up", 2 * R * W, lambda: products.outer_of_halves(middle, z, RANK, (2.0, 2.0), ends)),
        use("OUTER", "dB of down", R * H, lambda: products.outer(rows, [(z_down, 2.0)], ends, turned=True)),
        use("OUTER", "dA of down", R * W, lambda: products.outer(act, [(z_down, 1.0)], ends)),
        *(
            use("ADD", name, 2 * R * H, lambda t=t: products.add_low(rows, t, 2.0, ends),
                lambda t=t: products.add_low(act.new_ones(R, H), t, 2.0, ends))
            for name, t in (("of down", one), ("of gate, up", two))
        ),
    ]  # fmt: skip


def now(kernel: str) -> tuple[Any, ...]:
    """The constants as they are, in a candidate's form."""
    tile = tuple(getattr(_module(kernel), kernel))
    return (*tile, products.WALK) if kernel == "ADD" else tile


def put(kernel: str, candidate: tuple[Any, ...]) -> None:
    module = _module(kernel)
    setattr(module, kernel, type(getattr(module, kernel))(*candidate[:5]))
    if len(candidate) > 5:
        products.WALK = candidate[5]


def _module(kernel: str) -> Any:
    return next(module for module in (products, rows_, fp8_rows, four_bit, grouped_products) if hasattr(module, kernel))


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:110]}"


@cache
def _small() -> list[Use]:
    return uses(64)


def build(kernel: str, candidate: tuple[Any, ...]) -> str:
    """In a worker: compiled by a run on few tokens, which no kernel is specialised for; why not, if it is not."""
    put(kernel, candidate)
    try:
        for use in _small():
            if use.kernel == kernel:
                use.answer()
        torch.cuda.synchronize()
    except Exception as error:
        return _told(error)
    return ""


def build_all(wanted: list[tuple[str, tuple[Any, ...]]]) -> set[tuple[str, tuple[Any, ...]]]:
    """Those that could be built; the others are named."""
    good, workers = set(), max(1, min(15, (os.cpu_count() or 2) - 1))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(build, *each): each for each in wanted}
        for done in as_completed(waiting):
            each = waiting[done]
            # A worker that died says nothing of a candidate, which is then built when it is timed.
            wrong = "" if done.exception() else done.result()
            if wrong:
                print(f"  skipped {each[0]} {each[1]}: {wrong}", flush=True)
            else:
                good.add(each)
    return good


def tensors(answer: Any) -> list[torch.Tensor]:
    if isinstance(answer, torch.Tensor):
        return [answer] if answer.numel() else []
    return [t for part in answer for t in tensors(part)]


def off(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """The largest relative distance; nan where something is not finite."""
    gaps = [((g.float() - w.float()).norm() / w.float().norm()) for g, w in zip(got, want)]
    return float(torch.stack(gaps).max())


def measured(kernel: str, mine: list[Use], wants: list[list[torch.Tensor]], candidate: tuple[Any, ...]) -> list[float]:
    """ms of each use."""
    put(kernel, candidate)
    for use, want in zip(mine, wants):
        gap = off(tensors(use.answer()), want)
        if not gap <= 0.01:  # roundings to 8 bits of sums in another order
            raise ValueError(f"{use.name} differs from the default by {gap:.3g}")
    return [milliseconds(use.call, RUNS + 5, graph=True) for use in mine]


def tune_one(kernel: str, mine: list[Use], candidates: list[tuple[Any, ...]], deadline: float) -> tuple[Any, ...]:
    """The candidate with the least time over all uses; told in a line, and a line each where there are several."""
    usual = now(kernel)
    wants, found = [tensors(use.answer()) for use in mine], {}
    for candidate in (usual, *(c for c in candidates if c != usual)):
        if time.monotonic() > deadline:
            print(f"  skipped {kernel} {candidate}: out of time", flush=True)
            continue
        try:
            found[candidate] = measured(kernel, mine, wants, candidate)
        except Exception as error:
            print(f"  skipped {kernel} {candidate}: {_told(error)}", flush=True)
    put(kernel, usual)
    if usual not in found:
        return usual
    best = min(found, key=lambda c: sum(found[c]))
    _tell(kernel, best, sum(found[best]), sum(found[usual]), sum(use.gigabytes for use in mine))
    if len(mine) > 1:
        for i, use in enumerate(mine):
            its = min(found, key=lambda c: found[c][i])
            _tell(f"  {use.name}", its, found[its][i], found[usual][i], use.gigabytes)
    for use in mine:
        if use.other is not None:
            gap = off(tensors(use.answer()), tensors(use.other()))
            print(f"  {use.name}: instead of {milliseconds(use.other, RUNS + 5, graph=True):.3f} ms, off {gap:.4f}")
    ranked = sorted(found, key=lambda c: sum(found[c]))
    print("  all: " + ", ".join(f"{_short(c)} {sum(found[c]):.3f}" for c in ranked), flush=True)
    return best


def _whole(kernel: str, candidate: tuple[Any, ...]) -> tuple[Any, ...]:
    """With None for what it does not say."""
    return (*candidate, *now(kernel)[len(candidate) :]) if len(candidate) < len(now(kernel)) else candidate


def _short(candidate: tuple[Any, ...]) -> str:
    return "x".join("-" if part is None else str(part) for part in candidate)


def _tell(name: str, best: tuple[Any, ...], ms: float, usual: float, gigabytes: float) -> None:
    print(
        f"{name:18s} best {_short(best):20s} {ms:7.3f} ms {gigabytes / ms:5.2f} TB/s, now {usual:7.3f} ms", flush=True
    )


def constants(chosen: dict[str, tuple[Any, ...]]) -> str:
    parts = []
    for kernel, candidate in chosen.items():
        tile = [part for part in candidate[:5] if part is not None]
        parts.append(f"{kernel} = {type(getattr(_module(kernel), kernel)).__name__}({', '.join(map(str, tile))})")
        if len(candidate) > 5:
            parts.append(f"WALK = {candidate[5]}")
    return "; ".join(parts)


def tune(kernels: list[str]) -> None:
    began = time.monotonic()
    candidates = {kernel: [_whole(kernel, c) for c in CANDIDATES[kernel]] for kernel in kernels}
    wanted = [(kernel, c) for kernel in kernels for c in dict.fromkeys((now(kernel), *candidates[kernel]))]
    print(f"== {len(wanted)} candidates on {torch.cuda.get_device_name()}, {TOKENS} tokens", flush=True)
    good = build_all(wanted)
    print(f"  built in {time.monotonic() - began:.0f} s", flush=True)
    every, chosen = uses(TOKENS), {}
    for kernel in kernels:
        mine = [use for use in every if use.kernel == kernel]
        built = [c for c in candidates[kernel] if (kernel, c) in good]
        try:
            chosen[kernel] = tune_one(kernel, mine, built, began + SECONDS)
        except Exception as error:
            print(f"FAILED {kernel} as it is: {_told(error)}", flush=True)
        torch.cuda.empty_cache()
    print(f"{constants(chosen)}\n{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", choices=[*CANDIDATES], help="all when not given")
    tune(parser.parse_args().kernels or list(CANDIDATES))
