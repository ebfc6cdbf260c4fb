"""MODELS: the families this version trains, and how a config.json finds its own. One line here adds a model, or an
entry point of the group `erniekit.models`: its name is the model_type, its value a ModelSpec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from erniekit.errors import CheckpointError
from erniekit.models.fields import shown
from erniekit.registry import Registry

if TYPE_CHECKING:
    from erniekit.models.spec import ModelSpec


def _problem(name: str, spec: Any) -> str:
    """What is wrong with a family that an installed package brings."""
    from erniekit.models.spec import ModelSpec

    if not isinstance(spec, ModelSpec):
        return f"is not a ModelSpec but {type(spec).__name__}"
    if spec.name != name:
        return f"names itself {spec.name!r} in its ModelSpec"
    return spec.problem()


MODELS = Registry(
    "model",
    {
        "ernie4_5": "erniekit.models.ernie_dense:SPEC",
        "ernie4_5_moe": "erniekit.models.ernie_moe:SPEC",
        "ernie4_5_vl_moe": "erniekit.models.ernie_vl:SPEC",
        "llama": "erniekit.models.llama:SPEC",
    },
    group="erniekit.models",
    check=_problem,
)
# What else a family is called in a config.json: releases of ERNIE-4.5-VL and of its first port.
ALSO = {"ernie4_5_moe_vl": "ernie4_5_vl_moe", "ernie4_5_vl": "ernie4_5_vl_moe"}


def family_of(config: dict[str, Any]) -> str:
    """What a config.json calls its family, in our names. Paddle writes dense ERNIE as a MoE without experts."""
    kind = str(config.get("model_type", ""))
    if kind == "ernie4_5_moe" and not config.get("moe_num_experts"):
        return "ernie4_5"
    return ALSO.get(kind, kind)


def find(config: dict[str, Any], where: str = "config.json") -> ModelSpec:
    """The family a config.json describes."""
    kind = config.get("model_type", "")
    if not isinstance(kind, str):
        raise CheckpointError(
            f"model_type is {shown(kind)}, not a name", where=where, fix="supported: " + ", ".join(MODELS.names())
        )
    kind = family_of(config)
    if kind not in MODELS:
        raise CheckpointError(
            f"model_type {shown(kind)} is not one that erniekit supports",
            where=where,
            fix="supported: " + ", ".join(MODELS.names()) + "; an installed package may add one",
        )
    result: ModelSpec = MODELS.get(kind)
    return result
