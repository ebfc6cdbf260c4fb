"""Python files that a vision-language folder names and does not hold: what vLLM would miss, found before it starts."""

from __future__ import annotations

import json
from pathlib import Path

from erniekit.checkpoint.release_code import missing_code
from erniekit.cli.main import main
from support.seeing import seeing_folder
from support.vl_release_folder import release_folder


def settings(folder: Path, name: str, auto: object) -> None:
    (folder / name).write_text(json.dumps({"auto_map": auto}))


def test_files_of_every_entry_that_vllm_follows_are_looked_for(tmp_path: Path) -> None:
    assert missing_code(tmp_path) == ["auto_map: AutoConfig", "auto_map: AutoProcessor"]
    settings(tmp_path, "config.json", {"AutoConfig": "a.Config", "AutoModel": "modeling.Model"})
    settings(tmp_path, "tokenizer_config.json", {"AutoTokenizer": ["b.Slow", None], "AutoProcessor": "c.Processor"})
    assert missing_code(tmp_path) == ["a.py", "b.py", "c.py"]
    for name in "abc":
        (tmp_path / f"{name}.py").touch()
    assert missing_code(tmp_path) == []


def test_code_of_another_repository_is_no_file_of_the_folder(tmp_path: Path) -> None:
    settings(tmp_path, "config.json", {"AutoConfig": "own/repo--a.Config", "AutoProcessor": "own/repo--c.P"})
    assert missing_code(tmp_path) == []


def test_an_auto_map_that_is_none_is_missing(tmp_path: Path) -> None:
    for wrong in (None, "a.Config", [1], {"AutoConfig": 3}):
        settings(tmp_path, "config.json", wrong)
        assert missing_code(tmp_path)[0] == "auto_map: AutoConfig"


def test_an_export_says_what_vllm_would_miss(tmp_path: Path, capsys) -> None:
    assert main(["export", str(seeing_folder(tmp_path / "bare"))]) == 0
    assert "missing: auto_map: AutoConfig, auto_map: AutoProcessor" in capsys.readouterr().out
    assert main(["export", str(release_folder(tmp_path / "release"))]) == 0
    assert "missing:" not in capsys.readouterr().out
    assert missing_code(tmp_path / "release" / "export") == []
