"""Which files may name a vendor's API and the calls between ranks, whatever way these are written."""

from __future__ import annotations

import ast
import re
from pathlib import Path

SRC = Path(__file__).resolve().parents[2] / "src" / "erniekit"
# Where CUDA may be named: everything else asks devices/. Peers of the benchmark are other people's programs.
NAMES_CUDA = ("devices", "kernels", "bench/peers")


def cuda_named(code: str) -> list[int]:
    """Lines that use torch.cuda, a tensor's `cuda` or `is_cuda`, or the device word itself, as in "cuda:0"."""
    found: list[int] = []
    if "cuda" not in code:  # most files: parsing all of them takes seconds
        return found
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute):
            named = node.attr in ("cuda", "is_cuda")
        elif isinstance(node, ast.Import):
            named = any(alias.name.startswith("torch.cuda") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            named = module.startswith("torch.cuda") or (module == "torch" and any(a.name == "cuda" for a in node.names))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = re.fullmatch(r"(\S+[,:])?cuda(:\S*)?", node.value) is not None
        else:
            continue
        found += [node.lineno] if named else []
    return sorted(found)


# Of torch for whichever accelerator there is, and for single kinds: a Device has its own (devices/base.py).
ANY_ACCELERATOR = ("accelerator", "Stream", "Event")
KINDS = ("cuda", "cudnn", "xpu", "mps", "npu", "musa", "mtia", "hpu", "mlu")
OF_TORCH = {*ANY_ACCELERATOR, *KINDS}


def accelerator_named(code: str) -> list[int]:
    """Lines that use torch.accelerator, torch.Stream, torch.Event, or torch's module or back end of one kind."""
    found: list[int] = []
    if not any(name in code for name in OF_TORCH):
        return found
    tree = ast.parse(code)
    owners = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            owners |= {alias.asname for alias in node.names if alias.name == "torch" and alias.asname}
    owners |= {f"{owner}.backends" for owner in owners}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            named = node.attr in OF_TORCH and ast.unparse(node.value) in owners
        elif isinstance(node, ast.Import):
            named = any(_of_torch(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            named = any(_of_torch(f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            named = ast.unparse(node.args[0]) in owners and ast.unparse(node.args[1]).strip("'") in OF_TORCH
        else:
            continue
        found += [node.lineno] if named else []
    return sorted(found)


def _of_torch(module: str) -> bool:
    first, *rest = module.split(".")
    return first == "torch" and any(part in OF_TORCH for part in rest[: 2 if rest[:1] == ["backends"] else 1])


def test_streams_and_accelerators_of_torch_are_named_by_devices_and_kernels_alone() -> None:
    wrong = []
    for file in SRC.rglob("*.py"):
        place = file.relative_to(SRC).as_posix()
        if not place.startswith(tuple(f"{room}/" for room in NAMES_CUDA)):
            wrong += [f"{place}:{line}" for line in accelerator_named(file.read_text(encoding="utf-8"))]
    assert not wrong, "ask the Device (devices/base.py):\n" + "\n".join(wrong)


def test_every_way_to_name_an_accelerator_is_found() -> None:
    for line in (
        "torch.accelerator.synchronize()", "import torch.accelerator", "from torch import accelerator",
        "from torch.accelerator import current_stream", "torch.Stream(d)", "from torch import Stream",
        "def f(x: torch.Event): ...", "import torch as t\nt.accelerator", "getattr(torch, 'accelerator')",
        "from torch.backends.cuda import sdp_kernel", "torch.backends.cudnn.benchmark", "import torch.npu",
        "from torch.backends import mps", "hasattr(torch, 'musa')", "torch.xpu.x()",
    ):  # fmt: skip
        assert accelerator_named(line), line
    assert not accelerator_named("from asyncio import Event\nfrom erniekit.devices.base import Event\nself.Stream()")


def test_cuda_is_named_by_devices_and_kernels_alone() -> None:
    wrong = []
    for file in SRC.rglob("*.py"):
        place = file.relative_to(SRC).as_posix()
        if not place.startswith(tuple(f"{room}/" for room in NAMES_CUDA)):
            wrong += [f"{place}:{line}" for line in cuda_named(file.read_text(encoding="utf-8"))]
    assert not wrong, "\n".join(wrong)


def test_every_way_to_name_cuda_is_found() -> None:
    for line in (
        "torch.cuda.synchronize()", "import torch.cuda", "import torch.cuda.graphs as g", "from torch import cuda",
        "from torch.cuda import Event", "t.is_cuda", "t.cuda()", "f().cuda", "x = 'cuda'", "x = 'cuda:0'",
        "x = 'cpu:gloo,cuda:nccl'", "def f(x: torch.cuda.Event): ...",
    ):  # fmt: skip
        assert cuda_named(line), line
    assert not cuda_named("cfg.model.cuda_graph\ncfg.train.no_cuda\nsay('note cuda_graph: no cuda here')")


DOOR = "parallel/comm.py"
TALK = {
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce", "all_to_all",
    "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather",
    "gather_object", "irecv", "isend", "monitored_barrier", "new_group", "recv", "recv_object_list", "reduce",
    "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "send_object_list",
}  # fmt: skip


def talk_named(code: str) -> list[int]:
    """Lines that name one of torch.distributed's calls between ranks: as its attribute, or imported from it."""
    found: list[int] = []
    if "distributed" not in code:
        return found
    tree = ast.parse(code)
    called = {"torch.distributed"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            called |= {a.asname for a in node.names if a.asname and a.name.startswith("torch.distributed")}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            called |= {a.asname or a.name for a in node.names if a.name == "distributed"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in TALK and ast.unparse(node.value) in called:
            found.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            found += [node.lineno for alias in node.names if alias.name in TALK or "functional" in str(node.module)]
    return sorted(found)


def test_ranks_talk_through_one_door() -> None:
    wrong = []
    for file in SRC.rglob("*.py"):
        place = file.relative_to(SRC).as_posix()
        if place != DOOR:
            wrong += [f"{place}:{line}" for line in talk_named(file.read_text(encoding="utf-8"))]
    assert not wrong, "use erniekit.parallel.comm:\n" + "\n".join(wrong)


def test_every_way_past_the_door_is_found() -> None:
    for line in (
        "import torch.distributed as dist\ndist.all_reduce(x)", "torch.distributed.barrier()",
        "from torch import distributed as d\nd.send(x, 1)", "from torch.distributed import all_gather",
        "import torch.distributed as dist\nstart(dist.isend, x)",
        "import torch.distributed.distributed_c10d as c\nc.broadcast(x)",
        "from torch.distributed._functional_collectives import all_reduce",
    ):  # fmt: skip
        assert talk_named(line), line
    assert not talk_named("import torch.distributed as dist\ncomm.send(x, 1, g)\nwire.send(1)\ndist.get_rank()")
