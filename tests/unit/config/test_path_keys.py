"""Every key that names files says so where it is declared: the web page keeps those inside its roots."""

from __future__ import annotations

import re

import pytest

from erniekit.config.field import Key
from erniekit.config.flat import KEYS

NAMES = re.compile(
    r"(^|_)(dir|directory|path|paths|file|files|filelist|folder|folders|prefix|corpus|template|python|hostfile|root)$"
)
WORDS = re.compile(r"(?i)\b(file|files|folder|folders|path|paths|dir|prefix|prefixes|filename)\b")
NO_PATHS = {
    "chat_template": "the name of a template",
    "served_model_name": "a name that clients use; the folder is model_name_or_path's",
    "download_hub": "the name of a hub",
}


def suggests_a_path(k: Key) -> bool:
    return k.item in ("str", "object") and not k.choices and bool(NAMES.search(k.name) or WORDS.search(k.help))


def test_keys_that_look_like_paths_are_declared_as_paths() -> None:
    unmarked = [k.name for k in KEYS.values() if suggests_a_path(k) and not k.path and k.name not in NO_PATHS]
    assert not unmarked, "declare them with path=..., or say in NO_PATHS why they are none"
    assert not [name for name in NO_PATHS if KEYS[name].path]


def test_a_new_key_of_a_path_would_be_noticed() -> None:
    for name, help in (("hostfile", "x"), ("image_dir", "x"), ("x", "A file of rows."), ("corpus", "x")):
        assert suggests_a_path(Key(name, "data", "str", True, None, help)), name
    assert not suggests_a_path(Key("batch_size", "train", "int", False, 1, "Rows of a file."))


@pytest.mark.parametrize("k", [k for k in KEYS.values() if k.path], ids=lambda k: k.name)
def test_the_kind_of_a_path_fits_the_type_of_its_key(k: Key) -> None:
    assert k.item == "str"
    assert k.is_list == (k.path in ("several", "named"))
