"""Whose turn it is, who makes way, and how much may wait: the queue alone, and in a real engine."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from erniekit.api_load import Found, find_model
from erniekit.demo.tiny import make_tiny_model
from erniekit.serve.engines.base import CLIENT, GenerationJob, QueueFull, SamplingParams, Token, TokenStream
from erniekit.serve.engines.embedded import EmbeddedEngine, EngineLimits
from erniekit.serve.engines.fair_queue import FairQueue, over_share, youngest_of_largest
from erniekit.serve.engines.paged import PagedCache
from erniekit.serve.engines.sequence import RunningSequence, sequences_of

LENGTH = 96


def runs(client: str, count: int = 1) -> list[RunningSequence]:
    job = GenerationJob((3,), "m", SamplingParams(4), frozenset(), 9)
    return sequences_of(TokenStream((job,) * count, client))


def turns(queue: FairQueue, places: int, count: int) -> list[str]:
    """Clients in the order they are let in, where the oldest that runs ends whenever there is no place."""
    running: list[RunningSequence] = []
    order = []
    while len(order) < count and (new := queue.next(running)) is not None:
        if len(running) == places:
            running.pop(0)
            continue
        queue.take(new)
        running.append(new)
        order.append(new.client)
    return order


def test_those_that_are_cancelled_leave_the_queue_waiting_or_put_back():
    queue = FairQueue(10)
    waiting, back = runs("a", 2), runs("b")[0]
    queue.add(waiting)
    waiting[0].gone = queue.leaving = True
    queue.drop_gone()
    assert len(queue) == 1
    back.gone = True  # between two steps, and there was too little memory for it
    queue.put_back(back)
    queue.drop_gone()
    assert (len(queue), queue.next([])) == (1, waiting[1])


def test_clients_take_turns_however_much_one_of_them_asks_for():
    queue = FairQueue(64)
    queue.add(runs("greedy", 100))
    for k in range(19):
        queue.add(runs(f"client {k}", 2))
    first = turns(queue, 4, 20)
    assert len(set(first)) == 20, "each had one turn before any had two"


def test_requests_of_one_client_take_turns_too():
    queue = FairQueue(64)
    large, small = runs("proxy", 50), runs("proxy")
    queue.add(large)
    queue.add(small)
    running: list[RunningSequence] = []
    for _ in range(3):
        new = queue.next(running)
        assert new is not None
        queue.take(new)
        running.append(new)
    assert small[0] in running


def test_two_that_come_again_and_again_do_not_starve_a_third_with_one_place():
    queue = FairQueue(64)
    queue.add(runs("patient", 50))
    served: Counter[str] = Counter()
    for _ in range(60):
        for name in ("quick", "quicker"):
            if not any(stream.client == name for stream in queue._lines):
                queue.add(runs(name))
        new = queue.next([])
        assert new is not None
        queue.take(new)
        served[new.client] += 1
    assert min(served["patient"], served["quick"], served["quicker"]) >= 15


def test_a_place_moves_only_where_that_makes_the_shares_more_equal_and_once():
    greedy, other = runs("greedy", 8), runs("other", 8)
    running = list(greedy)
    for k in range(8):
        victim = over_share(other[k], running)
        if victim is None:
            break
        assert victim is greedy[7 - k], "the youngest"
        running.remove(victim)
        running.append(other[k])
    assert Counter(run.client for run in running) == {"greedy": 4, "other": 4}
    for run in greedy:
        run.preempted = True
    assert over_share(other[0], greedy) is None
    single = [run for k in range(8) for run in runs("one address")]
    assert over_share(runs("one address")[0], single) is None, "single requests of one client never displace each other"


def test_the_oldest_keeps_its_blocks():
    old, new = runs("a"), runs("b", 3)
    assert youngest_of_largest([*old, *new]) is new[-1]
    assert youngest_of_largest([*new, *old]) is new[-1], "not the small client's"
    assert youngest_of_largest(old) is old[0]


def test_a_large_request_does_not_fill_the_queue_and_a_new_client_finds_room():
    queue = FairQueue(8)
    busy = runs("a", 4)
    assert queue.accepts(TokenStream(runs("a", 128)[0].stream.jobs, "a"), busy, 4), "nothing waits yet"
    queue.add(runs("a", 128))
    assert len(queue) == 128
    for k in range(6):
        (run,) = runs("a")
        assert queue.accepts(run.stream, busy, 4), k
        queue.add([run])
    assert not queue.accepts(runs("a")[0].stream, busy, 4)
    assert queue.accepts(runs("b")[0].stream, busy, 4)
    for k in range(8):
        queue.add(runs(f"client {k}"))
    assert not queue.accepts(runs("b")[0].stream, busy, 4), "there is an end to that too"


# --- in a real engine


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return find_model(make_tiny_model(tmp_path_factory.mktemp("small")))


class Paced(EmbeddedEngine):
    """A step is not for free, and the next one begins when the event loop has seen all of the last: what is counted
    in steps does not depend on which thread gets the processor."""

    loop: asyncio.AbstractEventLoop | None = None

    def submit(self, *jobs: GenerationJob) -> TokenStream:
        self.loop = asyncio.get_running_loop()
        return super().submit(*jobs)

    def pace(self, *_: object) -> None:
        time.sleep(0.002)
        seen = threading.Event()

        def turn(left: int) -> None:
            if left:
                asyncio.get_running_loop().call_soon(turn, left - 1)
            else:
                seen.set()

        assert self.loop is not None
        try:
            self.loop.call_soon_threadsafe(turn, 3)  # an event arrives, wakes its reader, is read
        except RuntimeError:  # the loop is closed: nobody counts
            return
        while not seen.wait(0.1) and self.loop.is_running():
            pass


@pytest.fixture
def engine(small: Found) -> Iterator[EmbeddedEngine]:
    model = small.build()
    cache = PagedCache(model.config, 4 * LENGTH // 4, 4, torch.float32, "cpu")
    made = Paced({"m": model}, cache, EngineLimits(sequences=4, tokens=64, length=LENGTH, queue=16))
    model.layers[0].register_forward_pre_hook(made.pace)
    yield made
    made.stop()


def job(rng: random.Random, count: int, **wishes: float) -> GenerationJob:
    prompt = tuple(rng.randrange(5, 1000) for _ in range(rng.randrange(2, 20)))
    return GenerationJob(prompt, "m", SamplingParams(count, **{"temperature": 0, **wishes}), frozenset(), 1280)  # type: ignore[arg-type]


async def listen(engine: EmbeddedEngine, client: str, *jobs: GenerationJob) -> tuple[int, list[list[int]]]:
    """Steps of the engine until the first token, and the tokens of each answer."""
    CLIENT.set(client)
    began, first = engine.load().steps, None
    generated: list[list[int]] = [[] for _ in jobs]
    async for number, event in engine.submit(*jobs):
        if isinstance(event, Token):
            first = first or engine.load().steps - began
            generated[number].append(event.id)
        else:
            assert event.reason == "length", event
    assert first is not None
    return first, generated


def test_a_small_request_comes_through_while_a_large_one_runs_and_neither_answer_changes(engine: EmbeddedEngine):
    rng = random.Random(1)
    large = [job(rng, 40) for _ in range(14)]
    large[3] = job(rng, 40, temperature=1.0, seed=3)
    little = [job(rng, 4) for _ in range(3)]

    async def alone() -> tuple[list[list[int]], list[tuple[int, list[list[int]]]]]:
        generated = (await listen(engine, "greedy", *large))[1]
        return generated, [await listen(engine, "other", one) for one in little]

    async def together() -> tuple[list[list[int]], list[tuple[int, list[list[int]]]]]:
        running = asyncio.ensure_future(listen(engine, "greedy", *large))
        while engine.load().running < 4:
            await asyncio.sleep(0.001)
        waits = [await listen(engine, client, one) for client, one in zip(("other", "third", "greedy"), little)]
        assert engine.load().waiting > 4, "the large one is far from its end"
        return (await running)[1], waits

    generated, quiet = asyncio.run(alone())
    busy_said, busy = asyncio.run(together())
    assert busy_said == generated, "put back and computed anew, to the same tokens"
    assert [tokens for _, tokens in busy] == [tokens for _, tokens in quiet]
    load = engine.load()
    assert 1 <= load.preempted <= 3
    assert (load.running, load.cache_used) == (0, 0)
    # In the order of arrival they would wait for ten answers before them, 100 steps and more.
    assert max(wait for wait, _ in busy) <= max(wait for wait, _ in quiet) + 8


def test_many_clients_each_get_their_turn_behind_a_large_request(engine: EmbeddedEngine):
    rng = random.Random(2)
    ended: list[str] = []

    async def ask(client: str, *jobs: GenerationJob) -> None:
        await listen(engine, client, *jobs)
        ended.append(client)

    async def others() -> None:
        while engine.load().running < 4:
            await asyncio.sleep(0.001)
        await asyncio.gather(*(ask(f"client {k}", job(rng, 3)) for k in range(20)))

    async def go() -> None:
        await asyncio.gather(ask("greedy", *(job(rng, 12) for _ in range(32))), others())

    asyncio.run(asyncio.wait_for(go(), 60))
    assert ended[-1] == "greedy"
    assert len(set(ended)) == 21


def test_a_large_request_that_is_cancelled_leaves_nothing_behind(engine: EmbeddedEngine):
    rng = random.Random(3)

    async def go() -> None:
        CLIENT.set("greedy")
        stream = engine.submit(*(job(rng, 60) for _ in range(40)))
        await stream.events.get()
        await listen(engine, "other", job(rng, 3))  # displaces one of them
        assert engine.load().preempted > 0
        engine.cancel(stream)
        while engine.load().running:
            await asyncio.sleep(0.005)

    asyncio.run(asyncio.wait_for(go(), 60))
    load = engine.load()
    assert (load.waiting, load.cache_used) == (0, 0)
    assert engine.cache.free_blocks == engine.cache.blocks
    assert not engine._waiting._served, "no client is remembered"


def test_a_queue_full_of_one_client_has_room_for_another(engine: EmbeddedEngine):
    rng = random.Random(4)

    async def go() -> None:
        CLIENT.set("greedy")
        streams: list[TokenStream] = []
        try:
            while len(streams) < 40:
                streams.append(engine.submit(job(rng, 60)))
        except QueueFull:
            pass
        assert len(streams) < 40
        await listen(engine, "other", job(rng, 2))
        for stream in streams:
            engine.cancel(stream)

    asyncio.run(asyncio.wait_for(go(), 60))
