"""Roots: the folders a page may name files in. Every path of a form passes here before a job may read or write it.

Called by forms.check and jobs.start; the answer is the real path, symlinks followed, and that is what the job is given.
Which keys hold paths, and in which form, is declared with the keys (config/field.py).
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from erniekit.config.field import PathKind
from erniekit.config.flat import KEYS as DECLARED
from erniekit.errors import ConfigError
from erniekit.files.media_folders import FOLDERS_VARIABLE
from erniekit.printable import public
from erniekit.webui.contents import adapter_bases, file_lines, links_in, token_files

MAX_LENGTH = 1024  # of a whole path: longer ones are no typed path
MAX_NAME = 255  # of one part of it, as file systems have it

KINDS: dict[str, PathKind] = {name: k.path for name, k in DECLARED.items() if k.path}
KEYS = tuple(KINDS)

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


KEY_FILE = "server.key"  # of a job: the API key of its server


class PathError(ConfigError):
    """A path that is none, or that leads out of the roots."""


class Roots:
    """The working directory unless others are named; the first is where relative paths start."""

    def __init__(self, folders: Sequence[str | Path] = ()) -> None:
        self.folders = tuple(Path(os.path.realpath(Path(f).expanduser())) for f in folders or (Path.cwd(),))
        if missing := [str(f) for f in self.folders if not f.is_dir()]:
            raise ConfigError(f"{missing[0]} is not a folder", where="root", fix="name folders that exist")

    @property
    def environment(self) -> dict[str, str]:
        """For processes that read files on behalf of the page: pictures that rows name must be in the roots, too."""
        return {FOLDERS_VARIABLE: os.pathsep.join(map(str, self.folders))}

    def with_folder(self, folder: str | Path) -> Roots:
        return Roots((*self.folders, folder))

    def resolve(self, text: str, key: str = "path") -> Path:
        """The real path of what was typed; a PathError where it is not inside a root."""
        _check_text(text, key)
        try:
            real = Path(os.path.realpath(self.folders[0] / Path(text).expanduser()))
        except (OSError, ValueError, RuntimeError) as error:
            raise PathError(f"{key} is not a path: {error}", where=key, fix="check the path") from None
        if real.name == KEY_FILE:
            raise PathError(f"{key} names a secret of this page", where=key, fix="another file")
        if not self.holds(real):
            raise self._outside_error(key, f"{key} leads outside the folders of this page: {_short(text)}")
        return real

    def holds(self, real: Path) -> bool:
        return any(real == folder or folder in real.parents for folder in self.folders)

    def resolve_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values with every path in them resolved; the first one that leads out raises."""
        resolved = {name: self.resolve_value(name, value) for name, value in values.items()}
        self._check_bases(resolved)
        return resolved

    def resolve_value(self, name: str, value: Any) -> Any:
        kind = KINDS.get(name, "")
        if not kind or value in (None, "", (), []):
            return value
        if name == "resume_from_checkpoint" and str(value).lower() in ("true", "false", "none"):
            return value
        if kind == "model" and self._is_hub_id(str(value), name):
            return str(value)
        if kind in ("one", "out", "model"):
            return self._path(str(value), name)
        if kind == "prefixes":
            return self._prefixes(str(value), name)
        if kind == "prefix_list":
            return self._prefix_list(str(value), name)
        if kind == "numbers":
            items = str(value).replace(",", " ").split()
            return value if all(map(_is_number, items)) else str(self.resolve(str(value), name))
        items = _items(value)
        if kind == "named":
            return [
                f"{label}={self._path(path, name)}" for label, path in (_name_and_path(item, name) for item in items)
            ]
        return [self._path(self._no_pattern(item, name), name) for item in items]

    def missing(self, name: str, value: Any) -> str:
        """The first file or folder of a key that would be read and is not there; empty where all are."""
        kind = KINDS.get(name, "")
        if kind not in ("one", "several", "model") or name == "resume_from_checkpoint" or value in (None, "", (), []):
            return ""
        items = [str(item) for item in ([value] if isinstance(value, str) and kind != "several" else _items(value))]
        for item in items:
            first = self.folders[0] / item.partition("/")[0]
            if kind == "model" and self._is_hub_id(item, name) and not first.is_dir():
                continue  # a hub id; with a folder of that name here it is a path that was mistyped
            if not self.resolve(item, name).exists():
                return item
        return ""

    def _no_pattern(self, item: str, name: str) -> str:
        """A pattern may match links that lead out; the links of a folder are checked."""
        if glob.has_magic(item) and not self.resolve(item, name).exists():
            raise PathError(f"{name} is a pattern: {_short(item)}", where=name, fix="name files, or their folder")
        return item

    def _is_hub_id(self, text: str, name: str) -> bool:
        """`owner/name`, nothing of that name on the disk: it is looked up in the download cache."""
        looks_so = text.count("/") == 1 and not text.startswith(("/", ".", "~", "-"))
        return looks_so and not self.resolve(text, name).exists()

    def _path(self, text: str, name: str) -> str:
        """A file or folder; links inside a folder are what the job would follow, so they must stay inside as well."""
        real = self.resolve(text, name)
        links, complete = links_in(real, self.holds)
        self._check_links(links, name)
        if not complete and KINDS[name] != "out":
            raise PathError(
                f"{name} holds more files than this page looks through",
                where=name,
                fix="name a folder with fewer files in it: that of one model, or the data files themselves",
            )
        return str(real)

    def _check_links(self, links: Sequence[Path], name: str) -> None:
        for link in links:
            if not self.holds(Path(os.path.realpath(link))):
                raise self._outside_error(
                    name, f"{name} holds a link that leads outside the folders of this page: {link.name}"
                )

    # ---- token files of pre-training, as data/pretrain.py reads these keys

    def _prefix(self, text: str, name: str) -> Path:
        """A prefix, one of its files, or a folder of them; the files that would be opened must be inside the roots."""
        real = self.resolve(text, name)
        self._check_links(token_files(real), name)
        self._check_links(links_in(real, self.holds)[0], name)
        return real

    def _prefixes(self, text: str, name: str) -> str:
        """A path that exists, blanks included; else a list of alternating weights and prefixes, or of prefixes."""
        items = text.split()
        if len(items) < 2 or self._exists(text, name):
            return str(self._prefix(text, name))
        by_turns = len(items) % 2 == 0 and all(map(_is_number, items[::2]))
        paths = items[1::2] if by_turns else items
        resolved = [self._list_item(path, name) for path in paths]
        if by_turns:
            resolved = [item for pair in zip(items[::2], resolved) for item in pair]
        return " ".join(resolved)

    def _prefix_list(self, text: str, name: str) -> str:
        """A file with a prefix on every line; else prefixes between commas or blanks."""
        if self._exists(text, name) and (real := self.resolve(text, name)).is_file():
            for line in file_lines(real, name):
                self._prefix(line, name)
            return str(real)
        joined = ",".join(self._list_item(item, name) for item in text.replace(",", " ").split())
        if "," in joined and os.path.isfile(joined):  # read as a file of prefixes, of which none was checked
            raise PathError(f"{name} is a list and a file at once", where=name, fix="rename the file")
        return joined

    def _exists(self, text: str, name: str) -> bool:
        """Whether the text as a whole names something inside the roots: a file, a folder or token files."""
        try:
            real = self.resolve(text, name)
        except PathError:
            return False
        return real.exists() or bool(token_files(real))

    def _list_item(self, text: str, name: str) -> str:
        real = str(self._prefix(text, name))
        if re.search(r"[\s,]", real):  # the reader of the list would cut it there, into paths that were not checked
            raise PathError(
                f"{name} lists a path with a blank or a comma in it: {_short(real)}",
                where=name,
                fix="rename it, or name it alone",
            )
        return real

    # ---- adapters

    def _check_bases(self, resolved: Mapping[str, Any]) -> None:
        """An adapter's config names the model below it, which is opened unless the recipe names one.

        That of a teacher always is.
        """
        model = str(resolved.get("model_name_or_path") or "")
        names = ["model_name_or_path", "lora_path", "lora_modules", "output_dir"]
        if model and not adapter_bases(Path(model)):  # a model by itself, or a hub id
            names = []
        for name in (*names, "teacher_model_name_or_path"):
            value = resolved.get(name) or ()
            for text in [value] if isinstance(value, str) else value:
                folder = str(text).partition("=")[2] if KINDS[name] == "named" else str(text)
                for config, base in adapter_bases(Path(folder)):
                    self._check_base(config, base, name)

    def _check_base(self, config: Path, base: str, name: str) -> None:
        """Resolved from the first root, then from the adapter: refused if one that exists is outside, or both are."""
        try:
            places = (self.folders[0] / Path(base).expanduser(), config.parent / base)
            outside = [real for place in places if not self.holds(real := Path(os.path.realpath(place)))]
            refused = len(outside) == len(places) or any(real.exists() for real in outside)
        except (OSError, ValueError, RuntimeError):
            refused = True
        if refused:
            what = f"the adapter in {name} is of a model outside the folders of this page: {_short(base)}"
            raise self._outside_error(name, what, "name its model with model_name_or_path, or ")

    def _outside_error(self, key: str, what: str, first: str = "") -> PathError:
        inside = " or ".join(map(str, self.folders))
        return PathError(what, where=key, fix=f"{first}use a path inside {inside}, or start the page with root=DIR,DIR")


