"""quantize_report.html and .json in the quantised folder: quality before and after, worst weights, bytes, experts.

Written by run.py. Nothing in it depends on when or how fast it ran: the same work gives the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from erniekit.checkpoint.shards import write_json
from erniekit.quant_schemes import QuantRecipe
from erniekit.quantize.readers import readers
from erniekit.quantize.streams import Quality
from erniekit.track.page import document
from erniekit.track.tables import table, value_html

HTML, JSON = "quantize_report.html", "quantize_report.json"
WORST = 20  # weights that the page lists; the JSON has all


def report_facts(
    *,
    source: str,
    quant: str,
    recipe: QuantRecipe,
    method: str,
    moe: bool,
    layers: Sequence[dict[str, Any]],
    quality: Quality | None,
    measured_on: str,
    rows: int,
    bytes_before: int,
    bytes_after: int,
    expert_tokens: int,
) -> dict[str, Any]:
    weights = [weight for layer in layers for weight in layer["weights"]]
    experts = [{"layer": k, **row} for k, layer in enumerate(layers) for row in layer["experts"]]
    return {
        "model": source,
        "quant": quant,
        "kind": recipe.about,
        "method": method,
        "calibration_rows": rows,
        "bytes_before": bytes_before,
        "bytes_after": bytes_after,
        "quality": None if quality is None else {"measured_on": measured_on, **vars(quality)},
        "weights": by_error(weights),
        "layers": [{"layer": k, "drift": layer.get("drift")} for k, layer in enumerate(layers)],
        "expert_tokens": expert_tokens,
        "topped_up": [row for row in experts if row["used"] >= expert_tokens],
        "starved": [row for row in experts if row["used"] < expert_tokens],
        "readers": [vars(reader) for reader in readers(recipe, moe)],
    }


def by_error(weights: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The worst first: by what their rounding does to the layer's outputs; relative size, not squared."""
    known = [weight for weight in weights if weight["error"] is not None]
    known.sort(key=lambda weight: -weight["error"])
    return [
        {
            "weight": weight["weight"],
            "output_error": math.sqrt(weight["error"]),
            "rounded_to_nearest": math.sqrt(weight["nearest_error"]),
        }
        for weight in known
    ]


def write_report(folder: Path, facts: dict[str, Any]) -> None:
    write_json(folder / JSON, facts)
    (folder / HTML).write_text(page(facts), encoding="utf-8")


def page(facts: dict[str, Any]) -> str:
    before, after = facts["bytes_before"], facts["bytes_after"]
    tiles = [("size", _bytes(after), f"{after / before:.0%} of {_bytes(before)}")]
    quality = facts["quality"]
    if quality is not None:
        ratio = quality["quantised_perplexity"] / quality["perplexity"] - 1
        tiles += [
            (
                "perplexity",
                f"{quality['quantised_perplexity']:.4g}",
                f"before: {quality['perplexity']:.4g} ({ratio:+.2%})",
            ),
            ("KL divergence", f"{quality['kl']:.4g}", f"nats a token, on {quality['tokens']:,} tokens"),
        ]
    about = f"{facts['kind']}; {facts['method']}; of {facts['model']}"
    body = [f'<div class="head"><h1>{escape(facts["quant"])}</h1></div>', f"<p class=sub>{escape(about)}</p>"]
    body.append('<div class="tiles">' + "".join(_tile(*tile) for tile in tiles) + "</div>")
    if quality is None:
        body.append("<p class=note>Perplexity and KL were not measured: no rows were given (train_dataset_path).</p>")
    else:
        body.append(f"<p class=note>Measured on {escape(quality['measured_on'])}.</p>")
    body += _section("Who reads it", table([_reader(row) for row in facts["readers"]]))
    if facts["weights"]:
        note = "<p class=note>How far each product's outputs move, relative to their size, on the calibration rows.</p>"
        body += _section("Worst weights", table(facts["weights"][:WORST]) + note)
    drift = [row for row in facts["layers"] if row["drift"] is not None]
    if drift:
        body += _section("Drift of hidden states after each layer", table(drift))
    if facts["starved"]:
        body += _section("Starved experts", table(facts["starved"]) + _few(facts, "Even topped up"))
    if facts["topped_up"]:
        body += _section("Experts that were topped up", table(facts["topped_up"]) + _few(facts, "Routed only"))
    return document(f"quantised: {facts['quant']}", "\n".join(body))


def _few(facts: dict[str, Any], what: str) -> str:
    return f"<p class=note>{what}, these have fewer than {facts['expert_tokens']} calibration tokens.</p>"


def _reader(row: dict[str, Any]) -> dict[str, Any]:
    return {"program": row["name"], "loads it": row["loads"], "note": row["note"]}


def _section(title: str, inside: str) -> list[str]:
    return [f"<h2>{escape(title)}</h2>", f'<div class="card">{inside}</div>']


def _tile(label: str, value: str, more: str) -> str:
    return (
        f'<div class="tile"><div class="label">{escape(label)}</div><div class="value">{value_html(value)}</div>'
        f'<div class="more">{escape(more)}</div></div>'
    )


def _bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
