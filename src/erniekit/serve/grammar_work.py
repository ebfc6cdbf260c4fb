"""Compiles grammars of requests outside the event loop, bounded in number, in waiting and in time. Used by api.py.

Every schema is first looked at in a process: what takes too long there is refused, and never begun here.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from erniekit.extras import install_command
from erniekit.serve import structured
from erniekit.serve.engines.base import Grammar
from erniekit.serve.output_grammar import OutputGrammar
from erniekit.serve.prompt_worker import Failed
from erniekit.serve.request_error import RequestError
from erniekit.serve.request_parsing import ServedModel
from erniekit.serve.schema_probe import SchemaProbe, TooComplex
from erniekit.serve.work_queue import LEFT_S, Busy, Late, QueuedTask, Stuck, WorkQueue, result_of

THREADS, QUEUE = 2, 32
DEADLINE_S = 10.0
KEPT = 64  # compiled grammars; clients send the same few again and again

TableKey = tuple[str, int, frozenset[int]]


@dataclass(frozen=True)
class GrammarTask:
    grammar: OutputGrammar
    served: ServedModel
    opened: bool

    @property
    def vocab(self) -> int:
        return min(self.served.tokenizer.vocab_size, self.served.vocab)

    @property
    def table(self) -> TableKey:
        return self.served.tokenizer.fingerprint, self.vocab, self.served.stop_ids


class GrammarWork:
    """`compile` in the event loop; the work is done in threads."""

    def __init__(self) -> None:
        self._queue = WorkQueue("grammar", THREADS, QUEUE, self._do, self._leave, LEFT_S)
        self._own = threading.local()  # a thread's process
        self._probes: list[SchemaProbe] = []
        self._tables: dict[TableKey, structured.TokenTable] = {}
        self._kept: OrderedDict[tuple[TableKey, OutputGrammar, bool], Grammar] = OrderedDict()
        self._lock = threading.Lock()
        self._building = threading.Lock()

    async def compile(self, grammar: OutputGrammar, served: ServedModel, opened: bool) -> Grammar:
        """Raises RequestError for a schema that cannot be compiled, and where it cannot be done now."""
        if not structured.is_installed():
            fix = install_command("structured")
            raise RequestError(400, f"{grammar.param} is not supported by this server: {fix}", param=grammar.param)
        loop = asyncio.get_running_loop()
        task = QueuedTask(
            GrammarTask(grammar, served, opened), None, loop, loop.create_future(), time.monotonic() + DEADLINE_S
        )
        try:
            found = await result_of(self._queue, task)
        except Busy:
            raise RequestError(
                429, "the server is busy: too many schemas wait", code="queue_full", headers={"Retry-After": "2"}
            ) from None
        except (Late, Stuck):
            raise RequestError(503, "the schema could not be compiled in time", code="grammar_timeout") from None
        return self._checked(found, grammar, served)

    def _checked(self, found: Any, grammar: OutputGrammar, served: ServedModel) -> Grammar:
        if isinstance(found, structured.BadGrammar):
            raise RequestError(400, str(found), param=found.place, code="invalid_schema")
        if isinstance(found, structured.NoGrammar):
            raise RequestError(
                400,
                f"{grammar.param} is not supported with the tokenizer of {served.name}: its tokens have no fixed bytes",
                param=grammar.param,
            )
        if isinstance(found, Failed):
            if found.kind == "stopping":
                raise RequestError(503, "the server is stopping", code="stopping")
            raise RequestError(500, "the server failed on this request")
        compiled: Grammar = found
        return compiled

    def _do(self, queued: QueuedTask) -> Any:
        task: GrammarTask = queued.work
        key = task.table, task.grammar, task.opened
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        try:
            if found := self._probe(queued).first_wrong(task.grammar.parts, queued):
                return structured.BadGrammar(*found)
            made = structured.build_grammar(task.grammar, self._table(task), task.opened)
        except TooComplex:
            return structured.BadGrammar(task.grammar.param, "the schema is too complex to be compiled")
        except (structured.BadGrammar, structured.NoGrammar) as bad:
            return bad
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return made

    def _probe(self, queued: QueuedTask) -> SchemaProbe:
        probe: SchemaProbe | None = getattr(self._own, "probe", None)
        if probe is None:
            probe = self._own.probe = SchemaProbe()
            self._probes.append(probe)
        queued.process = probe
        return probe

    def _leave(self) -> None:
        probe: SchemaProbe | None = getattr(self._own, "probe", None)
        if probe is not None:
            self._probes.remove(probe)
            probe.reap()

    def _table(self, task: GrammarTask) -> structured.TokenTable:
        """Made once: a second for a large vocabulary."""
        with self._building:
            if task.table not in self._tables:
                self._tables[task.table] = structured.TokenTable(
                    task.served.tokenizer, task.vocab, task.served.stop_ids
                )
            return self._tables[task.table]

    def end(self) -> None:
        """Called in the event loop. Waiting requests get an error; no new work is started."""
        for task in self._queue.end():
            task.settle(Failed("stopping", ""))
        for probe in list(self._probes):
            probe.kill()
