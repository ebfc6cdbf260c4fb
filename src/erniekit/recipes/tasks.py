"""`erniekit eval DIR --tasks hellaswag,arc_easy`: public benchmarks through lm-evaluation-harness, an extra of its own.

Called by recipes/run.py. Scorer answers the harness's requests with our model, and must give the numbers of the
harness's own Hugging Face backend for the same folder; the harness itself is imported only here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from erniekit.api_load import find_model
from erniekit.config import RunConfig
from erniekit.data.tokenizer import Tokenizer
from erniekit.errors import ConfigError
from erniekit.extras import install_command
from erniekit.log import emit, paint, warn
from erniekit.models.score_head import refuse as refuse_score_head
from erniekit.recipes.eval_folder import results_folder, what_to_evaluate, write_evaluation
from erniekit.recipes.expert_layers import ignore_bias
from erniekit.recipes.run_plan import open_device, packed_as
from erniekit.registry import nearest
from erniekit.result import RunResult
from erniekit.serve.mtp_layers import proposed_tokens

if TYPE_CHECKING:
    from erniekit.devices.base import Device
    from erniekit.serve.text_engine import TextEngine

# Names of the same thing in task files; of several the first counts.
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_DEFAULT_LENGTH = 256
AT_ONCE = 8  # answers that are generated together, at least


class TaskGeneration(NamedTuple):
    """What a task requires of generated answers."""

    until: Sequence[str]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0


class Scorer:
    """What a benchmark needs of a language model, in text. No template; a first token only where the folder's own
    tokenizer always puts one (Llama's <s>)."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        max_length: int,
        batch_size: int = 1,
        device: Device | None = None,
        seed: int = 0,
        proposals: int = 0,
    ) -> None:
        """device: answers are generated in recorded steps there; None: in plain ones. proposals: tokens that the
        model's MTP layer proposes for them; the answers stay the same."""
        self.model, self.tokenizer, self.device, self.seed = model.eval(), tokenizer, device, seed
        self.proposals = proposals
        self.max_length, self.batch_size = max_length, batch_size
        bos = tokenizer.bos_id
        self._prefix = tokenizer.eos_id if bos is None else bos  # what an answer to nothing follows
        # ERNIE's <|begin_of_sentence|> belongs to its chat template, so it opens no plain text.
        self._opening = [bos] if bos is not None and tokenizer.begin_id == bos else []
        self.engine: TextEngine | None = None

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """(log-probability of the second text after the first, whether it is what greedy decoding would generate)."""
        return self._score([self._encoded(context, answer) for context, answer in pairs])

    def score_whole(self, texts: Sequence[str]) -> list[float]:
        """Log-probability of every token of a text, however long, each counted once."""
        return [sum(score for score, _ in self._score(self._windows(text))) for text in texts]

    def generate(
        self,
        context: str,
        until: Sequence[str],
        max_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
    ) -> str:
        """Up to the first of `until`; greedy at temperature 0."""
        return self.generate_all([(context, TaskGeneration(until, max_tokens, temperature, top_p, top_k))])[0]

    def generate_all(self, asked: Sequence[tuple[str, TaskGeneration]]) -> list[str]:
        """By the embedded engine, several at once; a seed's answers are the same in any batch."""
        from erniekit.serve.engines.base import GenerationJob, SamplingParams
        from erniekit.serve.text_engine import NAME, TextAnswer

        longest = max((g.max_tokens for _, g in asked), default=0)
        if longest >= self.max_length:
            raise ConfigError(
                f"the task needs answers of up to {longest} tokens, and question and answer have {self.max_length}",
                where="max_seq_len",
                fix=f"max_seq_len={2 * longest} or more, within the model's own positions",
            )
        tokenizer, ends = self.tokenizer, frozenset({self.tokenizer.eos_id, self.tokenizer.end_id})
        vocab = min(tokenizer.vocab_size, cast("Any", self.model).config.vocab_size)
        jobs, answers = [], []
        for number, (context, g) in enumerate(asked):
            ids = self._opening + tokenizer.encode_text(context)
            prompt = tuple(ids[-(self.max_length - g.max_tokens) :]) or (self._prefix,)
            how = SamplingParams(
                g.max_tokens, temperature=g.temperature, top_p=g.top_p, top_k=g.top_k, seed=self.seed + number
            )
            jobs.append(GenerationJob(prompt, NAME, how, ends, vocab))
            answers.append(TextAnswer(prompt, tokenizer, [stop for stop in g.until if stop]))
        if jobs:
            for _ in self._engine().pieces(jobs, answers):
                pass
        return [answer.text for answer in answers]

    def _engine(self) -> TextEngine:
        """Made with the first question that needs it, on the tensors of the model."""
        from erniekit.serve.shared_weights import same_tensors
        from erniekit.serve.text_engine import TextEngine

        if self.engine is None:
            config = cast("Any", self.model).config
            at_once = max(AT_ONCE, self.batch_size)
            tree = same_tensors(self.model)
            self.engine = TextEngine(tree, config, at_once, self.max_length, self.device, self.proposals)
        return self.engine

    def close(self) -> None:
        """Ends the engine's threads and frees its cache."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        """(context, window): whole windows follow the last token of the one before, and the last, which scores fewer
        tokens, has as much more context. A tokenizer's own first token is scored too: the harness counts it."""
        ids = self._opening + self.tokenizer.encode_text(text)
        out = []
        for start in range(0, len(ids), self.max_length):
            window = ids[start : start + self.max_length]
            first = start + len(window) - self.max_length - 1
            out.append((ids[first:start] if start else [self._prefix], window))
        return out

    def _encoded(self, context: str, answer: str) -> tuple[list[int], list[int]]:
        """Blanks at the seam belong to the answer: that is where tokenizers put them."""
        blanks = len(context) - len(context.rstrip())
        if blanks:
            context, answer = context[:-blanks], context[-blanks:] + answer
        if not context:
            return [self._prefix], self.tokenizer.encode_text(answer)
        before, both = self.tokenizer.encode_text(context), self.tokenizer.encode_text(context + answer)
        return self._opening + before, both[len(before) :]

    @torch.no_grad()
    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        out: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        scored = [k for k, (_, answer) in enumerate(pairs) if answer]
        order = sorted(scored, key=lambda k: -len(pairs[k][0]) - len(pairs[k][1]))  # like lengths together
        device = next(self.model.parameters()).device
        for at in range(0, len(order), self.batch_size):
            chosen = order[at : at + self.batch_size]
            # The last token is only a target; what is too long loses its beginning.
            rows = [((pairs[k][0] + pairs[k][1])[-(self.max_length + 1) :], len(pairs[k][1])) for k in chosen]
            longest = max(len(ids) for ids, _ in rows) - 1
            tokens = torch.tensor([ids[:-1] + [0] * (longest + 1 - len(ids)) for ids, _ in rows], device=device)
            logits = self.model(tokens)  # padding comes after, so no token attends to it
            for k, row, (ids, count) in zip(chosen, logits, rows):
                count = min(count, len(ids) - 1)
                log_probs = row[len(ids) - 1 - count : len(ids) - 1].float().log_softmax(-1)
                answer = torch.tensor(ids[-count:], device=device)
                greedy = bool((log_probs.argmax(-1) == answer).all())
                out[k] = (float(log_probs.gather(1, answer[:, None]).sum()), greedy)
        return out


