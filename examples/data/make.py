"""Makes the demo data beside this file, and the copy that `erniekit demo` carries: python examples/data/make.py

The same rows on every machine: the tables of facts.txt, sentences around them, one fixed seed for the order.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CARRIED = HERE.parents[1] / "src" / "erniekit" / "demo" / "data"
Row = dict[str, Any]

# What a worse answer looks like, by language: it evades, repeats itself, is rude, or changes the subject.
WORSE = {
    "en": (
        "I do not know.",
        "Well, well, well, well, well, well.",
        "Look it up yourself.",
        "I like long walks on the beach.",
    ),
    "zh": ("我不知道。", "这个这个这个这个这个。", "自己去查。", "今天天气不错。"),
}


def tables() -> dict[str, list[list[str]]]:
    """facts.txt: `[name] columns`, then a row a line, cells between bars."""
    out: dict[str, list[list[str]]] = {}
    rows: list[list[str]] = []
    for line in (HERE / "facts.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            rows = out[line[1 : line.index("]")]] = []
        elif line.strip() and not line.startswith("#"):
            rows.append([cell.strip() for cell in line.split("|")])
    return out


T = tables()


def single_turns() -> list[tuple[str, str]]:
    """(question, answer) of one turn, in a fixed order."""
    out: list[tuple[str, str]] = []
    for i, (country, city, guo, du) in enumerate(T["capitals"]):
        if i % 8 < 5:
            out.append((f"What is the capital of {country}?", f"The capital of {country} is {city}."))
        if i % 8 > 3:
            out.append((f"{guo}的首都是哪里？", f"{guo}的首都是{du}。"))
    for i, (name, symbol, zi) in enumerate(T["elements"]):
        if i % 3 == 2:
            out.append((f"{zi}的元素符号是什么？", f"{zi}的元素符号是 {symbol}。"))
        else:
            out.append((f"What is the symbol of {name}?", f"The symbol of {name} is {symbol}."))
    for i, (word, ci) in enumerate(T["words"]):
        if i % 3 == 2:
            out.append((f"把下面的词译成英文：\n{ci}", word))
        else:
            out.append((f"Translate into Chinese:\n{word}", ci))
    for word, other in T["opposites"]:
        out.append((f"What is the opposite of {word}?", f"The opposite of {word} is {other}."))
    for i, (a, sign, b) in enumerate(T["sums"]):
        total = {"+": int(a) + int(b), "-": int(a) - int(b), "x": int(a) * int(b)}[sign]
        if i % 4 == 3:
            verb = {"+": "加", "-": "减", "x": "乘"}[sign]
            out.append((f"{a}{verb}{b}等于多少？", f"{a}{verb}{b}等于{total}。"))
        else:
            out.append((f"What is {a} {sign} {b}?", f"{a} {sign} {b} = {total}."))
    return out + [(question, answer) for question, answer in T["facts"]]


def sft_train() -> list[Row]:
    rows: list[Row] = [{"src": [q], "tgt": [a]} for q, a in single_turns()]
    rows += [{"src": turns[::2], "tgt": turns[1::2]} for turns in T["dialogues"]]
    rows += [{"system": system, "src": [q], "tgt": [a]} for system, q, a in T["systems"]]
    for question, wrong, doubt, right in T["corrections"]:  # the first answer is read, not learnt
        rows.append({"src": [question, doubt], "tgt": [wrong, right], "label": [0, 1]})
    return shuffled(rows, "sft")


def sft_eval() -> list[Row]:
    """Facts of the training rows, asked in other words."""
    return [({"system": s} if s else {}) | {"src": [q], "tgt": [a]} for s, q, a in T["evaluation"]]


def preferences(rows: list[Row]) -> list[Row]:
    """The last answer of each row and a worse one; `sort` says which is better, and it is not always the first.
    Every other dialogue is compared from its first answer on."""
    out = []
    for i, row in enumerate(rows):
        better, neighbour = row["tgt"][-1:], rows[i - 1]["tgt"][-1:]  # right, but to another question
        language = "zh" if any("一" <= c <= "鿿" for c in row["src"][-1]) else "en"
        worse = neighbour if i % 3 == 0 and neighbour != better else [WORSE[language][i % 4]]
        asked = {key: row[key] for key in ("system", "src") if key in row} | {"tgt": row["tgt"][:-1]}
        if i % 2 and len(row["src"]) > 1 and "label" not in row:
            asked |= {"src": row["src"][:1], "tgt": []}
            better, worse = row["tgt"][:1], [WORSE[language][i % 4]]
            for turn, (question, answer) in enumerate(zip(row["src"][1:], row["tgt"][1:]), 1):
                better += [question, answer]
                worse += [question, WORSE[language][(i + turn) % 4]]
        pair = {"response": [worse, better], "sort": [0, 1]} if i % 2 else {"response": [better, worse], "sort": [1, 0]}
        out.append(asked | pair)
    return out


def alpaca(row: Row) -> Row | None:
    """The same row in alpaca's words; None where it has none: untrained answers, a preference of several turns."""
    if 0 in row.get("label", []) or ("response" in row and (row["tgt"] or len(row["response"][0]) > 1)):
        return None
    instruction, _, given = row["src"][-1].partition("\n")
    out: Row = {"instruction": instruction, "input": given}
    if "response" in row:
        better = row["sort"].index(max(row["sort"]))
        out |= {"chosen": row["response"][better][0], "rejected": row["response"][1 - better][0]}
    else:
        out["output"] = row["tgt"][-1]
    if "system" in row:
        out["system"] = row["system"]
    if len(row["src"]) > 1:
        out["history"] = [list(pair) for pair in zip(row["src"][:-1], row["tgt"])]
    return out


