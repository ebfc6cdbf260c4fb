"""`erniekit bench --real`: whole `erniekit train` commands as a user types them, each in a process of its own, timed
from outside: to the first line on the screen, to the first step, real tokens a second once it runs, and from the last
step to the end. Called by command.py; imports no torch.

A case's folder has the config.json of a real shape and a tokenizer; weights are drawn at random (continue_training:
False), so that nothing is downloaded. Its rows are text of the demo, cut to the token counts of the case.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from erniekit.bench.report import aligned
from erniekit.bench.workloads import FULL, LORA, TINY, TINY_EXPERTS
from erniekit.errors import ConfigError
from erniekit.log import emit
from erniekit.models.released import ERNIE_03B, ERNIE_21B

STEP = re.compile(r"\bglobal_step: (\d+)")
LOST = 0.5  # of the steps that are not timed: they meet new lengths, which are compiled then
HEAD = ("case", "first line s", "first step s", "tokens/s", "all steps", "to the end s", "aim", "what")
FIRST_TOKENS = 16  # of a prompt, where a row is one answer


@dataclass(frozen=True)
class RealCase:
    name: str
    about: str
    model: Mapping[str, Any]
    keys: Mapping[str, Any]
    rows: tuple[int, int] = (5000, 7500)  # tokens of each row, from and to
    answer: int = 0  # tokens of each of two answers: rows are preferences
    steps: int = 60
    aim: float | None = None  # real tokens a second on one H200


_PAIRS: dict[str, Any] = {**FULL, "stage": "DPO", "max_prompt_len": 4096}
_LORA_8K = {**LORA, "max_seq_len": 8192, "packing": False}
_CASES = (
    RealCase(
        "sft", "0.3B, every weight, 8K, packing off", ERNIE_03B, {**FULL, "max_seq_len": 8192, "packing": False},
        steps=120, aim=110e3,
    ),
    RealCase("sft-packed", "0.3B, every weight, packed 32K", ERNIE_03B, {**FULL, "max_seq_len": 32768}, aim=208e3),
    RealCase("lora", "21B-A3B, LoRA, 8K, packing off", ERNIE_21B, _LORA_8K, aim=25.2e3),
    RealCase("lora-fp8", "the same over fp8 weights", ERNIE_21B, {**_LORA_8K, "frozen_base": "fp8"}, aim=29.5e3),
    RealCase(
        "dpo", "0.3B, every weight, DPO, four pairs of 4K packed", ERNIE_03B, {**_PAIRS, "max_seq_len": 16384},
        rows=(3000, 3001), answer=512, aim=135e3,
    ),
    RealCase(
        "dpo-rows", "0.3B, every weight, DPO, four pairs of many lengths, packing off", ERNIE_03B,
        {**_PAIRS, "max_seq_len": 4608, "packing": False, "batch_size": 4}, rows=(1500, 3072), answer=512,
    ),
)  # fmt: skip
CASES = {case.name: case for case in _CASES}


def chosen(names: Sequence[str]) -> list[RealCase]:
    unknown = [name for name in names if name not in CASES]
    if unknown:
        fix = f"choose from: {', '.join(CASES)}"
        raise ConfigError(f"no case {unknown[0]!r}", where="erniekit bench --real --only", fix=fix)
    return [CASES[name] for name in names] or list(CASES.values())


def tiny(case: RealCase) -> RealCase:
    """Small enough for a CPU: whether the command runs, not how fast."""
    model = {**case.model, **TINY, "vocab_size": 1280, "num_key_value_heads": 2}
    model |= {**TINY_EXPERTS, "moe_num_shared_experts": 1} if "moe_num_experts" in model else {}
    keys = {**case.keys, "max_seq_len": 256, "compute_type": "fp32", "device": "cpu", "dataset_num_proc": 1}
    keys |= {"max_prompt_len": 128} if case.answer else {}
    keys.pop("frozen_base", None)
    rows, answer = ((64, 96), 16) if case.answer else ((100, 200), 0)
    return replace(case, model=model, keys=keys, rows=rows, answer=answer, steps=4, aim=None)


def cut(case: RealCase, layers: int) -> RealCase:
    """A model with experts of so many layers, where the whole one takes too long or too much memory."""
    if not layers or "moe_num_experts" not in case.model:
        return case
    model = {**case.model, "num_hidden_layers": layers, "moe_layer_end_index": layers - 1}
    return replace(case, model=model, about=f"{case.about}, {layers} layers", aim=None)


# --- files


def write_model(case: RealCase, folder: Path) -> None:
    from erniekit.demo.tiny import make_tokenizer  # imports torch

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(case.model)))
    make_tokenizer(folder)


def write_rows(case: RealCase, folder: Path, file: Path, count: int, seed: int = 0) -> None:
    """So many rows of JSONL, by the folder's tokenizer."""
    import sentencepiece

    from erniekit.demo.tiny import demo_text

    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    texts = [line.replace("\n", " ") + " " for line in demo_text()]
    sizes = [len(pieces.encode(line)) for line in texts]
    rng = random.Random(seed)

    def text(tokens: int) -> str:
        out: list[str] = []
        while tokens > 0:
            pick = rng.randrange(len(texts))
            out.append(texts[pick])
            tokens -= sizes[pick]
        return "".join(out[:-1]) or out[0]

    with file.open("w", encoding="utf-8") as lines:
        for _ in range(count):
            tokens = rng.randrange(*case.rows)
            row: dict[str, Any] = {"src": [text(FIRST_TOKENS)], "tgt": [text(tokens - FIRST_TOKENS)]}
            if case.answer:
                answers = [[text(case.answer)], [text(case.answer)]]
                row = {"src": [text(tokens)], "tgt": [], "response": answers, "sort": [1, 0]}
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")


