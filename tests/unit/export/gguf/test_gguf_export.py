"""`erniekit export format=gguf`: the file holds the source's weights, and appears whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from erniekit.checkpoint import manifest
from erniekit.checkpoint.manifest import MANIFEST
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.checkpoint.model_writer import write_model
from erniekit.cli.main import main
from erniekit.demo.tiny import FAMILIES
from erniekit.errors import CheckpointError
from erniekit.export.gguf import file as gguf_file
from erniekit.export.gguf.names import gguf_names, stored_config
from erniekit.export.run import export
from erniekit.lora.adapter_files import read_adapter
from erniekit.lora.merge import merged_in_fp32, row_updates
from erniekit.models.init import init_weights

# Largest relative error of a weight beside its block's largest: half a step, and the rounding of the scale.
BOUNDS = {"q8_0": 1 / 254 + 2e-3, "q4_0": 1 / 8 + 2e-3, "mxfp4": 1 / 4}


def blocks_off(got: torch.Tensor, want: torch.Tensor) -> float:
    size = want.reshape(-1, 32).abs().amax(-1, keepdim=True).clamp(min=1e-12)
    return float(((got - want).reshape(-1, 32).abs() / size).max())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("word", "dtype"), [("f32", torch.float32), ("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_a_plain_type_holds_every_weight_bit_for_bit(tiny, opened, tmp_path, family, word, dtype):
    file = opened(export(tiny[family], None, tmp_path / "out", gguf=word))
    folder = ModelFolder(tiny[family])
    entries = gguf_names(stored_config(folder.config))
    assert set(file.words) == {name for entry in entries for name in entry.theirs}
    state = folder.build().state_dict()
    for entry in entries:
        for name, want in zip(entry.theirs, entry.write(state[entry.ours])):
            got = file.weights(name)
            assert got.shape == want.shape
            assert torch.equal(got, (want if file.words[name] == "F32" else want.to(dtype)).float()), name
        ours = entry.read([file.weights(name) for name in entry.theirs])
        if word == "f32":
            assert torch.equal(ours, state[entry.ours]), entry.ours


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("word", BOUNDS)
def test_a_block_type_is_within_its_bound_and_what_decides_stays_fp32(tiny, opened, tmp_path, family, word):
    file = opened(export(tiny[family], None, tmp_path / "out", gguf=word))
    folder = ModelFolder(tiny[family])
    state = folder.build().state_dict()
    for entry in gguf_names(stored_config(folder.config)):
        for name, want in zip(entry.theirs, entry.write(state[entry.ours])):
            kind = file.words[name]
            eight = name in ("token_embd.weight", "output.weight") or (
                family == "ernie4_5_moe" and word == "mxfp4" and "exps" not in name
            )
            plain = "norm" in name or name.endswith(("ffn_gate_inp.weight", ".bias"))
            assert kind == ("F32" if plain else "Q8_0" if eight else word.upper())
            got = file.weights(name)
            assert torch.equal(got, want) if kind == "F32" else blocks_off(got, want) <= BOUNDS[kind.lower()], name


def test_experts_are_stacked_and_further_layers_are_left_out(tiny, opened, tmp_path):
    file = opened(export(tiny["ernie4_5_moe"], None, tmp_path / "out", gguf="f32"))
    state = ModelFolder(tiny["ernie4_5_moe"]).build().state_dict()
    gate_up = state["layers.1.mlp.experts.gate_up.weight"].reshape(8, 2, 32, 128)
    assert torch.equal(file.weights("blk.1.ffn_gate_exps.weight"), gate_up[:, 0])
    assert torch.equal(file.weights("blk.1.ffn_up_exps.weight"), gate_up[:, 1])
    assert tuple(file.weights("blk.1.ffn_down_exps.weight").shape) == (8, 128, 32)
    assert "blk.0.ffn_gate.weight" in file.words
    assert {name.split(".")[1] for name in file.words if name.startswith("blk.")} == {"0", "1"}
    assert any("mtp" in name for name in state), "the model has layers that the file leaves out"


def test_a_tied_embedding_is_stored_once_and_a_head_of_its_own_as_output(tiny, opened, tmp_path):
    tied = opened(export(tiny["ernie4_5"], None, tmp_path / "tied", gguf="f32"))
    own = opened(export(tiny["llama"], None, tmp_path / "own", gguf="f32"))
    assert "output.weight" not in tied.words
    head = ModelFolder(tiny["llama"]).build().state_dict()["head.weight"]
    assert torch.equal(own.weights("output.weight"), head)


def test_the_paddle_layout_gives_the_same_file_as_the_hf_layout(tiny, tmp_path):
    folder = ModelFolder(tiny["ernie4_5"])
    paddle = export(tiny["ernie4_5"], None, tmp_path / "paddle", layout="paddle")
    assert ModelFolder(paddle).layout == "paddle" != folder.layout
    one, other = (export(source, None, tmp_path / name / "out", gguf="q4_0")
                  for source, name in ((tiny["ernie4_5"], "a"), (paddle, "b")))  # fmt: skip
    assert (one / "model-Q4_0.gguf").read_bytes() == (other / "model-Q4_0.gguf").read_bytes()


def test_an_adapter_is_merged_in_fp32_before_the_weights_are_rounded(run, base, opened, capsys):
    assert main(["export", str(run), "format=gguf", "gguf_type=f32"]) == 0
    said = capsys.readouterr().out
    out = run / "gguf-f32"
    assert "merged" in said
    assert "against base + adapter: mean KL" in said
    assert "the checkpoint's own probe within" in said
    assert said.splitlines()[-1] == f"next     ollama create my-model -f {out}/Modelfile"
    folder = ModelFolder(base)
    state = folder.build().state_dict()
    updates = row_updates(folder.meta(), read_adapter(run / "checkpoint-10", folder.meta()))
    file = opened(out)
    for entry in gguf_names(folder.config):
        want = merged_in_fp32(state[entry.ours], updates.get(entry.ours, []))
        assert torch.equal(entry.read([file.weights(name) for name in entry.theirs]), want), entry.ours
    assert updates


def test_rows_that_are_no_whole_number_of_blocks_stay_16_bit(tiny, opened, tmp_path):
    folder = reshaped(tiny["llama"], tmp_path / "odd", intermediate_size=80)
    file = opened(export(folder, None, tmp_path / "out", gguf="q4_0"))
    assert file.words["blk.0.ffn_down.weight"] == "F16"  # rows of 80
    assert file.words["blk.0.ffn_up.weight"] == "Q4_0"


def test_the_keys_say_all_that_llama_cpp_asks_of_the_shape(tiny, opened, tmp_path):
    fields = opened(export(tiny["ernie4_5_moe"], None, tmp_path / "named", gguf="q8_0")).fields
    wanted = {
        "general.architecture": "ernie4_5-moe", "general.name": "named", "general.file_type": 7,
        "ernie4_5-moe.block_count": 2, "ernie4_5-moe.embedding_length": 128, "ernie4_5-moe.vocab_size": 1280,
        "ernie4_5-moe.feed_forward_length": 256, "ernie4_5-moe.context_length": 4096,
        "ernie4_5-moe.attention.head_count": 4, "ernie4_5-moe.attention.head_count_kv": 2,
        "ernie4_5-moe.attention.key_length": 32, "ernie4_5-moe.rope.freq_base": 500000.0,
        "ernie4_5-moe.expert_count": 8, "ernie4_5-moe.expert_used_count": 2,
        "ernie4_5-moe.expert_feed_forward_length": 32, "ernie4_5-moe.expert_shared_feed_forward_length": 32,
        "ernie4_5-moe.leading_dense_block_count": 1, "ernie4_5-moe.interleave_moe_layer_step": 1,
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 4,
    }  # fmt: skip
    assert {key: fields.get(key) for key in wanted} == wanted
    assert fields["ernie4_5-moe.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    assert len(fields["tokenizer.ggml.tokens"]) == len(fields["tokenizer.ggml.scores"]) == 1280


def reshaped(tiny: Path, folder: Path, **changes: object) -> Path:
    """A model of another shape with the same tokenizer."""
    model = ModelFolder(tiny)
    raw = {**model.config_json, **changes}
    config = model.spec.read_config(raw, "hf", False, "")
    built = model.spec.build(config)
    init_weights(built, 0, config.init_std)
    write_model(folder, config, built.state_dict().__getitem__, tokenizer_from=tiny)
    return folder


@pytest.mark.parametrize(
    ("family", "changes", "what"),
    [
        ("ernie4_5", {"use_bias": True}, "no biases"),
        ("ernie4_5_moe", {"moe_layer_interval": 2, "num_hidden_layers": 4}, "from layer 1 on each must have experts"),
        ("ernie4_5", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}}, "llama3"),
    ],
)  # fmt: skip
def test_a_model_that_llama_cpp_computes_otherwise_is_refused(tiny, tmp_path, family, changes, what):
    folder = reshaped(tiny[family], tmp_path / "model", **changes)
    with pytest.raises(CheckpointError, match=what) as error:
        export(folder, None, tmp_path / "out", gguf="q8_0")
    assert error.value.where
    assert error.value.fix
    assert not (tmp_path / "out").exists()


def test_a_capacity_that_llama_cpp_does_not_have_is_told(tiny, tmp_path, capsys):
    folder = reshaped(tiny["ernie4_5_moe"], tmp_path / "model", moe_capacity=[1.5, 1.5, 1.5])
    export(folder, None, tmp_path / "out", gguf="q8_0")
    assert "moe_capacity is not kept" in capsys.readouterr().err


def test_foreign_files_in_the_target_are_never_overwritten(tiny, tmp_path, capsys):
    target = tmp_path / "run" / "gguf-q8_0"
    target.mkdir(parents=True)
    for file in tiny["ernie4_5"].iterdir():
        if file.is_file():
            (tmp_path / "run" / file.name).write_bytes(file.read_bytes())
    (target / "model-Q8_0.gguf").write_bytes(b"mine")
    assert main(["export", str(tmp_path / "run"), "format=gguf"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3
    assert (target / "model-Q8_0.gguf").read_bytes() == b"mine"
    (target / "model-Q8_0.gguf").unlink()
    assert main(["export", str(tmp_path / "run"), "format=gguf"]) == 0
    assert main(["export", str(tmp_path / "run"), "format=gguf"]) == 0, "an earlier export is replaced"
    names = [MANIFEST, "Modelfile", "README.md", "model-Q8_0.gguf"]
    assert sorted(path.name for path in target.iterdir()) == sorted(names)


def test_a_killed_export_leaves_nothing_under_the_final_name(tiny, tmp_path):
    """The kill is real: SIGKILL after the third tensor, in a process of its own."""
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from erniekit.export.gguf.file import GgufWriter\n"
        "from erniekit.export.run import export\n"
        "real, count = GgufWriter.add, []\n"
        "def add(self, *given):\n"
        "    real(self, *given)\n"
        "    count.append(1)\n"
        "    if len(count) == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        "GgufWriter.add = add\n"
        "export(Path(sys.argv[1]), None, Path(sys.argv[2]), gguf='q8_0')\n"
    )
    out = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", program, str(tiny["ernie4_5"]), str(out)], env={**os.environ})
    assert done.returncode == -signal.SIGKILL
    assert not out.exists()
    export(tiny["ernie4_5"], None, out, gguf="q8_0")
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["out"], "what the kill left is cleared"


def test_a_byte_that_changes_on_the_disk_is_found_and_nothing_is_published(tiny, tmp_path, monkeypatch):
    real = gguf_file.GgufWriter.close

    def close(self):
        path = Path(self._file.name)
        real(self)
        data = bytearray(path.read_bytes())
        data[-33] ^= 1
        path.write_bytes(data)

    monkeypatch.setattr(gguf_file.GgufWriter, "close", close)
    with pytest.raises(CheckpointError, match="changed on its way to the disk"):
        export(tiny["ernie4_5"], None, tmp_path / "out", gguf="q8_0")
    assert not (tmp_path / "out").exists()


def test_a_weight_too_large_for_the_type_is_named(tiny, tmp_path):
    model = ModelFolder(tiny["ernie4_5"]).build()
    with torch.no_grad():
        model.layers[1].mlp.down.weight[3, 5] = 1e6
    write_model(tmp_path / "big", model.config, model.state_dict().__getitem__, tokenizer_from=tiny["ernie4_5"])
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_down\.weight holds a weight that F16 cannot"):
        export(tmp_path / "big", None, tmp_path / "out", gguf="f16")
    export(tmp_path / "big", None, tmp_path / "out", gguf="bf16")


@pytest.mark.parametrize("words", [["format=gguff"], ["format=gguf", "gguf_type=q5_1"]])
def test_a_wrong_word_is_three_lines_and_exit_code_2(tiny, capsys, words):
    assert main(["export", str(tiny["ernie4_5"]), *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["error", "where", "fix"]


def test_without_the_package_the_extra_to_install_is_named(tiny, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gguf", None)  # what an absent package looks like to `import`
    assert main(["export", str(tiny["ernie4_5"]), "format=gguf"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "error: the gguf package is not installed"
    assert lines[2] == 'fix:   pip install "erniekit-torch[gguf]"'


def test_the_proof_tells_how_far_each_type_is_from_its_source(tiny, tmp_path):
    far = {}
    for word in ("f32", "f16", "q8_0", "q4_0"):
        out = export(tiny["ernie4_5"], None, tmp_path / word, gguf=word)
        far[word] = manifest.check(out).info["proof"]["kl"]
    assert far["f32"] == 0.0
    assert 0 < far["f16"] < 1e-5 < far["q8_0"] < 1e-3 < far["q4_0"] < 0.5
