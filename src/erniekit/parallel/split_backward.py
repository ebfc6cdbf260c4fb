"""A backward pass in two: first the gradient of a stage's input, later those of its weights. Called by pipeline.py.

The spine is what lies between the input and the output in autograd's graph. A weight that only one node of it reads
waits: its gradient is that node's, computed again from what arrived there. Nodes are run a second time for it, which
torch's own do only for the requested outputs; Python functions, and weights that several nodes read (a tied head, a
router that also has a loss), are done with the input.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


class Waiting:
    """What is left of a backward pass: `run` adds up the gradients of the weights that waited."""

    def __init__(self, nodes: dict[Node, list[torch.nn.Parameter]]) -> None:
        self.nodes = nodes
        self.arrived: dict[Node, tuple[Any, ...]] = {}

    def run(self) -> None:
        for node, params in self.nodes.items():
            grads = [(k, grad) for k, grad in enumerate(self.arrived.pop(node, ())) if grad is not None]
            if not grads:
                continue
            edges = [GradientEdge(node, k) for k, _ in grads]
            inputs = [get_gradient_edge(param) for param in params]
            found = torch.autograd.grad(edges, inputs, [grad for _, grad in grads], allow_unused=True)
            for param, grad in zip(params, found):
                _add(param, grad)
        self.nodes = {}


def backward_of_input(
    output: torch.Tensor, grad: torch.Tensor | None, x: torch.Tensor, params: Iterable[torch.nn.Parameter]
) -> tuple[torch.Tensor, Waiting]:
    """The gradient of x, a leaf; `grad` is the output's, None of a loss."""
    trained = [param for param in params if param.requires_grad]
    top = output.grad_fn
    assert top is not None
    later, now = _divided(top, get_gradient_edge(x).node, trained)
    waiting = Waiting(later)
    handles = [node.register_prehook(_keep(waiting.arrived, node)) for node in later]
    found = torch.autograd.grad(
        [output], [x, *now], None if grad is None else [grad], retain_graph=True, allow_unused=True
    )
    for handle in handles:
        handle.remove()
    for param, each in zip(now, found[1:]):
        _add(param, each)
    return found[0], waiting


def _keep(arrived: dict[Node, tuple[Any, ...]], node: Node) -> Any:
    def hook(grads: tuple[Any, ...]) -> None:
        arrived[node] = grads

    return hook


def _divided(
    top: Node, bottom: Node, params: list[torch.nn.Parameter]
) -> tuple[dict[Node, list[torch.nn.Parameter]], list[torch.nn.Parameter]]:
    """Nodes of the spine with the weights that can wait for each, and the weights that cannot wait."""
    below = _order(top)  # a node after all it leads to
    spine = {bottom}
    for node in below:
        if any(child in spine for child in _children(node)):
            spine.add(node)
    leaf_of: dict[Node, torch.nn.Parameter] = {get_gradient_edge(param).node: param for param in params}
    readers: dict[Node, list[Node]] = {leaf: [] for leaf in leaf_of}
    for node in below:
        if node in spine and node is not bottom:
            for leaf in _off_spine(node, spine) & leaf_of.keys():
                readers[leaf].append(node)
    reached = set(below)
    later: dict[Node, list[torch.nn.Parameter]] = {}
    now = []
    for leaf, param in leaf_of.items():
        if len(readers[leaf]) == 1 and not isinstance(readers[leaf][0], BackwardCFunction):
            later.setdefault(readers[leaf][0], []).append(param)
        elif leaf in reached:
            now.append(param)
    return later, now


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _order(top: Node) -> list[Node]:
    """Everything below `top` and itself, children first. A stack of its own: graphs are deeper than Python recurses."""
    seen, out = {top}, []
    stack = [(top, iter(_children(top)))]
    while stack:
        node, children = stack[-1]
        child = next((c for c in children if c not in seen), None)
        if child is None:
            out.append(node)
            stack.pop()
        else:
            seen.add(child)
            stack.append((child, iter(_children(child))))
    return out


def _off_spine(node: Node, spine: set[Node]) -> set[Node]:
    """What a node of the spine leads to without another one between."""
    found: set[Node] = set()
    todo = [child for child in _children(node) if child not in spine]
    while todo:
        here = todo.pop()
        if here not in found:
            found.add(here)
            todo += [child for child in _children(here) if child not in spine]
    return found


def _add(param: torch.nn.Parameter, grad: torch.Tensor | None) -> None:
    """As autograd adds a gradient up, hooks included: sums in fp32 are made there."""
    if grad is None:
        return
    param.grad = grad if param.grad is None else param.grad + grad
    hooks: dict[int, Any] = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    for hook in list(hooks.values()):
        hook(param)