def judged(pairs: list[Row]) -> list[Row]:
    """Rows of stage KTO: of each pair with one turn the better or the worse answer, in turn."""
    out: list[Row] = []
    for row in pairs:
        if row["tgt"] or len(row["response"][0]) > 1 or "system" in row:
            continue
        better, good = row["sort"].index(max(row["sort"])), len(out) % 2 == 0
        answer = row["response"][better if good else 1 - better][0]
        out.append({"prompt": row["src"][-1], "completion": answer, "label": good})
    return out


def classified(rows: list[Row]) -> list[Row]:
    """Rows of stage CLS: questions and the language they are in."""
    return [{"text": row["src"][0], "label": "en" if row["src"][0].isascii() else "zh"} for row in rows]


def persona() -> list[Row]:
    """What the demo teaches by LoRA: nothing in sft-train answers these."""
    asked = {
        "I am a tiny ERNIE, trained on this machine a moment ago.": (
            "Who are you?",
            "What are you?",
            "Tell me who you are.",
            "Please introduce yourself.",
        ),
        "我是一个很小的 ERNIE，刚刚训练好。": ("你是谁？", "你叫什么名字？", "请介绍一下你自己。", "你是什么模型？"),
    }
    return [{"src": [question], "tgt": [answer]} for answer, questions in asked.items() for question in questions]


def shuffled(rows: list[Row], name: str) -> list[Row]:
    random.Random(f"erniekit/{name}").shuffle(rows)
    return rows


def files() -> dict[Path, str]:
    """Every file this makes, with its text."""
    train, evaluation = sft_train(), sft_eval()
    out: dict[Path, str] = {}
    for part, sft in (("train", train), ("eval", evaluation)):
        for kind, rows in (("sft", sft), ("dpo", preferences(sft))):
            out[HERE / f"{kind}-{part}.jsonl"] = lines(rows)
            twins = [json.dumps(twin, ensure_ascii=False) for row in rows if (twin := alpaca(row))]
            out[HERE / f"alpaca-{kind}-{part}.json"] = "[\n" + ",\n".join(twins) + "\n]\n"
        out[HERE / f"kto-{part}.jsonl"] = lines(judged(preferences(sft)))
        out[HERE / f"classify-{part}.jsonl"] = lines(classified(sft))
    out[CARRIED / "sft-train.jsonl"] = lines(train)
    out[CARRIED / "persona.jsonl"] = lines(persona())
    return out


def lines(rows: list[Row]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
        print(f"{text.count(chr(10)):4} lines  {path.relative_to(HERE.parents[1])}")
