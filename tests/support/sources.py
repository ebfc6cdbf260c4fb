"""Sources of samples with their rules and the cache's options in one call, as tests write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from erniekit.data import token_cache
from erniekit.data.token_cache import RowRules, TokenSource
from erniekit.data.tokenise import TokeniseJob
from erniekit.data.tokenizer import Tokenizer


def divided(options: dict[str, Any]) -> tuple[RowRules, dict[str, Any]]:
    names = {field.name for field in fields(RowRules)}
    rules = RowRules(**{name: value for name, value in options.items() if name in names})
    return rules, {name: value for name, value in options.items() if name not in names}


def open_source(path: str | Path, format: str | None, tokenizer: Tokenizer, **options: Any) -> TokenSource:
    rules, cache = divided(options)
    return token_cache.open_source(path, format, tokenizer, rules, **cache)


def open_sources(
    paths: Sequence[str | Path], formats: Sequence[str | None], tokenizer: Tokenizer, **options: Any
) -> list[TokenSource]:
    rules, cache = divided(options)
    return token_cache.open_sources(paths, formats, tokenizer, rules, **cache)


def row_job(path: str | Path, format: str | None, tokenizer: Tokenizer, **options: Any) -> TokeniseJob:
    rules, _ = divided(options)
    return token_cache.row_job(path, format, tokenizer, rules)
