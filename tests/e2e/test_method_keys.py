"""Keys of training methods as they are typed, each once: it is accepted and changes the run; and what cannot go
together is refused in three lines."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from erniekit.cli.main import main
from erniekit.demo.tiny import make_tiny_model
from support.jsonl import write_jsonl

USUAL = (
    "max_steps=2", "max_seq_len=64", "gradient_accumulation_steps=1", "device=cpu", "compute_type=fp32", "doctor=off",
    "report_to=none", "dataset_num_proc=1", "learning_rate=1e-2", "lr_scheduler_type=constant", "warmup_steps=0",
)  # fmt: skip


@dataclass(frozen=True)
class Ground:
    """A tiny dense model, one with experts and MTP, and a file of each kind of rows."""

    folder: Path

    @property
    def words(self) -> dict[str, str]:
        return {name: str(self.folder / name) for name in ("dense", "moe")} | {
            name: str(self.folder / f"{name}.jsonl") for name in ("sft", "other", "qa", "pairs", "judged", "classes")
        }

    def train(self, output: str, words: str, data: str = "sft", model: str = "dense") -> int:
        typed = words.format(**self.words).split()
        given = [f"model_name_or_path={self.words[model]}", f"output_dir={self.at(output)}"]
        if not any(word.startswith("train_dataset_path=") for word in typed):
            given.append(f"train_dataset_path={self.words[data]}")
        return main(["train", *given, *USUAL, *typed])

    def at(self, output: str) -> Path:
        return self.folder / "runs" / output

    def records(self, output: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.at(output) / "metrics.jsonl").read_text().splitlines()]

    def losses(self, output: str) -> list[float]:
        return [record["loss"] for record in self.records(output) if "loss" in record]

    def plain(self, words: str, data: str) -> list[float]:
        """Losses of the same run without the key, made once."""
        output = re.sub(r"[^\w=.]+", "-", f"plain-{data}-{words}")
        if not self.at(output).exists():
            assert self.train(output, words, data) == 0
        return self.losses(output)


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    folder = tmp_path_factory.mktemp("methods")
    make_tiny_model(folder / "dense")
    make_tiny_model(folder / "moe", family="ernie4_5_moe")
    numbers = range(6)
    asked = [f"What is {k}" + "?" * (k + 1) for k in numbers]
    write_jsonl(folder / "sft.jsonl", [{"src": [q], "tgt": [f"It is {k}."], "hard": -k} for k, q in enumerate(asked)])
    write_jsonl(folder / "other.jsonl", [{"src": [f"Name {k}."], "tgt": ["A name."]} for k in numbers])
    write_jsonl(folder / "qa.jsonl", [{"q": q, "a": "An answer."} for q in asked])
    write_jsonl(folder / "pairs.jsonl", [{"prompt": q, "chosen": "Yes.", "rejected": "No."} for q in asked])
    judged = [{"prompt": q, "completion": f"It is {k}.", "label": k % 2 == 0} for k, q in enumerate(asked)]
    write_jsonl(folder / "judged.jsonl", judged)
    write_jsonl(folder / "classes.jsonl", [{"text": q, "label": "ab"[k % 2]} for k, q in enumerate(asked)])
    return Ground(folder)


@pytest.fixture(autouse=True)
def cache(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERNIEKIT_CACHE", str(ground.folder / "cache"))


@dataclass(frozen=True)
class Case:
    words: str
    shows: Callable[[Ground, str], bool]
    data: str = "sft"
    model: str = "dense"


FULL, LORA = "fine_tuning=Full", "fine_tuning=LoRA lora_rank=2"
LATER = f"{FULL} optim=muon max_steps=3"  # the first update has one direction whatever the momentum
TEACHER = f"{FULL} teacher_model_name_or_path={{dense}} max_steps=3"


def moves(without: str, data: str = "sft") -> Callable[[Ground, str], bool]:
    """Some loss is another than that of the run without the key."""
    return lambda ground, output: ground.losses(output) != ground.plain(without, data)


def tells(*names: str) -> Callable[[Ground, str], bool]:
    def shown(ground: Ground, output: str) -> bool:
        found = {name for record in ground.records(output) for name, value in record.items() if value is not None}
        return set(names) <= found

    return shown


def holds(part: str) -> Callable[[Ground, str], bool]:
    """The result has a tensor with these words in its name."""

    def found(ground: Ground, output: str) -> bool:
        files = ground.at(output).glob("*model*.safetensors")
        return any(part in name for file in files for name in load_file(file))

    return found


def rank(number: int) -> Callable[[Ground, str], bool]:
    return lambda ground, output: json.loads((ground.at(output) / "adapter_config.json").read_text())["r"] == number


QUICK = {
    "use_dora": Case(f"{LORA} use_dora=True", holds("lora_magnitude_vector")),
    "teacher": Case(TEACHER, tells("kl_loss", "ce_loss")),
}
HEAVY = {
    "stage CLS, LoRA": Case(f"{LORA} stage=CLS", holds("score.weight"), "classes"),
    "train_only": Case(f"{FULL} train_only=model.layers.1", moves(FULL)),
    "neftune_noise_alpha": Case(f"{FULL} neftune_noise_alpha=20", moves(FULL)),
    "stage KTO": Case(f"{LORA} stage=KTO", tells("kto_loss", "kl"), "judged"),
    "columns": Case(f"{FULL} columns.prompt=q columns.response=a", moves(FULL), "qa"),
    "freeze": Case(f"{FULL} freeze=*.mlp.*", moves(FULL)),
    "optim": Case(f"{FULL} optim=muon", moves(FULL)),
    "muon_momentum": Case(f"{LATER} muon_momentum=0.5", moves(LATER)),
    "muon_learning_rate": Case(f"{FULL} optim=muon muon_learning_rate=0.1", moves(f"{FULL} optim=muon")),
    "muon_scale": Case(f"{FULL} optim=muon muon_scale=original", moves(f"{FULL} optim=muon")),
    "MTP alone": Case(f"{FULL} train_only=mtp num_nextn_predict_layers=1", tells("mtp_loss"), model="moe"),
    "lora_init": Case(f"{LORA} lora_init=pissa", rank(4)),
    "pissa_iterations": Case(f"{LORA} lora_init=pissa pissa_iterations=2", rank(4)),
    "neftune": Case(f"{FULL} neftune=True", moves(FULL)),
    "curriculum": Case(f"{FULL} curriculum=hard packing=False", moves(f"{FULL} packing=False")),
    "curriculum_epochs": Case(
        f"{FULL} packing=False curriculum=hard curriculum_epochs=0 max_steps=9",
        moves(f"{FULL} packing=False curriculum=hard max_steps=9"),
    ),
    "mix_schedule": Case(
        f"{FULL} train_dataset_path={{sft}},{{other}} train_dataset_prob=1,0 mix_schedule=2=0/1 packing=False",
        moves(f"{FULL} train_dataset_path={{sft}},{{other}} train_dataset_prob=1,0 packing=False"),
    ),
    "eval_generate": Case(
        f"{FULL} eval_dataset_path={{sft}} eval_generate=2 eval_generate_max_tokens=4 evaluation_strategy=steps "
        "eval_steps=1",
        tells("eval_exact_match", "eval_similarity"),
    ),
    "stage RM": Case("stage=RM", tells("rewards/margins"), "pairs"),
    "stage RM, LoRA": Case(f"stage=RM {LORA}", holds("score.weight"), "pairs"),
    "reward_margin": Case("stage=RM reward_margin=3", moves("stage=RM", "pairs"), "pairs"),
    "center_rewards_coefficient": Case("stage=RM center_rewards_coefficient=5", moves("stage=RM", "pairs"), "pairs"),
    "stage CLS": Case("stage=CLS", tells("accuracy"), "classes"),
    "class_labels": Case("stage=CLS class_labels=b,a", moves("stage=CLS", "classes"), "classes"),
    "desirable_weight": Case(f"{LORA} stage=KTO desirable_weight=3", moves(f"{LORA} stage=KTO", "judged"), "judged"),
    "undesirable_weight": Case(
        f"{LORA} stage=KTO undesirable_weight=0.5", moves(f"{LORA} stage=KTO", "judged"), "judged"
    ),
    "reference_logps": Case(f"{LORA} stage=KTO reference_logps=cached", tells("kl"), "judged"),
    "distill_alpha": Case(f"{TEACHER} distill_alpha=1", moves(TEACHER)),
    "distill_temperature": Case(f"{TEACHER} distill_temperature=3", moves(TEACHER)),
    "distill_kl": Case(f"{TEACHER} distill_kl=reverse", moves(TEACHER)),
}


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.full) for name in HEAVY)]
)  # fmt: skip
def test_a_key_that_is_typed_is_accepted_and_changes_the_run(name: str, ground: Ground) -> None:
    case = {**QUICK, **HEAVY}[name]
    output = name.replace(" ", "-").replace(",", "")
    assert ground.train(output, case.words, case.data, case.model) == 0
    assert all(math.isfinite(loss) for loss in ground.losses(output))
    assert case.shows(ground, output)


# What cannot go together -> words of the refusal.
REFUSED = {
    "use_dora=True compute_type=wint4/8": "use_dora does not work with",
    "use_dora=True lora_init=pissa": "use_dora does not work with lora_init",
    "use_dora=True save_format=paddle": "use_dora does not work with save_format",
    "use_dora=True tensor_parallel_degree=2": "use_dora does not work with tensor_parallel_degree",
    "lora_init=pissa lora_path={dense}": "lora_init: pissa makes new adapters",
    "optim=muon": "LoRA trains none",
    f"{FULL} optim=muon optim_states=8bit": "optim_states is 8bit",
    f"{FULL} optim=muon update_in_backward=True": "update_in_backward is True",
    f"{FULL} optim=muon compute_type=bf16 master_weights=none": "master_weights is none",
    f"{LORA} train_only=model.norm": "LoRA trains none of them",
    "stage=DPO neftune_noise_alpha=5": "noise on embeddings is for stage: SFT",
    "neftune_noise_alpha=-1": "neftune_noise_alpha",
    "stage=DPO teacher_model_name_or_path={dense}": "a teacher is of stage SFT",
    "stage=KTO teacher_model_name_or_path={dense}": "a teacher is of stage SFT",
    "teacher_model_name_or_path={dense} pipeline_parallel_degree=2": "distillation runs with data parallelism",
    "teacher_model_name_or_path={dense} distill_alpha=2": "distill_alpha",
    "stage=RM pipeline_parallel_degree=2": "stage RM runs with data parallelism",
    "stage=RM compute_type=fp8": "computes in bf16 or fp32",
    "stage=RM eval_generate=2 eval_dataset_path={pairs}": "generates no answers",
    "curriculum=length compat=erniekit": "both decide the order of rows",
    "mix_schedule=2=0/1": "2 shares, and 1 file",
    "train_dataset_path={sft},{other} mix_schedule=half": "half",
    "train_dataset_path={sft},{other} mix_schedule=2=0/0": "mix_schedule",
    "train_dataset_path={sft},{other} mix_schedule=2=0/1 mix_strategy=concat": "drawn at random",
    "eval_generate=2 eval_dataset_path={sft} pipeline_parallel_degree=2": "generation during training runs with data",
    "eval_generate=2 eval_dataset_path={sft} compute_type=wint8": "answers are generated from plain weights",
    "stage=KTO train_dataset_path={judged} token_loss=focal": "token_loss",
}
# Names what the model or the data does not have.
REFUSED_LATER = {
    f"{FULL} train_only=model.layer.1": "model.layer.1",
    f"{FULL} freeze=*": "freeze",
    f"{FULL} train_only=mtp": "mtp",
    "teacher_model_name_or_path=no/where": "no/where",
    "stage=RM": "hold no preference pairs",
    "stage=KTO": "label",
    "stage=CLS": "label",
    "stage=CLS train_dataset_path={classes} class_labels=a": "two classes or more",
    "stage=CLS train_dataset_path={classes} class_labels=a,a": "two classes or more",
    "curriculum=no_such_column": "no_such_column",
    "columns.prompts=q": "prompts",
    "columns.prompt=nothing": "nothing",
}


@pytest.mark.parametrize("words", [*REFUSED, *(pytest.param(words, marks=pytest.mark.full) for words in REFUSED_LATER)])
def test_what_cannot_be_is_refused_in_three_lines(
    words: str, ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ground.train("refused", words) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    lines = [line for line in said.splitlines() if line.startswith(("error:", "where:", "fix:"))]
    assert [line.partition(":")[0] for line in lines] == ["error", "where", "fix"]
    assert {**REFUSED, **REFUSED_LATER}[words] in said
    assert all(line.partition(":")[2].strip() for line in lines)
