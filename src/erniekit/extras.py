"""The name this project is installed under, and the command that installs one of its extras. Used wherever an optional
package is missing. On package indexes `erniekit` is another project, so no printed command may install that name."""

from __future__ import annotations

PROJECT = "erniekit-torch"


def install_command(extra: str) -> str:
    """For a shell; the extras are those of pyproject.toml."""
    return f'pip install "{PROJECT}[{extra}]"'
