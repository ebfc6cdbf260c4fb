"""ERNIEKit's VL rows: `text_info`, `image_info`, `video_info`, `order`, `is_system`. Called by the vision job."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from erniekit.data.formats.answers import BESIDE, attached, beside
from erniekit.data.formats.fields import BadRow, flag, named, require, text, unread
from erniekit.data.formats.message import MessageReader, one_thought, thought_in
from erniekit.data.media.limits import MediaError
from erniekit.data.media.place import MediaPlace, from_base64, located
from erniekit.data.thinking import THINK, THOUGHT
from erniekit.data.types import ChatMessage
from erniekit.data.vision.chat_rows import refuse_calls
from erniekit.data.vision.vision_row import BOUND, UNTRAINED, GivenMedium, VisionRow, mark, refuse_marks

_KNOWN = ("text_info", "text_list", "image_info", "video_info", "order", "is_system", "is_video", "prefix")
_LONGEST_S = 1e9  # of a time stamp; JSON also has NaN and Infinity
_ROLES = {"mask": "user", "no_mask": "assistant"}
Item = tuple[str, str, dict[str, Any]]  # role, content, the entry it came from


def read_info_row(row: dict[str, Any], folder: Path, compat: bool) -> VisionRow:
    """A text of a run of equal tags, and media before the text they are matched to, are one message."""
    texts = _entries(row, "text_info" if "text_info" in row else "text_list")
    images, videos = _entries(row, "image_info", False), _entries(row, "video_info", False)
    if compat and not images and not videos:
        raise BadRow("no_media", "a row without image_info and video_info goes to text_dataset_path")
    if compat and images and videos:
        raise BadRow("mixed", "ERNIEKit loses rows with both image_info and video_info")
    media, matched = _media(row, images, videos, folder, compat)
    items = (
        _ordered(row, texts, len(images), len(media))
        if row.get("order") and not compat
        else _placed(texts, matched, compat, bool(videos))
    )
    system = flag(row["is_system"], "is_system") if row.get("is_system") is not None else False
    lost = compat and bool(videos)  # ERNIEKit forgets `prefix` and `is_system` of a row with a video
    if not texts or texts[0].get("tag") != "mask":
        raise BadRow("role_order", "the first text must be tagged mask: a question comes before an answer")
    said = _messages(items, system and not lost, thoughts=not compat)
    if not compat:
        said = attached(said, beside(row), "text_info", MessageReader(False), last=True)
        refuse_calls(said)
        if any(message.thought and UNTRAINED in message.content for message in said):
            raise BadRow("bad_label", "the texts of an answer with a thought have different labels")
    if said[-1].role != "assistant":
        raise BadRow("no_answer", "the last text must be tagged no_mask: an answer comes last")
    prefix = refuse_marks(text(row.get("prefix") or "", "prefix", empty=True), "prefix")
    if lost or (compat and not _thinks(texts)):  # ERNIEKit puts an empty thought there, or nothing
        prefix = ""
    unused = tuple(unread(row, (*_KNOWN, "name", *(() if compat else BESIDE))))
    return VisionRow(tuple(said), tuple(media), unused, all_trained=lost, reasoning=_thinks(texts), prefix=prefix)


def _thinks(texts: list[dict[str, Any]]) -> bool:
    answers = "".join(str(entry.get("text")) for entry in texts if entry.get("tag") == "no_mask")
    return THINK in answers and THOUGHT in answers


def _entries(row: dict[str, Any], field: str, needed: bool = True) -> list[dict[str, Any]]:
    if needed:
        require(row, field)
    value = row.get(field) or []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise BadRow("wrong_type", f"`{field}` must be a list of objects, not {named(value)}")
    return value


def _media(
    row: dict[str, Any], images: list[Any], videos: list[Any], folder: Path, compat: bool
) -> tuple[list[GivenMedium], list[int]]:
    """The media of the row, and the text each is matched to; frames given as pictures are one."""
    if row.get("is_video") and images:
        places = tuple(_place(entry, f"image_info[{i}]", folder, compat) for i, entry in enumerate(images))
        stamps = tuple(_number(entry, "time_stamp", f"image_info[{i}]") for i, entry in enumerate(images))
        declared = _declared(images[0]) if compat else None
        given = GivenMedium(places, True, stamps, declared=declared)
        return [given], [_matched(images[0], "image_info[0]", compat)]
    media, matched = [], []
    for i, entry in enumerate(images):
        field = f"image_info[{i}]"
        declared = _declared(entry) if compat and entry.get("is_valid") else None
        media.append(GivenMedium((_place(entry, field, folder, compat),), declared=declared))
        matched.append(_matched(entry, field, compat))
    for i, entry in enumerate(videos):
        field = f"video_info[{i}]"
        frames = entry.get("extracted_frame_indices") or []
        if not isinstance(frames, list) or not all(type(index) is int and index >= 0 for index in frames):
            raise BadRow("wrong_type", f"`{field}.extracted_frame_indices` must be a list of numbers")
        place = _place(entry, field, folder, compat)
        declared = _declared(entry) if compat else None
        media.append(GivenMedium((place,), True, frames=tuple(sorted(frames)), declared=declared))
        matched.append(_matched(entry, field, compat))
    return media, matched


def _place(entry: dict[str, Any], field: str, folder: Path, compat: bool) -> MediaPlace:
    inline = entry.get("image_base64") or entry.get("video_base64")
    try:
        if inline is not None:
            found: MediaPlace | bytes = from_base64(text(inline, f"{field}.image_base64"))
        else:
            require(entry, "image_url")
            found = located(text(entry["image_url"], f"{field}.image_url"), folder, base64_too=compat)
    except MediaError as error:
        raise BadRow(error.kind, f"`{field}`: {error.reason}") from None
    return found if isinstance(found, MediaPlace) else MediaPlace(content=found, label=field)


def _declared(entry: dict[str, Any]) -> tuple[int, int] | None:
    width, height = entry.get("image_width"), entry.get("image_height")
    return (width, height) if isinstance(width, int) and isinstance(height, int) and width and height else None


def _matched(entry: dict[str, Any], field: str, compat: bool) -> int:
    """ERNIEKit takes -1 for 0."""
    value = entry.get("matched_text_index", 0)
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRow("wrong_type", f"`{field}.matched_text_index` must be a number, not {named(value)}")
    if value < (-1 if compat else 0):
        raise BadRow("length_mismatch", f"`{field}.matched_text_index` is {value}; the first text is 0")
    return max(value, 0)


def _number(entry: dict[str, Any], key: str, field: str) -> float:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRow("wrong_type", f"`{field}.{key}` must be a number of seconds, not {named(value)}")
    if not 0 <= value < _LONGEST_S:
        raise BadRow("wrong_type", f"`{field}.{key}` is {value:g}, and must be a number of seconds")
    return float(value)


def _placed(texts: list[dict[str, Any]], matched: list[int], compat: bool, videos: bool) -> list[Item]:
    before: dict[int, list[int]] = {}
    for number, index in enumerate(matched):
        if index >= len(texts):
            raise BadRow("length_mismatch", f"matched_text_index {index} of {len(texts)} texts")
        before.setdefault(index, []).append(number)
    no_labels = compat and not _thinks(texts) and not videos  # there the last answer is trained, whatever they say
    items: list[Item] = []
    for i, entry in enumerate(texts):
        role, content = _text(entry, f"text_info[{i}]", compat)
        first = not items or items[-1][0] != role
        for number in before.get(i, ()):
            if role == "assistant" and not first:
                raise BadRow("media_in_answer", f"a picture is matched to text {i}, inside an answer")
            items.append(("user", mark(number), {}))  # media matched to an answer end the question
        items.append((role, content, {} if no_labels else entry))
    return items


def _ordered(row: dict[str, Any], texts: list[dict[str, Any]], images: int, media: int) -> list[Item]:
    order = row["order"]
    if not isinstance(order, dict) or not all(isinstance(order.get(key), list) for key in ("type", "index")):
        raise BadRow("wrong_type", "`order` must be an object with the lists `type` and `index`")
    if len(order["type"]) != len(order["index"]):
        raise BadRow(
            "length_mismatch", f"`order` has {len(order['type'])} types and {len(order['index'])} numbers: one of each"
        )
    items: list[Item] = []
    named_texts: set[int] = set()
    named_media: set[int] = set()
    for kind, index in zip(order["type"], order["index"]):
        if type(index) is not int:
            raise BadRow("wrong_type", "`order.index` must hold numbers")
        if kind == "text":
            if not 0 <= index < len(texts):
                raise BadRow("length_mismatch", f"`order` names text {index} of {len(texts)}")
            role, content = _text(texts[index], f"text_info[{index}]", False)
            items.append((role, content, texts[index]))
            named_texts.add(index)
        elif kind in ("image", "video"):
            number = index + (images if kind == "video" else 0)
            if index < 0 or number >= media:
                raise BadRow("length_mismatch", f"`order` names {kind} {index}, which the row does not have")
            items.append(("user", mark(number), {}))
            named_media.add(number)
        else:
            raise BadRow("wrong_type", f"`order.type` holds {kind!r}; known are text, image, video")
    for what, count, named_ones in (("texts", len(texts), named_texts), ("pictures and videos", media, named_media)):
        if len(named_ones) < count:
            raise BadRow("length_mismatch", f"`order` names {len(named_ones)} of the row's {count} {what}")
    return items


def _text(entry: dict[str, Any], field: str, compat: bool) -> tuple[str, str]:
    require(entry, "text", "tag")
    if entry["tag"] not in _ROLES:
        raise BadRow("wrong_type", f"`{field}.tag` must be mask or no_mask, not {str(entry['tag'])[:40]!r}")
    role = _ROLES[entry["tag"]]
    content = refuse_marks(text(entry["text"], f"{field}.text", empty=True), field).strip()
    if role == "assistant" and not content and not compat:
        raise BadRow("empty_text", f"`{field}.text` is an empty answer")
    return role, rewritten_table(content) if compat and role == "assistant" else content


def _messages(items: list[Item], system: bool, thoughts: bool) -> list[ChatMessage]:
    """thoughts: those beside a text are read."""
    said: list[ChatMessage] = []
    runs: list[tuple[str, list[Item]]] = []
    for item in items:
        if not runs or runs[-1][0] != item[0]:
            runs.append((item[0], []))
        runs[-1][1].append(item)
    for role, run in runs:
        labels = [flag(e["label"], "label") if e.get("label") is not None else True for _, _, e in run]
        if role == "user" or len(set(labels)) == 1:
            contents = [content for _, content, _ in run]
        else:  # the last decides about the end of the answer
            contents = [content if trained else UNTRAINED + content for (_, content, _), trained in zip(run, labels)]
        trained = role == "user" or any(labels)
        thought = _thought([entry for _, _, entry in run]) if thoughts and role == "assistant" else ""
        content, thought = one_thought(BOUND.join(contents), thought, "text_info")
        said.append(ChatMessage(role, content, trained, thought=thought))
    if system:
        if len(said) < 4:
            raise BadRow("no_answer", "`is_system` is 1 and no question follows the system text and its answer")
        said[:2] = [ChatMessage("system", said[0].content)]
    return said


def _thought(entries: list[dict[str, Any]]) -> str:
    """Of an answer, which is one text or several."""
    found = [refuse_marks(thought_in(entry, "text_info"), "text_info") for entry in entries]
    if any(found[1:]):
        raise BadRow("bad_thought", "a thought stands beside the first text of an answer, not beside a later one")
    return found[0]


_RULE = re.compile(r"^(\s*\|?\s*:?-+:?\s*\|)+\s*$")


def rewritten_table(answer: str) -> str:
    """Markdown tables as ERNIEKit's reader writes them: one blank around cells, rules of three dashes at most."""
    if not _has_table(answer):
        return answer
    return "\n".join(_table_line(line) if line.lstrip().startswith("|") else line for line in answer.splitlines())


def _has_table(answer: str) -> bool:
    lines = [line.strip() for line in answer.strip().split("\n")]
    for above, rule, below in zip(lines, lines[1:], lines[2:]):
        if _RULE.match(rule) and above.count("|") == rule.count("|") == below.count("|") > 0:
            return True
    return False


def _table_line(line: str) -> str:
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    if "-" not in line:
        return "| " + " | ".join(cells) + " |"
    shorter: Callable[[str], str] = lambda cell: re.sub(r"-{3,}", "---", cell)  # noqa: E731
    out = "| " + " | ".join(map(shorter, cells)) + " |"
    for long, short in ((":---:", ":-:"), (":--:", ":-:"), (":---", ":--"), ("---:", "--:")):
        out = out.replace(long, short)
    return out
