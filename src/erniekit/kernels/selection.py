"""Which implementation of an operation runs, and why: for each operation its implementations, the fastest first, each
with the reason why it cannot take given facts. The last takes everything.

Called by the kernels themselves and, for a table of a whole model, by recipes/kernel_table.py. `force` overrules the
order, for tests and benchmarks (the key `kernels`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from erniekit import capabilities
from erniekit.kernels import cudnn_packed, flash4, fp8_cards, quack_gemm
from erniekit.kernels.available import why_no_triton

ALIGNED = 8  # widths of 16-bit numbers that tensor cores' kernels load are multiples of this
HIGHEST_RANK = 128  # of adapters that the expert kernels hold in registers
HIGHEST_WITHIN = 64  # of those whose factors fit next to the tiles of a product
LISTED = "queries and keys of different lengths have bounds: packed attention"
APART = "positions are put in by a step of its own"
FEW_WIDTH = 32  # hidden and width of experts, where products have tiles of few rows: columns of a tile
PAGED_HEADS = (16, 32, 64, 128, 256)  # channels of a head that paged attention's tiles take
GATED_HIDDEN = 2048  # widest input of gate and up that is faster with SwiGLU in the product: 0.16 for 0.24 ms at 1024


class Choice(NamedTuple):
    operation: str
    implementation: str
    reason: str


class Implementation(NamedTuple):
    name: str
    why_not: Callable[[Any], str | None]


@dataclass(frozen=True)
class AttentionFacts:
    device: torch.device
    group: int  # query heads to a kv head
    head_dim: int
    gradients: bool = True
    same_bits: bool = False  # results must be equal bit for bit each time
    listed: bool = False  # documents look at keys that a list names: prompts they share, or keys of other ranks
    dtype: torch.dtype = torch.bfloat16
    apart: bool = False  # positions are put into queries and keys in a step of its own


@dataclass(frozen=True)
class FrameFacts:
    """Of attention inside each frame of pictures."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int


@dataclass(frozen=True)
class ExpertFacts:
    device: torch.device
    dtype: torch.dtype
    hidden: int
    width: int  # of one expert's feed-forward on this rank
    ranks: tuple[int, ...] = ()  # of its adapters


@dataclass(frozen=True)
class GateUpFacts:
    device: torch.device
    hidden: int
    rows: int  # of gate and up together, on this rank
    whole: bool  # one plain weight, without bias, adapters and collectives around it


@dataclass(frozen=True)
class PagedFacts:
    """Of a server's attention over its cache, and of what else of a step runs in Triton."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int


@dataclass(frozen=True)
class ProductFacts:
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True)
class HeadFacts:
    device: torch.device
    dtype: torch.dtype
    rows: int  # of its weight, on this rank
    bias: bool = False


@dataclass(frozen=True)
class Fp8Facts:
    """Of a product with static scales."""

    device: torch.device
    width: int
    rows: int  # of the weight, of one expert
    experts: bool = False


def _none(facts: Any) -> None:
    return None


def _no_card(device: torch.device) -> str | None:
    return None if device.type == "cuda" else f"not on {device.type}"


def _no_triton(device: torch.device) -> str | None:
    return _no_card(device) or why_no_triton()


def _no_nvidia(device: torch.device) -> str | None:
    """Of libraries for NVIDIA cards: other vendors' cards have capabilities of their own numbers, or none."""
    return _no_triton(device) or capabilities.why_not("nvidia")


def _not_bf16(dtype: torch.dtype) -> str | None:
    return None if dtype == torch.bfloat16 else f"for bf16, not {str(dtype).removeprefix('torch.')}"


def _no_flash4(packed: bool) -> Callable[[AttentionFacts], str | None]:
    def why_not(f: AttentionFacts) -> str | None:
        if problem := _not_together(f) or _no_nvidia(f.device):
            return problem
        if f.same_bits:
            return "does not give the same bits each time"
        if f.listed and not packed:
            return LISTED
        return flash4.why_not(f.group, f.head_dim, packed, f.gradients, f.device)

    return why_not


def _not_together(f: AttentionFacts) -> str | None:
    return APART if f.apart else None


def _no_rows(f: AttentionFacts) -> str | None:
    return _not_together(f) or _no_triton(f.device) or (LISTED if f.listed else None)


def _no_cudnn_packs(f: AttentionFacts) -> str | None:
    if problem := _not_together(f) or _no_nvidia(f.device):
        return problem
    if f.same_bits:
        return "takes up to 32 GiB for the same bits each time"
    if torch.cuda.get_device_capability(f.device) < (9, 0):
        return "for Hopper cards and newer"
    return None if cudnn_packed.library() is not None else f"{cudnn_packed.PACKAGE} is not installed"


def _no_flash(f: AttentionFacts) -> str | None:
    if f.apart:
        return _no_varlen(f)
    return _no_triton(f.device) or capabilities.why_not("varlen")


