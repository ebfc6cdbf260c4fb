"""`erniekit bench --real`: whole `erniekit train` commands as a user types them, each in a process of its own, timed
from outside: to the first line on the screen, to the first step, real tokens a second once it runs, and from the last
step to the end. Called by command.py; imports no torch.

A case's folder has the config.json of a real shape and a tokenizer; weights are drawn at random (continue_training:
False), so that nothing is downloaded or written. Its rows are text of the demo, cut to the token counts of the case;
where a case has pictures, each row begins with one. What the command printed is kept.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import yaml

from erniekit.bench.real_cases import RealCase
from erniekit.bench.report import aligned, speed, target_line
from erniekit.config import load, refuse_not_yet_supported
from erniekit.config.flat import canonical
from erniekit.errors import ConfigError, ErnieKitError
from erniekit.log import emit

STEP = re.compile(r"\bglobal_step: (\d+)")
LOST = 0.5  # of the steps that are not timed: they meet new lengths, which are compiled then
HEAD = ("case", "first line s", "first step s", "tokens/s", "all steps", "to the end s", "aim", "what")
OUTPUT, PICTURES = "out", "pictures"  # folders beside the rows
OURS = ("model_name_or_path", "train_dataset_path", "output_dir", "max_steps")  # what results are read from
FIRST_TOKENS = 16  # of a prompt, where a row is one answer
LAST_LINES = 8  # of a command that failed, on the screen
LEAST = 20.0  # seconds: a case is not begun with less


# --- files


def write_model(case: RealCase, folder: Path) -> None:
    from erniekit.demo.tiny import make_tokenizer  # imports torch
    from erniekit.demo.tiny_vision import CONTROL, TOKEN_IDS

    folder.mkdir(parents=True, exist_ok=True)
    ids, control = (TOKEN_IDS, CONTROL) if case.picture else ({}, ())  # of the tokenizer that is made here
    (folder / "config.json").write_text(json.dumps({**case.model, **ids}))
    make_tokenizer(folder, control=control)


def write_rows(case: RealCase, folder: Path, file: Path, count: int, seed: int = 0) -> None:
    """So many rows of JSONL, by the folder's tokenizer; pictures go into a folder beside the file."""
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

    def row(number: int) -> dict[str, Any]:
        tokens = rng.randrange(*case.rows)
        if case.answer:
            answers = [[text(case.answer)], [text(case.answer)]]
            return {"src": [text(tokens)], "tgt": [], "response": answers, "sort": [1, 0]}
        question, answer = text(FIRST_TOKENS), text(tokens - case.picture - FIRST_TOKENS)
        if not case.picture:
            return {"src": [question], "tgt": [answer]}
        seen = {"type": "image_url", "image_url": {"url": f"{PICTURES}/{pictures[number].name}"}}
        asked = {"role": "user", "content": [seen, {"type": "text", "text": question}]}
        return {"messages": [asked, {"role": "assistant", "content": answer}]}

    pictures = _pictures(case, file.parent / PICTURES, count, seed)
    with file.open("w", encoding="utf-8") as lines:
        for number in range(count):
            lines.write(json.dumps(row(number), ensure_ascii=False) + "\n")


def _pictures(case: RealCase, folder: Path, count: int, seed: int) -> list[Path]:
    if not case.picture:
        return []
    from erniekit.bench.picture_files import draw_pictures  # imports torch

    return draw_pictures(folder, count, case.picture, seed)


# --- one command


def measured(case: RealCase, folder: Path, more: Mapping[str, str], again: bool, log: Path) -> dict[str, Any]:
    """folder: of the case's files, kept from run to run. again: once before, so that every cache is warm; where that
    fails it is the result. log: gets what is printed."""
    model, rows = folder / "model", folder / "rows.jsonl"
    if not rows.exists():
        write_model(case, model)
        write_rows(case, model, rows, case.count)
    runs: list[dict[str, Any]] = []
    with log.open("w", encoding="utf-8") as printed:
        while len(runs) < (2 if again else 1) and not (runs and "failed" in runs[-1]):
            runs.append(_command(case, folder, more, printed))
    return {"case": case.name, "about": case.about, "aim": case.aim, **runs[-1], "before": runs[:-1]}


