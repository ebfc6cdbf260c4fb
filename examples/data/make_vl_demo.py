"""Makes sft_vl-train_demo1.jsonl, which ERNIEKit's VL recipes name: python examples/data/make_vl_demo.py

ERNIEKit's own file of that name asks about pictures it does not come with. This one asks about the pictures of
shapes-train.tar, in the same form of rows: all questions about a picture are turns of one conversation.
"""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NAME = "sft_vl-train_demo1.jsonl"


def url(row: dict[str, Any]) -> str:
    return str(row["messages"][0]["content"][0]["image_url"]["url"])


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """rows: of shapes-train.jsonl."""
    out = []
    for picture, asked in groupby(rows, url):
        text = []
        for row in asked:
            question, answer = row["messages"]
            text.append({"text": question["content"][1]["text"], "tag": "mask"})
            text.append({"text": answer["content"], "tag": "no_mask"})
        shown = {"matched_text_index": 0, "image_url": picture}
        out.append(json.dumps({"image_info": [shown], "text_info": text}) + "\n")
    return out


def make(folder: Path) -> None:
    rows = [json.loads(line) for line in (HERE / "shapes-train.jsonl").read_text(encoding="utf-8").splitlines()]
    (folder / NAME).write_text("".join(lines(rows)), encoding="utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
