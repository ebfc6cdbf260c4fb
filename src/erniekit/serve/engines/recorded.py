"""Steps of fixed shapes, recorded once and replayed: chunks of prompts, and bursts of tokens of all that decode.

Used by embedded.py where the device records graphs; without them the same work is launched one by one, which is how
tests run it on a CPU. A token that is drawn goes into the state on the device (step_state.py), from where the next step
takes it: the host launches ahead and reads tokens when they have arrived. plain_step.py is the definition.
Where models are in one batch (adapter_batch.py), a step in which no row has an adapter runs the base's own modules: of
a step of few rows the products of low rank are half of the time. It is recorded when the first of its size comes, so
that a start takes no longer and servers of adapters alone record nothing for it; all recordings share their memory.
T tokens of a step, B rows of a batch, R rows that draw.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from erniekit.devices.base import Device
from erniekit.kernels import few_tokens
from erniekit.kernels.paged_attention import PagedTokens, Tiles
from erniekit.log import warn
from erniekit.serve.engines.adapter_batch import AdapterRows, batchable, joined, without_adapters
from erniekit.serve.engines.base import Token
from erniekit.serve.engines.flat_layers import angles, logits_of, run_flat
from erniekit.serve.engines.launched import Fetched, LaunchedStep
from erniekit.serve.engines.out_of_memory import is_out_of_memory, reason
from erniekit.serve.engines.paged import PagedCache, SequencePiece
from erniekit.serve.engines.recorded_speculation import RecordedProposals, StepTensors
from erniekit.serve.engines.sampler import draw_numbers, sample
from erniekit.serve.engines.sequence import RunningSequence
from erniekit.serve.engines.speculation import Planned
from erniekit.serve.engines.step_state import PLACE, TURN, Sent, StepState

TILE = 64  # tokens of a prompt that one program of the attention kernel takes
SHORT_TILE = 16  # where there are fewer
TOGETHER = ""  # the name of all models that are in one batch
FETCHED = 8  # copies of results that can be on their way, for each model
Work = tuple[Callable[[], None], list[torch.Tensor]]  # what launches or replays it, and the logits it leaves


def sizes_up_to(most: int, first: int = 1, factor: int = 2) -> list[int]:
    """Sizes that are recorded: others are filled up to the next."""
    out = [first]
    while out[-1] < most:
        out.append(min(out[-1] * factor, most))
    return out


class ChunkInputs:
    """Of a step over T tokens of prompts, R of which draw."""

    def __init__(self, tokens: int, rows: int, slots: int, device: torch.device, pinned: bool) -> None:
        self.tile = TILE if tokens >= TILE else SHORT_TILE
        self.tokens = Sent((5, tokens), torch.int64, device, pinned)  # ids, slots, places, turns, the ids behind them
        self.tiles = Sent((2, -(-tokens // self.tile) + min(slots, tokens)), torch.int32, device, pinned)
        self.last = Sent((2, rows), torch.int64, device, pinned)  # tokens that draw, their slots


class RecordedSteps:
    """sequences: at once; tokens: of prompts in one step; length: of a sequence; burst: tokens a row in one launch;
    proposals: tokens that the MTP layer proposes for a row, if any; memory_key: what leaves more memory if lowered."""

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        cache: PagedCache,
        device: Device,
        sequences: int,
        tokens: int,
        length: int,
        burst: int,
        proposals: int = 0,
        memory_key: str = "gpu_memory_utilization",
    ) -> None:
        batched = {name: models[name] for name in batchable(models)}
        # Of models that are not in the batch no step asks for it.
        self.numbers = dict.fromkeys(models, 0) | {name: number for number, name in enumerate(batched)}
        self.adapters, self.batched = AdapterRows(), frozenset(batched)
        self.models: dict[str, Any] = {TOGETHER: joined(batched, self.adapters)} if batched else {}
        self.models |= {name: model for name, model in models.items() if name not in batched}
        self.bases = frozenset(without_adapters(models))
        base = next(name for name in batched if name in self.bases) if batched else None
        self.base: str | None = base  # what steps without adapters are recorded of; None: no others are
        self.trees = self.models if base is None else {**self.models, base: models[base]}
        self.cache, self.device, self.burst, self.memory_key = cache, device, burst, memory_key
        self.handle, self.pinned = cache.keys[0].device, device.pins_memory
        self.state = StepState(sequences, cache.blocks_for(length), cache.blocks, self.handle, self.pinned)
        self.batches = sizes_up_to(sequences)
        self.chunks = sizes_up_to(tokens + sequences, SHORT_TILE, 4)
        config = next(iter(self.models.values())).config
        # Behind pictures a text's places on the axes may run ahead of its place in the sequence.
        turned = angles(config, (length + 1) * (1 if config.mrope is None else 4), self.handle)
        self.tensors = StepTensors(self.state, cache, *turned, config.rope_style == "halves", length)
        self.rows = {size: Sent((size,), torch.int64, self.handle, self.pinned) for size in self.batches}
        for sent in self.rows.values():
            sent.here[...] = self.state.padding_slot
        most = self.batches[-1]
        self.inputs = {size: ChunkInputs(size, most, sequences, self.handle, self.pinned) for size in self.chunks}
        self.ring = torch.zeros(burst, most, dtype=torch.int64, device=self.handle)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=self.handle)
        self.drawn = torch.zeros(most, dtype=torch.int64, device=self.handle)
        count = FETCHED * len(self.models)
        self._rings, self._drawn = (Fetched(t, count, self.pinned) for t in (self.ring, self.drawn))
        self.proposals = RecordedProposals(self.tensors, proposals, burst, most) if proposals else None
        if self.proposals is not None:
            self._rounds = Fetched(self.proposals.ring, count, self.pinned)
        self._blocks = [0] * sequences  # of each slot, as the state has them
        self._works: dict[tuple[str, str, int, bool], Work] = {}
        self._base_fits = True  # nothing has failed to be recorded for steps without adapters

    def tree_of(self, model: str) -> str:
        """What `launch` calls it by; models of one name are launched together."""
        return TOGETHER if model in self.batched else model

    # --- slots

    def join(self, run: RunningSequence) -> None:
        run.slot = self.state.free.pop()
        self._blocks[run.slot] = 0
        self.state.set_model(run.slot, self.numbers[run.job.model])
        self.state.set_sampling(run.slot, *draw_numbers(run.job.sampling, run.job.vocab, run.seed))

    def leave(self, run: RunningSequence) -> None:
        """What is in flight for the slot comes before what its next owner writes: the device works in order."""
        if run.slot >= 0:
            self.state.free.append(run.slot)
        run.slot, run.placed, run.ahead = -1, False, 0
        run.epoch += 1

    # --- a launch

    def record_all(self) -> None:
        """Everything that requests with plain sampling use. Sizes for which there is no memory are taken off `batches`
        and `chunks`; without the smallest nothing can be computed, and it fails."""
        self._recorded_sizes("chunk", self.chunks[:1])  # before batches that could leave no memory for it
        # Batches next: with shorter chunks prompts take more steps, with smaller batches clients wait for each other.
        self.batches = self._recorded_sizes("batch", self.batches)
        self.chunks = self._recorded_sizes("chunk", self.chunks)

    def _recorded_sizes(self, kind: str, sizes: list[int]) -> list[int]:
        for number, size in enumerate(sizes):
            try:
                for name in self.models:
                    self._work(name, kind, size, True)
                continue
            except Exception as error:  # not kept: its frames hold memory
                if not number or not is_out_of_memory(error):
                    raise
            for name in self.models:
                self._works.pop((name, kind, size, True), None)
            self.device.empty_cache()
            return sizes[:number]  # larger ones need more
        return sizes

    def launch(self, name: str, group: Sequence[Planned], steps: int) -> LaunchedStep:
        """Pieces of prompts, and `steps` tokens of each sequence that decodes. Sequences whose sampling depends on the
        tokens before are read at once; then steps is 1, and nothing else may be in flight."""
        fresh = [(run, piece) for run, piece in group if not run.placed]
        going = [run for run, _ in group if run.placed]
        special = any(needs_history(run) for run, _ in group)
        for run, _ in group:
            if self._blocks[run.slot] != len(run.table):
                self.state.set_table(run.slot, run.table)
                self._blocks[run.slot] = len(run.table)
        self.state.send()
        firsts = [run for run, piece in fresh if piece.stop == run.length]
        out = LaunchedStep([(run, run.epoch) for run in firsts], [(run, run.epoch) for run in going], steps)
        out.launched, out.decodes_only = time.perf_counter(), not fresh
        known: list[Token | None] = []
        if fresh:
            known += self._chunk(name, fresh, firsts, special, out)
        if firsts and going and not special:
            out.first_event = self.device.event()
            out.first_event.record()
        if going:
            known += self._batch(name, going, steps, special, out)
        if special:
            out.known = known
        elif firsts or going:
            out.event = self.device.event()
            out.event.record()
        return out

    def _chunk(
        self, name: str, fresh: Sequence[Planned], firsts: list[RunningSequence], special: bool, out: LaunchedStep
    ) -> list[Token | None]:
        size = _at_least(self.chunks, sum(piece.stop - piece.start for _, piece in fresh))
        inputs = self.inputs[size]
        self._fill(inputs, fresh)
        replay, left = self._work_for([run for run, _ in fresh], name, "chunk", size, not special)
        replay()
        for run, piece in fresh:
            run.cached = piece.stop
        for run in firsts:
            run.placed, run.ahead = True, run.ahead + 1
            self.state.set_place(run.slot, run.cached, _turn(run, run.cached))
        if special:
            return self._sampled(left[0], firsts)
        out.drawn = self._drawn.take(self.drawn) if firsts else None
        return []

    def _fill(self, inputs: ChunkInputs, fresh: Sequence[Planned]) -> None:
        tokens, tiles, last = (np.zeros_like(sent.here) for sent in (inputs.tokens, inputs.tiles, inputs.last))
        tokens[1], last[1] = self.state.padding_slot, self.state.padding_slot
        at = tile = drawing = 0
        for run, piece in fresh:
            count = piece.stop - piece.start
            end = at + count
            tokens[0, at:end] = piece.ids[piece.start : piece.stop]
            tokens[1, at:end] = run.slot
            tokens[2, at:end] = np.arange(piece.start, piece.stop)
            tokens[3, at:end] = np.arange(piece.start, piece.stop) if piece.vision is None else _turns(piece)
            behind = piece.ids[piece.start + 1 : piece.stop + 1]
            tokens[4, at : at + len(behind)] = behind
            for first in range(at, end, inputs.tile):
                tiles[:, tile] = first, min(inputs.tile, end - first)
                tile += 1
            if piece.stop == run.length:
                last[:, drawing] = end - 1, run.slot
                drawing += 1
            at = end
        for sent, values in ((inputs.tokens, tokens), (inputs.tiles, tiles), (inputs.last, last)):
            sent.put(values)

    def _batch(
        self, name: str, going: list[RunningSequence], steps: int, special: bool, out: LaunchedStep
    ) -> list[Token | None]:
        size, slots = _at_least(self.batches, len(going)), [run.slot for run in going]
        self.rows[size].put([*slots, *[self.state.padding_slot] * (size - len(slots))])
        replay, left = self._work_for(going, name, "batch", size, not special)
        if not special:
            self.cursor.zero_()
        for _ in range(steps):
            replay()
        if self.proposals is not None and not special:
            out.rounds, out.state = self._rounds.take(self.proposals.ring), self.state
            return []
        self.state.move_on(slots, steps)
        for run in going:
            run.cached += steps
            run.ahead += steps
        if special:
            self.state.numbers.changed = True  # this work left the places where they were
            return self._sampled(left[0], going)
        out.ring = self._rings.take(self.ring)
        return []

    def _sampled(self, logits: torch.Tensor, runs: list[RunningSequence]) -> list[Token | None]:
        """By the tokens generated before, which the host has: nothing else is in flight."""
        if not runs:
            return []
        tokens = sample(logits[: len(runs)], [run.row() for run in runs])
        slots = torch.tensor([run.slot for run in runs], device=self.handle)
        ids = torch.tensor([0 if token is None else token.id for token in tokens], device=self.handle)
        self.state.tokens.index_copy_(0, slots, ids)
        return tokens

    # --- what is recorded

    def _work_for(self, runs: Sequence[RunningSequence], name: str, kind: str, size: int, draws: bool) -> Work:
        """Without the products of adapters where none of these sequences has one."""
        if name != TOGETHER or self.base is None or not self.bases.issuperset(run.job.model for run in runs):
            return self._work(name, kind, size, draws)
        key = (self.base, kind, size, draws)
        if self._base_fits or key in self._works:
            try:
                return self._work(*key)
            except Exception as error:  # of no request: what is recorded runs on the padding slot
                self._base_fits, problem = False, reason(error, self.memory_key)
            self.device.empty_cache()  # behind the error, whose frames hold memory
            warn(f"steps without adapters are not recorded, answers of the base are slower: {problem}")
        return self._work(name, kind, size, draws)

    def _work(self, name: str, kind: str, size: int, draws: bool) -> Work:
        key = (name, kind, size, draws)
        if key not in self._works:
            held: list[torch.Tensor] = [self.drawn]
            body = self._chunk_body if kind == "chunk" else self._batch_body
            if kind == "batch" and draws and self.proposals is not None:
                body = self._round_body

            def work() -> None:
                with few_tokens.enabled():
                    held[0] = body(name, size, draws)

            self._works[key] = (self._recorded(work, kind, size), held)
        return self._works[key]

    def _recorded(self, work: Callable[[], None], kind: str, size: int) -> Callable[[], None]:
        if not self.device.records_graphs:
            return work
        # Capturing runs the step: on the padding slot, so that no sequence draws a token.
        sents = [self.rows[size]] if kind == "batch" else [self.inputs[size].tokens, self.inputs[size].last]
        kept = [(sent, sent.here.copy()) for sent in sents]
        for sent, values in kept:
            empty = np.zeros_like(values)
            if kind == "batch":
                empty[...] = self.state.padding_slot
            else:
                empty[1] = self.state.padding_slot
            sent.put(empty)
        tiles = self.inputs[size].tiles if kind == "chunk" else None
        counts = None if tiles is None else tiles.here.copy()
        if tiles is not None:
            tiles.put(np.zeros_like(tiles.here))
        self.state.send()
        try:
            return self.device.recorded(work)
        finally:  # other work may take these inputs
            for sent, values in kept:
                sent.put(values)
            if tiles is not None:
                tiles.put(counts)

    def _chunk_body(self, name: str, size: int, draws: bool) -> torch.Tensor:
        model, inputs = self.trees[name], self.inputs[size]
        ids, rows, places, turns, behind = inputs.tokens.there.unbind(0)
        tiles = Tiles(inputs.tiles.there[0], inputs.tiles.there[1], inputs.tile)
        last, slots = inputs.last.there.unbind(0)
        where = PagedTokens(rows, places, self.state.tables, self.cache.size)
        self.adapters.of = self.state.models.there.index_select(0, rows)
        x, added = run_flat(model, model.embed_ids(ids), where, self.tensors.turns(turns), self.cache, tiles)
        logits = logits_of(model, x.index_select(0, last), added.index_select(0, last))
        if not draws:
            return logits
        drawn = self.tensors.drawn(logits, slots, places.index_select(0, last) + 1)
        self.drawn.copy_(drawn)
        self.state.tokens.index_copy_(0, slots, drawn.clamp(min=0))
        if self.proposals is not None:
            self.proposals.after_chunk(model, x + added, behind, where, tiles, last, slots, drawn)
        return drawn  # the logits' memory is free for others

    def _round_body(self, name: str, size: int, draws: bool) -> torch.Tensor:
        """As a batch, with proposals."""
        assert self.proposals is not None
        drawn = self.proposals.round(self.trees[name], self.rows[size].there, self.adapters, self.cursor)
        self.cursor.add_(1).remainder_(self.burst)
        return drawn

    def _batch_body(self, name: str, size: int, draws: bool) -> torch.Tensor:
        model, state, rows = self.trees[name], self.state, self.rows[size].there
        numbers = state.numbers.there.index_select(0, rows)
        places, turns = numbers[:, PLACE].long(), numbers[:, TURN].long()
        where = PagedTokens(rows, places, state.tables, self.cache.size)
        self.adapters.of = state.models.there.index_select(0, rows)
        embedded = model.embed_ids(state.tokens.index_select(0, rows))
        logits = logits_of(model, *run_flat(model, embedded, where, self.tensors.turns(turns), self.cache, None))
        if not draws:
            return logits
        drawn = self.tensors.drawn(logits, rows, places + 1)
        state.tokens.index_copy_(0, rows, drawn.clamp(min=0))
        # The padding slot does not advance: its one block is overwritten at each step.
        moved = numbers[:, :2] + (rows != state.padding_slot)[:, None].int()
        state.numbers.there[:, :2].index_copy_(0, rows, moved)
        self.ring[:, :size].index_copy_(0, self.cursor, drawn[None])
        self.cursor.add_(1).remainder_(self.burst)  # recording goes round as often as it likes
        return drawn


def needs_history(run: RunningSequence) -> bool:
    """Whether its next token depends on the one before by more than the model, or more than its id is returned."""
    sampling = run.job.sampling
    return not sampling.plain or sampling.logprobs is not None or run.matcher is not None


def is_plain(run: RunningSequence, piece: SequencePiece) -> bool:
    """Pieces that recorded steps do not compute: of prompts with pictures, and of those whose states are pooled."""
    return run.pooled is not None or (run.features is not None and piece.start < len(run.job.prompt))


def _at_least(sizes: Sequence[int], count: int) -> int:
    return next(size for size in sizes if size >= count)


def _turn(run: RunningSequence, place: int) -> int:
    vision = run.job.vision
    return place if vision is None else int(vision.positions_in(place, place + 1)[0, 0])


def _turns(piece: SequencePiece) -> np.ndarray:
    assert piece.vision is not None
    return piece.vision.positions_in(piece.start, piece.stop)[:, 0]