def _recipe(case: RealCase, folder: Path) -> Path:
    keys = {
        "model_name_or_path": str(folder / "model"),
        "continue_training": False,
        "train_dataset_path": str(folder / "rows.jsonl"),
        "output_dir": str(folder / OUTPUT),
        "cache_dir": str(folder / "cache"),
        "max_steps": case.steps,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        **case.keys,
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(keys, sort_keys=False), encoding="utf-8")
    return path


def check_keys(cases: Sequence[RealCase], work: Path, more: Mapping[str, str]) -> None:
    """What the commands would refuse about the keys, before the first of them starts."""
    if own := [key for key in more if canonical(key) in OURS]:
        raise ConfigError(
            f"{own[0]} is the benchmark's own key",
            where="erniekit bench --real",
            fix="leave it out; --steps N sets the steps, --output_dir DIR where results go",
        )
    for case in cases:
        folder = work / case.name
        folder.mkdir(exist_ok=True)
        try:
            refuse_not_yet_supported(load(_words(case, folder, more), "train"))
        except ErnieKitError as error:
            error.where = f"{error.where or 'key=value'}, case {case.name} of erniekit bench --real"
            if case is not cases[0]:  # some take it
                error.fix += f"; or --only with cases other than {case.name}"
            raise


def _words(case: RealCase, folder: Path, more: Mapping[str, str]) -> list[str]:
    """After `erniekit train`."""
    return [str(_recipe(case, folder)), *(f"{key}={value}" for key, value in more.items())]


def _command(case: RealCase, folder: Path, more: Mapping[str, str], printed: TextIO) -> dict[str, Any]:
    output = folder / OUTPUT
    shutil.rmtree(output, ignore_errors=True)  # of the run before, in a folder of ours
    words = [sys.executable, "-m", "erniekit", "train", *_words(case, folder, more)]
    began = time.monotonic()
    lines, code = _printed(words, began, printed)
    ended = time.monotonic() - began
    steps = [(when, int(found[1])) for when, line in lines if "loss: " in line and (found := STEP.search(line))]
    if why := failure(code, steps[-1][1] if steps else 0, case.steps):
        return {"failed": [line for _, line in lines[-LAST_LINES:]], "exit_code": code, "why": why}
    record = json.loads((output / "run.json").read_text(encoding="utf-8"))
    speeds = rates(list(_records(output / "metrics.jsonl")))
    # A run logs tokens alone; every step has the data's pictures a token, or nearly.
    pictures, tokens = (sum(file.get(name, 0) for file in record["data"]["train"]) for name in ("pictures", "tokens"))
    return {
        "first_line_s": lines[0][0],
        "first_step_s": steps[0][0],
        "to_the_end_s": ended - steps[-1][0],
        "seconds": ended,
        "start_seconds": record.get("start_seconds", {}),
        **speeds,
        "pictures_per_s": speeds["tokens_per_s"] * pictures / tokens if pictures else None,
        "rows": [line.strip() for _, line in lines if line.startswith(("rows ", "note "))],
    }


def failure(code: int, step: int, steps: int) -> str:
    """Empty: it ended well, with its last step."""
    if code < 0:
        return f"killed by signal {-code} ({signal.strsignal(-code)})"
    return f"exit code {code}" if code else f"ended after step {step} of {steps}" if step < steps else ""


