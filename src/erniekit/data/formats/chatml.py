"""The `chatml` format: `messages` with `tools` and tool calls, one training example per trained assistant message.

Called through the FORMATS table. `label` counts every assistant message, trained or not.
"""

from __future__ import annotations

from typing import Any

from erniekit.data.formats.messages import one_per_answer, read_messages, read_tools
from erniekit.data.types import Conversation


def conversations(row: Any, compat: bool) -> list[Conversation]:
    messages, unused = read_messages(row, compat)
    return one_per_answer(messages, read_tools(row), unused)
