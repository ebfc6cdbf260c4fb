"""Answers generated at every evaluation of a training run: read by people, and compared with the data's own.

Hooked in by training.py. The embedded engine runs on a second tree of modules over the same weights, so that nothing of
the model in training is changed; each data rank answers its share of the prompts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import nn

from erniekit import heartbeat
from erniekit.config import RunConfig
from erniekit.data.preference import PairSample
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import IGNORE, Sample
from erniekit.data.unpaired import UnpairedSample
from erniekit.files import own, settle
from erniekit.lora.inject import inject
from erniekit.parallel.sharding_table import plain
from erniekit.printable import counted
from erniekit.recipes.built import Built
from erniekit.recipes.datasets import TrainData
from erniekit.track import Trackers
from erniekit.track.samples import FILE, keep_until

SHOWN = 3  # samples of an evaluation on the screen; all are in samples.jsonl and the report
WIDTH = 160  # characters of each part there


@dataclass(frozen=True)
class Prompt:
    ids: tuple[int, ...]
    reference: tuple[int, ...]


@dataclass(frozen=True)
class GeneratedAnswer:
    prompt: str
    answer: str
    reference: str

    @property
    def exact(self) -> bool:
        return self.answer.strip() == self.reference.strip()

    @property
    def similarity(self) -> float:
        return SequenceMatcher(None, self.answer.strip(), self.reference.strip(), autojunk=False).ratio()


class GenerationEval:
    def __init__(
        self, cfg: RunConfig, built: Built, data: TrainData, tokenizer: Tokenizer, trackers: Trackers, output: Path
    ) -> None:
        self.built, self.tokenizer, self.trackers = built, tokenizer, trackers
        self.path, self.max_tokens = output / FILE, cfg.train.eval_generate_max_tokens
        self.begun = False
        longest = built.folder.config.max_positions - 1
        found = (prompt_of(source.sample(k)) for source in data.evaluation for k in range(len(source)))
        self.prompts = list(islice((one for one in found if 0 < len(one.ids) < longest), cfg.train.eval_generate))

    def __call__(self, step: int) -> dict[str, float]:
        """Metrics, the same on every rank; the samples are written by one."""
        world = self.built.world
        answers: list[list[int]] = [[] for _ in self.prompts]
        for rank, made in enumerate(world.gather(self._share(world.rank, world.size))):
            answers[rank :: world.size] = made
        samples = [self._sample(prompt, ids) for prompt, ids in zip(self.prompts, answers)]
        if world.is_main:
            self._write(step, samples)
            right = sum(sample.exact for sample in samples)
            for sample in samples[:SHOWN]:
                fields = (f"{name} {_short(value)!r}" for name, value in asdict(sample).items())
                self.trackers.event(step, "sample", ", ".join(fields))
            self.trackers.event(
                step, "generated", f"{counted(len(samples), 'answer')}, {right} equal the reference; all in {FILE}"
            )
        count = max(1, len(samples))
        return {
            "eval_exact_match": sum(sample.exact for sample in samples) / count,
            "eval_similarity": sum(sample.similarity for sample in samples) / count,
        }

    def _share(self, rank: int, ranks: int) -> list[list[int]]:
        from erniekit.serve.batch_generation import generate_greedily  # the server's engine: half a second to import

        built, prompts = self.built, self.prompts[rank::ranks]
        tree = plain_copy(built)  # every rank: sharded weights are gathered together
        tokenizer = self.tokenizer
        return generate_greedily(
            tree,
            built.folder.config,
            [prompt.ids for prompt in prompts],
            device=built.device,
            dtype=built.dtype,
            stop_ids=frozenset(id for id in (tokenizer.eos_id, tokenizer.end_id) if id is not None),
            vocab=tokenizer.vocab_size,
            max_tokens=self.max_tokens,
        )

    def _sample(self, prompt: Prompt, ids: Sequence[int]) -> GeneratedAnswer:
        question, answer, reference = (self.tokenizer.decode(part) for part in (prompt.ids, ids, prompt.reference))
        return GeneratedAnswer(question, answer, reference)

    def _write(self, step: int, samples: Sequence[GeneratedAnswer]) -> None:
        """A new run begins a new file; a resumed one goes on, and a step that it evaluates again is replaced."""
        path = own(self.path)
        if not self.begun and not self.trackers.info.start_step:
            path.unlink(missing_ok=True)
        self.begun = True
        keep_until(path, step - 1)
        with path.open("a", encoding="utf-8") as out:
            for sample in samples:
                row = {"global_step": step, **asdict(sample), "exact_match": sample.exact}
                out.write(json.dumps(row, ensure_ascii=False) + "\n")
        settle(path)


def prompt_of(sample: Sample) -> Prompt:
    """What comes before a sample's last answer, and that answer; of a pair its chosen one."""
    ids, labels = sample.ids, sample.labels
    if isinstance(sample, PairSample):
        labels = labels[: sample.scored]
    trained = np.flatnonzero(labels != IGNORE)
    if not len(trained):
        return Prompt((), ())
    if isinstance(sample, (PairSample, UnpairedSample)):
        first = int(trained[0])
    else:  # several turns: the last stretch without a gap
        gaps = np.flatnonzero(np.diff(trained) > 1)
        first = int(trained[gaps[-1] + 1] if len(gaps) else trained[0])
    return Prompt(tuple(ids[: first + 1].tolist()), tuple(labels[trained[trained >= first]].tolist()))


@torch.no_grad()
def plain_copy(built: Built) -> nn.Module:
    """The model's modules once more, over the same memory; where weights are sharded, over a gathered copy."""
    folder = built.folder
    tree = folder.spec.cast(folder.meta(), built.dtype)
    if built.lora:
        inject(tree, built.lora, built.plan.config.train.seed)
    held: dict[str, torch.Tensor] = {}
    for name, param in built.parameters():
        heartbeat.beat()
        whole = param.full_tensor() if hasattr(param, "full_tensor") else param.detach()
        held[name] = whole.detach().to(built.device.handle, folder.spec.dtype_of(name, built.dtype))
    for part in built.engine.parts:
        held |= {plain(name): value.detach() for name, value in part.named_buffers()}
    tree.load_state_dict({name: held[plain(name)] for name in tree.state_dict()}, assign=True)
    return tree.eval().requires_grad_(False)


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= WIDTH else flat[: WIDTH - 3] + "..."
