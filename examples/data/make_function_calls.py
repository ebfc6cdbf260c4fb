"""Makes the function-call demo data beside this file: python examples/data/make_function_calls.py

Conversations in which the assistant calls a tool, reads its answer and replies; the facts are those of facts.txt.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from make import T

HERE = Path(__file__).resolve().parent
Row = dict[str, Any]


def tool(name: str, about: str, argument: str) -> Row:
    schema = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


TOOLS = [
    tool("capital_of", "The capital of a country.", "country"),
    tool("symbol_of", "The symbol of a chemical element.", "element"),
    tool("translate", "An English word in Chinese.", "word"),
]


def asked(question: str, name: str, argument: str, value: str, result: str, answer: str) -> list[Row]:
    call = {"type": "function", "function": {"name": name, "arguments": json.dumps({argument: value})}}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": json.dumps({"result": result}, ensure_ascii=False)},
        {"role": "assistant", "content": answer},
    ]


def exchanges() -> Iterator[list[Row]]:
    for country, city, *_ in T["capitals"]:
        question, answer = f"Which city is the capital of {country}?", f"{city} is the capital of {country}."
        yield asked(question, "capital_of", "country", country, city, answer)
    for name, symbol, *_ in T["elements"]:
        yield asked(f"How is {name} written?", "symbol_of", "element", name, symbol, f"{name} is written {symbol}.")
    for word, ci, *_ in T["words"]:
        yield asked(f"What is '{word}' in Chinese?", "translate", "word", word, ci, f"'{word}' is {ci} in Chinese.")


def rows() -> list[Row]:
    """Every third conversation asks twice; every fifth needs no tool at first."""
    turns = list(exchanges())
    random.Random(11).shuffle(turns)
    greeting = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hello! What can I look up?"}]
    out, at = [], 0
    while at < len(turns):
        count = 2 if len(out) % 3 == 2 else 1
        said = [m for turn in turns[at : at + count] for m in turn]
        out.append({"messages": [*(greeting if len(out) % 5 == 4 else []), *said], "tools": TOOLS})
        at += count
    return out


def main() -> None:
    made = rows()
    for name, part in (("eval", made[:10]), ("train", made[10:])):
        lines = [json.dumps(row, ensure_ascii=False) for row in part]
        (HERE / f"function-call-{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
