"""Files that would run a program or eat the memory of whoever opens them: row P1.

Every poison is first shown to work on a careless reader; then the commands a user would type are given it. The canary
is never created, the error names the file, and it comes within a second.
"""

from __future__ import annotations

import json
import pickle
import runpy
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import jinja2
import pytest
import torch
import yaml
from safetensors.torch import load_file

from erniekit.checkpoint import manifest
from erniekit.checkpoint.manifest import MANIFEST, Manifest
from erniekit.cli.main import main
from faults.places import Payload, Place, words_of
from faults.results import fault
from support.clock import within

SECONDS = 1.0  # of this process's own time for an error: other work on the machine does not count, nor first imports


# A case poisons its place and returns (what a careless reader would do, what the error must say).
Case = Callable[[Place], tuple[Callable[[], object], str]]


def weights_that_are_a_pickle(place: Place) -> tuple[Callable[[], object], str]:
    (place.model / "model.safetensors").unlink()
    path = place.model / "pytorch_model.bin"
    path.write_bytes(place.pickled())
    return lambda: pickle.loads(path.read_bytes()), "pytorch_model.bin"


def weights_in_an_archive_of_torch(place: Place) -> tuple[Callable[[], object], str]:
    (place.model / "model.safetensors").unlink()
    path = place.model / "model.pt"
    torch.save({"w": Payload(place.canary)}, path)
    return lambda: torch.load(path, weights_only=False), "model.pt"


def a_pickle_that_calls_itself_safetensors(place: Place) -> tuple[Callable[[], object], str]:
    path = place.model / "model.safetensors"
    path.write_bytes(place.pickled())
    return lambda: pickle.loads(path.read_bytes()), "model.safetensors"


def an_adapter_that_is_a_pickle(place: Place) -> tuple[Callable[[], object], str]:
    path = place.root / "adapter" / "adapter_model.bin"
    path.parent.mkdir()
    path.write_bytes(place.pickled())
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    told = {**config, "base_model_name_or_path": str(place.model)}
    (path.parent / "adapter_config.json").write_text(json.dumps(told))
    return lambda: pickle.loads(path.read_bytes()), "adapter_model.bin"


def _forge(place: Place, name: str, content: bytes) -> Path:
    """Into the checkpoint, with a manifest that vouches for it."""
    folder = place.run / "checkpoint-2"
    (folder / name).write_bytes(content)
    sealed = manifest.load(folder)
    sealed = Manifest({**sealed.files, name: manifest.measure(folder / name)}, sealed.info)
    (folder / MANIFEST).write_bytes(sealed.to_bytes())
    return folder / name


def optimiser_state_that_is_a_pickle(place: Place) -> tuple[Callable[[], object], str]:
    path = _forge(place, "optimizer.safetensors", place.pickled())
    return lambda: pickle.loads(path.read_bytes()), "optimizer.safetensors"


def loader_state_that_is_a_pickle(place: Place) -> tuple[Callable[[], object], str]:
    path = _forge(place, "state.json", place.pickled())
    return lambda: pickle.loads(path.read_bytes()), "state.json"


def a_recipe_that_makes_an_object(place: Place) -> tuple[Callable[[], object], str]:
    call = f'!!python/object/apply:os.system ["touch {place.canary}"]'
    path = place.recipe(f"model_name_or_path: {place.model}\nseed: {call}\n")
    return lambda: yaml.load(path.read_text(), yaml.UnsafeLoader), "recipe.yaml:2"


def a_recipe_that_holds_a_billion_words(place: Place) -> tuple[Callable[[], object], str]:
    levels = [f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 10)}]" for k in range(1, 10)]
    path = place.recipe("a0: &a0 [x]\n" + "\n".join(levels) + "\n")

    def count() -> None:
        def words(value: object) -> int:
            return 1 if isinstance(value, str) else len(value) * words(value[0])  # type: ignore[arg-type,index]

        if words(yaml.safe_load(path.read_text())["a9"]) == 10**9:
            place.canary.touch()

    return count, "recipe.yaml"


def a_model_with_code_of_its_own(place: Place) -> tuple[Callable[[], object], str]:
    return _with_code(place, model_type="evil"), "evil"


def a_known_model_with_code_of_its_own(place: Place) -> tuple[Callable[[], object], str]:
    return _with_code(place), "auto_map"


