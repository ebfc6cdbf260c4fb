"""`erniekit export BASE lora_path=A[,B] output_dir=DEST`: what is merged, where it goes, and what is refused before any
work; and which tokenizer goes with the result."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from erniekit.checkpoint import manifest
from erniekit.checkpoint import probe as probes
from erniekit.checkpoint.identity import model_identity, write_base
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.model_writer import write_model
from erniekit.checkpoint.probe import Probe
from erniekit.cli.main import main
from erniekit.export.run import export
from erniekit.lora.adapter import LowRank, adapter_of, attach, combined
from erniekit.lora.adapter_files import read_adapter, write_adapter
from erniekit.lora.inject import inject, lora_linears
from erniekit.lora.settings import LoRASettings
from erniekit.models.init import init_weights

IDS = torch.arange(3, 27)[None]


@torch.no_grad()
def logits(folder: Path, *adapters: Path) -> torch.Tensor:
    model = ModelFolder(folder).build()
    if adapters:
        attach(model, combined([read_adapter(path, model) for path in adapters]))
    return model(IDS)


def make_adapter(folder: Path, base: Path, seed: int, rank: int = 4, layout: str = "hf") -> Path:
    """An adapter of its own rank with its probe, as a run would leave it."""
    model = ModelFolder(base).build()
    settings = LoRASettings.resolve(rank=rank)
    inject(model, settings, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, module in lora_linears(model):
            for pair in module.pairs().values():
                pair.B.normal_(0, 0.1, generator=generator)
        probe = probes.measure(model, Probe(IDS, IDS.roll(-1)), f"cpu/float32/{torch.__version__}/one device")
    write_adapter(folder, adapter_of(model, settings, base=str(base)), model, layout)
    probes.save(folder, probe)
    return folder


def other_model(folder: Path, like: Path) -> Path:
    """The same shapes, other weights."""
    model = ModelFolder(like).build()
    init_weights(model, seed=1, std=0.1)
    write_model(folder, model.config, model.state_dict().__getitem__, tokenizer_from=like)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def adapters(tmp_path: Path, base: Path) -> list[Path]:
    """Two adapters of different rank on one base, one in PEFT's files and one in Paddle's."""
    return [make_adapter(tmp_path / "a", base, 1), make_adapter(tmp_path / "b", base, 2, rank=2, layout="paddle")]


def test_base_and_adapter_are_merged_into_the_folder_that_is_named(
    base: Path, adapters: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, dest = contents(base), tmp_path / "dest"
    assert main(["export", str(base), f"lora_path={adapters[0]}", f"output_dir={dest}"]) == 0
    want = logits(base, adapters[0])
    assert (want - logits(base)).abs().max() > 0.1
    torch.testing.assert_close(logits(dest), want, atol=1e-4, rtol=0)
    assert contents(base) == before
    assert manifest.check(dest).info["adapters"] == [str(adapters[0])]
    said = capsys.readouterr().out
    assert f"of {adapters[0]} into {base}" in said
    assert "the checkpoint's own probe within" in said
    assert said.splitlines()[-1] == f"next     erniekit chat {dest}"


@pytest.mark.parametrize("form", ["keys", "word is the destination", "flag with two words"])
def test_several_adapters_are_summed_in_any_form_of_the_command(
    form: str, base: Path, adapters: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dest, (a, b) = tmp_path / "dest", adapters
    words = {
        "keys": [f"model_name_or_path={base}", f"lora_path={a},{b}", f"output_dir={dest}"],
        "word is the destination": [str(dest), "--model_name_or_path", str(base), f"lora_path={a},{b}"],
        "flag with two words": [str(base), "--output_dir", str(dest), "--lora_path", str(a), str(b)],
    }[form]
    assert main(["export", *words]) == 0
    # summed by hand, so that `combined`, which the proof uses, is not its own witness
    model = ModelFolder(base).build()
    one, two = (read_adapter(path, model).updates for path in adapters)
    name = "model.layers.1.self_attn.o_proj"
    exact = model.layers[1].attn.out.weight + sum(u.scale * (u.B @ u.A) for u in (one[name], two[name]))
    torch.testing.assert_close(ModelFolder(dest).build().layers[1].attn.out.weight, exact, atol=1e-6, rtol=0)
    torch.testing.assert_close(logits(dest), logits(base, a, b), atol=1e-4, rtol=0)
    assert (logits(dest) - logits(base, a)).abs().max() > 0.1
    assert "base + 2 adapters" in capsys.readouterr().out


def test_an_adapter_whose_base_moved_is_exported_by_the_words_that_the_error_gives(
    base: Path, adapters: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = adapters[0] / "adapter_config.json"
    written = json.loads(config.read_text())
    config.write_text(json.dumps({**written, "base_model_name_or_path": str(tmp_path / "gone")}))
    assert main(["export", str(adapters[0])]) == 2
    words = capsys.readouterr().err.partition("fix:   name it: ")[2].partition(", or ")[0].split()
    assert words == [f"lora_path={adapters[0]}", "model_name_or_path=DIR"]
    assert main(["export", *(word.replace("=DIR", f"={base}") for word in words)]) == 0
    torch.testing.assert_close(logits(adapters[0] / "export"), logits(base, adapters[0]), atol=1e-4, rtol=0)


def test_an_adapter_of_a_recipe_or_of_no_folder_here_needs_a_place_for_its_export(
    base: Path, adapters: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "run.yaml"
    recipe.write_text(f"lora_path: {adapters[0]}\nmodel_name_or_path: {base}\n")
    for words in ([str(recipe)], ["lora_path=someone/adapter", f"model_name_or_path={base}"]):
        assert main(["export", *words]) == 2
        assert "output_dir is missing: where" in capsys.readouterr().err
    assert not (adapters[0] / "export").exists()


def test_an_earlier_export_is_replaced_and_a_run_gets_its_result_inside(
    base: Path, adapters: list[Path], run: Path, tmp_path: Path
) -> None:
    dest = tmp_path / "dest"
    for adapter in adapters:
        assert main(["export", str(base), f"lora_path={adapter}", f"output_dir={dest}"]) == 0
        torch.testing.assert_close(logits(dest), logits(base, adapter), atol=1e-4, rtol=0)
    assert not (dest / "export").exists()
    before = contents(run)
    assert main(["export", str(base), f"lora_path={adapters[0]}", f"output_dir={run}"]) == 0
    torch.testing.assert_close(logits(run / "export"), logits(base, adapters[0]), atol=1e-4, rtol=0)
    assert {name: data for name, data in contents(run).items() if not name.startswith("export/")} == before


def test_lora_path_may_be_a_run_and_names_its_base_itself(base: Path, run: Path, tmp_path: Path) -> None:
    assert main(["export", f"lora_path={run}", f"output_dir={tmp_path / 'dest'}"]) == 0
    torch.testing.assert_close(logits(tmp_path / "dest"), logits(base, run / "checkpoint-10"), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["BASE", "lora_path=TMP/none", "output_dir=TMP/dest"], "there is no adapter"),
        (["BASE", "lora_path=TMP/a,TMP/none", "output_dir=TMP/dest"], "there is no adapter"),
        (["BASE", "lora_path=BASE", "output_dir=TMP/dest"], "holds a whole model, no adapter"),
        (["BASE", "lora_path=TMP", "output_dir=TMP/dest"], "holds no adapter"),
        (["BASE", "lora_path=TMP/a"], "output_dir is missing: where"),
        (["BASE", "lora_path=TMP/a,TMP/a", "output_dir=TMP/dest"], "names an adapter twice"),
        (["BASE", "lora_path=TMP/a", "output_dir=TMP/mine"], "not written by an export"),
        (["BASE", "lora_path=TMP/a", "output_dir=TMP/mine/notes.txt"], "is not a folder"),
        (["BASE", "lora_path=TMP/a", "output_dir=BASE"], "would replace what it is made from"),
        (["BASE", "output_dir=TMP/dest"], "both name output_dir"),
        (["TMP/dest", "lora_path=TMP/a", "model_name_or_path=BASE", "output_dir=TMP/dest"], "both name output_dir"),
        (["BASE", "TMP/dest", "lora_path=TMP/a"], "both name model_name_or_path"),
        (["TMP/a", "lora_path=TMP/b", "output_dir=TMP/dest"], "holds an adapter, where the base of one is needed"),
        (["LLAMA", "lora_path=TMP/a", "output_dir=TMP/dest"], "belongs to another base model|are not in this model"),
        (["OTHER", "lora_path=TMP/a", "output_dir=TMP/dest"], "as the checkpoint did when saved"),
        (["OTHER", "lora_path=TMP/a,TMP/b", "output_dir=TMP/dest"], "was trained on another model"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_nothing_is_written(
    words: list[str],
    what: str,
    base: Path,
    adapters: list[Path],
    paddle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    other = other_model(tmp_path / "other", base)
    before, kept = contents(base), contents(tmp_path)
    places = {"BASE": str(base), "TMP": str(tmp_path), "OTHER": str(other), "LLAMA": str(paddle / "llama_fused")}
    for name, place in places.items():
        words = [word.replace(name, place) for word in words]
    assert main(["export", *words]) == 2
    error = capsys.readouterr().err
    assert any(part in error for part in what.split("|")), error
    assert "fix:" in error
    assert contents(base) == before
    assert contents(tmp_path) == kept


def test_adapters_of_different_bases_need_the_base_to_be_named(
    base: Path, adapters: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(base, tmp_path / "copy")
    far = make_adapter(tmp_path / "far", tmp_path / "copy", 3)
    words = ["export", f"lora_path={adapters[0]},{far}", f"output_dir={tmp_path / 'dest'}"]
    assert main(words) == 2
    assert "name different base models" in capsys.readouterr().err
    assert main([*words, f"model_name_or_path={base}"]) == 0


def test_split_refuses_adapters_by_name(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"output_dir={tmp_path / 'dest'}", f"model_name_or_path={base}", f"lora_path={tmp_path / 'none'}"]
    assert main(["split", *words]) == 2
    assert "merges no adapters" in capsys.readouterr().err
    assert not (tmp_path / "dest").exists()


def test_a_recipes_lora_path_that_its_run_began_with_gives_the_runs_result(
    base: Path, adapters: list[Path], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model_name_or_path: {base}\noutput_dir: {run}\nlora_path: {adapters[0]}\n")
    (run / "run.json").write_text(json.dumps({"config": [{"key": "lora_path", "value": str(adapters[0])}]}))
    assert main(["export", str(recipe)]) == 0
    torch.testing.assert_close(logits(run / "export"), logits(base, run / "checkpoint-10"), atol=1e-4, rtol=0)
    assert "started from it" in capsys.readouterr().out
    recipe.write_text(f"model_name_or_path: {base}\noutput_dir: {run}\nlora_path: {adapters[1]}\n")
    assert main(["export", str(recipe)]) == 0  # this run began elsewhere: the adapter is meant
    torch.testing.assert_close(logits(run / "export"), logits(base, adapters[1]), atol=1e-4, rtol=0)


def test_another_base_is_refused_by_its_files_where_there_is_no_probe_and_can_be_asked_for(
    base: Path, adapters: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, dest = other_model(tmp_path / "other", base), tmp_path / "dest"
    (adapters[0] / probes.FILE).unlink()
    write_base(adapters[0], model_identity(base), str(base))
    words = ["export", str(other), f"lora_path={adapters[0]}", f"output_dir={dest}"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in (str(other), str(base), "override_base"))
    assert not dest.exists()
    assert main([*words, "override_base=True"]) == 0
    torch.testing.assert_close(logits(dest), logits(other, adapters[0]), atol=1e-4, rtol=0)


def test_the_same_base_in_another_layout_passes_with_a_warning(
    base: Path, adapters: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_base(adapters[0], model_identity(base), str(base))
    paddle_form = export(base, None, tmp_path / "paddle_form", layout="paddle")
    assert main(["export", str(paddle_form), f"lora_path={adapters[0]}", f"output_dir={tmp_path / 'dest'}"]) == 0
    assert "yet answers alike" in capsys.readouterr().err


def test_adapters_combined_add_what_each_adds(base: Path, adapters: list[Path]) -> None:
    model = ModelFolder(base).build()
    one, two = (read_adapter(path, model) for path in adapters)
    name = "model.layers.0.mlp.up_proj"
    del two.updates[name]  # of one adapter alone

    def dense(update: LowRank) -> torch.Tensor:
        return update.scale * (update.B @ update.A)

    both = combined([one, two]).updates
    torch.testing.assert_close(dense(both[name]), dense(one.updates[name]))
    name = "model.layers.0.mlp.down_proj"
    torch.testing.assert_close(dense(both[name]), dense(one.updates[name]) + dense(two.updates[name]))


# ---- the tokenizer that goes with the result


def retemplate(folder: Path, like: Path, text: str) -> None:
    """The tokenizer of `like` with another chat template."""
    for name in ("tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(like / name, folder / name)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": text}))


def template(folder: Path) -> str | None:
    return json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template")


def test_a_merged_model_has_the_tokenizer_it_was_trained_with_not_its_bases(
    base: Path, adapters: list[Path], tmp_path: Path
) -> None:
    shutil.copytree(base, tmp_path / "base2")
    (tmp_path / "base2" / "chat_template.jinja").write_text("the base's")  # must not mix with the adapter's
    retemplate(adapters[0], base, "trained with this")
    (adapters[0] / "generation_config.json").write_text('{"eos_token_id": 7}')
    dest = tmp_path / "dest"
    assert main(["export", str(tmp_path / "base2"), f"lora_path={adapters[0]}", f"output_dir={dest}"]) == 0
    assert template(dest) == "trained with this"
    assert not (dest / "chat_template.jinja").exists()
    assert json.loads((dest / "generation_config.json").read_text()) == {"eos_token_id": 7}


def test_adapters_with_different_templates_need_a_tokenizer_to_be_named(
    base: Path, adapters: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    retemplate(adapters[0], base, "one")
    retemplate(adapters[1], base, "other")
    words = ["export", str(base), f"lora_path={adapters[0]},{adapters[1]}", f"output_dir={tmp_path / 'dest'}"]
    assert main(words) == 2
    assert "different tokenizers or chat templates" in capsys.readouterr().err
    assert main([*words, f"tokenizer_name={tmp_path / 'none'}"]) == 2
    assert "holds no tokenizer" in capsys.readouterr().err
    assert not (tmp_path / "dest").exists()
    assert main([*words, f"tokenizer_name={adapters[1]}"]) == 0
    assert template(tmp_path / "dest") == "other"
