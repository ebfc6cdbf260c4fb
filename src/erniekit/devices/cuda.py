"""One NVIDIA card, and what the other vendors share whose build of torch calls their cards cuda (cuda_family.py). TF32
stays off: fp32 means fp32 (ERNIEKit's launcher sets the same)."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any, ClassVar

import torch

from erniekit.devices import cuda_family
from erniekit.devices.base import Device, Event, Finding
from erniekit.devices.findings import tool_finding

# Dense bf16 tensor-core rates from the vendors' data sheets, FLOP/s, by a part of the card's name.
BF16_PEAK = {
    "H200": 989.4e12,
    "H100": 989.4e12,
    "H800": 989.4e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
}
CAPTURE = "thread_local"  # of errors while recording: other threads go on
EVIDENCE = "ran on one H200; several cards in one machine are described, not run"
WHEN_ABSENT = "check the driver (nvidia-smi), or run with device=cpu"


# Of NCCL, where ranks share a card: no fabric between them, and few blocks of each, as all must run at once.
SHARED_CARD = {"NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}


class CudaDevice(Device):
    vendor: ClassVar[str] = "nvidia"
    backend: ClassVar[str] = "cpu:gloo,cuda:nccl"
    asynchronous: ClassVar[bool] = True
    pins_memory: ClassVar[bool] = True
    counts_memory: ClassVar[bool] = True
    fast_bf16: ClassVar[bool] = True
    triton: ClassVar[bool] = True
    records_graphs: ClassVar[bool] = True
    scales_in_loss: ClassVar[bool] = True
    # Ran on an H200. Triton needs a C compiler and Python's headers, the three others a torch that has them: tried.
    proven: ClassVar[frozenset[str]] = frozenset({"bf16", "fp8", "graphs", "nvidia"})

    def bind(self, index: int) -> None:
        torch.cuda.set_device(index)

    def share(self, rank: int, ranks: int) -> Device:
        """NCCL refuses two ranks on one card of one host: each gets another host id, and they use sockets."""
        own = {"NCCL_HOSTID": f"{socket.gethostname()}-rank{rank}", **SHARED_CARD}
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
            own |= dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), "lo")
        for name, value in own.items():
            os.environ.setdefault(name, value)
        return super().share(rank, ranks)

    def capability(self) -> tuple[int, int] | None:
        return torch.cuda.get_device_capability()

    def smi_id(self) -> str | None:
        """The card's unique name: its number here need not be its number there (CUDA_VISIBLE_DEVICES)."""
        unique = str(getattr(torch.cuda.get_device_properties(self.handle), "uuid", ""))
        return f"GPU-{unique}" if unique else None

    def synchronise(self, handle: torch.device | None = None) -> None:
        torch.cuda.synchronize(handle)

    def event(self) -> Event:
        return torch.cuda.Event(enable_timing=True)

    def stream(self) -> Any:
        return torch.cuda.Stream(self.handle)

    def current_stream(self) -> Any:
        return torch.cuda.current_stream(self.handle)

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def graphed(self, module: Callable[..., Any], inputs: tuple[torch.Tensor, ...], memory: Any = None) -> Any:
        with gradients_as_given():
            _open_backward_thread(self.handle)
            return torch.cuda.make_graphed_callables(module, inputs, pool=memory)

    def graph_memory(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def recorded(self, work: Callable[[], None]) -> Callable[[], None]:
        aside = torch.cuda.Stream(self.handle)
        aside.wait_stream(torch.cuda.current_stream(self.handle))
        with torch.cuda.stream(aside):  # what is built or chosen at first use must not be recorded
            work()
            work()
        torch.cuda.current_stream(self.handle).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # One pool of memory for all: replayed one after the other, none needs what another left.
        with torch.cuda.graph(graph, pool=_shared_graph().pool(), capture_error_mode=CAPTURE):
            work()
        # With `work` live the tensors that it names: what is replayed reads them where they were.
        return partial(_replay, graph, work)

    def free_memory(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated()

    def reserved(self) -> int:
        return torch.cuda.memory_reserved()

    def peak_allocated(self) -> int:
        return torch.cuda.max_memory_allocated()

    def peak_reserved(self) -> int:
        return torch.cuda.max_memory_reserved()

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def same_bits(self) -> None:
        # Without it torch refuses products: with workspace where it likes, cuBLAS may add up in another order.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it is never read

    def rng_state(self) -> torch.Tensor | None:
        return torch.cuda.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state)


@cache
def _shared_graph() -> Any:
    """The first in the pool, never replayed: torch takes no pool that all graphs have left while a tensor of theirs
    lives, as after a recording that failed or where other models are served."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=CAPTURE):
        torch.zeros(1, device="cuda")
    return graph


@cache
def _open_backward_thread(handle: torch.device) -> None:
    """torch computes gradients in a thread of its own, which has no CUDA context before its first kernel; cuBLAS warns
    where that is a product, as it is where recorded layers come before any loss."""
    one = torch.ones(1, device=handle, requires_grad=True)
    torch.autograd.grad((one * 2,), (one,), (torch.ones_like(one),))


@contextmanager
def gradients_as_given() -> Iterator[None]:
    """Gradients that autograd is handed inside are not compared with their outputs' shapes: for that torch imports
    sympy and parts of its compiler, seconds of a run's start, and recording hands it tensors made like the outputs."""
    usual = torch.autograd._make_grads
    if "torch.fx.experimental.symbolic_shapes" in sys.modules:
        yield
        return

    def made(outputs: Any, grads: Any, is_grads_batched: bool) -> Any:
        return usual(outputs, grads, is_grads_batched) if any(grad is None for grad in grads) else tuple(grads)

    torch.autograd._make_grads = made
    try:
        yield
    finally:
        torch.autograd._make_grads = usual


def _replay(graph: Any, work: Callable[[], None]) -> None:
    """work: what was recorded, for its tensors only."""
    graph.replay()


class CudaLikeDevice(CudaDevice):
    """Another vendor's card that torch calls cuda: nothing is proven, and NVIDIA's own queries return nothing."""

    proven: ClassVar[frozenset[str]] = frozenset()
    lacks: ClassVar[Mapping[str, str]] = {"nvidia": "not an NVIDIA card"}
    quiet_lacks: ClassVar[frozenset[str]] = frozenset({"fp8", "graphs", "nvidia"})

    def capability(self) -> tuple[int, int] | None:
        return None

    def smi_id(self) -> str | None:
        return None


def present() -> bool:
    """Cards that torch calls cuda and that no other vendor has marked."""
    return torch.cuda.is_available() and cuda_family.maker() == "nvidia"


def count() -> int:
    return torch.cuda.device_count()


def make() -> Device:
    return cuda_family.make(CudaDevice, BF16_PEAK)


def findings() -> list[Finding]:
    if torch.version.cuda is None:
        return [Finding(False, f"torch {torch.__version__} is not a CUDA build", "install a CUDA build of torch")]
    return [
        Finding(True, f"torch {torch.__version__} for CUDA {torch.version.cuda}"),
        tool_finding("nvidia-smi", "the driver's tool is not on PATH; without a driver torch sees no card"),
    ]
