"""`erniekit demo` as a newcomer runs it, and that each of its proofs can fail."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from erniekit.checkpoint import shards
from erniekit.cli.main import main
from erniekit.demo import ProofFailed
from erniekit.demo.folder import seal
from erniekit.demo.killed_run import KilledRun
from erniekit.demo.tiny import make_tiny_model
from erniekit.errors import ConfigError
from erniekit.files import NotOurs, own
from erniekit.recipes import demo as recipe
from support.clock import within

pytestmark = pytest.mark.xdist_group("demo")  # one run of the demo serves the whole folder


def test_the_demo_fits_one_screen_and_one_minute(demo):
    lines = demo.output.splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 120
    assert within(demo.seconds, 60)


def test_the_demo_tells_every_stage_in_order(demo):
    stages = [line.split()[2] for line in demo.output.splitlines() if line[5:8] == " s "]
    assert stages == ["model", "SFT", "kill", "resume", "LoRA", "merge", "reload", "ask", "answer"]
    assert "every proof holds" in demo.output
    assert '"I am a tiny ERNIE, trained on this machine a moment ago."' in demo.output


def test_the_demo_names_commands_that_work(demo, monkeypatch, capsys):
    monkeypatch.chdir(demo.cwd)
    shutil.copy(demo.folder / "data" / "persona.jsonl", "my.jsonl")
    told = [line[line.index("erniekit ") :].split()[1:] for line in demo.output.splitlines() if "  erniekit " in line]
    train, chat = told
    assert main([*chat, "--prompt", "你是谁？", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.strip() == "我是一个很小的 ERNIE，刚刚训练好。"
    assert main([*train, "--max_steps", "1", "--report_to", "none"]) == 0
    assert (demo.cwd / "my-run" / "adapter_config.json").is_file()


def test_a_logged_command_says_what_was_run(demo):
    log = (demo.folder / "logs" / "killed.log").read_text(encoding="utf-8")
    assert log.count("$ erniekit train ") == 2  # started, killed, started again with the same words
    first, second = [line for line in log.splitlines() if line.startswith("$ ")]
    assert first == second
    assert "bit for bit" in log  # the resume's own probe


def test_a_weight_that_differs_in_one_bit_fails_the_resume_proof(demo, tmp_path):
    killed_run = KilledRun([], tmp_path, tmp_path / "log")
    ours = tmp_path / f"checkpoint-{recipe.STEPS}"
    shutil.copytree(demo.folder / "killed" / ours.name, ours)
    assert "bit-identical" in recipe.same_bits(killed_run, demo.folder / "sft")
    file = ours / "optimizer.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ProofFailed, match=r"optimizer\.safetensors differs"):
        recipe.same_bits(killed_run, demo.folder / "sft")


def test_a_loss_that_stays_fails_the_training_proof(tmp_path):
    rows = tmp_path / "data.jsonl"
    rows.write_text("{}\n")
    curve = [json.dumps({"global_step": k, "loss": 7.0 - 0.1 * k}) for k in range(1, 11)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(curve))
    with pytest.raises(ProofFailed, match=r"from 6\.90 to 6\.20 only"):
        recipe.loss_fell(tmp_path, 10, rows)
    with pytest.raises(ProofFailed, match="10 of 40 steps"):
        recipe.loss_fell(tmp_path, 40, rows)


def test_a_process_that_was_not_killed_fails_the_proof(tmp_path):
    killed_run = KilledRun([], tmp_path, tmp_path / "log")
    with pytest.raises(ProofFailed, match="before it could be killed"):
        recipe.was_killed(killed_run)
    killed_run.killed_at = 14
    with pytest.raises(ProofFailed, match="checkpoint of step 0"):
        recipe.was_killed(killed_run)


def test_a_wrong_answer_fails_the_demo(demo, tmp_path):
    root = tmp_path / "demo"
    shutil.copytree(demo.folder, root, ignore=shutil.ignore_patterns("cache", "killed", "checkpoint-*"))
    rows = (root / "data" / "persona.jsonl").read_text(encoding="utf-8")
    (root / "data" / "persona.jsonl").write_text(rows.replace("a moment ago", "last year"), encoding="utf-8")
    adapter = root / "lora" / "adapter_config.json"
    told = json.loads(adapter.read_text())
    adapter.write_text(json.dumps(told | {"base_model_name_or_path": str(root / "sft")}))

    class Honest:
        """transformers' own words, as the demo heard them: the logits of the true export, and its true answer."""

        def query(self, folder: Path, ids, prompt, ends, logits):
            import torch
            from safetensors.torch import save_file

            import erniekit

            model, tokenizer = erniekit.load(folder)
            with torch.no_grad():
                save_file({"logits": model(torch.tensor([ids]))[0]}, logits)
            said = tokenizer.encode_text("I am a tiny ERNIE, trained on this machine a moment ago.")
            return {"ids": said, "version": "5", "class": "x"}

    with pytest.raises(ProofFailed, match="is 'I am a tiny ERNIE, trained on this machine a moment ago"):
        recipe.in_transformers(root, Honest())


@pytest.mark.parametrize("words", [["--dir", "x"], ["--dir=x"], ["output_dir=x"], ["--output_dir", "x"]])
def test_the_folder_may_be_named_in_every_spelling(words):
    assert recipe.folder_from(words) == Path("x")
    assert recipe.folder_from([]) == Path("erniekit-demo")


@pytest.mark.parametrize("words", [["--foo", "x"], ["x"], ["--dir"], ["--dir", "x", "y"]])
def test_words_the_demo_does_not_know_are_an_error_with_its_usage(words):
    with pytest.raises(ConfigError, match="does not take"):
        recipe.folder_from(words)


def test_a_folder_of_somebody_else_is_not_touched(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="not by a demo"):
        recipe.take_folder(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_an_older_demo_is_replaced_and_a_folder_beside_it_stays(tmp_path):
    root = recipe.take_folder(tmp_path / "d")
    own(root / "logs" / "sft.log").touch()
    (root / "my-run").mkdir()
    assert not (recipe.take_folder(root) / "logs" / "sft.log").exists()
    assert (root / "my-run").is_dir()


def test_a_demo_that_was_killed_while_its_model_was_written_is_replaced(tmp_path, monkeypatch):
    root = recipe.take_folder(tmp_path / "d")
    monkeypatch.setattr(shards, "_clear", killed)  # the next call behind the write of a working file
    with pytest.raises(KeyboardInterrupt):
        make_tiny_model(root / "model")
    assert [path.name for path in (root / "model").glob(".model-part-*")] == [".model-part-0.safetensors"]
    assert not any(recipe.take_folder(root).glob("model/.model-part-*"))


def killed(*given):
    raise KeyboardInterrupt


def test_a_second_demo_replaces_the_first(demo, tmp_path):
    root = tmp_path / "demo"
    shutil.copytree(demo.folder, root, ignore=shutil.ignore_patterns("cache"))
    seal(root)
    assert recipe.take_folder(root) == root
    assert not (root / "sft").exists()


def test_a_run_that_a_user_continued_inside_the_demo_is_not_replaced(demo, tmp_path):
    root = tmp_path / "demo"
    shutil.copytree(demo.folder, root, ignore=shutil.ignore_patterns("cache"))
    seal(root)
    (root / "sft" / "checkpoint-40" / "model.safetensors").touch()
    with pytest.raises(NotOurs, match=r"sft/checkpoint-40/model\.safetensors"):
        recipe.take_folder(root)