def _no_varlen(f: AttentionFacts | FrameFacts) -> str | None:
    """Of FlashAttention-2 as torch has it, by itself."""
    if problem := _no_card(f.device) or capabilities.why_not("varlen"):
        return problem
    if f.dtype not in (torch.bfloat16, torch.float16):
        return f"for 16-bit numbers, not {str(f.dtype).removeprefix('torch.')}"
    return f"heads of {f.head_dim} channels are not multiples of {ALIGNED}" if f.head_dim % ALIGNED else None


def _no_masks(f: AttentionFacts) -> str | None:
    """Documents one by one: the host needs their bounds. Where nothing else is there, a mask costs less."""
    if f.device.type == "cpu":
        return "no wait to be saved on a CPU"
    if f.device.type == "cuda" and capabilities.has("varlen"):
        return "only where no kernel takes packed documents"
    return None


def _no_paged(f: PagedFacts) -> str | None:
    if problem := _no_triton(f.device):
        return problem
    if f.head_dim not in PAGED_HEADS:
        return f"for heads of {', '.join(map(str, PAGED_HEADS))} channels, not {f.head_dim}"
    return None


def _no_expert_kernels(f: ExpertFacts) -> str | None:
    if problem := _no_triton(f.device):
        return problem
    if problem := _not_bf16(f.dtype):
        return problem
    if f.hidden % ALIGNED or f.width % ALIGNED:
        return f"widths {f.hidden} and {f.width} are not multiples of {ALIGNED}"
    if max(f.ranks, default=0) > HIGHEST_RANK:
        return f"adapters of rank {max(f.ranks)} are above {HIGHEST_RANK}"
    return None


def _no_grouped(f: ProductFacts) -> str | None:
    if problem := _no_card(f.device) or capabilities.why_not("grouped") or _not_bf16(f.dtype):
        return problem
    return None if hasattr(torch.nn.functional, "grouped_mm") else "this torch has no grouped_mm"


def _no_blocks(f: ProductFacts) -> str | None:
    """A CPU has its numbers at hand, and fp32 on a card keeps the loop's order of sums where products are to be had."""
    if f.device.type == "cpu":
        return "no wait to be saved on a CPU"
    if f.device.type == "cuda" and capabilities.has("grouped") and capabilities.has("bf16"):
        return f"only where there is no grouped product of any kind, not for {str(f.dtype).removeprefix('torch.')}"
    return None


def _no_fp8(f: Fp8Facts) -> str | None:
    if problem := _no_card(f.device) or fp8_cards.why_not(f.device, f.experts):
        return problem
    if f.width % fp8_cards.ALIGNED or f.rows % fp8_cards.ALIGNED:
        return f"widths {f.width} and {f.rows} are not multiples of {fp8_cards.ALIGNED}"
    return None


def _no_fp8_tiles(f: Fp8Facts) -> str | None:
    if problem := _no_fp8(f) or _no_triton(f.device):
        return problem
    return None if torch.cuda.get_device_capability(f.device) == fp8_cards.GROUPED else "for Hopper cards"


def _no_bf16_tiles(f: ExpertFacts) -> str | None:
    if problem := _no_nvidia(f.device) or _no_expert_kernels(f):
        return problem
    if max(f.ranks, default=0) > HIGHEST_WITHIN:
        return f"adapters of rank {max(f.ranks)} are above {HIGHEST_WITHIN}"
    return None if torch.cuda.get_device_capability(f.device) == fp8_cards.GROUPED else "for Hopper cards"


def _no_few(f: ExpertFacts) -> str | None:
    if problem := _no_expert_kernels(f):
        return problem
    if f.hidden % FEW_WIDTH or f.width % FEW_WIDTH:
        return f"widths {f.hidden} and {f.width} are not multiples of {FEW_WIDTH}"
    return None


def _no_quack(f: ProductFacts) -> str | None:
    return _no_nvidia(f.device) or _no_grouped(f) or quack_gemm.why_not("experts", f.device)


def _no_quack_head(f: HeadFacts) -> str | None:
    if f.rows < quack_gemm.WIDE:
        return f"fewer than {quack_gemm.WIDE} columns"
    if f.bias:
        return "a bias is added"
    if problem := _no_nvidia(f.device) or _no_grouped(ProductFacts(f.device, f.dtype)):
        return problem
    return quack_gemm.why_not("head", f.device)


def _no_gated(f: GateUpFacts) -> str | None:
    if problem := _no_nvidia(f.device):
        return problem
    if not f.whole:
        return "adapters, a bias, another kind of weight or a collective are between"
    if f.hidden > GATED_HIDDEN:
        return f"not faster above a hidden size of {GATED_HIDDEN}"
    if f.hidden % 64 or f.rows % 128:
        return f"widths {f.hidden} and {f.rows} are not multiples of 64 and 128"
    return quack_gemm.why_not("feed-forward", f.device)


