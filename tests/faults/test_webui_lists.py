"""W5: keys of the page whose paths lie inside files, lists and folders, made to lead out of the roots.

What is let through is read once more with the reader of the run itself: it must not come to a file outside.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from erniekit.data import mmap_files, pretrain
from erniekit.errors import ConfigError, ErnieKitError
from erniekit.webui import contents, forms
from erniekit.webui.jobs import Jobs
from erniekit.webui.paths import Roots
from faults.results import fault

SECRET = "a-secret-nobody-may-read"


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """A root with token files, lists, models and adapters, some of which lead to `outside`."""
    room, out = tmp_path / "work", tmp_path / "outside"
    for folder in (room / "model", room / "tokens", room / "linked", room / "mixed", out / "model", out / "tokens"):
        folder.mkdir(parents=True)
    for place in (room / "tokens" / "a", room / "tokens" / "b", out / "tokens" / "x", room / "mixed" / "a"):
        for suffix in (".bin", ".idx"):
            Path(f"{place}{suffix}").write_text(SECRET if out in place.parents else "")
    for suffix in (".bin", ".idx"):
        (room / "linked" / f"x{suffix}").symlink_to(out / "tokens" / f"x{suffix}")
    (room / "mixed" / "b.bin").write_text("")
    (room / "mixed" / "b.idx").symlink_to(out / "tokens" / "x.idx")
    (out / "weights.txt").write_text(f"{SECRET}\n")
    (out / "list.txt").write_text("tokens/a\n")
    (out / "model" / "config.json").write_text("{}")
    (room / "model" / "config.json").write_text("{}")
    (room / "list-out.txt").write_text(f"tokens/a\n{out}/tokens/x\n")
    (room / "list-up.txt").write_text("../outside/tokens/x\n")
    (room / "list-home.txt").write_text("~root/x\n")
    (room / "list-link.txt").write_text("tokens/a\n\n  linked/x  \n")
    (room / "list-nul.txt").write_text("tokens/a\x00b\n")
    (room / "list-good.txt").write_text("tokens/a\n tokens/b\n")
    (room / "list-blank.txt").write_text("my tokens/a\n")
    (room / "weights-good.txt").write_text("0.3\n0.7\n")
    (room / "weights-link.txt").symlink_to(out / "weights.txt")
    for name, base in (("absolute", str(out / "model")), ("climbs", "../../outside/model"), ("inside", "model")):
        (room / f"adapter-{name}").mkdir()
        config = {"base_model_name_or_path": base}
        (room / f"adapter-{name}" / "adapter_config.json").write_text(json.dumps(config))
    (room / "run" / "checkpoint-3").mkdir(parents=True)
    told = {"base_model_name_or_path": str(out / "model")}
    (room / "run" / "checkpoint-3" / "lora_config.json").write_text(json.dumps(told))
    (room / "model-linked").mkdir()
    (room / "model-linked" / "config.json").symlink_to(out / "model" / "config.json")
    return room


def hostile(room: Path) -> list[dict[str, object]]:
    out = room.parent / "outside"
    return [
        {"data_filelist": "list-out.txt"},
        {"data_filelist": "list-up.txt"},
        {"data_filelist": "list-home.txt"},
        {"data_filelist": "list-link.txt"},
        {"data_filelist": "list-nul.txt"},
        {"data_filelist": str(out / "list.txt")},
        {"data_filelist": f"tokens/a,{out}/tokens/x"},
        {"data_filelist": f"tokens/a,b {out}/tokens/x"},  # at commas alone this would be two paths
        {"data_filelist": f"tokens/a {out}/tokens/x,b"},
        {"data_filelist": "tokens/a,linked/x"},
        {"data_filelist": "linked/x.bin"},
        {"data_filelist": "linked"},
        {"data_filelist": "tokens/a", "data_weights": str(out / "weights.txt")},
        {"data_filelist": "tokens/a", "data_weights": "../outside/weights.txt"},
        {"data_filelist": "tokens/a", "data_weights": "weights-link.txt"},
        {"input_dir": f"0.5 tokens/a 0.5 {out}/tokens/x"},
        {"input_dir": f"{out}/tokens/x"},
        {"input_dir": f"tokens/a {out}/tokens/x"},
        {"input_dir": f"1,5 {out}/tokens/x"},
        {"input_dir": "linked/x"},
        {"input_dir": "linked"},
        {"input_dir": "mixed"},
        {"input_dir": "0.5 tokens/a 0.5 linked/x"},
        {"model_name_or_path": "model-linked"},
        {"model_name_or_path": "adapter-absolute"},
        {"model_name_or_path": "adapter-climbs"},
        {"model_name_or_path": "run"},
        {"tokenizer_name": "model-linked"},
        {"resume_from_checkpoint": "model-linked"},
    ]


def harmless(room: Path) -> list[dict[str, object]]:
    return [
        {"data_filelist": "list-good.txt", "data_weights": "weights-good.txt"},
        {"data_filelist": "list-good.txt", "data_weights": "0.3,0.7"},
        {"data_filelist": "tokens/a tokens/b"},
        {"input_dir": "tokens"},
        {"input_dir": "0.3 tokens/a 0.7 tokens/b"},
        {"input_dir": "tokens/a"},
        {"model_name_or_path": "adapter-inside"},
    ]


def recipe(values: dict[str, object]) -> str:
    data = {} if {"input_dir", "data_filelist"} & set(values) else {"input_dir": "tokens/a"}
    return forms.to_yaml({"model_name_or_path": "model", **data, **values}, "train.pt")


def opened(values: dict[str, object]) -> list[Path]:
    """The token files and the weights that the run's own reader would come to."""
    if values.get("data_filelist"):
        named = pretrain._listed(str(values["data_filelist"]))
        weights = Path(str(values.get("data_weights") or os.devnull))
    else:
        named, weights = pretrain._weighted_names(str(values.get("input_dir") or ""))[0], Path(os.devnull)
    prefixes = [prefix for name in named for prefix in mmap_files.find(name)]
    files = [Path(prefix + suffix) for prefix in prefixes for pair in mmap_files.SUFFIXES.values() for suffix in pair]
    return [Path(os.path.realpath(path)) for path in (*files, weights) if path.is_file()]


