"""What a server offers: names from folders, adapters beside their base, memory for the cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.cli.main import main
from erniekit.config import load
from erniekit.devices import pick
from erniekit.devices.cpu import CpuDevice
from erniekit.errors import ConfigError, DeviceError
from erniekit.lora.adapter import adapter_of
from erniekit.lora.adapter_files import write_adapter
from erniekit.lora.frozen_base import packing
from erniekit.lora.inject import inject
from erniekit.lora.settings import LoRASettings
from erniekit.model_contract import packed_layers
from erniekit.models.layers.linear import HoldsWeight
from erniekit.serve import loaded_models
from erniekit.serve.engines.embedded import EngineLimits
from erniekit.weight_kinds import SERVED
from support.recording_cpu import recording_cpu
from support.serving import tiny_folder


@pytest.fixture(scope="module")
def base(paddle: Path, tmp_path_factory) -> Path:
    return tiny_folder(paddle, tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory) -> list[Path]:
    folders = [tmp_path_factory.mktemp("adapters") / name for name in ("style", "facts/export")]
    for seed, folder in enumerate(folders):
        model = ModelFolder(base).build()
        settings = LoRASettings(2, 4.0)
        inject(model, settings, seed)
        write_adapter(folder, adapter_of(model, settings, base=str(base)), model)
    return folders


def names(*words: str) -> list[tuple[str, bool]]:
    return [(o.name, o.found.adapter is not None) for o in loaded_models.find_models(load(list(words), "server"))]


def test_a_model_is_called_like_its_folder_or_as_asked(base: Path):
    assert names(str(base)) == [("base", False)]
    assert names(str(base), "served_model_name=mine") == [("mine", False)]


def test_an_adapter_comes_first_and_brings_its_base(base: Path, adapters: list[Path]):
    assert names(str(adapters[0])) == [("style", True), ("base", False)]
    assert names(f"model_name_or_path={base}", f"lora_path={adapters[0]}") == [("style", True), ("base", False)]
    assert names(str(adapters[1])) == [("facts", True), ("base", False)], "an export is called after its run"


def test_several_adapters_stand_beside_their_base_by_name(base: Path, adapters: list[Path]):
    words = f"lora_modules=a={adapters[0]},{adapters[1]}"
    assert names(str(base), words) == [("base", False), ("a", True), ("facts", True)]


def test_two_of_one_name_and_a_folder_without_an_adapter_are_refused(base: Path, adapters: list[Path]):
    with pytest.raises(ConfigError) as error:
        names(str(base), f"lora_modules=base={adapters[0]}")
    assert "two models" in error.value.what
    with pytest.raises(ConfigError) as error:
        names(str(base), f"lora_modules=x={base}")
    assert "no adapter" in error.value.what
    for entry in ("style", f"={adapters[0]}", f"default={adapters[0]}"):
        with pytest.raises(ConfigError, match=r"an adapter cannot be called|is not a folder here") as error:
            names(str(base), f"lora_modules={entry}")
        assert error.value.where == "lora_modules"
        assert "name=DIR" in error.value.fix


def test_the_cache_holds_every_sequence_where_memory_allows_and_says_so_where_not(base: Path, monkeypatch, capsys):
    config = ModelFolder(base).config
    limits = EngineLimits(sequences=4, length=100)
    cpu = pick("cpu")
    assert loaded_models.make_cache(config, limits, 8, torch.float32, cpu, 0.9).blocks == 4 * 13
    each = loaded_models.bytes_per_block(config, 8, torch.float32)
    monkeypatch.setattr(CpuDevice, "usable_memory", lambda device, share: 20 * each)
    assert loaded_models.make_cache(config, limits, 8, torch.float32, cpu, 0.9).blocks == 20
    assert "max_num_seqs" in capsys.readouterr().err
    monkeypatch.setattr(CpuDevice, "usable_memory", lambda device, share: 12 * each)
    with pytest.raises(DeviceError) as error:
        loaded_models.make_cache(config, limits, 8, torch.float32, cpu, 0.9)
    assert error.value.where == "max_model_len"


@pytest.mark.parametrize("word", ["wint8", "wint4"])
def test_weights_are_packed_as_they_are_read_and_adapters_share_them(
    base: Path, adapters: list[Path], word: str
) -> None:
    cfg = load([str(adapters[0]), "device=cpu", f"quantization={word}"], "server")
    entries = loaded_models.find_models(cfg)
    loaded = loaded_models.load_models(cfg, entries)
    loaded.engine.stop("the test is over", 5)
    assert "int8" in loaded.about
    plain = ModelFolder(base).build(torch.float32).eval()
    linears = [n for n, m in plain.named_modules() if isinstance(m, HoldsWeight) and n.startswith("layers.")]
    assert list(packed_layers(loaded.engine.models["base"])) == linears

    weights = ModelFolder(base)
    packed = weights.build(torch.float32, "cpu", packing(weights, SERVED[word], "cpu")).eval()
    adapted = loaded_models.with_adapter(packed, entries[0].found)
    for name, layer in packed_layers(packed).items():
        assert adapted.get_submodule(name).base.packed_data.data_ptr() == layer.packed_data.data_ptr()
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        wanted, got, same = (model(ids) for model in (plain, packed, adapted))
    assert 0 < (got - wanted).norm() / wanted.norm() < 0.05
    assert torch.allclose(same, got, atol=1e-5), "a fresh adapter adds nothing"


def test_a_quantised_folder_is_served_as_it_is_whatever_quantization_says(base: Path, tmp_path: Path, capsys) -> None:
    import erniekit

    erniekit.run("quantize", base, quant="w8a16", output_dir=tmp_path / "small")
    cfg = load([str(tmp_path / "small"), "device=cpu", "quantization=wint4"], "server")
    loaded = loaded_models.load_models(cfg, loaded_models.find_models(cfg))
    loaded.engine.stop("the test is over", 5)
    assert not packed_layers(next(iter(loaded.engine.models.values())))
    assert "quantised already" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "records"), [((), True), (("decoding=auto",), True), (("decoding=exact",), False)])
def test_exact_decoding_takes_the_models_own_forward_where_steps_could_be_recorded(
    base: Path, words: tuple[str, ...], records: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded_models, "pick", lambda *asked: recording_cpu())
    cfg = load([str(base), "max_num_seqs=2", "max_model_len=64", *words], "server")
    engine = loaded_models.load_models(cfg, loaded_models.find_models(cfg)).engine
    try:
        assert (engine.recorded is not None) is records
    finally:
        engine.stop()


def test_another_way_of_decoding_is_refused_as_typed(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["server", str(base), "decoding=fast"]) == 2
    error = capsys.readouterr().err
    assert "decoding" in error
    assert "auto, exact" in error


def test_the_context_is_the_models_own_unless_memory_holds_less_which_one_line_says(base: Path, monkeypatch, capsys):
    config, cpu = ModelFolder(base).config, pick("cpu")

    def length(*words: str) -> int:
        serve = load([str(base), "block_size=8", *words], "server").serve
        return loaded_models.context_length(serve, config, torch.float32, cpu)

    assert length() == config.max_positions
    assert length("max_model_len=100") == 100
    assert capsys.readouterr().err == ""
    assert length("max_model_len=1000000") == config.max_positions
    assert (
        f"context: {config.max_positions} tokens, the model's own; max_model_len is 1,000,000"
        in capsys.readouterr().err
    )
    each = loaded_models.bytes_per_block(config, 8, torch.float32)
    monkeypatch.setattr(CpuDevice, "usable_memory", lambda device, share: 20 * each)
    assert length() == 160
    told = capsys.readouterr().err
    assert f"context: 160 of the model's {config.max_positions} tokens" in told
    assert told.count("\n") == 1
    assert length("max_model_len=200") == 200, "what was asked for is kept, or refused by the cache"


def test_a_hosts_memory_is_taken_for_one_long_sequence_or_several_usual_ones(base: Path, monkeypatch):
    config, cpu = ModelFolder(base).config, pick("cpu")
    monkeypatch.setattr(CpuDevice, "usable_memory", lambda device, share: 1 << 30)  # the machine's own changes by use
    long = EngineLimits(sequences=4, length=100_000)
    cache = loaded_models.make_cache(config, long, 8, torch.float32, cpu, 0.9, given=False)
    assert cache.blocks == 12_500
    many = EngineLimits(sequences=100, length=100_000)
    assert loaded_models.make_cache(config, many, 8, torch.float32, cpu, 0.9, given=False).blocks == 100 * 256
    assert not any(tensor.any() for tensor in (cache.keys[0], cache.values[-1]))