OPERATIONS: dict[str, tuple[Implementation, ...]] = {
    "attention": (
        Implementation("flash4", _no_flash4(packed=False)),
        Implementation("rows", _no_rows),  # torch's call of cuDNN or FlashAttention-2
        Implementation("sdpa", _none),
    ),
    "packed attention": (
        Implementation("flash4", _no_flash4(packed=True)),
        Implementation("cudnn", _no_cudnn_packs),
        Implementation("flash", _no_flash),  # FlashAttention-2, as torch has it
        Implementation("masked", _no_masks),
        Implementation("sdpa", _none),
    ),
    # Of a vision tower, inside each frame.
    "frame attention": (Implementation("flash", _no_varlen), Implementation("sdpa", _none)),
    # Of a server: keys and values lie in blocks of a pool.
    "paged attention": (Implementation("triton", _no_paged), Implementation("gathered", _none)),
    "feed-forward": (Implementation("quack", _no_gated), Implementation("product and swiglu", _none)),
    "experts": (Implementation("triton", _no_expert_kernels), Implementation("plain", _none)),
    # Of a server's step: no gradients, no adapters, weights as they are.
    "experts of few tokens": (Implementation("triton", _no_few), Implementation("as of many", _none)),
    "grouped products": (
        Implementation("quack", _no_quack),
        Implementation("torch", _no_grouped),
        Implementation("blocks", _no_blocks),
        Implementation("loop", _none),
    ),
    # Low-rank updates in the pass of a product; apart: a pass of their own after it.
    "experts' products with updates": (Implementation("triton", _no_bf16_tiles), Implementation("apart", _none)),
    # Emulated: fp8 values multiplied in fp32, rounded once.
    "fp8 products": (Implementation("tensor cores", _no_fp8), Implementation("emulated", _none)),
    "experts' fp8 products": (Implementation("triton", _no_fp8_tiles), Implementation("torch", _none)),
    "head": (Implementation("quack", _no_quack_head), Implementation("torch", _none)),
}

# Lines of a run's table that are no choice among kernels -> what they follow from.
BY_KEYS = {
    "weights": "compute_type",
    "frozen weights": "frozen_base",
    "frozen products": "frozen_products",
    "compiled layers": "compile",
    "CUDA graphs": "cuda_graph",
    "AdamW": "optim and the device",
    "results of a step": "optim and the device",
}

FORCED = "forced by kernels"  # the reason of such a choice
_forced: dict[str, str] = {}


def force(choices: Mapping[str, str]) -> None:
    """From now on in this process; each takes the place of a first choice and must be possible."""
    for operation, name in choices.items():
        if operation in BY_KEYS:
            raise ValueError(f"{operation} is no choice among kernels: it follows from {BY_KEYS[operation]}")
        if operation not in OPERATIONS:
            raise ValueError(f"no operation {operation!r}: one of {', '.join(OPERATIONS)}")
        names = [each.name for each in OPERATIONS[operation]]
        if name not in names:
            raise ValueError(f"no implementation {name!r} of {operation}: one of {', '.join(names)}")
    _forced.clear()
    _forced.update(choices)
    _select.cache_clear()


def select(operation: str, facts: Any) -> Choice:
    """Its first implementation that can, and why not those before it."""
    return _select(operation, facts, capabilities.version())


@functools.cache
def _select(operation: str, facts: Any, version: int) -> Choice:
    """version: of what the device is known to lack."""
    reasons: list[str] = []
    for name, why_not in OPERATIONS[operation]:
        forced = _forced.get(operation)
        if forced is not None and name != forced:
            continue
        problem = why_not(facts)
        if problem is None:
            return Choice(operation, name, FORCED if forced else "; ".join(reasons) or "the fastest")
        reasons.append(f"{name}: {problem}")
    raise ValueError(f"{operation} cannot be forced here: {reasons[0]}")


def documents_apart(facts: AttentionFacts) -> str:
    """Of packed documents in queries and keys that have their positions already. A forced implementation that puts
    them in itself is passed over. Called inside compiled layers, too: nothing is kept, and nothing looked for."""
    forced = _forced.get("packed attention")
    for name, why_not in OPERATIONS["packed attention"]:
        if name == forced and why_not(facts) is None:
            return name
    for name, why_not in OPERATIONS["packed attention"]:
        if why_not(facts) is None:
            return name
    raise AssertionError("the last takes everything")


def only(operation: str, name: str, reason: str) -> Choice:
    """Of a run whose other settings leave one implementation, for a reason: another cannot be forced."""
    wanted = _forced.get(operation, name)
    if wanted != name:
        raise ValueError(f"{operation} cannot be forced here: {wanted}: {reason}")
    return Choice(operation, name, FORCED if operation in _forced else reason)


def idle(used: Collection[str]) -> list[str]:
    """What is forced of operations that are not among those used, as it was written."""
    return [f"{operation}={name}" for operation, name in _forced.items() if operation not in used]


def chosen(operation: str, facts: Any) -> str:
    return select(operation, facts).implementation
