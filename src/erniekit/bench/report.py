"""A benchmark's result for people: one table, and remarks below it.

Called by command.py with the workers' JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HEAD = (
    "workload", "runner", "step ms", "tokens/s", "trained/s", "MFU", "of GEMM", "peak GiB", "compile s", "vs best peer",
    "same loss",
)  # fmt: skip

COMMAND = "erniekit train"  # in the place of a runner, where a whole command is timed


def table(results: Sequence[dict[str, Any]], commands: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """Markdown, aligned: it reads in a terminal and in a page. commands: results of whole ones, below the workloads."""
    body = [_row(result, run, k == 0) for result in results for k, run in enumerate(result["runs"])]
    body += map(_command_row, commands)
    return aligned(HEAD, body, text_columns=(0, 1))


def aligned(head: Sequence[str], body: Sequence[Sequence[str]], text_columns: Sequence[int]) -> list[str]:
    """text_columns: aligned left; numbers are aligned right."""
    widths = [max(len(row[c]) for row in (head, *body)) for c in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        fitted = [c.ljust(w) if k in text_columns else c.rjust(w) for k, (c, w) in enumerate(zip(cells, widths))]
        return "| " + " | ".join(fitted) + " |"

    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return [line(head), rule, *(line(row) for row in body)]


def _row(result: dict[str, Any], run: dict[str, Any], ours: bool) -> tuple[str, ...]:
    name = result["workload"] if ours else ""
    why = "absent" if run.get("absent") else "failed"
    if "step_ms" not in run:
        return (name, run["runner"], why, *("-" for _ in HEAD[3:]))
    ratio = result["ratio_to_best_peer"] if ours else None
    parity = run.get("parity") or {}
    same = "" if ours or not parity else "yes" if parity["equal"] else "NO: " + ", ".join(parity["wrong"])
    return (
        name,
        run["runner"],
        f"{run['step_ms']:.2f}",
        speed(run),
        f"{run['trained_tokens_per_s']:,.0f}",
        _percent(run["mfu"]),
        _percent(run["of_ceiling"]),
        f"{run['peak_gib']:.1f}" if run.get("peak_gib") else "-",
        f"{run['compile_s']:.1f}",
        f"{ratio:.2f}x" if ratio else "-" if ours and result.get("tiny") else "",
        same,
    )


def _command_row(result: Mapping[str, Any]) -> tuple[str, ...]:
    """What a whole command's own records know: no peer runs beside it, and no product is timed in its process."""
    name = (str(result["case"]), COMMAND)
    if "failed" in result:
        return (*name, "failed", *("-" for _ in HEAD[3:]))
    peak = result["peak_gib"]
    return (
        *name,
        f"{result['step_ms']:.2f}",
        speed(result),
        f"{result['trained_tokens_per_s']:,.0f}",
        _percent(result["mfu"]),
        "-",
        f"{peak:.1f}" if peak else "-",
        *("-", "", ""),
    )


def speed(run: Mapping[str, Any]) -> str:
    """Tokens a second, and the pairs or pictures among them."""
    out = f"{run['tokens_per_s']:,.0f}"
    for kind in ("pairs", "pictures"):
        if run.get(f"{kind}_per_s"):
            out += f" ({run[f'{kind}_per_s']:.3g} {kind})"
    return out


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def differences(result: dict[str, Any]) -> list[str]:
    """How far each peer's first step is from ours."""
    out = []
    for run in result["runs"]:
        if run.get("parity"):
            shown = ", ".join(f"{name} {value:.1e}" for name, value in run["parity"]["differences"].items())
            out.append(f"{run['runner']} differs by: {shown}")
    return out


def remarks(results: Sequence[dict[str, Any]]) -> list[str]:
    """What the card does; targets and limits, what was missing, what failed, what does not compare."""
    out = _machine(results)
    if any(result.get("tiny") for result in results):
        out.append("--tiny checks that everything runs and computes the same: toy sizes compare no speed with a peer's")
    for result in results:
        name, ours = result["workload"], result["runs"][0]
        if "step_ms" in ours:
            out += _goals(name, result, ours)
        if timed := [f"{run['runner']} at {gauges}" for run in result["runs"] if (gauges := _gauges(run))]:
            out.append(f"{name}: timed {'; '.join(timed)}")
        for run in result["runs"]:
            if run.get("absent"):
                out.append(f"{name}: {run['runner']} is absent: {run['absent']}")
            if run.get("failed"):
                out.append(f"{name}: {run['runner']}: {run['failed']}")
            if "data_wait" in run:
                out.append(f"{name}: {run['runner']} waited for data {100 * run['data_wait']:.1f} % of the time")
            if run.get("note"):
                out.append(f"{name}: {run['runner']}: {run['note']}")
            if run.get("parity") and not run["parity"]["equal"]:
                out.append(f"{name}: {run['runner']} does not compute the same: {', '.join(run['parity']['wrong'])}")
        if result.get("note"):
            out.append(f"{name}: {result['note']}")
        if result.get("busiest_expert"):
            out.append(f"{name}: the busiest expert has {100 * result['busiest_expert']:.1f} % of a layer's choices")
    return out


def _machine(results: Sequence[dict[str, Any]]) -> list[str]:
    """The rate of a large product, once: each workload's process has measured it, and the median is reported."""
    rated = sorted((r for r in results if r.get("gemm")), key=lambda r: float(r["gemm"]["held_tflops"]))
    if not rated:
        return []
    middle = rated[len(rated) // 2]
    gemm, gauges = middle["gemm"], _gauges(middle["gemm"])
    burst, held = (
        f"{rate:,.0f}" if rate >= 10 else f"{rate:.3g}" for rate in (gemm["burst_tflops"], gemm["held_tflops"])
    )
    return [f"{middle['device']}: {burst} TFLOP/s at first, {held} held" + (f" ({gauges})" if gauges else "")]


def _gauges(readings: dict[str, Any]) -> str:
    units = (("clock_mhz", "MHz"), ("power_w", "W"), ("temperature_c", "C"))
    return ", ".join(f"{readings[name]:.0f} {unit}" for name, unit in units if readings.get(name) is not None)


def _goals(name: str, result: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    out = []
    if result["target"]:
        rate = ours["pairs_per_s"] if result["unit"] == "pairs" else ours["tokens_per_s"]
        out.append(target_line(name, result["target"], result["unit"], rate))
    if result["limit_gib"] and ours.get("peak_gib"):
        fits = "within" if ours["peak_gib"] <= result["limit_gib"] else "ABOVE"
        out.append(f"{name}: peak {ours['peak_gib']:.1f} GiB, {fits} the limit of {result['limit_gib']:.0f}")
    return out


def target_line(name: str, target: float, unit: str, rate: float) -> str:
    share = rate / target
    verdict = "reached" if share >= 1 else "short"
    return f"{name}: target {target:,.0f} {unit}/s, {rate:,.1f}: {100 * share:.0f} %, {verdict}"