def run_tasks(cfg: RunConfig) -> RunResult:
    """Of lora_path, of what a run in output_dir trained, or of model_name_or_path where there is nothing yet."""
    harness = import_harness()
    manager = harness.tasks.TaskManager()
    names = known_tasks(manager, cfg.train.eval_tasks)  # before a model is loaded for nothing
    packed = packed_as(cfg)
    opened = open_device(cfg)
    cfg, device, dtype = opened.config, opened.device, opened.dtype
    source, base, trained = what_to_evaluate(cfg)
    found = find_model(source, base, cfg.model.download_hub, cfg.lora.override_base, cfg.checkpoint.verify)
    refuse_score_head(found.weights.config.labels, "eval_tasks", str(found.weights.path))
    tokenizer = found.tokenizer(cfg.model.tokenizer_name)
    model = found.build(dtype, device.handle, packed)
    ignore_bias(cfg, model)
    emit(f"model    {source}")
    config: Any = model.config
    length = min(cfg.data.max_seq_len, config.max_positions)
    recording = device if cfg.serve.decoding == "auto" and device.records_graphs and device.triton else None
    rows, proposals = cfg.train.per_device_eval_batch_size, proposed_tokens(cfg.serve, config)
    scorer = Scorer(model, tokenizer, length, rows, recording, cfg.train.seed, proposals)
    with results_folder(cfg, source, trained) as output, closing(scorer):
        metrics = measure(cfg, harness, manager, names, scorer)
        if proposals and scorer.engine is None:
            warn(f"num_speculative_tokens={proposals} has no effect: these tasks score texts and generate none")
        written = write_evaluation(output, source, metrics)
    for name, value in metrics.items():
        emit(f"task     {name:<40} {value:.4f}")
    emit(f"{paint('done', 'green', 'bold')}     {written}")
    return RunResult(output, metrics)


