"""llms.txt: every page of the documentation with its first sentence, for programs that read it.

python tests/support/llms.py > llms.txt
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FIRST = ("getting-started.md", "train.md", "data.md", "config.md", "python-api.md")


def llms_text() -> str:
    docs = ROOT / "docs"
    pages = sorted(docs.rglob("*.md"), key=lambda p: p.relative_to(docs).as_posix())
    english = [page for page in pages if "zh" not in page.relative_to(docs).parts]
    first = [docs / name for name in FIRST]
    ordered = [*first, *(page for page in english if page not in first)]
    chinese = [page for page in pages if page not in english]
    own = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
    parts = [
        "# erniekit",
        "",
        f"> {_about(ROOT / 'README.md')}",
        "",
        *_section("Documentation", ordered),
        *_section("Project", own),
        *_section("Chinese", chinese),
        "## Machine-readable",
        "",
        "- [JSON schema of recipes](docs/recipe.schema.json): every key with type, choices, default and help",
    ]
    return "\n".join(parts) + "\n"


def _section(title: str, pages: list[Path]) -> list[str]:
    lines = [f"- [{_title(page)}]({page.relative_to(ROOT).as_posix()}): {_about(page)}" for page in pages]
    return [f"## {title}", "", *lines, ""]


def _title(page: Path) -> str:
    return next(line[2:].strip() for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("# "))


def _about(page: Path) -> str:
    """The first sentence of plain text, without links and marks."""
    if page.name == "CHANGELOG.md":
        return "What changed, release by release."
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    blocks = [" ".join(block.split()) for block in text.split("\n\n")]
    plain = (b for b in blocks if b and b[0] not in "#|![-<>" and not b.startswith("**Ran"))
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", next(plain, ""))
    sentence = re.split(r"(?<=[.!?])\s|(?<=。)", words, maxsplit=1)[0]
    return sentence.replace("*", "").replace("`", "").rstrip(":")


if __name__ == "__main__":
    print(llms_text(), end="")
