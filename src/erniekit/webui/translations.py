"""Texts of the page in English and Chinese: translate(key, lang) for its own, help_of and label_of for declared keys.

Called by the pages. Every key that a form offers, and every text of the page, has both languages.
"""

from __future__ import annotations

from erniekit.config.flat import KEYS
from erniekit.webui.translations_advanced import ADVANCED_ZH
from erniekit.webui.translations_keys import HELP_ZH, LABELS
from erniekit.webui.translations_page import TRANSLATIONS

LANGUAGES = {"en": "English", "zh": "中文"}


def translate(key: str, lang: str = "en", **values: object) -> str:
    """The text of a key of TRANSLATIONS; `values` fill its {names}. An unknown key is shown as it is."""
    english, chinese = TRANSLATIONS.get(key, (key, key))
    text = chinese if lang == "zh" else english
    return text.format(**values) if values else text


def help_of(key: str, lang: str = "en", page: str = "") -> str:
    """What a declared key does; on some pages something narrower than in a recipe of training."""
    if f"{page}.{key}.info" in TRANSLATIONS:
        return translate(f"{page}.{key}.info", lang)
    english = KEYS[key].help if key in KEYS else ""
    return HELP_ZH.get(key) or ADVANCED_ZH.get(key, english) if lang == "zh" else english


def label_of(key: str, lang: str = "en", page: str = "") -> str:
    """What a field is called; the key itself where it has no label: the recipe shows the key."""
    english, chinese = TRANSLATIONS.get(f"{page}.{key}") or LABELS.get(key, (key, key))
    return chinese if lang == "zh" else english
