"""Both languages have every word, and every field of the first forms has a Chinese help."""

from __future__ import annotations

import ast
import re
import string
from pathlib import Path

import pytest

import erniekit.webui
from erniekit.config.flat import KEYS
from erniekit.webui import forms
from erniekit.webui.translations import LANGUAGES, help_of, label_of, translate
from erniekit.webui.translations_advanced import ADVANCED_ZH
from erniekit.webui.translations_keys import HELP_ZH, LABELS
from erniekit.webui.translations_page import TRANSLATIONS

PAGES = Path(str(erniekit.webui.__file__)).parent
CHINESE = re.compile(r"[\u4e00-\u9fff]")


def names(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


@pytest.mark.parametrize("key", sorted(TRANSLATIONS))
def test_a_word_is_there_in_both_languages_with_the_same_blanks(key: str) -> None:
    english, chinese = TRANSLATIONS[key]
    assert english.strip()
    assert chinese.strip()
    assert not CHINESE.search(english)
    assert names(english) == names(chinese)


def test_words_are_translated_and_not_repeated() -> None:
    same = [
        key for key, (english, chinese) in TRANSLATIONS.items() if english == chinese and re.search("[a-z]{3}", english)
    ]
    assert len(same) <= len(TRANSLATIONS) // 10, same


def test_every_key_the_pages_say_is_in_the_table() -> None:
    """Text of the form `page.thing` in the code of the pages is a key of TRANSLATIONS."""
    prefixes = {key.partition(".")[0] for key in TRANSLATIONS}
    missing = []
    for file in [*PAGES.glob("*.py"), *(PAGES / "pages").glob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            said = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if (
                re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", said)
                and said.partition(".")[0] in prefixes
                and said not in TRANSLATIONS
            ):
                missing.append(f"{file.name}: {said}")
    known = set(forms.PAGES)
    assert not [m for m in missing if m.split(": ")[1] not in known]


@pytest.mark.parametrize("page", forms.PAGES)
def test_every_basic_field_has_a_label_and_a_chinese_help(page: str) -> None:
    for f in forms.form(page).basic:
        assert f.key in LABELS, f.key
        assert CHINESE.search(help_of(f.key, "zh")), f.key
        assert help_of(f.key, "en") == f.help


@pytest.mark.parametrize("page", forms.PAGES)
def test_every_key_that_a_form_offers_is_explained_in_chinese(page: str) -> None:
    """Also those of "Advanced options", which are explained one at a time."""
    english = [f.key for f in forms.form(page).fields if not CHINESE.search(help_of(f.key, "zh"))]
    assert not english, f"write these into translations_advanced.py: {english}"


def test_labels_and_helps_are_of_keys_that_exist() -> None:
    assert not (set(LABELS) | set(HELP_ZH) | set(ADVANCED_ZH)) - set(KEYS)
    assert not set(HELP_ZH) & set(ADVANCED_ZH)


def test_no_page_writes_a_sentence_outside_the_table() -> None:
    """Words on the screen come from TRANSLATIONS: the pages' own code holds no English sentence but docstrings, and
    what goes to gradio as text is named by a key."""
    found = []
    for file in (PAGES / "pages").glob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        for node in ast.walk(tree):
            said = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if id(node) not in told and re.search(r"^[A-Z][a-z']+( [a-z']+){2,}", said) and "confirm(" not in said:
                found.append(f"{file.name}: {said[:60]}")
            if isinstance(node, ast.keyword) and node.arg in ("label", "info", "placeholder"):
                fixed = node.value.value if isinstance(node.value, ast.Constant) else ""
                if isinstance(fixed, str) and " " in fixed.replace("key: value", ""):
                    found.append(f"{file.name}: {fixed}")
    assert not found


def test_what_is_not_known_is_shown_rather_than_raised() -> None:
    assert translate("no.such") == "no.such"
    assert help_of("wandb_api_key", "zh") == KEYS["wandb_api_key"].help, "no form offers it"
    assert label_of("max_bad_steps", "zh") == "max_bad_steps"
    assert set(LANGUAGES) == {"en", "zh"}
