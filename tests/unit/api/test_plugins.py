"""Models, formats, losses, trackers and devices of installed packages: real distributions in a folder on sys.path."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

import erniekit
from erniekit.cli.main import main
from erniekit.config import load
from erniekit.data.classification import class_rows, classes_in
from erniekit.data.formats import FORMATS
from erniekit.data.preference import PairRules
from erniekit.data.tokenizer import load_tokenizer
from erniekit.data.unpaired_source import unpaired_rows
from erniekit.devices import pick
from erniekit.errors import ConfigError, DataError, DeviceError
from erniekit.loss_table import TOKEN_LOSSES
from erniekit.models import MODELS
from erniekit.track import TRACKERS
from support.installed import install
from support.jsonl import write_jsonl
from support.sources import open_source

from .conftest import KEYS

MOON = '''
from dataclasses import replace

import torch.nn.functional as F

import erniekit
from erniekit.data.preference import Preference
from erniekit.data.types import ChatMessage, Conversation
from erniekit.models import llama
from erniekit.models.layers.decoder import Decoder


class Moon(Decoder):
    """Llama with larger embeddings."""

    def embed_ids(self, ids):
        return 2 * super().embed_ids(ids)


def read_config(*args):
    return replace(llama.read_config(*args), family="moon")


def write_config(*args):
    return {**llama.write_config(*args), "model_type": "moon", "architectures": ["MoonForCausalLM"]}


SPEC = replace(llama.SPEC, name="moon", read_config=read_config, write_config=write_config, build=Moon)


def conversations(row, compat):
    return [Conversation((ChatMessage("user", row["q"]), ChatMessage("assistant", row["a"])))]


def half(logprobs):
    return -logprobs / 2


def preference(row, compat):
    sides = (("user", row["q"]), ("assistant", row["good"]), ("assistant", row["bad"]))
    return Preference(*((ChatMessage(*said),) for said in sides))


def log_sigmoid(chosen_logps, rejected_logps, reference_chosen_logps, reference_rejected_logps, beta):
    margin = chosen_logps - reference_chosen_logps - rejected_logps + reference_rejected_logps
    return F.softplus(-beta * margin)


def apart(chosen_logps, rejected_logps):
    return rejected_logps - chosen_logps


class File(erniekit.Tracker):
    name = "moonfile"

    def start(self, run):
        self.path = run.output_dir / "moon.txt"

    def log(self, step, metrics, kind):
        with self.path.open("a") as file:
            file.write(f"{step} {kind}\\n")
'''
CHIP = """
from erniekit.devices.cpu import count, make, present  # noqa: F401
EVIDENCE = "a chip of the moon"
"""


def test_a_package_brings_a_model_a_format_a_loss_a_tracker_and_a_device_that_a_recipe_names(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from erniekit.demo.tiny import make_tiny_model

    install(
        site,
        "moon-kit",
        {
            "models": "moon = moon:SPEC",
            "formats": "moonrows = moon:conversations",
            "losses": "half = moon:half",
            "trackers": "moonfile = moon:File",
            "devices": "moonchip = moonchip",
        },
        moon=MOON,
        moonchip=CHIP,
    )
    plain = make_tiny_model(tmp_path / "llama", family="llama")
    moon = make_tiny_model(tmp_path / "moon", family="llama")
    told = json.loads((moon / "config.json").read_text())
    (moon / "config.json").write_text(json.dumps({**told, "model_type": "moon"}))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"q": f"What is {k}?", "a": f"Number {k}."}) + "\n" for k in range(8)))
    words = {
        **KEYS, "train_dataset_path": rows, "train_dataset_type": "moonrows", "max_steps": 2, "fine_tuning": "Full",
        "device": "moonchip",
    }  # fmt: skip
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({**words, "report_to": ["moonfile"], "token_loss": "half"}, default=str))
    run = tmp_path / "run"
    assert main(["train", str(recipe), f"model_name_or_path={moon}", f"output_dir={run}"]) == 0
    assert (run / "moon.txt").read_text().split("\n")[:2] == ["1 train", "2 train"]
    assert json.loads((run / "config.json").read_text())["model_type"] == "moon"
    mine = erniekit.TrainingRun(run)
    whole = erniekit.train(**words, model_name_or_path=moon, output_dir=tmp_path / "whole")
    other = erniekit.train(**words, model_name_or_path=plain, output_dir=tmp_path / "other")
    assert whole.metrics["loss"][0] == pytest.approx(2 * mine.metrics["loss"][0], rel=1e-5), "half of each token's loss"
    assert abs(whole.metrics["loss"][0] - other.metrics["loss"][0]) > 1e-3, "another model"
    assert mine.chat("What is 3?", max_new_tokens=3, temperature=0) is not None
    assert erniekit.load(run).module.__class__.__name__ == "Moon"
    assert erniekit.load(mine.export()).module.__class__.__name__ == "Moon"
    assert {(p.name, p.distribution, p.problem) for p in erniekit.plugins()} == {
        (name, "moon-kit 1.0", "") for name in ("moon", "moonrows", "half", "moonfile", "moonchip")
    }
    capsys.readouterr()
    assert main(["train", str(recipe), f"model_name_or_path={moon}", f"output_dir={run}2", "token_loss=hal"]) == 2
    assert "token_loss" in capsys.readouterr().err


def test_rows_are_read_again_when_the_package_that_reads_them_changes(site: Path, base: Path, tmp_path: Path) -> None:
    rows = [{"q": f"What is {k}?", "a": f"Number {k}."} for k in range(4)]
    keys = dict(model_name_or_path=base, data=rows, train_dataset_type="moonrows", max_steps=1, **KEYS)
    install(site, "moon-kit", {"formats": "moonrows = moon:conversations"}, moon=MOON)
    one = erniekit.train(**keys, output_dir=tmp_path / "one")
    (site / "moon.py").write_text(MOON.replace('row["a"]', 'row["a"] * 2'))
    del sys.modules["moon"]
    from erniekit.data import formats

    formats.reader_of.cache_clear()
    two = erniekit.train(**keys, output_dir=tmp_path / "two")
    assert one.metrics["loss"] != two.metrics["loss"]


def test_a_broken_package_costs_one_line_that_names_it_and_nothing_else(
    site: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = ("models", "formats", "losses", "trackers", "devices")
    install(site, "sad-kit", {group: f"sad = sad_module{':X' * (group != 'devices')}" for group in groups})
    (site / "sad_module.py").write_text("raise ImportError('no libsad.so')")
    for table, kind in ((MODELS, "model"), (FORMATS, "dataset type"), (TRACKERS, "tracker")):
        with pytest.raises(ConfigError, match=f"{kind}.*'sad' of the installed package sad-kit 1.0 does not load"):
            table.get("sad")
    with pytest.raises(DeviceError, match=r"package sad-kit 1.0 does not load: ImportError: no libsad"):
        pick("sad")
    capsys.readouterr()
    assert pick("auto").vendor == "cpu"
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "sad-kit 1.0 does not load: ImportError: no libsad.so" in said
    assert [p.name for p in erniekit.plugins() if "sad-kit 1.0 does not load" in p.problem] == ["sad"] * len(groups)
    keys = dict(model_name_or_path=base, data=[{"src": ["a"], "tgt": ["b"]}], max_steps=1, output_dir=tmp_path / "run")
    erniekit.train(**keys, **{**KEYS, "report_to": "all"})
    said = capsys.readouterr().err
    assert "tracker (report_to) 'sad' of the installed package sad-kit 1.0" in said
    with pytest.raises(ConfigError, match="sad-kit"):
        erniekit.train(**{**keys, "output_dir": tmp_path / "other"}, **KEYS, token_loss="sad")


def test_a_device_package_whose_card_cannot_be_asked_stops_nobody_who_does_not_name_it(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = {"devices": "sadchip = sadchip:SAD_VISIBLE\nhalfchip = halfchip"}
    install(site, "sad-kit", entries, sadchip=CHIP + "\n\ndef present():\n    raise OSError('driver exploded')\n")
    (site / "halfchip.py").write_text(f"{CHIP}\ndel make\n")
    assert pick("auto").vendor == "cpu"
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2, "a line for each"
    assert any("package sad-kit 1.0 cannot be used: its present() raised OSError: driver exploded" in s for s in said)
    with pytest.raises(DeviceError, match=r"its present\(\) raised OSError: driver exploded") as refused:
        pick("sadchip")
    assert refused.value.where == f"entry point erniekit.devices, {site / 'sadchip.py'}:7"
    assert refused.value.fix.startswith("update or uninstall sad-kit")
    with pytest.raises(DeviceError, match=r"package sad-kit 1\.0 cannot be used: its file has no function make"):
        pick("halfchip")
    assert {p.name: p.problem.partition(" cannot be used: ")[2] for p in erniekit.plugins()} == {
        "sadchip": "", "halfchip": "its file has no function make()",
    }  # fmt: skip


def test_a_fault_in_a_packages_model_names_its_line_and_not_erniekit(
    site: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    wrong = MOON.replace("return 2 * super().embed_ids(ids)", "return {}['moon']")
    install(site, "moon-kit", {"models": "moon = moon:SPEC"}, moon=wrong)
    config = json.loads((base / "config.json").read_text())
    moon = tmp_path / "moon"
    shutil.copytree(base, moon)
    (moon / "config.json").write_text(json.dumps({**config, "model_type": "moon"}))
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"src": ["a"], "tgt": ["b"]}] * 4)
    words = {**KEYS, "train_dataset_path": rows, "max_steps": 1, "output_dir": tmp_path / "run"}
    assert main(["train", f"model_name_or_path={moon}", *(f"{key}={value}" for key, value in words.items())]) == 1
    error, where = capsys.readouterr().err.strip().splitlines()[-2:]
    line = wrong.splitlines().index("        return {}['moon']") + 1
    assert error == "error: KeyError: 'moon'"
    assert where.startswith(
        f"where: {site / 'moon.py'}:{line}, of the installed package moon-kit 1.0: a fault of that code, written to "
    )


def test_a_name_that_is_built_in_or_brought_twice_is_refused_with_a_line(
    site: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(site, "bold-kit", {"models": "ernie4_5 = moon:SPEC", "trackers": "twice = moon:File"}, moon=MOON)
    install(site, "late-kit", {"trackers": "twice = moon:File"})
    keys = dict(model_name_or_path=base, data=[{"src": ["a"], "tgt": ["b"]}], max_steps=1, output_dir=tmp_path / "run")
    erniekit.train(**keys, **KEYS)
    said = capsys.readouterr().err
    assert said.count("bold-kit 1.0: its model 'ernie4_5' is not used, that name is built in") == 1
    assert (
        "late-kit 1.0: its tracker (report_to) 'twice' is not used, that name is also brought by bold-kit 1.0" in said
    )
    assert MODELS.get("ernie4_5").name == "ernie4_5"
    with pytest.raises(ConfigError, match="report_to"):
        erniekit.train(**{**keys, "output_dir": tmp_path / "other"}, **{**KEYS, "report_to": "twice"})
    assert [p.problem for p in erniekit.plugins() if p.name == "ernie4_5"] == ["the name is built in"]


def test_what_is_no_model_or_tracker_is_refused_by_its_package(site: Path) -> None:
    install(site, "odd-kit", {"models": "moon2 = moon:SPEC", "trackers": "fun = moon:half"}, moon=MOON)
    with pytest.raises(ConfigError, match=r"odd-kit 1.0 names itself 'moon'"):
        MODELS.get("moon2")
    with pytest.raises(ConfigError, match=r"odd-kit 1.0 is not a subclass of erniekit.Tracker"):
        TRACKERS.get("fun")


def test_a_package_that_exits_when_it_is_imported_ends_nothing(site: Path) -> None:
    install(site, "exit-kit", {"losses": "leaves = exit_module:X"})
    (site / "exit_module.py").write_text("raise SystemExit(0)")
    with pytest.raises(ConfigError, match=r"exit-kit 1\.0 does not load: SystemExit"):
        TOKEN_LOSSES.get("leaves")
    assert [p.name for p in erniekit.plugins() if "exit-kit 1.0 does not load" in p.problem] == ["leaves"]


def test_a_package_brings_a_preference_loss_and_rows_of_pairs(site: Path, base: Path, tmp_path: Path) -> None:
    install(
        site,
        "moon-kit",
        {
            "preference_formats": "moonpairs = moon:preference",
            "preference_losses": "ours = moon:log_sigmoid\napart = moon:apart",
        },
        moon=MOON,
    )
    rows = tmp_path / "pairs.jsonl"
    told = [{"q": f"What is {k}?", "good": f"Number {k}.", "bad": "No."} for k in range(6)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in told))
    keys = dict(
        **KEYS, model_name_or_path=base, train_dataset_path=rows, train_dataset_type="moonpairs", stage="DPO",
        max_steps=2, beta=0.3,
    )  # fmt: skip
    own = erniekit.train(**keys, loss_type="ours", output_dir=tmp_path / "own")
    built_in = erniekit.train(**keys, loss_type="sigmoid", output_dir=tmp_path / "built-in")
    assert own.metrics["loss"] == pytest.approx(built_in.metrics["loss"], abs=1e-6)
    assert own.metrics["ours_loss"] == pytest.approx(own.metrics["loss"])
    cfg = load([f"{key}={value}" for key, value in {**keys, "loss_type": "apart"}.items()], "train")
    assert cfg.dpo.reference_free, "it takes none of the reference's numbers"
    assert {p.name for p in erniekit.plugins() if not p.problem} == {"moonpairs", "ours", "apart"}


@pytest.mark.full
def test_what_is_no_preference_loss_and_a_reader_that_fails_are_named(site: Path, base: Path, tmp_path: Path) -> None:
    lines = "half = moon:half\nmean = moon:mean"
    mean = "\n\ndef mean(chosen_logps, rejected_logps):\n    return chosen_logps.mean()\n"
    entries = {"preference_losses": lines, "preference_formats": "moonpairs = moon:preference"}
    install(site, "moon-kit", entries, moon=MOON + mean)
    rows = tmp_path / "pairs.jsonl"
    rows.write_text('{"q": "a", "good": "b", "bad": "c"}\n' * 3 + '{"q": "a"}\n')
    keys = dict(
        **KEYS, model_name_or_path=base, train_dataset_path=rows, train_dataset_type="moonpairs", stage="DPO",
        max_steps=1,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"moon-kit 1\.0 has the parameter 'logprobs', which is not given to it"):
        erniekit.train(**keys, loss_type="half", output_dir=tmp_path / "a")
    with pytest.raises(DataError, match=r"moonpairs of moon-kit 1\.0: KeyError: 'good'"):
        erniekit.train(**keys, loss_type="mean", output_dir=tmp_path / "b")
    with pytest.raises(ConfigError, match=r"the preference loss mean of moon-kit 1\.0 gave the shape \[\]"):
        erniekit.train(**keys, loss_type="mean", output_dir=tmp_path / "c", max_bad_fraction=0.5)


JUDGES = """
from erniekit.data.classification import ClassRow
from erniekit.data.types import ChatMessage
from erniekit.data.unpaired import Unpaired


