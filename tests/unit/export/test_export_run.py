"""`erniekit export`: what it finds, what it writes, what it proves, and that a failure leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from erniekit.checkpoint import manifest
from erniekit.checkpoint import probe as probes
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.model_writer import write_model
from erniekit.checkpoint.probe import Probe
from erniekit.checkpoint.writer import publish
from erniekit.cli.main import main
from erniekit.config import load
from erniekit.errors import CheckpointError, ConfigError
from erniekit.export.run import export
from erniekit.lora.adapter import adapter_of, attach
from erniekit.lora.adapter_files import read_adapter, write_adapter
from erniekit.lora.frozen_base import on_grid
from erniekit.lora.inject import inject
from erniekit.lora.merge import merged_in_fp32, row_updates
from erniekit.lora.settings import LoRASettings
from erniekit.models.init import init_weights
from erniekit.recipes.run import export_command, run_export, split_command

IDS = torch.arange(3, 27)[None]


def logits(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    model = ModelFolder(folder).build()
    if adapter is not None:
        attach(model, read_adapter(adapter, model))
    with torch.no_grad():
        return model(IDS)


def test_the_command_merges_the_newest_checkpoint_and_says_what_to_type_next(
    run: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export_command([f"output_dir={run}", f"model_name_or_path={base}", "lora=True"]) == 0
    out = run / "export"
    want = logits(base, run / "checkpoint-10")
    torch.testing.assert_close(logits(out), want, atol=1e-4, rtol=0)  # the tolerance the command itself states
    assert (want - logits(base)).abs().max() > 0.1
    said = capsys.readouterr().out
    assert "checkpoint-10" in said
    assert "merged logits within" in said
    assert "the checkpoint's own probe within" in said
    assert said.splitlines()[-1] == f"next     erniekit chat {out}"
    assert len(said.splitlines()) <= 6


def test_the_base_named_by_the_adapter_is_used_when_none_is_given(run: Path, base: Path) -> None:
    assert export_command([f"output_dir={run}"]) == 0
    assert manifest.check(run / "export").info["base"] == str(base)


def test_an_adapter_in_output_dir_itself_goes_before_checkpoints(run: Path, base: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copyfile(run / "checkpoint-5" / name, run / name)
    export_command([f"output_dir={run}", f"model_name_or_path={base}"])
    torch.testing.assert_close(logits(run / "export"), logits(base, run / "checkpoint-5"), atol=1e-4, rtol=0)


def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(
    run: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = run / "checkpoint-10" / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    export_command([f"output_dir={run}", f"model_name_or_path={base}"])
    torch.testing.assert_close(logits(run / "export"), logits(base, run / "checkpoint-5"), atol=1e-4, rtol=0)
    assert "checkpoint-10 is damaged" in capsys.readouterr().err


def test_where_no_checkpoint_is_whole_one_whose_model_is_gets_exported(
    run: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (5, 10):
        (run / f"checkpoint-{step}" / "optimizer-rank-00000-of-00001.safetensors").unlink()
    export_command([f"output_dir={run}", f"model_name_or_path={base}"])
    torch.testing.assert_close(logits(run / "export"), logits(base, run / "checkpoint-10"), atol=1e-4, rtol=0)
    said = capsys.readouterr().err
    assert said.count("checkpoint-10 is damaged and passed over: optimizer-rank-00000-of-00001.safetensors is") == 1
    assert "checkpoint-10 is taken all the same: the files of its model are whole" in said
    for step in (5, 10):
        (run / f"checkpoint-{step}" / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"every checkpoint in this folder is damaged \(2 found\)"):
        export_command([f"output_dir={run}", f"model_name_or_path={base}"])


def test_an_empty_output_dir_is_an_error_with_the_key_to_set(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither an adapter nor a model") as error:
        export_command([f"output_dir={tmp_path}"])
    assert "output_dir" in error.value.where
    assert error.value.fix


def test_a_fully_trained_model_is_rewritten_bit_for_bit_in_the_layout_asked(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output_dir = tmp_path / "run"
    shutil.copytree(base, output_dir / "checkpoint-7")
    export_command([f"output_dir={output_dir}", "save_format=paddle"])
    out = ModelFolder(output_dir / "export")
    assert out.layout == "paddle"
    want, got = ModelFolder(base).build().state_dict(), out.build().state_dict()
    assert all(torch.equal(want[name], got[name]) for name in want)
    assert "every tensor bit-identical" in capsys.readouterr().out


def test_a_whole_model_where_an_adapter_was_asked_for_is_warned_of_and_told_once(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output_dir = tmp_path / "run"
    shutil.copytree(base, output_dir / "checkpoint-7")
    run_export(load([f"output_dir={output_dir}", "lora=True", f"model_name_or_path={base}"], "export"))
    said = capsys.readouterr()
    assert said.out.count("model_name_or_path is not used") == 1
    assert said.err.count("lora is True, but") == 1
    assert "no adapter: nothing is merged" in said.err


@pytest.mark.parametrize("command", [export_command, split_command])
def test_an_edited_config_of_a_whole_model_is_named_where_its_probe_differs(
    command: Callable[[list[str]], int], base: Path, tmp_path: Path
) -> None:
    saved = save_whole(tmp_path / "run", base)
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1.0}))
    with pytest.raises(CheckpointError, match="as the checkpoint did when saved") as error:
        command([f"output_dir={saved}"])
    assert error.value.fix.startswith("config.json is not as saved")
    assert "adapter" not in error.value.fix
    own = tmp_path / "own"  # the way out that it names
    shutil.copytree(saved, own, ignore=lambda *_: ["MANIFEST.json", probes.FILE])
    command([f"output_dir={own}"])
    saved_probe = probes.load(saved)
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as error:
        export(base, None, tmp_path / "out", probe=replace(saved_probe, rows=saved_probe.rows + 1))
    assert error.value.fix.startswith("use another checkpoint of the run")
    assert "adapter" not in error.value.fix


@pytest.mark.parametrize("command", ["export", "split"])
@pytest.mark.parametrize("named", ["run", "run/checkpoint-7"])
def test_a_checkpoint_with_edited_settings_is_used_with_a_warning_named_or_found_in_its_run(
    command: str, named: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = save_whole(tmp_path / "run", base)
    edited = [saved / "config.json", saved / "tokenizer_config.json"]
    for file in edited:
        file.write_text(json.dumps(json.loads(file.read_text()), indent=7))
    assert main([command, str(tmp_path / named)]) == 0
    said = capsys.readouterr().err
    assert "passed over" not in said
    for file in edited:
        assert said.count(f"{file} is not as it was saved: it was edited, or is damaged") == 1


@pytest.mark.parametrize("left", ["", '{"model_type": ', "[]"])
def test_a_checkpoint_whose_settings_cannot_be_read_is_damaged_and_passed_over(
    left: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = save_whole(tmp_path / "run", base)
    older = saved.with_name("checkpoint-3")
    shutil.copytree(saved, older)
    (saved / "config.json").write_text(left)
    assert main(["export", str(tmp_path / "run")]) == 0
    assert f"{saved} is damaged and passed over: config.json has" in capsys.readouterr().err
    (older / "tokenizer_config.json").write_text(left)
    assert main(["export", str(tmp_path / "run")]) == 2
    assert "every checkpoint in this folder is damaged (2 found)" in capsys.readouterr().err


def test_an_edited_config_lets_no_damaged_weights_pass(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = save_whole(tmp_path / "run", base)
    (saved / "config.json").write_text((saved / "config.json").read_text() + "\n")
    weights = sorted(saved.glob("model*.safetensors"))[0]
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert main(["export", str(tmp_path / "run")]) == 2
    assert f"damaged and passed over: {weights.name} does not match its sha256" in capsys.readouterr().err


def save_whole(output_dir: Path, base: Path) -> Path:
    """A published checkpoint of a full run: weights, probe, manifest."""
    with torch.no_grad():
        probe = probes.measure(ModelFolder(base).build(), Probe(IDS, IDS.roll(-1)), "cpu/float32/x/one device")

    def write(folder: Path) -> None:
        shutil.copytree(base, folder, dirs_exist_ok=True)
        probes.save(folder, probe)

    output_dir.mkdir()
    return publish(output_dir, "checkpoint-7", write)


@pytest.mark.parametrize("layout", ["hf", "paddle"])
def test_layouts_hold_the_same_merged_numbers(run: Path, base: Path, tmp_path: Path, layout: str) -> None:
    out = export(base, run / "checkpoint-10", tmp_path / layout, layout=layout)
    assert ModelFolder(out).layout == layout
    torch.testing.assert_close(logits(out), logits(base, run / "checkpoint-10"), atol=1e-4, rtol=0)


@pytest.mark.parametrize("layout", ["hf", "paddle"])
def test_a_conversion_tells_which_tensors_hold_something_else_than_numbers(
    base: Path, tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = shutil.copytree(base, tmp_path / "broken")
    for file in broken.glob("*.safetensors"):
        weights = load_file(file)
        for name, weight in weights.items():
            if name.endswith("layers.1.mlp.down_proj.weight"):
                weight[0, :3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
            if name.endswith("embed_tokens.weight"):
                weight[2, 5], weight[3, 5] = 3e38, 3e38  # finite, though not their sum
        save_file(weights, file, {"format": "pt"})
    assert export_command([f"output_dir={broken}", f"save_format={layout}"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "infinite" in line]
    size = f"{ModelFolder(base).config.hidden_size * ModelFolder(base).config.intermediate_size:,}"
    assert said == [
        f"warning: model.layers.1.mlp.down_proj.weight holds 3 of {size} values that are NaN or infinite, "
        f"in {broken} as in the export"
    ]
    copied, source = (ModelFolder(folder).build().state_dict() for folder in (broken / "export", broken))
    assert all(torch.equal(copied[name].view(torch.int32), source[name].view(torch.int32)) for name in source)


def test_tokenizer_and_generation_config_travel_and_copy_tokenizer_can_be_off(
    run: Path, base: Path, tmp_path: Path
) -> None:
    with_it = export(base, run / "checkpoint-10", tmp_path / "with")
    without = export(base, run / "checkpoint-10", tmp_path / "without", copy_tokenizer=False)
    names = {"tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"}
    assert names <= {f.name for f in with_it.iterdir()}
    assert not names & {f.name for f in without.iterdir()}
    assert (without / "generation_config.json").is_file()


def test_shards_stay_below_the_asked_size_and_the_index_names_every_tensor(
    run: Path, base: Path, tmp_path: Path
) -> None:
    out = export(base, run / "checkpoint-10", tmp_path / "out", max_shard_size=2e-4)
    shards = sorted(out.glob("model-*-of-*.safetensors"))
    assert len(shards) > 2
    held = [load_file(str(f)) for f in shards]
    assert all(sum(t.numel() * t.element_size() for t in shard.values()) <= 200_000 for shard in held)
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == {name: f.name for f, shard in zip(shards, held) for name in shard}


def test_bf16_is_merged_in_fp32_and_checked_against_measured_rounding(
    run: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = ModelFolder(base).build(torch.bfloat16)
    write_model(tmp_path / "half", half.config, half.state_dict().__getitem__)
    out = export(tmp_path / "half", run / "checkpoint-10", tmp_path / "out")
    got = ModelFolder(out).build()
    update = read_adapter(run / "checkpoint-10", got).updates["model.layers.1.self_attn.o_proj"]
    exact = half.layers[1].attn.out.weight.float() + update.scale * (update.B @ update.A)
    assert torch.equal(got.layers[1].attn.out.weight, exact.to(torch.bfloat16))
    proof = manifest.check(out).info["proof"]
    assert 1e-4 < proof["merged"] <= proof["merged_allowed"] < 1.0  # rounding shows, and is bounded
    assert "allowed" in capsys.readouterr().out


def test_an_update_lost_in_bf16_rounding_is_told(
    run: Path, base: Path, paddle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = ModelFolder(base).build(torch.bfloat16)
    write_model(tmp_path / "half", half.config, half.state_dict().__getitem__)
    shutil.copytree(run / "checkpoint-10", tmp_path / "tiny")
    config = json.loads((tmp_path / "tiny" / "adapter_config.json").read_text())
    (tmp_path / "tiny" / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 1e-3}))
    (tmp_path / "tiny" / manifest.MANIFEST).unlink()  # edited on purpose
    export(tmp_path / "half", tmp_path / "tiny", tmp_path / "out")
    assert "too small for this dtype" in capsys.readouterr().err


def test_a_failed_proof_publishes_nothing_and_keeps_the_export_before(run: Path, base: Path, tmp_path: Path) -> None:
    out = export(base, run / "checkpoint-5", tmp_path / "out")
    before = manifest.check(out)
    wrong = Probe(IDS, IDS.roll(-1), 0.0, torch.zeros(4, 512), "", "cpu/float32/x")
    with pytest.raises(CheckpointError, match="as the checkpoint did when saved"):
        export(base, run / "checkpoint-10", out, probe=wrong)
    assert manifest.check(out) == before
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_the_wrong_base_is_found_by_the_checkpoints_probe(run: Path, base: Path, tmp_path: Path) -> None:
    """Same shapes, other weights: merging works and its logits are consistent; only the saved answer can tell."""
    other = ModelFolder(base).build()
    init_weights(other, seed=1, std=0.1)
    write_model(tmp_path / "other", other.config, other.state_dict().__getitem__)
    with pytest.raises(CheckpointError, match="as the checkpoint did when saved") as error:
        export_command([f"output_dir={run}", f"model_name_or_path={tmp_path / 'other'}"])
    assert "model_name_or_path" in error.value.fix
    assert not (run / "export").exists()


def test_the_source_is_never_overwritten(base: Path) -> None:
    with pytest.raises(CheckpointError, match="replace what it is made from"):
        export(base, None, base)


# Memory this process owns; pages of mapped files, which the system can drop, are not counted.
PEAK = """
import sys, threading
from pathlib import Path
from erniekit.export.run import export
from erniekit.recipes.run import export_command

