"""Adapters that come while a server runs: what a client is told where the engine cannot take one."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path

import pytest
from torch import nn

from erniekit.errors import CheckpointError
from erniekit.serve.engines.model_changes import ModelRefused
from erniekit.serve.request_error import RequestError
from erniekit.serve.request_parsing import ServedModel
from erniekit.serve.runtime_adapters import RuntimeAdapters


class FullEngine:
    """One whose memory is taken: every model that comes is refused."""

    def add_model(self, name: str, model: nn.Module) -> Future[None]:
        refused: Future[None] = Future()
        refused.set_exception(ModelRefused("OutOfMemoryError: 3 GiB"))
        return refused

    def remove_model(self, name: str) -> None:
        raise AssertionError("there is none to remove")


def test_an_adapter_that_the_engine_cannot_take_is_not_served(tmp_path: Path, capsys):
    (tmp_path / "style").mkdir()
    models: dict[str, ServedModel] = {}

    def open_adapter(name: str, key: str, folder: Path) -> tuple[nn.Module, ServedModel]:
        return nn.Identity(), ServedModel(name, None, frozenset(), 8, 8)  # type: ignore[arg-type]

    adapters = RuntimeAdapters(FullEngine(), models, (str(tmp_path),), open_adapter)
    with pytest.raises(RequestError, match="cannot be served beside the others: unload one") as caught:
        asyncio.run(adapters.load("style", "style"))
    assert (caught.value.status, caught.value.code) == (503, "no_room")
    assert (models, adapters.loaded) == ({}, set())
    assert "OutOfMemoryError: 3 GiB" in capsys.readouterr().err


def test_a_client_is_not_told_where_the_servers_folders_are(tmp_path: Path):
    (tmp_path / "style").mkdir()

    def open_adapter(name: str, key: str, folder: Path) -> tuple[nn.Module, ServedModel]:
        raise CheckpointError(f"no adapter in {folder}", where="lora_path", fix="name another")

    adapters = RuntimeAdapters(FullEngine(), {}, (str(tmp_path),), open_adapter)
    with pytest.raises(RequestError) as caught:
        asyncio.run(adapters.load("style", str(tmp_path / "style")))
    assert caught.value.message == "the adapter cannot be loaded: no adapter in style"
