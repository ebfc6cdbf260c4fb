"""The error where a package of the extra `vision` is missing."""

from __future__ import annotations

from erniekit.errors import DataError
from erniekit.extras import install_command


def not_installed(package: str, use: str) -> DataError:
    return DataError(f"{use} needs {package}, which is not installed", fix=install_command("vision"))
