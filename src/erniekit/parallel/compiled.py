"""torch.compile of decoder layers. Used by apply.py; `eager` for the odd batch of another shape."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from erniekit.kernels.kernel_op import see_into_kernels
from erniekit.model_contract import row_functions, spread, waits_for_host, wrap

SHAPES = 64  # programs of one layer's code at most: rows of evaluation, packs of very many documents


BACKEND = "inductor"  # torch's; its tests on a CPU take one that compiles nothing


def compile_layers(
    part: nn.Module, packs_on_host: bool = False, shards_inside: bool = False, as_written: bool = False
) -> None:
    """Each decoder layer as a whole: they are alike, so one compilation serves them all.

    A module that waits for the host is left as it is, and what is around it becomes several graphs;
    so does a layer with experts where fully_shard gathers weights within it (shards_inside), and any layer
    where no kernel takes packed documents as they are (packs_on_host). In all others nothing may fall back to
    Python.

    as_written: 16-bit results are rounded wherever the layer as it is written rounds them. Else those inside a fused
    kernel stay in fp32, and the programs with and without gradients, which fuse otherwise, differ by a few bits.
    """
    import torch._dynamo.config  # seconds: only where something is compiled

    torch._dynamo.config.recompile_limit = max(SHAPES, torch._dynamo.config.recompile_limit)  # a limit met ends the run
    see_into_kernels()
    for _, layer in spread(part).held_layers():
        waiting = [m for m in layer.modules() if waits_for_host(m)]
        for module in waiting:
            wrap(module, torch._dynamo.disable)
        whole = not waiting and not packs_on_host and not (shards_inside and layer.sparse)
        wrap(layer, torch.compile(fullgraph=whole, dynamic=False, backend=BACKEND, options=_options(as_written)))
    compile_row_functions(part, as_written)


def _options(as_written: bool) -> dict[str, Any] | None:
    """Of torch's compiler, of no other back end."""
    return {"emulate_precision_casts": True} if as_written and BACKEND == "inductor" else None


def compile_row_functions(part: nn.Module, as_written: bool = False) -> None:
    """Functions that go element by element, of as many rows as there are this time (`row_functions`). One compilation
    serves all modules that have the same one."""
    done: dict[Any, Any] = {}
    for module in part.modules():
        for name in row_functions(module):
            function = getattr(module, name)
            if function not in done:
                compiled = torch.compile(function, fullgraph=True, backend=BACKEND, options=_options(as_written))
                done[function] = _over_rows(compiled)
            setattr(module, name, done[function])


def _over_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: torch.Tensor) -> Any:
        for one in given:
            torch._dynamo.maybe_mark_dynamic(one, 0)
        return function(*given)

    return call


def is_of_compiler(error: BaseException) -> bool:
    """Whether torch's compiler raised it, or programs that it starts did not end well. By name: importing the compiler
    takes seconds, and where it was not imported there is no such error."""
    return any(kind.__module__.startswith(("torch._inductor", "torch._dynamo")) for kind in type(error).__mro__)


_eager = False


def is_eager() -> bool:
    return _eager


@contextmanager
def eager() -> Iterator[None]:
    """Compiled layers run as they are written: a batch of another shape is not worth a compilation."""
    global _eager
    before, _eager = _eager, True
    try:
        # Where torch's compiler was never imported nothing is compiled, and calling it would import it.
        with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext():
            yield
    finally:
        _eager = before
