"""`erniekit demo`: the whole single-device path on a tiny model, offline, each stage with its proof.

Called by cli/commands.py. Reads top to bottom; a stage is what a user can type, and its log is in the demo's folder.
"""

from __future__ import annotations

import filecmp
import json
import shutil
import time
from pathlib import Path

from erniekit.demo.folder import seal, take_folder
from erniekit.demo.killed_run import KilledRun
from erniekit.demo.transformers_process import TransformersProcess
from erniekit.devices import DEVICES, INSTALLED, pick
from erniekit.errors import ConfigError
from erniekit.files import own
from erniekit.log import emit, paint, typed
from erniekit.recipes.demo_proofs import describe, logged, logged_train, loss_fell, require

ROWS = 40  # of sft-train.jsonl: what a model this small learns by heart in seconds
STEPS, SAVE_STEPS, KILL_AFTER = 40, 10, 14
LORA_STEPS = 20
QUESTION = "Who are you?"


def demo_command(args: list[str]) -> int:
    if args[:1] == ["vision"]:
        from erniekit.recipes.demo_vision import vision_demo

        return vision_demo(folder_from(args[1:], "erniekit-demo-vision"))
    args, device = device_from(args)
    root = take_folder(folder_from(args))
    emit(f"{paint('erniekit demo', 'bold')}: a tiny ERNIE is trained, killed, resumed, adapted, merged and queried.")
    on = "the CPU" if device == "cpu" else pick(device).name  # which lists what that device lacks
    emit(f"Offline, on {on}; files and logs go to {root}/. On the left, the time since the start.\n")
    began = time.perf_counter()
    other = TransformersProcess(own(root / "logs" / "transformers.log"))
    try:
        run_stages(root, other, began, device)
    finally:
        other.close()
    seal(root)
    emit(paint("every proof holds", "green", "bold") + "\n")
    emit("\n".join(next_lines(root)))
    return 0


def device_from(args: list[str]) -> tuple[list[str], str]:
    """The other arguments, and the one after --device (or device=NAME); the CPU when none is given."""
    arguments = [part for name in args for part in name.split("=", 1)]
    at = next((k for k, name in enumerate(arguments) if name.removeprefix("--") == "device"), None)
    if at is None or at + 1 == len(arguments):
        return args, "cpu"
    name = arguments[at + 1]
    if name not in DEVICES and name not in INSTALLED:
        raise ConfigError(f"no device is called {name!r}", where="--device", fix=f"one of {', '.join(DEVICES)}")
    return arguments[:at] + arguments[at + 2 :], name


def folder_from(args: list[str], default: str = "erniekit-demo") -> Path:
    """--dir DIR, or output_dir in any of the spellings of a run's key."""
    arguments = [part for name in args for part in name.split("=", 1)]
    if not arguments:
        return Path(default)
    if len(arguments) != 2 or arguments[0].removeprefix("--") not in ("dir", "output_dir"):
        raise ConfigError(
            f"demo does not take {' '.join(args)!r}",
            where="command line",
            fix="erniekit demo [vision] [--dir DIR] [--device NAME]",
        )
    return Path(arguments[1])


def run_stages(root: Path, other: TransformersProcess, began: float, device: str = "cpu") -> None:
    import torch

    from erniekit.demo.tiny import make_tiny_model

    def show(name: str, proof: str) -> None:
        emit(f"{time.perf_counter() - began:5.1f} s  {paint(f'{name:<8}', 'cyan')} {proof}")

    # The same run twice: here, and at the same time in a process that will be killed.
    arguments = sft_arguments(root, root / "killed", device)
    killed = KilledRun(["train", *arguments], root / "killed", own(root / "logs" / "killed.log"))
    threads = torch.get_num_threads()
    # Runs are bit-identical only with equal numbers of threads; for so small a model one is fastest, too.
    torch.set_num_threads(1)
    try:
        write_data(root)
        make_tiny_model(root / "model")
        show("model", describe(root / "model"))

        killing = killed.start_and_kill(KILL_AFTER)
        logged_train(sft_arguments(root, root / "sft", device), root / "logs" / "sft.log")
        show("SFT", loss_fell(root / "sft", STEPS, root / "data" / "sft.jsonl"))
        killing.join()
        show("kill -9", was_killed(killed))

        again = killed.start()
        logged_train(lora_arguments(root, device), root / "logs" / "lora.log")
        again.wait()
        show("resume", same_bits(killed, root / "sft"))
        learnt = loss_fell(root / "lora", LORA_STEPS, root / "data" / "persona.jsonl")
        show("LoRA", f"{learnt}; {share_trained(root / 'lora')}")

        export(root / "lora", root / "logs" / "export.log")
        show("merge", merged(root / "lora" / "export"))
        reloaded, before, after = in_transformers(root, other)
        show("reload", reloaded)
        show("ask", f'"{QUESTION}" before LoRA: "{before}"')
        show("answer", f'"{QUESTION}" merged:      "{after}"')
    finally:
        killed.close()
        torch.set_num_threads(threads)


# ---- what is run: the arguments a user would type


def sft_arguments(root: Path, output: Path, device: str) -> list[str]:
    return [
        f"model_name_or_path={root / 'model'}",
        f"train_dataset_path={root / 'data' / 'sft.jsonl'}",
        f"output_dir={output}",
        "fine_tuning=Full",
        "learning_rate=6e-3",
        "warmup_steps=5",
        f"max_steps={STEPS}",
        f"save_steps={SAVE_STEPS}",
        *shared_arguments(root, device),
    ]


