"""Fields: the values of a config.json, each with its type and bounds checked before anything is built from it.

Used by the families (models/*.py). A config.json is untrusted: every refusal names the key, what was found
and what is accepted. The bounds are far above any published model and far below what would exhaust a machine.
"""

from __future__ import annotations

import math
from typing import Any

from erniekit.errors import CheckpointError

MAX_LAYERS = 1000
MAX_WIDTH = 1 << 20  # hidden_size
MAX_MLP = 1 << 22  # intermediate_size, of a layer and of an expert
MAX_VOCABULARY = 1 << 24
MAX_HEADS = MAX_HEAD_DIM = MAX_EXPERTS = 1 << 14
MAX_POSITIONS = 1 << 31
MAX_FURTHER = 64  # layers that predict further tokens
MAX_ENDS = 1000  # ids in a list of them

SCALINGS = ("default", "linear", "llama3")
_LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_FIX = "check that this folder is a complete model download"


class Fields:
    """`size` and `need` for whole numbers, `number` for others, `flag` for switches; null is as good as absent."""

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        self.raw, self.where = raw, where

    def refuse(self, key: str, wanted: str, found: Any, fix: str = _FIX) -> CheckpointError:
        return CheckpointError(
            f"config.json needs {wanted} {key!r}, found {shown(found)}", where=f"{self.where}, key {key}", fix=fix
        )

    def need(self, key: str, most: int = MAX_MLP) -> int:
        """A size without a sane default."""
        return self._whole(key, self.raw.get(key), 1, most)

    def size(self, key: str, default: int, least: int = 1, most: int = MAX_MLP) -> int:
        value = self.raw.get(key)
        return default if value is None else self._whole(key, value, least, most)

    def _whole(self, key: str, value: Any, least: int, most: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refuse(key, "a positive integer" if least == 1 else f"an integer of {least} or more", value)
        if value > most:
            raise self.refuse(key, f"an integer of {least} to {most:,}", value)
        return value

    def number(self, key: str, default: float, least: float, most: float) -> float:
        value = self.raw.get(key)
        return default if value is None else self._number(key, value, least, most)

    def _number(self, key: str, value: Any, least: float, most: float) -> float:
        """An integer stays one: config.json is written back as it was found."""
        if not _is_number(value) or not least <= value <= most:
            raise self.refuse(key, f"a number from {least:g} to {most:g}", value)
        return float(value) if isinstance(value, float) else value

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool | int) or value not in (0, 1):
            raise self.refuse(key, "true or false for", value)
        return bool(value)

    def only(self, key: str, *allowed: Any) -> None:
        """A setting whose other values would need other arithmetic: refused, never ignored."""
        value = self.raw.get(key)
        if value is not None and value not in allowed:
            raise CheckpointError(
                f"config.json sets {key} to {shown(value)}; only {', '.join(map(repr, allowed))} is supported",
                where=f"{self.where}, key {key}",
                fix="use a model of the supported kind",
            )

    def token(self, key: str, default: int | None) -> int | None:
        """A special token's id, -1 for none; the first one where config.json lists several."""
        value = self.raw.get(key)
        if value is None:
            return default
        ids = value if isinstance(value, list) else [value]
        if not 1 <= len(ids) <= MAX_ENDS or not all(_is_id(id) for id in ids):
            raise self.refuse(key, "a token id, or a list of them, for", value)
        first: int = ids[0]
        return first

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of `count` numbers that are not negative; empty where there is none."""
        value = self.raw.get(key)
        if value is None or value == []:
            return ()
        if not isinstance(value, list) or len(value) != count or not all(_is_number(v) and v >= 0 for v in value):
            raise self.refuse(key, f"a list of {count} numbers for", value)
        return tuple(value)

    def heads(self, default_dim: int | None) -> tuple[int, int, int]:
        """(heads, key-value heads, size of each), which must fit each other. default_dim None: hidden_size / heads."""
        heads, hidden = self.need("num_attention_heads", MAX_HEADS), self.need("hidden_size", MAX_WIDTH)
        kv = self.size("num_key_value_heads", heads, 1, MAX_HEADS)
        if heads % kv:
            raise self.refuse("num_key_value_heads", f"a divisor of num_attention_heads ({heads}) for", kv)
        dim = self.size("head_dim", default_dim or max(1, hidden // heads), 1, MAX_HEAD_DIM)
        if dim % 2:  # rotary positions turn pairs of channels
            expected = f"an even number for ({hidden} hidden_size, {heads} num_attention_heads)"
            raise self.refuse("head_dim", expected, dim)
        return heads, kv, dim

    def rope(self, default_theta: float) -> tuple[float, dict[str, Any] | None]:
        """transformers 5 nests theta and scaling in rope_parameters, older files and Paddle keep them at the top."""
        nested = self.object("rope_parameters")
        self._refuse_two_ropes(nested)
        scaling = nested or self.object("rope_scaling") or self._paddle_scaling()
        theta = nested.get("rope_theta") or self.raw.get("rope_theta") or default_theta
        theta = float(self._number("rope_theta", theta, 1e-3, 1e15))
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind not in SCALINGS:
            raise CheckpointError(
                f"rope scaling {shown(kind)} is not supported",
                where=f"{self.where}, rope_parameters",
                fix="supported: " + ", ".join(SCALINGS),
            )
        if kind == "default":
            return theta, None
        for key in ("factor", *(_LLAMA3 if kind == "llama3" else ())):
            self._number(f"rope {kind} {key}", scaling.get(key), 1e-6, 1e9)
        if kind == "llama3" and scaling["low_freq_factor"] == scaling["high_freq_factor"]:
            found = scaling["high_freq_factor"]
            raise self.refuse("rope llama3 high_freq_factor", "another number than low_freq_factor for", found)
        return theta, {**scaling, "rope_type": kind}

    def _refuse_two_ropes(self, nested: dict[str, Any]) -> None:
        """A file that was edited for longer texts: transformers takes rope_scaling, where others look at the other."""
        flat = self.object("rope_scaling")
        kinds = [m.get("rope_type") or m.get("type") or "default" for m in (flat, nested)]
        if flat and nested and (kinds[0] != kinds[1] or flat.get("factor") != nested.get("factor")):
            raise CheckpointError(
                f"rope_scaling is {shown(flat)}, and rope_parameters {shown(nested)}",
                where=f"{self.where}, rope_scaling",
                fix="take out the one that is not meant",
            )

    def object(self, key: str) -> dict[str, Any]:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(key, "an object (or null) for", value)
        return value or {}

    def _paddle_scaling(self) -> dict[str, Any]:
        kind, factor = self.raw.get("rope_scaling_type"), self.raw.get("rope_scaling_factor")
        return {"rope_type": kind, "factor": 1.0 if factor is None else factor} if kind else {}


def shown(value: Any, width: int = 60) -> str:
    """A value in an error; a long one is cut, and no more of it is spelled out than is shown."""
    if isinstance(value, str | list | dict) and len(value) > width:
        kind = {str: "a text", list: "a list", dict: "an object"}[type(value)]
        return f"{kind} of {len(value):,}"
    if isinstance(value, int) and abs(value) >= 10**width:
        return "an integer of more than 60 digits"
    text = repr(value)
    return text if len(text) <= width else text[: width - 3] + "..."


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -1 <= value < MAX_POSITIONS
