"""Records how TRL divides preference texts without a prompt column; needs trl: `python record_prompts.py`."""

from __future__ import annotations

import json
from pathlib import Path

from trl.data_utils import extract_prompt

CASES = [
    ("The sky is blue.", "The sky is green."),
    ("Question: 2 + 2? Answer: 4", "Question: 2 + 2? Answer: 5"),
    ("Say hi:\nhi there", "Say hi:\nno"),
    ("中国的首都是北京。", "中国的首都是上海。"),
    ("unhappy end", "unhappier end"),
    ("Two  spaces", "Two  space-ships"),
    ("tail kept  \n a ", "tail kept  \n b "),
]

if __name__ == "__main__":
    out = []
    for chosen, rejected in CASES:
        found = extract_prompt({"chosen": chosen, "rejected": rejected})
        parts = [found["prompt"], found["chosen"], found["rejected"]]
        out.append({"chosen": chosen, "rejected": rejected, "parts": parts})
    text = json.dumps(out, ensure_ascii=False, indent=1) + "\n"
    Path(__file__).with_name("implicit_prompts.json").write_text(text, encoding="utf-8")
