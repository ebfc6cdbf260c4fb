"""Adapters loaded and unloaded while a server runs, under vLLM's routes. Built by loaded_models.py, called by api.py.

Only folders below those of `lora_dirs` are read. An adapter is read and checked in a thread of its own; the engine then
takes it between two steps. One that is unloaded is answered 404 at once, and its running answers end as they would.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from torch import nn

from erniekit.errors import ErnieKitError
from erniekit.log import emit, warn
from erniekit.serve.engines.model_changes import ModelRefused
from erniekit.serve.request_error import RequestError
from erniekit.serve.request_parsing import ServedModel

MAX_ADAPTERS = 64  # that were loaded at run time
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./:-]{0,127}")


class ChangingEngine(Protocol):
    def add_model(self, name: str, model: nn.Module) -> Future[None]: ...
    def remove_model(self, name: str) -> None: ...


# (name, engine's name, folder) -> the model with its adapter, and how it is served.
OpenAdapter = Callable[[str, str, Path], tuple[nn.Module, ServedModel]]


class RuntimeAdapters:
    """models: those of the API, which this changes, in the event loop only."""

    def __init__(
        self,
        engine: ChangingEngine,
        models: dict[str, ServedModel],
        folders: tuple[str, ...],
        open_adapter: OpenAdapter,
    ) -> None:
        self.engine, self.models, self.open_adapter = engine, models, open_adapter
        self.folders = tuple(Path(folder).expanduser().resolve() for folder in folders)
        self.loaded: set[str] = set()
        self._numbers = itertools.count(1)
        self._loading = asyncio.Lock()

    async def load(self, name: str, path: str, replaces: bool = False) -> str:
        """A message on what was done; RequestError where it cannot be."""
        self._check_name(name, replaces)
        folder = self._allowed(path)
        async with self._loading:
            self._check_name(name, replaces)
            # The engine's own name is never used twice: prefixes in its cache are known by it.
            engine_name = f"{name}#{next(self._numbers)}"
            tree, served = await self._opened(name, engine_name, folder)
            try:
                await asyncio.wrap_future(self.engine.add_model(engine_name, tree))
            except ModelRefused as error:
                warn(f"an adapter was not loaded: {error}")
                raise RequestError(
                    503, "the adapter cannot be served beside the others: unload one, and load it again", code="no_room"
                ) from None
            except RuntimeError as error:
                raise RequestError(503, str(error), code="stopping") from None
            if name in self.loaded:
                self.engine.remove_model(self.models[name].engine_name)
            self.models[name] = served
            self.loaded.add(name)
        emit(f"adapter {name} loaded from {folder}")
        return f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, name: str) -> str:
        if name not in self.loaded:
            known = name in self.models
            why = "was not loaded at run time" if known else "is not loaded"
            raise RequestError(
                400 if known else 404,
                f"{name!r} {why}: only adapters of /v1/load_lora_adapter can be unloaded"[:300],
                param="lora_name",
                code=None if known else "model_not_found",
            )
        self.loaded.remove(name)
        self.engine.remove_model(self.models.pop(name).engine_name)
        emit(f"adapter {name} unloaded")
        return f"Success: LoRA adapter '{name}' removed successfully."

    def _check_name(self, name: str, replaces: bool) -> None:
        if not self.folders:
            raise RequestError(
                403, "adapters cannot be loaded here: start the server with lora_dirs=DIR", code="adapters_not_allowed"
            )
        if name == "default":
            raise RequestError(400, "lora_name: default is the base's own name, take another", param="lora_name")
        if not _NAME.fullmatch(name):
            raise RequestError(400, "lora_name: letters, digits and _./:- are allowed, 128 at most", param="lora_name")
        if name in self.models and not (replaces and name in self.loaded):
            raise RequestError(
                400, f"there is a model {name!r} already: unload it, or take another name", param="lora_name"
            )
        if len(self.loaded) >= MAX_ADAPTERS and name not in self.loaded:
            raise RequestError(400, f"{MAX_ADAPTERS} adapters are loaded: unload one first", param="lora_name")

    def _allowed(self, path: str) -> Path:
        """The folder, links followed; a relative path is one below a folder of lora_dirs."""
        if "\0" not in path:
            for allowed in self.folders:
                try:
                    folder = (allowed / path).resolve()
                    if folder.is_relative_to(allowed) and folder.is_dir():
                        return folder
                except (OSError, RuntimeError):  # links that lead in a circle are the second
                    continue
        # The same message for what is absent and what is not allowed: a client learns nothing of other folders.
        raise RequestError(400, "lora_path is not a folder below one of the server's lora_dirs", param="lora_path")

    async def _opened(self, name: str, engine_name: str, folder: Path) -> tuple[nn.Module, ServedModel]:
        done: Future[tuple[nn.Module, ServedModel]] = Future()

        def work() -> None:
            try:
                done.set_result(self.open_adapter(name, engine_name, folder))
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=work, name="adapter", daemon=True).start()
        try:
            return await asyncio.wrap_future(done)
        except ErnieKitError as error:
            what = error.what
            for allowed in self.folders:  # a client names folders below these, and need not know where they are
                what = what.replace(f"{allowed}/", "")
            raise RequestError(400, f"the adapter cannot be loaded: {what}"[:400], param="lora_path") from None
        except Exception as error:
            warn(f"an adapter could not be loaded: {type(error).__name__}: {error}"[:400])
            raise RequestError(400, "the adapter cannot be loaded: its files are damaged", param="lora_path") from None
