"""PEERS: other ways to train the same model, each a Runner in a file of its own; and what each needs to be there.

Read by turns.py; nothing here is imported before it is used, and what is missing is reported, not an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from erniekit.registry import Registry

if TYPE_CHECKING:
    from erniekit.bench.runner import Runner

PEERS = Registry(
    "peer",
    {
        "hf": "erniekit.bench.peers.hf:Transformers",
        "hf+compile": "erniekit.bench.peers.hf:CompiledTransformers",
        "hf+fa4": "erniekit.bench.peers.hf:CompiledFlash4",
        "hf+liger": "erniekit.bench.peers.liger:Liger",
        "hf+liger+fp32": "erniekit.bench.peers.liger:LigerMasters",
        "peft": "erniekit.bench.peers.peft:Peft",
        "peft-attention": "erniekit.bench.peers.peft:PeftAttention",
        "peft-vl": "erniekit.bench.peers.peft_vl:VisionPeft",
        "unsloth": "erniekit.bench.peers.unsloth:Unsloth",
        "unsloth-4bit": "erniekit.bench.peers.unsloth_4bit:Unsloth4Bit",
    },
)


@dataclass(frozen=True)
class Needs:
    modules: tuple[str, ...]
    pip: str


NEEDS = {
    "hf": Needs(("transformers",), "pip install transformers"),
    "hf+compile": Needs(("transformers",), "pip install transformers"),
    "hf+fa4": Needs(("transformers", "flash_attn.cute"), "pip install flash-attn-4"),
    "hf+liger": Needs(("transformers", "liger_kernel"), "pip install liger-kernel"),
    "hf+liger+fp32": Needs(("transformers", "liger_kernel"), "pip install liger-kernel"),
    "peft": Needs(("transformers", "peft"), "pip install peft"),
    "peft-attention": Needs(("transformers", "peft"), "pip install peft"),
    "peft-vl": Needs(("transformers", "peft"), "pip install peft"),
    "unsloth": Needs(("transformers", "peft", "unsloth_zoo"), "pip install peft unsloth_zoo"),
    "unsloth-4bit": Needs(
        ("transformers", "peft", "unsloth_zoo", "bitsandbytes"), "pip install peft unsloth_zoo bitsandbytes"
    ),
}


def absent(name: str) -> str:
    """Empty where the peer can be tried; else how to get it."""
    missing = [module for module in NEEDS[name].modules if not _found(module)]
    return f"{', '.join(missing)} is not installed: {NEEDS[name].pip}" if missing else ""


def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # nor the package around it
        return False


def peer_class(name: str) -> type[Runner]:
    cls: type[Runner] = PEERS.get(name)
    return cls