def _check_text(text: str, key: str) -> None:
    if not text or not text.strip():
        raise PathError(f"{key} is empty", where=key, fix="name a file or folder")
    if any(ord(c) < 32 or ord(c) == 127 for c in text):
        raise PathError(f"{key} holds a control character", where=key, fix="type the path again")
    if "://" in text:  # as a path it would name a folder of this machine
        raise PathError(
            f"{key} is an address: {_short(public(text))}",
            where=key,
            fix="download it into a folder of this page, or start the run on the command line",
        )
    too_long = len(os.fsencode(text)) > MAX_LENGTH or any(len(os.fsencode(p)) > MAX_NAME for p in text.split("/"))
    if too_long:
        raise PathError(f"{key} is longer than a path can be", where=key, fix=f"at most {MAX_LENGTH} bytes")


def _items(value: Any) -> list[str]:
    items = value.split(",") if isinstance(value, str) else list(value)
    return [str(item).strip() for item in items if str(item).strip()]


def _name_and_path(item: str, key: str) -> tuple[str, str]:
    label, equals, path = item.partition("=")
    if not equals or not path or not _LABEL.fullmatch(label):
        raise PathError(f"{key} is {_short(item)!r}", where=key, fix="name=DIR, such as mine=output/run")
    return label, path


def _is_number(item: str) -> bool:
    try:
        return float(item) == float(item)  # nan is none
    except ValueError:
        return False


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