def _with_code(place: Place, **changes: str) -> Callable[[], object]:
    code = place.model / "modeling_evil.py"
    code.write_text(f"import pathlib\npathlib.Path({str(place.canary)!r}).touch()\nclass Evil: pass\n")
    mapped = {"AutoConfig": "modeling_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    for name in ("config.json", "tokenizer_config.json"):
        file = place.model / name
        told = json.loads(file.read_text())
        file.write_text(json.dumps({**told, **(changes if name == "config.json" else {}), "auto_map": mapped}))
    return lambda: runpy.run_path(str(code))


def a_chat_template_that_calls_the_system(place: Place) -> tuple[Callable[[], object], str]:
    text = "{{ messages.__init__.__globals__.__builtins__.__import__('os').system('touch " + str(place.canary) + "') }}"
    reaches = "{{ cycler.__init__.__globals__.os.system('touch " + str(place.canary) + "') }}"
    file = place.model / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": reaches + text}))
    return lambda: jinja2.Environment().from_string(reaches).render(messages=[]), "template"


def settings_nested_without_end(place: Place) -> tuple[Callable[[], object], str]:
    path = place.model / "config.json"
    path.write_text('{"a": ' * 200_000)

    def read() -> None:
        try:
            json.loads(path.read_text())
        except RecursionError:
            place.canary.touch()

    return read, "config.json"


CASES: dict[Case, tuple[str, ...]] = {  # the commands that meet it; the first one on every commit
    weights_that_are_a_pickle: ("chat", "train", "eval", "doctor", "server"),
    weights_in_an_archive_of_torch: ("train", "chat", "eval", "server"),
    a_pickle_that_calls_itself_safetensors: ("chat", "train", "eval", "server"),
    an_adapter_that_is_a_pickle: ("adapter", "adapter export"),
    optimiser_state_that_is_a_pickle: ("resume",),
    loader_state_that_is_a_pickle: ("resume",),
    a_recipe_that_makes_an_object: ("recipe", "recipe train", "recipe chat", "recipe server", "recipe export"),
    a_recipe_that_holds_a_billion_words: ("recipe", "recipe train", "recipe chat", "recipe server", "recipe export"),
    a_model_with_code_of_its_own: ("chat", "train", "eval", "server"),
    a_known_model_with_code_of_its_own: ("chat",),
    a_chat_template_that_calls_the_system: ("chat", "train"),
    settings_nested_without_end: ("chat", "train", "eval", "server"),
}
GOES_ON = {a_known_model_with_code_of_its_own}  # our own code reads it; a warning says so


def poison(case: Case, command: str, sound: Path, root: Path, capsys: pytest.CaptureFixture) -> float:
    """Seconds to the error."""
    place = Place(root)
    shutil.copytree(sound, root, ignore=shutil.ignore_patterns("cache"))
    careless, said = case(place)
    assert not place.canary.exists(), "the fault struck while it was made"
    careless()
    assert place.canary.exists(), "the poison is none"
    place.canary.unlink()
    capsys.readouterr()
    began = time.process_time()
    code = main(words_of(command, place))
    took = time.process_time() - began
    shown = capsys.readouterr()
    story = f"{case.__name__}, {command}: {shown.err}"
    assert not place.canary.exists(), story
    assert code == (0 if case in GOES_ON else 2), story
    assert said in shown.err, story
    assert ("warning: " if case in GOES_ON else "error: ") in shown.err, story
    assert "Traceback" not in shown.err, story
    for _ in range(3):
        if within(took, SECONDS):
            break
        # The first command of its kind in this process imports what it needs, and other tests may have left threads.
        began = time.process_time()
        assert main(words_of(command, place)) == code, story
        took = time.process_time() - began
        capsys.readouterr()
    assert within(took, SECONDS), f"{took:.1f} s: {story}"
    shutil.rmtree(root)
    return took


def test_poisoned_files_are_refused_by_name_and_never_run(sound, tmp_path, capsys):
    with fault("P1", "pickles, tags, remote code, bombs and templates, each to one command") as row:
        longest = 0.0
        for case, commands in CASES.items():
            row.count += 1
            longest = max(longest, poison(case, commands[0], sound, tmp_path / str(row.count), capsys))
            row.hits += 1
        assert row.count >= 10
        row.note = f"nothing ran; refused by name within {longest:.1f} s"


@pytest.mark.full
def test_poisoned_files_are_refused_by_every_command_that_meets_them(sound, tmp_path, capsys):
    with fault("P1", "the same, each to every command that would open it") as row:
        longest = 0.0
        for case, commands in CASES.items():
            for command in commands:
                row.count += 1
                longest = max(longest, poison(case, command, sound, tmp_path / str(row.count), capsys))
                row.hits += 1
        assert row.count >= 30
        row.note = f"nothing ran; refused by name within {longest:.1f} s"


def test_files_of_other_toolkits_beside_sound_weights_are_not_opened(sound, tmp_path):
    """training_args.bin, optimizer.pt and the like lie in many folders: they are passed over, not loaded."""
    place = Place(tmp_path / "place")
    shutil.copytree(sound, place.root, ignore=shutil.ignore_patterns("cache"))
    names = (
        "training_args.bin",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "pytorch_model.bin",
        "scaler.pdparams",
    )
    for name in names:
        (place.model / name).write_bytes(place.pickled())
    assert main(words_of("chat", place)) == 0
    assert not place.canary.exists()


def test_an_index_that_names_files_outside_its_folder_is_refused(sound, tmp_path, capsys):
    place = Place(tmp_path / "place")
    shutil.copytree(sound, place.root, ignore=shutil.ignore_patterns("cache"))
    secret = shutil.move(place.model / "model.safetensors", tmp_path / "secret.safetensors")
    names = load_file(secret)
    for word in ("../../secret.safetensors", str(secret)):
        index = {"weight_map": dict.fromkeys(names, word)}
        (place.model / "model.safetensors.index.json").write_text(json.dumps(index))
        assert main(words_of("chat", place)) == 2
        assert f"a file outside the folder: {word}" in capsys.readouterr().err
