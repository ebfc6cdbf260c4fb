"""A pipeline's action list for every rank: what is computed, and between it what is sent and received. No torch.

A pure function of the schedule's name and three numbers. The runner executes it, the planner replays it.
"""

from __future__ import annotations

from collections import deque
from functools import cache

from erniekit.parallel.pipeline_actions import (
    BACKWARD,
    FORWARD,
    INPUT,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    WEIGHT,
    Action,
    Order,
    gpipe,
    one_forward_one_backward,
    warm_up,
)
from erniekit.parallel.pipeline_simulator import simulate

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


def resolved(name: str, stages_each: int) -> str:
    """`auto` decided: 1F1B, interleaved where ranks hold several stages."""
    if name == "auto":
        return "interleaved" if stages_each > 1 else "1f1b"
    return "interleaved" if name in ("gpipe", "1f1b") and stages_each > 1 else name


@cache
def computations(name: str, ranks: int, stages_each: int, micro_batches: int) -> tuple[Order, ...]:
    """Of each rank, in order, transfers left out."""
    name = resolved(name, stages_each)
    if name == "gpipe":
        return tuple(gpipe(ranks, micro_batches, rank) for rank in range(ranks))
    assert name in SCHEDULES, name
    each = tuple(one_forward_one_backward(ranks, stages_each, micro_batches, rank) for rank in range(ranks))
    if name != "zero_bubble":
        return each
    return _without_bubbles(each, [warm_up(ranks, stages_each, micro_batches, rank) for rank in range(ranks)])


@cache
def schedule(name: str, ranks: int, stages_each: int, micro_batches: int) -> tuple[Order, ...]:
    """Of each rank, transfers included; ends also where every send waits for its receive.

    Transfers have one order for the whole pipeline, that of the moments at which what they carry is ready; every
    rank's list keeps to it. So no two ranks can each wait in a transfer that the other has only later.
    """
    orders = computations(name, ranks, stages_each, micro_batches)
    last = ranks * stages_each - 1
    timeline = simulate(orders)
    # (moment, transfers first, then a fixed order) -> action, for each rank
    keyed: list[list[tuple[tuple[float, int, Action], Action]]] = [[] for _ in orders]
    for rank, spans in enumerate(timeline.ranks):
        for action, start, end in ((span.action, span.start, span.end) for span in spans):
            keyed[rank].append(((start, 1, action), action))
            sent = _sent(action, last)
            if sent is None or sent.peer.stage % ranks == rank:
                continue
            keyed[rank].append(((end, 0, sent), sent))
            keyed[sent.peer.stage % ranks].append(((end, 0, sent), sent.peer))
    return tuple(tuple(action for _, action in sorted(one)) for one in keyed)


def _sent(action: Action, last: int) -> Action | None:
    """What a computation has for a neighbour."""
    if action.kind == FORWARD and action.stage < last:
        return action._replace(kind=SEND_ACTIVATION)
    if action.kind in (BACKWARD, INPUT) and action.stage > 0:
        return action._replace(kind=SEND_GRADIENT)
    return None


def _without_bubbles(orders: tuple[Order, ...], limits: list[int]) -> tuple[Order, ...]:
    """The same orders with backward in two (zero bubble, arXiv 2401.10241, its variant H1): gradients of weights are
    computed where a rank would wait, and no more is held than the order held before. limits: that, of each rank.

    In ticks of one forward pass; the first stage hands no gradient on, so its backward stays whole (two ticks)."""
    ranks = len(orders)
    last = max(action.stage for order in orders for action in order)
    done: dict[Action, int] = {}
    made: list[list[Action]] = [[] for _ in orders]
    at, free, held = [0] * ranks, [0] * ranks, [0] * ranks
    waiting: list[deque[Action]] = [deque() for _ in orders]
    tick = 0
    while any(at[r] < len(orders[r]) or waiting[r] for r in range(ranks)):
        for rank in (r for r in range(ranks) if free[r] <= tick):
            action = orders[rank][at[rank]] if at[rank] < len(orders[rank]) else None
            full = action is not None and action.kind == FORWARD and held[rank] >= limits[rank]
            if action is not None and not full and _ready(action, done, tick, last):
                if action.kind == BACKWARD and action.stage > 0:
                    action = action._replace(kind=INPUT)
                    waiting[rank].append(action._replace(kind=WEIGHT))
                at[rank] += 1
            elif waiting[rank]:
                action = waiting[rank].popleft()
            else:
                continue
            held[rank] += (action.kind == FORWARD) - (action.kind in (BACKWARD, WEIGHT))
            free[rank] = done[action] = tick + (2 if action.kind == BACKWARD else 1)
            made[rank].append(action)
        tick += 1
    return tuple(map(tuple, made))


def _ready(action: Action, done: dict[Action, int], tick: int, last: int) -> bool:
    kind, stage, m = action
    if kind == FORWARD:
        before = 0 if stage == 0 else done.get(Action(FORWARD, stage - 1, m))
    elif stage == last:
        before = done.get(Action(FORWARD, stage, m))
    else:
        before = done.get(Action(INPUT, stage + 1, m))
    return before is not None and before <= tick