class Nothing:
    """Starts nothing."""

    pid = 0

    def __call__(self, argv: list[str], log: Path, folder: Path) -> Nothing:
        return self

    def wait(self) -> int:
        return 0


def test_no_list_weight_link_or_adapter_leads_out_of_the_roots(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(room)
    jobs = Jobs(room / "webui", Roots([room]), Nothing())
    with fault("W5", "paths that leave the roots inside lists, weights, links and adapters") as row:
        for values in hostile(room):
            with pytest.raises(ConfigError) as refused:
                jobs.start("train", recipe(values))
            assert SECRET not in str(refused.value)
            assert any(key in refused.value.where for key in values), (values, refused.value)
            row.count += 1
        assert not jobs.list()
        row.hits = row.count
        row.note = "each refused before a job is made"
    for values in harmless(room):
        job = jobs.start("train", recipe(values))
        told = forms.from_yaml(job.recipe.read_text(encoding="utf-8"))
        files = opened(told)
        assert files or "input_dir" not in values
        assert all(path.is_relative_to(room.resolve()) for path in files), (values, files)
    # Where the recipe names the model, the one that the adapter names is not opened.
    jobs.start("server", "model_name_or_path: model\nlora_path: [adapter-absolute]\n")


def test_the_reader_of_a_run_finds_nothing_outside_in_whatever_the_page_lets_through(
    room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every way to put three words together, by each separator: the page's grammar is the reader's."""
    monkeypatch.chdir(room)
    roots = Roots([room])
    out = room.parent / "outside"
    (room / "tokens dir").mkdir()
    words = ("tokens/a", f"{out}/tokens/x", "../outside/tokens/x", "0.5", "linked/x", "list-good.txt", "nan", "~")
    tried = passed = 0
    for key in ("input_dir", "data_filelist", "data_weights"):
        for first in words:
            for second in words:
                for gap in (",", " ", ", ", " ,", "\u00a0", "\u3000", "/"):
                    tried += 1
                    text = f"{first}{gap}{second}"
                    try:
                        resolved = roots.resolve_value(key, text)
                    except ErnieKitError:
                        continue
                    passed += 1
                    if key == "data_weights":
                        assert not Path(resolved).is_file() or roots.holds(Path(os.path.realpath(resolved)))
                        continue
                    named = (
                        pretrain._listed(resolved) if key == "data_filelist" else pretrain._weighted_names(resolved)[0]
                    )
                    for name in named:
                        assert roots.holds(Path(os.path.realpath(Path(name).expanduser()))), (key, text, resolved)
    assert tried > passed > 20


def test_the_page_knows_the_files_of_a_prefix_as_the_reader_does() -> None:
    assert set(contents.SUFFIXES) == {suffix for pair in mmap_files.SUFFIXES.values() for suffix in pair}
