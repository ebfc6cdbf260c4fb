"""From what a user typed as a model to a folder on this disk: as typed, in the download cache, or from the hub.

Called by recipes, export, serve and api.
"""

from __future__ import annotations

import os
from pathlib import Path

from erniekit.errors import CheckpointError
from erniekit.files import refuse_special

DOWNLOAD = {
    "huggingface": "hf download {id} --local-dir {id}",
    "modelscope": "modelscope download --model {id} --local_dir {id}",
    "aistudio": "aistudio download --model {id} --local_dir {id}",
}


def resolve_model(name: str | None, hub: str | None = None) -> Path:
    """A folder as typed, the newest cached snapshot of a hub id, or that id downloaded from the Hugging Face hub.

    A mistyped path is not looked up on the hub: its first part is a folder here."""
    if not name:
        raise CheckpointError("no model given", where="model_name_or_path", fix="set it to a folder or a hub id")
    folder = expanded(name)
    if _is_model(folder):
        return folder
    if folder.is_dir():
        raise CheckpointError(
            f"{name} is a folder without config.json",
            where="model_name_or_path",
            fix="point at the folder that holds config.json and the .safetensors files",
        )
    if folder.is_file():
        holds = _is_model(folder.parent)
        raise CheckpointError(
            f"{name} is a file, where the folder of a model is needed",
            where="model_name_or_path",
            fix=f"name its folder: {folder.parent}" if holds else "name the folder with config.json and the weights",
        )
    cached = _cached_snapshot(name)
    if cached:
        return cached
    command = DOWNLOAD.get(hub or "huggingface", DOWNLOAD["huggingface"]).format(id=name)
    if looks_like_id(name) and hub in (None, "huggingface") and not folder.parent.is_dir() and not _is_offline():
        from erniekit.checkpoint.hub_download import download

        return download(name, command)
    raise CheckpointError(
        f"model {name!r} is neither a folder here nor in the download cache",
        where="model_name_or_path",
        fix=f"download it first: {command}" if looks_like_id(name) else "check the path",
    )


def expanded(name: str) -> Path:
    """With `~` as the home folder. `~name` stays as it is where this machine has no user of that name."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def looks_like_id(name: str) -> bool:
    """`owner/name`; a relative path of two parts looks the same, so a folder of that name counts first."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def lasting_name(name: str, folder: Path) -> str:
    """What to store as the place of a model that `name` was resolved to: the hub id of a cached snapshot, else a path
    that means the same wherever it is read."""
    return str(folder.resolve()) if _is_model(expanded(name)) else name


def _is_offline() -> bool:
    """The hub tools' own switch."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def _cached_snapshot(name: str) -> Path | None:
    """The Hugging Face cache keeps models--owner--name/{refs/main,snapshots/<commit>}."""
    home = os.environ.get("HF_HUB_CACHE") or os.path.join(os.environ.get("HF_HOME") or "~/.cache/huggingface", "hub")
    repo = Path(home).expanduser() / ("models--" + name.replace("/", "--"))
    main = repo / "refs" / "main"
    found = [repo / "snapshots" / main.read_text().strip()] if main.is_file() else []
    if (repo / "snapshots").is_dir():
        found += sorted((repo / "snapshots").iterdir(), key=lambda p: p.stat().st_mtime, reverse=True)
    return next((p for p in found if _is_model(p)), None)


def _is_model(folder: Path) -> bool:
    names = ("config.json", "adapter_config.json")
    for name in names:
        refuse_special(folder / name, CheckpointError)
    return any((folder / name).is_file() for name in names)
