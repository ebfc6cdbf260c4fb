"""The JSON files and templates next to a vocabulary, read within bounds and with the kind of every value checked.

Called by tokenizer.py. They come from an untrusted folder: a value of another kind is refused with its key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from erniekit.errors import CheckpointError
from erniekit.files import read_object, refuse_special

MAX_TEMPLATE = 4 << 20  # bytes of a chat template; the longest published ones have some 20 KB
MAX_ID = 1 << 24  # of an added token: as many rows as an embedding may have
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "cls_token", "sep_token", "mask_token")
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(_ROLES, (str, dict)),
    **dict.fromkeys(("additional_special_tokens", "extra_special_tokens"), (list, dict)),
    "added_tokens_decoder": (dict,),
    "chat_template": (str, list),
    **dict.fromkeys(("add_bos_token", "add_prefix_space", "legacy"), (bool,)),
}
_TYPES = {str: "a text", dict: "an object", list: "a list", bool: "true or false"}


def read_settings(path: Path) -> dict[str, Any]:
    """Empty where there is no such file."""
    value = _object(path)
    for key, kinds in _KINDS.items():
        if value.get(key) is not None and not isinstance(value[key], kinds):
            raise _refusal(path, key, " or ".join(_TYPES[kind] for kind in kinds), value[key])
    for number in value.get("added_tokens_decoder") or {}:
        if number.isdecimal() and (len(number) > 9 or int(number) >= MAX_ID):
            raise _refusal(path, "added_tokens_decoder", f"ids below {MAX_ID:,}", number)
    template = value.get("chat_template")
    for entry in template if isinstance(template, list) else ():
        if not isinstance(entry, dict) or not all(isinstance(entry.get(k), str) for k in ("name", "template")):
            raise _refusal(path, "chat_template", "entries of a name and a template", entry)
    return value


def read_added(path: Path) -> dict[str, int]:
    """added_tokens.json: each token's id."""
    value = _object(path)
    for token, id in value.items():
        if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < MAX_ID:
            raise _refusal(path, token, f"an id below {MAX_ID:,}", id)
    return value


def read_template(path: Path) -> str | None:
    refuse_special(path, CheckpointError)
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_TEMPLATE + 1)
        if len(raw) > MAX_TEMPLATE:
            raise ValueError(f"larger than {MAX_TEMPLATE >> 20} MiB")
        return raw.decode("utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(
            f"{path.name} cannot be read: {reason}", where=str(path), fix="download it again"
        ) from None


def _object(path: Path) -> dict[str, Any]:
    refuse_special(path, CheckpointError)
    if not path.is_file():
        return {}
    try:
        return read_object(path, CheckpointError)
    except OSError as error:
        raise CheckpointError(
            f"{path.name} cannot be read: {error.strerror or error}", where=str(path), fix="check the file"
        ) from error


def _refusal(path: Path, key: str, wanted: str, found: Any) -> CheckpointError:
    reason = f"a {type(found).__name__} of {len(found)}" if isinstance(found, list | dict) else repr(found)[:60]
    return CheckpointError(
        f"{path.name} needs {wanted} for {key[:60]!r}, found {reason}",
        where=f"{path}, key {key[:60]}",
        fix="download the file again",
    )
