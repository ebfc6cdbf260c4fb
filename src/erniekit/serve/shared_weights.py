"""One set of weights in several trees of modules: a base and its adapters, or a model and the engine that runs it.

Used by loaded_models.py, the Python interface (api/model.py), engines/adapter_batch.py and evaluation tasks.
"""

from __future__ import annotations

import copy

from torch import nn

from erniekit.api_load import Found
from erniekit.lora.adapter import attach
from erniekit.lora.adapter_files import read_adapter
from erniekit.models.layers.linear import share_packed
from erniekit.models.layers.rounding import share_rounding


def same_tensors(model: nn.Module) -> nn.Module:
    """A copy of the modules around the tensors of the model itself."""
    kept = {id(t): t for t in (*model.parameters(), *model.buffers())}
    made: nn.Module = copy.deepcopy(model, kept)
    return made


def second_tree(base: nn.Module, found: Found) -> nn.Module:
    """Further modules around the base's own tensors, with the adapter if there is one."""
    tree = found.weights.meta()
    share_packed(base, tree)
    tree.load_state_dict(base.state_dict(), assign=True)
    share_rounding(base, tree)
    if found.adapter is not None:
        attach(tree, read_adapter(found.adapter, tree, found.weights.verify))
    return tree.eval()
