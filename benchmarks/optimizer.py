"""Times of AdamW's update and the gradients' norm on an NVIDIA card: launches to choose from, and what it replaced.

python benchmarks/optimizer.py
"""

from __future__ import annotations

import argparse
import time

import torch
from device_cases.optimizer import RATES, slots
from timing import queued_milliseconds as ms
from torch.optim.adamw import adamw

from erniekit.kernels.adamw import FusedAdamW, norm_reference

# (elements a block, blocks a program, warps): the default first.
VARIANTS = ((1024, 4, 8), (512, 8, 4), (1024, 1, 8), (1024, 4, 4), (2048, 4, 8), (2048, 2, 16), (1024, 16, 8))
LAYER_03B = ((2560, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (1024,), (1024,))
LAYER_13B = ((15360, 5120), (5120, 5120), (27648, 5120), (5120, 13824), (5120,), (5120,))
SHAPES = {
    "361M": [(103424, 1024), *LAYER_03B * 18, (1024,)],
    "2.87B": [(32000, 5120), (32000, 5120), *LAYER_13B * 8, (5120,)],
}


def clock(size: str) -> None:
    given = slots(SHAPES[size], torch.bfloat16, torch.bfloat16)
    count = sum(s.master.numel() for s in given)
    grads = [s.grad for s in given]
    scale, good = torch.tensor(0.5, device="cuda"), torch.ones((), device="cuda")

    def line(name: str, took: float, each: int) -> None:
        print(f"  {name:44} {took:7.3f} ms {each * count / took / 1e9:6.2f} TB/s ({each} bytes)")

    print(f"{size}: {count / 1e6:.1f}M parameters in {len(given)} tensors")
    for variant in VARIANTS:
        try:
            fused = FusedAdamW(*variant)
            line(
                f"update {variant}",
                ms(lambda fused=fused: fused.update("", given, RATES, scale, good)),
                28,
            )
            line(f"norm   {variant}", ms(lambda fused=fused: fused.norm("", grads)), 2)
        except Exception as error:
            print(f"  {variant}: {type(error).__name__}: {str(error).splitlines()[0]}")
    line("norm by foreach", ms(lambda: norm_reference(grads)), 2)
    fused = FusedAdamW()
    fused.update("", given, RATES, scale, good)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(5):
        fused.norm("", grads)
        fused.update("", given, RATES, scale, good)
    print(f"  on the host a norm and an update take          {(time.perf_counter() - began) * 200:7.3f} ms")
    torch.cuda.synchronize()

    def before() -> None:
        """What there was: fp32 gradients, a sweep for the clip, torch's fused update, a sweep for the weights."""
        wide = [g.float() for g in grads]
        norm_reference(wide)
        torch._foreach_mul_(wide, scale)
        adamw(
            [s.master for s in given], wide, [s.average for s in given], [s.square for s in given], [],
            [s.step for s in given], fused=True, amsgrad=False, lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1,
            eps=1e-8, maximize=False,
        )  # fmt: skip
        for s in given:
            s.weight.copy_(s.master)  # type: ignore[union-attr]

    def now() -> None:
        fused.norm("", grads)
        fused.update("", given, RATES, scale, good)

    lean = [s._replace(average=s.average.bfloat16(), square=s.square.bfloat16()) for s in given]
    line(
        "now, moments in 16 bit",
        ms(lambda lean=lean: fused.update("lean", lean, RATES, scale, good), 4),
        20,
    )
    line("before: fp32 copy, norm, clip, fused, copy", ms(before, 4), 30)
    line("now: norm and update", ms(now, 4), 30)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for size in SHAPES:
        clock(size)