# --- one command


def measured(case: RealCase, folder: Path, more: Mapping[str, str], again: bool = False) -> dict[str, Any]:
    """folder: of the case's files, kept from run to run. again: once before, so that every cache is warm."""
    model, rows = folder / "model", folder / "rows.jsonl"
    if not rows.exists():
        write_model(case, model)
        write_rows(case, model, rows, 400 if case.steps > 10 else 24)
    runs = [_command(case, folder, more) for _ in range(2 if again else 1)]
    return {"case": case.name, "about": case.about, "aim": case.aim, **runs[-1], "before": runs[:-1]}


def _command(case: RealCase, folder: Path, more: Mapping[str, str]) -> dict[str, Any]:
    output = folder / "out"
    shutil.rmtree(output, ignore_errors=True)  # of the run before, in a folder of ours
    keys = {
        "model_name_or_path": folder / "model",
        "continue_training": False,
        "train_dataset_path": folder / "rows.jsonl",
        "output_dir": output,
        "cache_dir": folder / "cache",
        "max_steps": case.steps,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        **case.keys,
        **more,
    }
    command = [sys.executable, "-m", "erniekit", "train", *(f"{key}={value}" for key, value in keys.items())]
    began = time.monotonic()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        output_lines = list(_timed(process, began))
        code = process.wait()
    ended = time.monotonic() - began
    if code:
        return {"failed": [line for _, line in output_lines[-8:]], "exit_code": code}
    steps = [(when, int(found[1])) for when, line in output_lines if "loss: " in line and (found := STEP.search(line))]
    first, last = steps[0][0], max(when for when, step in steps if step == case.steps)
    return {
        "first_line_s": output_lines[0][0],
        "first_step_s": first,
        "to_the_end_s": ended - last,
        "seconds": ended,
        "start_seconds": json.loads((output / "run.json").read_text(encoding="utf-8")).get("start_seconds", {}),
        **rates(list(_records(output / "metrics.jsonl"))),
        "rows": [line.strip() for _, line in output_lines if line.startswith(("rows ", "note "))],
    }


def _timed(process: subprocess.Popen[str], began: float) -> Iterator[tuple[float, str]]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip():
            yield time.monotonic() - began, line.rstrip()


def _records(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "tokens_per_second" in record:
            yield record


def rates(records: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Real tokens a second: the median of the later steps, and the mean of all but the first, compilations counted."""
    speeds = [record["tokens_per_second"] for record in records]
    later = speeds[int(LOST * len(speeds)) :]
    tokens = sum(r["tokens_per_second"] * r["interval_runtime"] for r in records[1:])
    spent = sum(r["interval_runtime"] for r in records[1:])
    return {
        "tokens_per_s": statistics.median(later),
        "all_steps_tokens_per_s": tokens / spent if spent else None,
        "steps": len(records),
        "mfu": records[-1].get("mfu"),
    }


def table(results: Sequence[Mapping[str, Any]]) -> list[str]:
    return aligned(HEAD, [_row(result) for result in results], text_columns=(0, len(HEAD) - 1))


def _row(result: Mapping[str, Any]) -> tuple[str, ...]:
    name, about = str(result["case"]), str(result["about"])
    if "failed" in result:
        return (name, *("-" for _ in HEAD[2:-1]), "failed", about)
    whole = result["all_steps_tokens_per_s"]
    return (
        name,
        f"{result['first_line_s']:.1f}",
        f"{result['first_step_s']:.1f}",
        f"{result['tokens_per_s']:,.0f}",
        f"{whole:,.0f}" if whole else "-",
        f"{result['to_the_end_s']:.1f}",
        f"{result['aim']:,.0f}" if result["aim"] else "-",
        about,
    )


def run_real(
    cases: Sequence[RealCase], out: Path, work: Path, more: Mapping[str, str], again: bool
) -> tuple[list[dict[str, Any]], bool]:
    """Results in order, also in out/real.json after every case; and whether one failed. work: for models and rows."""
    results: list[dict[str, Any]] = []
    for case in cases:
        emit(f"{case.name}: {case.about}")
        result = measured(case, work / case.name, more, again)
        results.append(result)
        for line in result.get("failed", ()):
            emit(f"  {line}")
        (out / "real.json").write_text(json.dumps({"results": results}, indent=1))
    return results, any("failed" in result for result in results)
