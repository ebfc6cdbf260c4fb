"""`erniekit plan ... --timeline FILE`: the best pipeline's step as a picture. Called by plan_command.py; where a
picture may go is decided here for `erniekit rehearse` too (rehearsed_timeline.py)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from erniekit.errors import ConfigError
from erniekit.files.marked_file import state_of, write_marked
from erniekit.log import emit
from erniekit.parallel.pipeline_timeline import as_svg, as_text
from erniekit.printable import counted

if TYPE_CHECKING:
    from erniekit.planner.evaluate import Candidate

SHOWN = 4  # micro-batches for each rank: further ones look the same
TERMINAL = "-"
MARK = "<!-- written by `erniekit`"


def timeline_target(text: str | None) -> str | Path | None:
    """`-` for the terminal, or an SVG file that is not there, or is as we drew it."""
    if text is None or text == TERMINAL:
        return text
    target = Path(text).expanduser()
    if target.suffix != ".svg":
        raise ConfigError(
            f"{text} is not an SVG file", where="--timeline", fix="--timeline pipeline.svg, or - to print it"
        )
    if not target.parent.is_dir():
        raise ConfigError(f"no folder {target.parent}", where="--timeline", fix="create it, or name another file")
    _refuse_other(target)
    return target


def _refuse_other(target: Path) -> None:
    if state_of(target, MARK) in ("foreign", "edited"):
        what = f"{target} exists and was not drawn by erniekit, or was changed since"
        raise ConfigError(what, where="--timeline", fix="name a new file")


def write_picture(target: Path, picture: str) -> None:
    write_marked(target, MARK, "", picture, lambda: _refuse_other(target))


def draw(target: str | Path, ranked: list[Candidate], schedule: str, quiet: bool) -> str | None:
    """Of the fastest layout that has a pipeline; where it went, None where none has one."""
    from erniekit.planner.schedule import replay

    one = next((c for c in ranked if c.times is not None), None)
    if one is None or one.times is None:
        if not quiet:
            emit("timeline no layout that fits has a pipeline")
        return None
    layout = one.layout
    shown = min(one.micro_batches, SHOWN * layout.pp)
    timeline = replay(schedule, layout.pp, layout.virtual_stages, shown, one.times)
    about = f"{layout.describe()}, {shown} of {counted(one.micro_batches, 'micro-batch', 'micro-batches')}"
    if isinstance(target, Path):
        write_picture(target, as_svg(timeline))
    if not quiet:
        emit(f"timeline {about}{f': {target}' if isinstance(target, Path) else ''}")
        for line in as_text(timeline):
            emit(f"  {line}")
    return str(target)
