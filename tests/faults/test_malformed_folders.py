"""Model folders whose JSON files and headers hold what they must not: row P2.

A generator puts values of every wrong kind into every field that is read. Each is either refused in three lines, with
the key, or is harmless: never another exception, and never a model larger than its bounds.
"""

from __future__ import annotations

import json
import resource
import shutil
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from erniekit.api_load import find_model
from erniekit.checkpoint import state as states
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.cli.main import main
from erniekit.errors import ErnieKitError
from erniekit.models import costs, find
from erniekit.recipes.model_config import Recorder
from erniekit.serve.folder import stop_ids
from faults.places import Place, words_of
from faults.results import fault
from support.clock import within
from support.serving import tiny_folder

SECONDS = 4.0  # of this process's own time for one refusal; two cores that others use make it slower, too
NUMBERS = [0, -1, 1, 3, 10**12, 2**63, 10**400, 2.5, -0.5, 1e308, float("nan"), float("inf"), float("-inf")]
DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]
VALUES = [None, "", "8", "x" * 10_000, True, False, *NUMBERS, [], [1], ["a"], [None], [1, 2, 3, 4], [[1]], {}, {"a": 1}]
VALUES += [{"rope_type": "llama3"}, {"rope_type": "linear", "factor": "2"}, {"type": ["x"]}, DEEP]
DENSE = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
}  # fmt: skip
EXPERTS = {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 64, "moe_layer_start_index": 1}
SEEING = {"freq_allocation": 2, "vision_config": {"depth": 2, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}}
FAMILIES = {
    "ernie4_5": {"model_type": "ernie4_5", **DENSE},
    "ernie4_5_moe": {"model_type": "ernie4_5_moe", **DENSE, **EXPERTS},
    "ernie4_5_vl_moe": {"model_type": "ernie4_5_moe_vl", **DENSE, **EXPERTS, **SEEING},
    "llama": {"model_type": "llama", **DENSE},
}


def fields_read(raw: dict[str, Any]) -> set[str]:
    """The fields a family asks for, by watching it read."""
    seen = Recorder(raw)
    find(seen).read_config(seen, "hf", False, "here")
    return seen.asked


def malformed() -> Iterator[tuple[str, str, Any, dict[str, Any]]]:
    for family, raw in FAMILIES.items():
        for field in sorted(fields_read(raw)):
            yield family, field, "missing", {k: v for k, v in raw.items() if k != field}
            yield from ((family, field, value, {**raw, field: value}) for value in VALUES)


def test_every_field_of_config_json_with_every_wrong_kind_of_value_is_refused_by_its_key_or_harmless():
    with fault("P2", "every field that is read, with values of every kind, to its reader") as row:
        began = time.process_time()
        for family, field, value, raw in malformed():
            row.count += 1
            for layout in ("hf", "paddle"):
                refused, config = None, None
                try:
                    config = find(raw, "there/config.json").read_config(raw, layout, False, "there/config.json")
                except ErnieKitError as error:
                    refused = error
                if refused is not None:
                    row.hits += layout == "hf"
                    assert refused.fix, (field, value)
                    assert refused.where.startswith("there/config.json"), (field, value)
                    assert len(str(refused)) < 1000, (field, value)
                if config is not None:
                    assert config.num_layers <= 1000, (family, field)
                    assert costs.parameters(config) < 10**17, (family, field)
        took = time.process_time() - began
        assert row.count > 1500
        assert row.hits > row.count / 2, "the values are not wrong enough"
        row.note = f"{row.hits} refused in three lines, the rest harmless; {took * 1e6 / row.count:.0f} us each"


def written(folder: Path, raw: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(raw))


def opened(folder: Path) -> None:
    """As every command that loads weights does, up to the point where memory is taken."""
    found = find_model(folder)
    found.weights.check_names()
    found.weights.check_shapes(found.weights.meta())
    found.tokenizer()
    stop_ids(found)