def judged(row):
    said = (ChatMessage("user", row["q"]),), (ChatMessage("assistant", row["a"]),)
    return [Unpaired(*said, row["stars"] > 3)]


def sorted_text(row):
    return ClassRow(row["q"], "good" if row["stars"] > 3 else "bad")
"""


def test_a_package_reads_rows_of_stages_kto_and_cls(site: Path, base: Path, tmp_path: Path) -> None:
    entries = {"unpaired_formats": "stars = judge:judged", "class_formats": "stars = judge:sorted_text"}
    install(site, "judge-kit", entries, judge=JUDGES)
    rows = write_jsonl(
        tmp_path / "rows.jsonl",
        [{"q": f"What is {k}?", "a": f"Number {k}.", "stars": k} for k in range(6)] + [{"q": "lost"}],
    )
    plain = write_jsonl(
        tmp_path / "plain.jsonl",
        [{"prompt": f"What is {k}?", "completion": f"Number {k}.", "label": k > 3} for k in range(6)],
    )
    options: dict = dict(max_seq_len=96, cache_dir=tmp_path / "cache", num_proc=1, max_bad_fraction=1.0)
    tokenizer = load_tokenizer(base)
    judged = dict(pairs=PairRules(64), kind=unpaired_rows, **options)
    own, built_in = open_source(rows, "stars", tokenizer, **judged), open_source(plain, None, tokenizer, **judged)
    assert [own.sample(i).ids.tolist() for i in range(6)] == [built_in.sample(i).ids.tolist() for i in range(6)]
    assert own.report.first_bad[0].reason == "stars of judge-kit 1.0: KeyError: 'a'"
    classes = classes_in([rows], formats=["stars"])
    assert classes == ("bad", "good")
    source = open_source(rows, "stars", tokenizer, kind=class_rows(classes), **options)
    assert [int(source.sample(i).labels[-1]) for i in range(6)] == [0, 0, 0, 0, 1, 1]
    with pytest.raises(ConfigError, match="unknown dataset type of stage KTO 'star'"):
        open_source(rows, "star", tokenizer, **judged)
    assert {(p.kind, p.name, p.problem) for p in erniekit.plugins()} == {
        ("dataset type of stage KTO", "stars", ""),
        ("dataset type of stage CLS", "stars", ""),
    }
