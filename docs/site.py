"""For mkdocs (`make docs`): pages that lie beside docs/ join the site, and links between the two places follow.

The pages themselves are written for the repository, where GitHub and editors follow their links as they are.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
JOINED = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "SECURITY.md": "SECURITY.md"}
JOINED["CHANGELOG.md"] = "CHANGELOG.md"
FENCE = re.compile(
    r"^(```\w+) \w+$", re.MULTILINE
)  # the word that tells a test what to do with a block (CONTRIBUTING.md)
LINK = re.compile(r"(?<=\]\()([^)#\s]+)((?:#[^)\s]*)?)(?=\))")


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for name, target in JOINED.items():
        files.append(File.generated(config, target, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links into the repository become links within the site; to what the site has not, such as code, plain text."""
    here = page.file.src_uri
    source = ROOT / next((name for name, target in JOINED.items() if target == here), f"docs/{here}")

    def followed(link: re.Match[str]) -> str:
        target, anchor = link[1], link[2]
        if "://" in target or target.startswith("mailto:"):
            return link[0]
        place = (source.parent / target).resolve()
        inside = _in_site(place)
        if inside is None:
            return link[0]
        depth = here.count("/")
        return "../" * depth + inside + anchor

    markdown = FENCE.sub(r"\1", markdown)
    return LINK.sub(followed, _without_outside(markdown, source))


def _in_site(place: Path) -> str | None:
    """A file of the repository -> its place in the site's sources."""
    if not place.is_relative_to(ROOT):
        return None
    name = place.relative_to(ROOT).as_posix()
    if name in JOINED:
        return JOINED[name]
    return name.removeprefix("docs/") if name.startswith("docs/") and place.is_file() else None


def _without_outside(markdown: str, source: Path) -> str:
    """`[text](../src/file.py)` -> `text`: files that are no pages."""

    def plain(link: re.Match[str]) -> str:
        target = link[2].partition("#")[0]
        if not target or "://" in target or target.startswith("mailto:"):
            return link[0]
        return link[0] if _in_site((source.parent / target).resolve()) else link[1]

    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)", plain, markdown)