@pytest.mark.full
def test_every_field_with_every_value_in_a_real_folder_is_refused_before_memory_is_taken(paddle, tmp_path):
    tiny_folder(paddle, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    with fault("P2", "the same in a folder with weights, opened whole") as row:
        for field in sorted(fields_read(raw)):
            for value in VALUES:
                row.count += 1
                written(tmp_path, {**raw, field: value})
                before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
                fix = "none needed"
                try:
                    opened(tmp_path)
                except ErnieKitError as error:
                    row.hits += 1
                    fix = error.fix
                assert fix, (field, value)
                assert within(time.process_time() - began, SECONDS), (field, value)
                assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10, (field, value)
        assert row.hits > row.count / 3


BAD_CONFIGS = {  # config.json as a file
    "empty": b"",
    "a list": b"[1]",
    "a number": b"7",
    "open": b'{"model_type": ',
    "brackets": b"[" * 100_000,
    "objects": b'{"a":' * 100_000,
    "utf-16": '{"model_type": "llama"}'.encode("utf-16"),
    "zeros": bytes(1000),
    "a number of 10,000 digits": b'{"vocab_size": ' + b"9" * 10_000 + b"}",
    "not a name": b'{"model_type": ["llama"]}',
    "no type": b"{}",
}
SIDE_FILES = {  # the other JSON files of a folder: (name, content, which file the error names)
    "tokens of a number": ("tokenizer_config.json", {"eos_token": 7}),
    "extra tokens of a number": ("tokenizer_config.json", {"additional_special_tokens": 3}),
    "decoder as a list": ("tokenizer_config.json", {"added_tokens_decoder": [1]}),
    "decoder of huge ids": ("tokenizer_config.json", {"added_tokens_decoder": {"9" * 30: {"content": "<a>"}}}),
    "templates without names": ("tokenizer_config.json", {"chat_template": [{"template": 3}]}),
    "a list for settings": ("tokenizer_config.json", [1, 2]),
    "a map of numbers": ("special_tokens_map.json", {"unk_token": True}),
    "huge added ids": ("added_tokens.json", {"<x>": 10**12}),
    "ends in a list": ("generation_config.json", [2]),
    "no index": ("model.safetensors.index.json", {}),
    "an index of numbers": ("model.safetensors.index.json", {"weight_map": {"a": 3}}),
    "an index to a parent": ("model.safetensors.index.json", {"weight_map": {"a": "../../etc/passwd"}}),
    "an index to anywhere": ("model.safetensors.index.json", {"weight_map": {"a": "/etc/passwd"}}),
    "an index to settings": ("model.safetensors.index.json", {"weight_map": {"a": "config.json"}}),
    "an index to nothing": ("model.safetensors.index.json", {"weight_map": {"a": ""}}),
}


def refusal(folder: Path) -> ErnieKitError:
    began = time.process_time()
    with pytest.raises(ErnieKitError) as caught:
        opened(folder)
    assert within(time.process_time() - began, SECONDS)
    return caught.value


def test_json_files_of_a_model_folder_that_hold_something_else_are_refused_by_name(paddle, tmp_path):
    with fault("P2", "config.json, index, tokenizer and generation files that hold something else") as row:
        tiny_folder(paddle, tmp_path / "sound")
        for what, content in BAD_CONFIGS.items():
            row.count += 1
            shutil.copytree(tmp_path / "sound", tmp_path / "bad")
            (tmp_path / "bad" / "config.json").write_bytes(content)
            assert "config.json" in str(refusal(tmp_path / "bad")), what
            shutil.rmtree(tmp_path / "bad")
            row.hits += 1
        for what, (name, value) in SIDE_FILES.items():
            row.count += 1
            shutil.copytree(tmp_path / "sound", tmp_path / "bad")
            (tmp_path / "bad" / name).write_text(json.dumps(value))
            assert name in str(refusal(tmp_path / "bad")) or "passwd" in str(refusal(tmp_path / "bad")), what
            shutil.rmtree(tmp_path / "bad")
            row.hits += 1
        with (tmp_path / "sound" / "config.json").open("r+b") as file:
            file.truncate(1 << 30)  # a gigabyte of nothing
        row.count += 1
        assert "larger than 16 MiB" in refusal(tmp_path / "sound").what
        row.hits += 1
        row.note = "each refused by name, within two seconds of processor time"


def header(tensors: dict[str, Any], data: int = 0, text: bytes | None = None) -> bytes:
    raw = json.dumps(tensors).encode() if text is None else text
    return struct.pack("<Q", len(raw)) + raw + bytes(data)


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


LYING_HEADERS = {
    "offsets outside": header({"a": entry(data_offsets=[0, 8_000_000], shape=[2_000_000])}, 8),
    "overlap": header({"a": entry(), "b": entry(data_offsets=[4, 12])}, 12),
    "unknown dtype": header({"a": entry(dtype="F99")}, 8),
    "negative shape": header({"a": entry(shape=[-2])}, 8),
    "a shape of terabytes": header({"a": entry(shape=[10**12])}, 8),
    "a fraction of a shape": header({"a": entry(shape=[2.0])}, 8),
    "twice the same name": header({}, 8, b'{"a":' + json.dumps(entry()).encode() + b',"a":{}}'),
    "a header beyond the file": struct.pack("<Q", 1 << 40) + b"{}",
    "a header of 100 MB": header({}, 0, b'{"a": "' + b"x" * 100_000_000 + b'"}'),
    "brackets": header({}, 0, b'{"a":' + b"[" * 100_000),
}


def test_weight_files_with_lying_headers_are_refused_by_name(paddle, tmp_path):
    with fault("P2", "safetensors headers that lie") as row:
        tiny_folder(paddle, tmp_path)
        for what, content in LYING_HEADERS.items():
            row.count += 1
            (tmp_path / "model.safetensors").write_bytes(content)
            error = refusal(tmp_path)
            assert "model.safetensors" in error.what, what
            assert error.fix, what
            row.hits += 1


def test_sizes_that_contradict_the_weight_files_are_refused_when_the_folder_is_opened(paddle, tmp_path):
    tiny_folder(paddle, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    for key, value in {"num_hidden_layers": 900, "vocab_size": 513, "hidden_size": 128}.items():
        written(tmp_path, {**raw, key: value})
        with pytest.raises(ErnieKitError, match=rf"config\.json says {key} {value}, the weight files") as caught:
            ModelFolder(tmp_path)
        assert caught.value.where.endswith(f"key {key}")


def test_a_model_from_scratch_that_no_memory_holds_is_refused_before_it_is_built(sound, tmp_path, capsys):
    place = Place(tmp_path / "place")
    shutil.copytree(sound, place.root, ignore=shutil.ignore_patterns("cache", "out"))
    raw = json.loads((place.model / "config.json").read_text())
    written(place.model, {**raw, "num_hidden_layers": 1000, "intermediate_size": 1 << 22, "hidden_size": 1 << 16})
    assert main([*words_of("train", place), "--continue_training", "False"]) == 2
    assert "config.json describes a model of" in capsys.readouterr().err


COMMANDS = ("chat", "train", "eval", "doctor", "server", "export", "split")
SAMPLE = {"num_hidden_layers": 10**12, "rope_parameters": [64, 64], "eos_token_id": [], "head_dim": "32"}


def words(command: str, place: Place) -> list[str]:
    if command == "export":
        return ["export", str(place.model), f"lora_path={place.run}", f"output_dir={place.root}/made"]
    if command == "split":
        return ["split", f"model_name_or_path={place.model}", f"output_dir={place.root}/made"]
    return words_of(command, place)


@pytest.mark.parametrize("commands", [COMMANDS[:2], pytest.param(COMMANDS, marks=pytest.mark.full)])
def test_commands_refuse_a_malformed_config_in_three_lines(sound, tmp_path, capsys, commands):
    with fault("P2", "a sample of them, to commands as typed") as row:
        for command in commands:
            for key, value in SAMPLE.items():
                row.count += 1
                place = Place(tmp_path / str(row.count))
                shutil.copytree(sound, place.root, ignore=shutil.ignore_patterns("cache"))
                raw = json.loads((place.model / "config.json").read_text())
                written(place.model, {**raw, key: value})
                capsys.readouterr()
                assert main(words(command, place)) == 2, (command, key)
                said = capsys.readouterr().err
                assert key in said, (command, said)
                assert all(f"\n{word}" in f"\n{said}" for word in ("error: ", "where: ", "fix:   ")), (command, said)
                assert "fault of erniekit" not in said
                row.hits += 1


BAD_ADAPTERS = [
    {"r": 10**12}, {"r": "8"}, {"r": None}, {"lora_alpha": float("inf")}, {"lora_alpha": []}, {"alpha_pattern": [1]},
    {"alpha_pattern": {"(a+)+$": 3}}, {"alpha_pattern": {"(": 3}}, {"alpha_pattern": {"q_proj": "x"}},
    {"base_model_name_or_path": 7}, {"base_model_name_or_path": "~nobody-here/x"}, {"peft_type": ["LORA"]},
    {"base_model_name_or_path": "a\0b"}, {"base_model_name_or_path": "x" * 100_000},
]  # fmt: skip


def test_adapter_configs_that_hold_something_else_are_refused_in_three_lines(sound, tmp_path, capsys):
    with fault("P2", "adapter_config.json with values of other kinds") as row:
        for changes in BAD_ADAPTERS:
            row.count += 1
            place = Place(tmp_path / str(row.count))
            shutil.copytree(sound, place.root, ignore=shutil.ignore_patterns("cache", "checkpoint-*"))
            path = place.run / "adapter_config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
            began = time.process_time()
            with pytest.raises(ErnieKitError) as caught:
                find_model(place.run).build()
            assert within(time.process_time() - began, SECONDS), changes
            assert caught.value.fix, changes
            row.hits += 1


BAD_STATES = [{"step": "4"}, {"step": -7}, {"packs": 10**30}, {"promise": []}, {"random": 3}, {"loss_sum": "x"}]


def test_a_state_that_holds_something_else_is_refused_with_its_key(tmp_path):
    for changes in BAD_STATES:
        (tmp_path / states.FILE).write_text(json.dumps({"step": 1, "random": {}, **changes}))
        with pytest.raises(ErnieKitError) as caught:
            states.load(tmp_path)
        assert next(iter(changes)) in caught.value.where
