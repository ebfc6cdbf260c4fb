"""Rows of a text and its class, from tables as well."""

from __future__ import annotations

from erniekit.data.classification import classes_in


def test_whole_numbers_in_a_table_are_classes(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text,label\ngood film,1\nbad film,0\nfine,10\nfine,2\n", encoding="utf-8")
    assert classes_in([path]) == ("0", "1", "2", "10")