def owned():
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024

warm_base, warm_adapter, base, adapter, out, shard = sys.argv[1:]
export(Path(warm_base), Path(warm_adapter), Path(out + "-warm"))  # what a first use of torch costs is not ours
start, peak, done = owned(), 0, threading.Event()

def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, owned())

watcher = threading.Thread(target=watch)
watcher.start()
export(Path(base), Path(adapter), Path(out), max_shard_size=float(shard))
done.set()
watcher.join()
print(peak - start)
"""


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads RssAnon from /proc")
def test_memory_is_bounded_by_a_shard_and_a_layer_not_by_the_model(run: Path, base: Path, tmp_path: Path) -> None:
    """A 16-layer model of 77 MB in shards of 8 MB, merged and proven."""
    spec = ModelFolder(base).spec
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 16, "vocab_size": 1024}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 64, "tie_word_embeddings": True}
    config = spec.read_config({"model_type": "ernie4_5", **shape, **heads}, "hf", False, "")
    model = spec.build(config)
    write_model(tmp_path / "base", config, model.state_dict().__getitem__, max_shard_size=0.008)
    total = sum(p.numel() * 4 for p in model.parameters())
    assert total > 75e6
    settings = LoRASettings.resolve(rank=4)
    inject(model, settings, seed=1)
    write_adapter(tmp_path / "adapter", adapter_of(model, settings), model)
    # freed blocks go back to the system at once, so that what is owned is what is in use
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    folders = (base, run / "checkpoint-10", *(tmp_path / name for name in ("base", "adapter", "out")))
    command = [sys.executable, "-c", PEAK, *map(str, folders), "0.008"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    # a shard twice (held and being written), a layer of 5 MB, activations; the model alone would be 77 MB
    assert int(done.stdout.split()[-1]) < 40e6
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()


@pytest.mark.parametrize(("grid", "least", "most"), [("int8", 0.0, 0.5), ("int4", 0.5, 10.0)])
def test_an_adapter_goes_on_the_numbers_of_a_packed_base_and_the_lost_share_is_told(
    run: Path, base: Path, tmp_path: Path, grid: str, least: float, most: float, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(base), f"lora_path={run / 'checkpoint-10'}", f"output_dir={tmp_path / 'out'}", f"merge_grid={grid}"]
    assert export_command(words) == 0
    said = capsys.readouterr().out
    merged, source = (ModelFolder(folder).build().state_dict() for folder in (tmp_path / "out", base))
    model = ModelFolder(base).build()
    updates = row_updates(model, read_adapter(run / "checkpoint-10", model))
    lost = added = 0.0
    for name, weight in source.items():
        if name not in updates:
            assert torch.equal(merged[name], weight), name
            continue
        kept = on_grid(grid, name, weight)
        exact = merged_in_fp32(kept, updates[name])
        assert torch.equal(merged[name], on_grid(grid, name, exact)), name
        lost += float((merged[name] - exact).square().sum())
        added += float((exact - kept).square().sum())
    share = (lost / added) ** 0.5
    assert least < share < most
    assert f"rounded  merged weights to what {grid} keeps: {share:.0%} of the update's size is lost" in said
    assert "checked  every other tensor bit-identical to its source" in said
    assert manifest.check(tmp_path / "out").info["merge_grid"] == grid


@pytest.mark.parametrize("grid", ["fp8", "int8", "int4", "int4-group", "mxfp4", "nf4", "wint4/8"])
def test_who_packs_a_16_bit_export_by_the_rule_of_its_grid_has_just_its_numbers(
    run: Path, base: Path, tmp_path: Path, grid: str
) -> None:
    half = tmp_path / "half"
    weights = {name: weight.bfloat16() for name, weight in ModelFolder(base).build().state_dict().items()}
    write_model(half, ModelFolder(base).config, lambda name: weights[name])
    export(half, run / "checkpoint-10", tmp_path / "out", grid=grid, override_base=True)
    model = ModelFolder(base).build()
    updates = row_updates(model, read_adapter(run / "checkpoint-10", model))
    source = ModelFolder(tmp_path / "out")
    written = {entry.ours: source.read(entry) for entry in source.entries() if entry.ours in updates}
    assert len(written) == len(updates)
    for name, weight in written.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(on_grid(grid, name, weight), weight), name


@pytest.mark.parametrize(("setting", "trained"), [
    ("cpu/float32/2.9/one device/wint4/8 base", "wint4/8"), ("cpu/float32/2.9/one device", "bf16"),
])  # fmt: skip
def test_an_adapter_of_another_kind_of_base_than_the_grid_gets_one_warning(
    run: Path, base: Path, tmp_path: Path, setting: str, trained: str, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(run / "checkpoint-10", adapter)
    probe = probes.load(adapter)
    assert probe is not None
    probes.save(adapter, replace(probe, setting=setting))
    export(base, adapter, tmp_path / "out", grid="int8", verify=False, override_base=True)
    said = capsys.readouterr()
    lines = [line for line in (said.out + said.err).splitlines() if "was trained over" in line]
    assert len(lines) == 1
    assert f"was trained over frozen_base: {trained}; merge_grid: int8 puts it on other numbers" in lines[0]
    if trained == "wint4/8":
        export(base, adapter, tmp_path / "same", grid=trained, verify=False, override_base=True)
        said = capsys.readouterr()
        assert "was trained over" not in said.out + said.err


def test_a_grid_without_an_adapter_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no adapter to merge"):
        export(base, None, tmp_path / "out", grid="int4")
    assert not (tmp_path / "out").exists()