def measure(cfg: RunConfig, harness: Any, manager: Any, names: list[str], scorer: Scorer) -> dict[str, float]:
    limit = cfg.train.max_evaluate_steps
    try:
        found = harness.simple_evaluate(
            model=language_model(harness, scorer),
            tasks=names,
            task_manager=manager,
            limit=limit if limit > 0 else None,
            random_seed=cfg.train.seed,
            numpy_random_seed=cfg.train.seed,
            torch_random_seed=cfg.train.seed,
        )
    except OSError as error:  # what `datasets` raises for files and for the network
        raise ConfigError(
            f"the data of a task could not be read: {error}",
            where="eval_tasks",
            fix="run it once where the hub can be reached; its files are then kept under HF_HOME",
        ) from error
    return dict(flat(found["results"]))


def flat(results: dict[str, dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """{"hellaswag": {"acc,none": 0.5}} -> ("hellaswag/acc", 0.5); a name without a comma (sample_len) is no metric."""
    for task, values in results.items():
        for name, value in values.items():
            metric, comma, kind = name.partition(",")
            if comma and isinstance(value, (int, float)) and not isinstance(value, bool):
                yield f"{task}/{metric}" + (f",{kind}" if kind != "none" else ""), float(value)


def known_tasks(manager: Any, names: Sequence[str]) -> list[str]:
    """Tasks, groups, patterns (mmlu_*) and task files of one's own, as the harness takes them."""
    out: list[str] = []
    for name in names:
        found = [name] if Path(name).is_file() else manager.match_tasks([name])
        if not found:
            near = nearest(name, list(manager.all_tasks))
            raise ConfigError(
                f"lm-evaluation-harness has no task {name!r}",
                where="eval_tasks",
                fix=(f"did you mean {near[0]}? " if near else "") + "a task's .yaml file works, too",
            )
        out += found
    return out


def import_harness() -> Any:
    try:
        import lm_eval
        import lm_eval.api.model
        import lm_eval.tasks
    except ImportError as error:
        raise ConfigError(
            f"tasks are evaluated with lm-evaluation-harness, which is not installed ({error})",
            where="eval_tasks",
            fix=install_command("tasks"),
        ) from None
    return lm_eval


def language_model(harness: Any, scorer: Scorer) -> Any:
    """The harness's own interface around a Scorer."""

    class ErnieKitLM(harness.api.model.LM):
        def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            return scorer.score([request.args for request in requests])

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            return scorer.score_whole([request.args[0] for request in requests])

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            asked = [request.args for request in requests]
            return scorer.generate_all([(context, TaskGeneration(**generation(how))) for context, how in asked])

    return ErnieKitLM()


def generation(settings: dict[str, Any]) -> dict[str, Any]:
    """A task's generation_kwargs as arguments of Scorer.generate."""
    scored = {name: value for name, value in settings.items() if value is not None}
    lengths = [int(scored.pop(name)) for name in _LENGTHS if name in scored]
    until = scored.pop("until", [])
    temperature, sampled = float(scored.pop("temperature", 0.0)), scored.pop("do_sample", True)
    top_p, top_k = float(scored.pop("top_p", 1.0)), int(scored.pop("top_k", 0))
    if scored.get("num_beams") == 1:
        del scored["num_beams"]
    if scored:
        raise ConfigError(
            "a task uses unknown generation settings: "
            + ", ".join(f"{name}={value}" for name, value in scored.items()),
            where="eval_tasks",
            fix="erniekit export writes a folder that `lm_eval --model hf` reads; or leave this task out",
        )
    return {
        "until": [until] if isinstance(until, str) else list(until),
        "max_tokens": lengths[0] if lengths else _DEFAULT_LENGTH,
        "temperature": temperature if sampled else 0.0,
        "top_p": top_p,
        "top_k": top_k,
    }