def _printed(command: Sequence[str], began: float, printed: TextIO) -> tuple[list[tuple[float, str]], int]:
    """What it prints, each line with its time, and its exit code. A process group of its own: when we are stopped it is
    killed with all that it started, as a run of ours has nothing to save."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    ) as process:
        lines: list[tuple[float, str]] = []
        try:
            for when, line in _timed(process, began):
                lines.append((when, line))
                print(line, file=printed, flush=True)
            return lines, process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


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
    last = records[-len(later) :]
    return {
        "tokens_per_s": statistics.median(later),
        "trained_tokens_per_s": statistics.median(record.get("trained_tokens_per_second", 0.0) for record in last),
        "step_ms": 1e3 * statistics.median(record["interval_runtime"] for record in last),
        "peak_gib": records[-1].get("max_memory_allocated"),
        "all_steps_tokens_per_s": tokens / spent if spent else None,
        "steps": len(records),
        "mfu": records[-1].get("mfu"),
        "data_wait": statistics.median(record.get("data_wait", 0.0) for record in last),
    }


def table(results: Sequence[Mapping[str, Any]]) -> list[str]:
    return aligned(HEAD, [_row(result) for result in results], text_columns=(0, len(HEAD) - 1))


def _row(result: Mapping[str, Any]) -> tuple[str, ...]:
    name, about = str(result["case"]), str(result["about"])
    if "failed" in result:
        return (name, "failed", *("-" for _ in HEAD[2:-1]), f"{about}: {result['why']}")
    whole = result["all_steps_tokens_per_s"]
    return (
        name,
        f"{result['first_line_s']:.1f}",
        ", then ".join(f"{run['first_step_s']:.1f}" for run in (*result["before"], result)),
        speed(result),
        f"{whole:,.0f}" if whole else "-",
        f"{result['to_the_end_s']:.1f}",
        f"{result['aim']:,.0f}" if result["aim"] else "-",
        about,
    )


def remarks(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the table of workloads has no column for: seconds of the start and the end, and the aim."""
    out = []
    for result in results:
        if "failed" in result:
            out.append(f"{result['case']}: {result['why']}")
            continue
        firsts = ", then ".join(f"{run['first_step_s']:.1f}" for run in (*result["before"], result))
        out.append(
            f"{result['case']}: first line after {result['first_line_s']:.1f} s, first step after {firsts} s, "
            f"{result['to_the_end_s']:.1f} s from the last step to the end"
        )
        if result["aim"]:
            out.append(target_line(result["case"], result["aim"], "tokens", result["tokens_per_s"]))
    return out


def log_name(case: RealCase) -> str:
    return f"real-{case.name}.log"


def kept_results(file: Path) -> dict[str, dict[str, Any]]:
    """Of an earlier command, by case; none where the file is absent or not one of these."""
    try:
        return {result["case"]: result for result in json.loads(file.read_text())["results"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def run_real(
    cases: Sequence[RealCase],
    out: Path,
    work: Path,
    more: Mapping[str, str],
    again: bool,
    tiny: bool = False,
    until: float = math.inf,
) -> tuple[list[dict[str, Any]], bool]:
    """Results in order, and whether one failed or was not begun; after every case also in out/real.json, beside those
    of other cases that were measured before. work: for models and rows; tiny: the cases are cut to toys. until: by
    the monotonic clock; no case is begun with less than LEAST seconds before it."""
    results: list[dict[str, Any]] = []
    kept = kept_results(out / "real.json")
    for number, case in enumerate(cases):
        if until - time.monotonic() < LEAST:
            emit(f"time limit: {', '.join(later.name for later in cases[number:])} not begun")
            return results, True
        log = out / log_name(case)
        emit(f"{case.name}: {case.about}; what it prints: {log}")
        result = measured(case, work / case.name, more, again, log)
        result |= {"when": time.strftime("%Y-%m-%d %H:%M"), "tiny": tiny, "keys": dict(more)}
        results.append(result)
        if "failed" in result:
            emit(f"{case.name} failed: {result['why']}; all it printed is in {log}, its last lines:")
        for line in result.get("failed", ()):
            emit(f"  {line}")
        before = kept.pop(case.name, None)
        if "failed" in result and before is not None:  # what was measured is not lost to a mistyped key
            result["last_good"] = before.get("last_good") if "failed" in before else before
        kept[case.name] = result
        (out / "real.json").write_text(json.dumps({"results": list(kept.values())}, indent=1))
    return results, any("failed" in result for result in results)