def lora_arguments(root: Path, device: str) -> list[str]:
    return [
        f"model_name_or_path={root / 'sft'}",
        f"train_dataset_path={root / 'data' / 'persona.jsonl'}",
        f"output_dir={root / 'lora'}",
        "fine_tuning=LoRA",
        "lora_rank=8",
        "learning_rate=2e-2",
        f"max_steps={LORA_STEPS}",
        *shared_arguments(root, device),
    ]


def shared_arguments(root: Path, device: str) -> list[str]:
    return [
        "lr_scheduler_type=cosine",
        "adam_beta2=0.95",
        "max_seq_len=512",
        "compute_type=fp32",
        f"device={device}",
        *([] if device == "cpu" else ["deterministic=True"]),  # two runs are compared bit for bit
        "report_to=none",
        "dataset_num_proc=1",
        f"cache_dir={root / 'cache'}",
    ]


def export(output: Path, log: Path) -> None:
    from erniekit.config import load
    from erniekit.export.run import run_export

    arguments = [str(output)]
    with logged("export", arguments, log):
        run_export(load(arguments, "export"))


def write_data(root: Path) -> None:
    from erniekit.demo.tiny import PERSONA, TRAIN

    rows = TRAIN.read_text(encoding="utf-8").splitlines(keepends=True)
    own(root / "data" / "sft.jsonl").write_text("".join(rows[:ROWS]), encoding="utf-8")
    shutil.copyfile(PERSONA, own(root / "data" / "persona.jsonl"))


# ---- what is proven: each gives the text of its line or raises


def was_killed(killed: KilledRun) -> str:
    newest = killed.checkpoint()
    require(killed.killed_at > 0, "the second process was over before it could be killed", killed.log)
    between = 0 < newest <= killed.killed_at < STEPS
    require(between, f"killed at step {killed.killed_at} with a checkpoint of step {newest}", killed.log)
    return (
        f"a second process on the same run died at step {killed.killed_at}; its newest checkpoint is of step {newest}"
    )


def same_bits(killed: KilledRun, undisturbed: Path) -> str:
    """The files of the last checkpoints, byte for byte: weights and optimiser states."""
    from safetensors import safe_open

    one, other = (folder / f"checkpoint-{STEPS}" for folder in (undisturbed, killed.output))
    require(other.is_dir(), f"the second run of the same command did not reach step {STEPS}", killed.log)
    files = sorted(path.name for path in one.glob("*.safetensors") if path.name != "probe.safetensors")
    tensors = 0
    for name in files:
        same = filecmp.cmp(one / name, other / name, shallow=False)
        require(same, f"{name} differs from the undisturbed run's", other)
        with safe_open(str(one / name), framework="pt") as file:
            tensors += len(file.keys())
    require(tensors > 0, "no weights to compare", one)
    return f"same command again: all {tensors} weight and optimiser tensors bit-identical to the undisturbed run"


def share_trained(output: Path) -> str:
    from erniekit.api_load import load

    model, _ = load(output)
    adapter = sum(p.numel() for name, p in model.named_parameters() if ".lora." in name)
    total = sum(p.numel() for p in model.parameters())
    require(adapter > 0, "the adapter is empty", output)
    return f"{adapter:,} weights and {total - adapter:,} frozen ones"


def merged(folder: Path) -> str:
    from erniekit.checkpoint import manifest

    proof = manifest.load(folder).info["proof"]
    return f"adapter folded into the weights: logits within {proof['merged']:.0e} of base + adapter"


def in_transformers(root: Path, other: TransformersProcess) -> tuple[str, str, str]:
    """The export in transformers against base + adapter here; and the answer before and after LoRA."""
    import torch
    from safetensors.torch import load_file

    from erniekit.api_load import find_model
    from erniekit.data.template import prompt_ids
    from erniekit.export.verify import FP32_RELATIVE

    found = find_model(root / "lora")
    model, tokenizer = found.build(), found.tokenizer()
    prompt = prompt_ids([{"role": "user", "content": QUESTION}], tokenizer)
    ids = prompt + tokenizer.encode_text(wanted(root))
    ends, file = [tokenizer.eos_id, tokenizer.end_id], own(root / "logs" / "logits.safetensors")
    before = other.query(root / "sft", ids, prompt, ends, file)
    after = other.query(root / "lora" / "export", ids, prompt, ends, file)
    other_logits = load_file(file)["logits"]
    with torch.no_grad():
        logits = model(torch.tensor([ids]))[0]
    difference = float((logits - other_logits).abs().max())
    allowed = FP32_RELATIVE * max(10.0, float(logits.abs().max()))
    require(
        difference <= allowed, f"logits differ by {difference:.1e}, allowed {allowed:.1e}", root / "lora" / "export"
    )
    answer, old = (tokenizer.decode(result["ids"]) for result in (after, before))
    require(answer == wanted(root), f"the answer to {QUESTION!r} is {answer!r}", root / "lora" / "export")
    require(answer != old, "LoRA changed nothing", root / "lora")
    reloaded = f"{after['class']} of transformers {after['version']}: logits within {difference:.0e} of ours"
    return reloaded, " ".join(old.split())[:60], answer


def wanted(root: Path) -> str:
    """What the persona data answers to the question."""
    lines = (root / "data" / "persona.jsonl").read_text(encoding="utf-8").splitlines()
    return next(row["tgt"][0] for row in map(json.loads, lines) if row["src"][0] == QUESTION)


def next_lines(root: Path) -> list[str]:
    arguments = ("--data", "my.jsonl", "--output_dir", "my-run", "--compute_type", "fp32")
    own = typed("train", "--model_name_or_path", root / "sft", *arguments)
    return [
        f"next     {own}",
        f"           my.jsonl: one JSON object a line, as in {root / 'data' / 'sft.jsonl'}",
        f"         {typed('chat', root / 'lora' / 'export')}",
        f"look     {root / 'sft' / 'report.html'}",
    ]
