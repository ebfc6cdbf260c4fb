"""Which format a row has, by the names of its fields. formats/ calls it with the first rows of a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from erniekit.data.formats.fields import is_preference
from erniekit.data.formats.prompt_completion import PROMPTS, prompt_and_completion


@dataclass(frozen=True)
class Detected:
    format: str  # a name in FORMATS and PREFERENCE_FORMATS
    why: str
    preference: bool = False  # rows hold two answers to compare: data for stage DPO
    vision: bool = False  # some hold pictures or videos


def guessed(row: Any, vision: bool = False) -> Detected | None:
    """vision: rows may hold pictures."""
    return (_guess_seen(row) if vision else None) or _guess(row)


def _guess(row: Any) -> Detected | None:
    if isinstance(row, list):
        if row and isinstance(row[0], dict) and "role" in row[0]:
            return Detected("messages", "each row is a list of role/content messages")
        return None
    if not isinstance(row, dict):
        return None
    if is_preference(row):
        return guess_pair(row)
    if "src" in row:
        return Detected("erniekit", "rows have `src` and `tgt`")
    if "messages" in row:
        messages = row["messages"] if isinstance(row["messages"], list) else []
        calls = any(isinstance(m, dict) and (m.get("tool_calls") or m.get("role") == "tool") for m in messages)
        if row.get("tools") or calls:
            return Detected("chatml", "rows have `messages` with tools")
        return Detected("messages", "rows have `messages`")
    if "conversations" in row:
        return Detected("sharegpt", "rows have `conversations`")
    names = prompt_and_completion(row)
    if names is not None and names != ("instruction", "output"):
        return Detected("prompt_completion", f"rows have `{names[0]}` and `{names[1]}`")
    if "instruction" in row or ("output" in row and "input" in row):
        return Detected("alpaca", "rows have `instruction` and `output`")
    return None


def _guess_seen(row: Any) -> Detected | None:
    """Of a row with pictures or videos."""
    if isinstance(row, dict) and ("text_info" in row or "text_list" in row):
        return Detected("erniekit", "rows have `text_info`, with pictures or videos", vision=True)
    pairs = isinstance(row, dict) and is_preference(row)
    fields = ("messages", "prompt", "chosen", "rejected") if pairs else ("messages",)
    messages = [row.get(field) for field in fields] if isinstance(row, dict) else [row]
    contents = [m.get("content") for one in messages if isinstance(one, list) for m in one if isinstance(m, dict)]
    kinds = {part.get("type") for c in contents if isinstance(c, list) for part in c if isinstance(part, dict)}
    media_columns = isinstance(row, dict) and any(row.get(name) for name in ("images", "image", "videos", "video"))
    if (contents or pairs) and (media_columns or kinds & {"image", "image_url", "video", "video_url"}):
        if pairs:
            why = "rows have pictures or videos and two answers: preference data, for `stage: DPO`"
            return Detected(guess_pair(row).format, why, preference=True, vision=True)
        return Detected("messages", "rows have `messages` with pictures or videos", vision=True)
    return None


def guess_pair(row: dict[str, Any]) -> Detected:
    if row.get("response") is not None and row.get("sort") is not None:
        format, fields = "erniekit", "`response` and `sort`"
    elif isinstance(row.get("conversations"), list):
        format, fields = "sharegpt", "`conversations`, `chosen` and `rejected`"
    elif all(isinstance(row[name], str) for name in ("chosen", "rejected")) and not any(
        row.get(name) is not None for name in (*PROMPTS, "messages")
    ):
        format, fields = "prompt_completion", "`chosen` and `rejected`, which begin with the same prompt"
    else:
        chosen = row.get("chosen")
        messages = chosen[0] if isinstance(chosen, list) and chosen else chosen
        listed = isinstance(messages, dict) or any(isinstance(row.get(field), list) for field in ("messages", "prompt"))
        format, fields = "messages" if listed else "alpaca", "`chosen` and `rejected`"
    return Detected(format, f"rows have {fields}: preference data, for `stage: DPO`", preference=True)
