"""Steps for which there is no memory when they are recorded: the engine goes on with those it has, and says so."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from erniekit.api_load import Found
from erniekit.serve.engines import recorded
from erniekit.serve.engines.embedded import EmbeddedEngine, EngineLimits
from erniekit.serve.engines.model_changes import ModelRefused
from erniekit.serve.engines.paged import PagedCache
from erniekit.serve.loaded_models import with_adapter
from support.engine_jobs import LENGTH, alone, answers, job, listen, make_adapter, prompts
from support.recording_cpu import SmallCpu, small_cpu


def started(models: dict[str, torch.nn.Module], device: SmallCpu, sequences: int, tokens: int) -> EmbeddedEngine:
    cache = PagedCache(next(iter(models.values())).config, 128, 4, torch.float32, "cpu")
    limits = EngineLimits(sequences=sequences, tokens=tokens, length=LENGTH)
    return EmbeddedEngine(models, cache, limits, device)


def needed(models: dict[str, torch.nn.Module], sequences: int, tokens: int) -> dict[tuple[str, int], int]:
    """Bytes that recording takes, by kind and size."""
    device = small_cpu()
    engine = started(models, device, sequences, tokens)
    answers(engine, [job([3, 4], list(models)[-1])])
    engine.stop()
    steps = engine.recorded
    assert steps is not None
    first, *chunks = (("chunk", size) for size in steps.chunks)
    return dict(zip([first, *(("batch", size) for size in steps.batches), *chunks], device.room.taken, strict=True))


@pytest.mark.parametrize(
    ("sequences", "tokens", "faults", "left"),
    [
        # Chunks of up to 69 tokens are asked for. In one of 16 each of the sequences may have its last token.
        (5, 64, 1, (5, 16 - 5)),
        # Batches of up to 40 and chunks of up to 44; of 16 tokens half are for the last ones of sequences.
        (40, 4, 2, (8, 4)),
    ],
)
def test_where_memory_ends_while_steps_are_recorded_smaller_ones_answer(
    small: Found, sequences: int, tokens: int, faults: int, left: tuple[int, int], capsys
):
    room = needed({"m": small.build()}, sequences, tokens)
    device = small_cpu(room["chunk", 16])
    engine = started({"m": small.build()}, device, sequences, tokens)
    asked = prompts(12)
    try:
        assert answers(engine, [job(p) for p in asked]) == [alone(small.build(), p) for p in asked]
        assert device.room.faults == faults, "memory was to run out"
        steps = engine.recorded
        assert steps is not None
        assert steps.chunks == [16]
        assert steps.batches == [
            size for kind, size in room if kind == "batch" and room[kind, size] <= device.room.size
        ]
        assert (engine.limits.sequences, engine.limits.tokens) == left
        load = engine.load()
        assert (load.cache_used, load.healthy) == (0, True)
    finally:
        engine.stop()
    (told,) = capsys.readouterr().err.splitlines()
    assert f"{left[0]} of {sequences} answers at once, prompts in steps of {left[1]} of {tokens} tokens" in told
    assert told.endswith("a lower gpu_memory_utilization leaves more memory")


def test_without_memory_for_the_smallest_step_answers_come_from_plain_ones(small: Found, capsys):
    device = small_cpu(0)
    engine = started({"m": small.build()}, device, 5, 16)
    try:
        assert answers(engine, [job(p) for p in prompts(4)]) == [alone(small.build(), p) for p in prompts(4)]
        assert device.room.faults == 1
        assert engine.recorded is None
        assert engine.limits.sequences == 5
    finally:
        engine.stop()
    (told,) = capsys.readouterr().err.splitlines()
    assert "steps are not recorded, answers will be slow: OutOfMemoryError" in told
    assert told.endswith("a lower gpu_memory_utilization leaves more memory")


def test_without_memory_for_their_inputs_the_engine_starts_with_plain_steps(small: Found, monkeypatch, capsys):
    faults = []

    def full(*sizes: object) -> None:
        faults.append(sizes)
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

    monkeypatch.setattr(recorded, "StepState", full)
    engine = started({"m": small.build()}, small_cpu(), 5, 16)
    try:
        assert answers(engine, [job([3, 4])]) == [alone(small.build(), [3, 4])]
        assert engine.recorded is None
    finally:
        engine.stop()
    assert len(faults) == 1
    (told,) = capsys.readouterr().err.splitlines()
    assert "Tried to allocate 2.00 GiB; a lower gpu_memory_utilization leaves more memory" in told


def test_an_error_of_another_kind_is_not_taken_for_want_of_memory(small: Found, monkeypatch):
    def broken(*sizes: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(recorded, "StepState", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        started({"m": small.build()}, small_cpu(), 5, 16)


def test_an_adapter_with_which_the_largest_steps_do_not_fit_is_refused_and_all_sizes_stay(small: Found, tmp_path: Path):
    adapter = Found(small.weights, make_adapter(small.weights, tmp_path / "a", 1))
    base = small.build()
    room = max(needed({"m": base}, 5, 64).values())
    both = needed({"m": base, "a": with_adapter(base, adapter)}, 5, 64)
    assert both["chunk", 16] < room < both["chunk", 69]
    device = small_cpu(room)
    engine = started({"m": base}, device, 5, 64)

    async def go() -> list[int]:
        running = asyncio.ensure_future(listen(engine, job([3, 4, 5], max_tokens=30)))
        while engine.load().steps < 3:
            await asyncio.sleep(0.001)
        with pytest.raises(ModelRefused, match="of 64 tokens; a lower gpu_memory_utilization"):
            await asyncio.wrap_future(engine.add_model("a", with_adapter(base, adapter)))
        return (await running)[0]

    try:
        assert asyncio.run(asyncio.wait_for(go(), 60)) == alone(small.build(), [3, 4, 5], 30)
        assert device.room.faults == 1
        assert engine.recorded is not None
        assert (engine.recorded.batches, engine.recorded.chunks) == ([1, 2, 4, 5], [16, 64, 69])
        assert list(engine.models) == ["m"]
    finally:
        engine.stop()


def test_answers_that_have_no_place_in_steps_recorded_anew_wait_and_go_on(small: Found, tmp_path: Path, monkeypatch):
    """An adapter goes, and others have taken memory since the steps were recorded."""
    base = small.build()
    adapter = Found(small.weights, make_adapter(small.weights, tmp_path / "a", 1))
    least = needed({"m": base}, 40, 4)["chunk", 16]
    device = small_cpu()
    engine = started({"m": base, "a": with_adapter(base, adapter)}, device, 40, 4)
    asked = [[k, k + 1] for k in range(3, 15)]
    waited, most = engine._wait, []

    def wait() -> bool:
        goes_on = waited()
        most.append(len(engine._running))
        if most[-1] == len(asked) and device.room.size > least:
            device.room.size = least
            engine.remove_model("a")
        return goes_on

    monkeypatch.setattr(engine, "_wait", wait)
    try:
        said = asyncio.run(asyncio.wait_for(listen(engine, *(job(p, max_tokens=30) for p in asked)), 60))
        assert said == [alone(small.build(), p, 30) for p in asked]
        assert device.room.faults == 2
        after = most[most.index(len(asked)) + 1 :]
        assert max(after) == engine.limits.sequences == 8
        assert engine.load().cache_used == 0
    finally:
        engine.stop()
