"""`erniekit demo vision`: a tiny ERNIE-4.5-VL learns shapes, colours and counts from nothing and is asked about
pictures it has not seen, with their pixels and without. Offline, on the CPU.

Called by recipes/demo.py. What is trained is a recipe in the demo's folder, for `erniekit train`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

from erniekit.config import load
from erniekit.demo import shapes
from erniekit.demo.folder import seal, take_folder
from erniekit.files import own
from erniekit.log import emit, paint, typed
from erniekit.progress import WorkProgress
from erniekit.recipes.demo_proofs import describe, logged_train, loss_fell, require
from erniekit.track import jsonl

PICTURES, HELD_OUT, STEPS = 1024, 64, 250
WANTED = 0.95  # of the held-out questions
NEAR_CHANCE = 0.4  # of them without a picture
RECIPE = "recipe.yaml"
AnswerFunction = Callable[[bytes, str], str]  # a picture and which question -> the answer


def vision_demo(root: Path) -> int:
    root = take_folder(root)
    emit(f"{paint('erniekit demo vision', 'bold')}: a tiny ERNIE-4.5-VL learns from pictures and answers questions.")
    emit(f"Offline, on the CPU; files and logs go to {root}/. On the left, the time since the start.\n")
    began = time.perf_counter()

    def show(name: str, proof: str) -> None:
        emit(f"{time.perf_counter() - began:5.1f} s  {paint(f'{name:<8}', 'cyan')} {proof}")

    run_stages(root, show, PICTURES, STEPS, shapes.scenes(HELD_OUT, seed=2))
    seal(root)
    emit(paint("every proof holds", "green", "bold") + "\n")
    emit(f"again    {typed('train', root / 'data' / RECIPE)} output_dir=my-run")
    emit(f"look     {root / 'sft' / 'report.html'}")
    return 0


def run_stages(
    root: Path, show: Callable[[str, str], None], pictures: int, steps: int, held_out: Sequence[shapes.Scene]
) -> None:
    import torch

    from erniekit.demo.tiny_vision import make_tiny_vision

    recipe = write_data(root, pictures, steps)
    show("pictures", f"{pictures:,} of shapes, colours and counts; {len(shapes.QUESTIONS)} questions about each")
    make_tiny_vision(root / "model")
    show("model", describe(root / "model"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for so small a model one is fastest
    try:
        train(recipe, root, steps)
        show("train", loss_fell(root / "sft", steps, root / "data" / "train.jsonl"))
        with asking(recipe, root / "sft") as answer:
            show("seen", right(root, answer, held_out, at_least=WANTED))
            show("blank", blank(root, answer, held_out))
    finally:
        torch.set_num_threads(threads)


def write_data(root: Path, pictures: int, steps: int) -> Path:
    """Pictures and rows, and the recipe that trains on them."""
    data = root / "data"
    for name in ("train.tar", "train.jsonl", RECIPE):
        own(data / name)
    table = shapes.write_pictures(data, "train", shapes.scenes(pictures, seed=1))
    keys = dict(
        stage="VL-SFT", model_name_or_path=str(root / "model"), train_dataset_path=str(table), fine_tuning="Full",
        learning_rate=2e-3, lr_scheduler_type="cosine", warmup_steps=20, adam_beta2=0.95, max_steps=steps,
        save_steps=steps, max_seq_len=2048, compute_type="fp32", device="cpu", report_to="none",
        cache_dir=str(root / "cache"), dataset_num_proc=1, media_num_proc=1, logging_steps=1,
    )  # fmt: skip
    (data / RECIPE).write_text(yaml.safe_dump(keys, sort_keys=False), encoding="utf-8")
    return data / RECIPE


def train(recipe: Path, root: Path, steps: int) -> None:
    with progress(root / "sft", steps):
        logged_train([str(recipe), f"output_dir={root / 'sft'}"], root / "logs" / "train.log")


@contextmanager
def progress(output: Path, steps: int) -> Iterator[None]:
    """Progress of the run, whose own output goes to a file."""
    over, bar = threading.Event(), WorkProgress("training", steps, "steps")  # made before sys.stderr is that file

    def follow() -> None:
        with bar:
            while not over.wait(0.5):
                file = output / jsonl.FILE
                bar.add((file.read_bytes().count(b"\n") if file.exists() else 0) - bar.done)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def asking(recipe: Path, model: Path) -> Iterator[AnswerFunction]:
    """The trained model as a function of a picture and a question."""
    from erniekit.api_load import load as load_model
    from erniekit.data.media.worker import MediaPool
    from erniekit.data.vision.prompt_reader import PromptReader
    from erniekit.demo.tiny_vision import answer
    from erniekit.recipes.vision_data import vision_rules

    found, tokenizer = load_model(model)
    assert tokenizer is not None
    rules = vision_rules(load([str(recipe)]), model)
    pool = MediaPool(1, rules.limits)
    reader = PromptReader(tokenizer, rules, pool)
    try:
        yield lambda png, topic: answer(found, tokenizer, reader, shapes.question(shapes.data_url(png), topic))
    finally:
        pool.close()


# ---- what is proven: each gives the text of its line or raises


def right(root: Path, answer: AnswerFunction, scenes: Sequence[shapes.Scene], at_least: float) -> str:
    found = {topic: share(scenes, topic, [answer(s.png(), topic) for s in scenes]) for topic in shapes.QUESTIONS}
    mean = sum(found.values()) / len(found)
    by_question = ", ".join(f"{topic} {part:.0%}" for topic, part in found.items())
    require(mean >= at_least, f"{mean:.0%} of the answers about new pictures are right ({by_question})", root / "sft")
    return f"{mean:.0%} of {len(found) * len(scenes)} answers about new pictures are right: {by_question}"


def blank(root: Path, answer: AnswerFunction, scenes: Sequence[shapes.Scene]) -> str:
    """The picture must matter: the answer does not follow from the question."""
    png = shapes.blank_png()
    found = [share(scenes, topic, [answer(png, topic)] * len(scenes)) for topic in shapes.QUESTIONS]
    mean = sum(found) / len(found)
    require(mean <= NEAR_CHANCE, f"{mean:.0%} are right with nothing to see", root / "sft")
    return f"with nothing to see {mean:.0%} are; chance is {shapes.CHANCE:.0%}"


def share(scenes: Sequence[shapes.Scene], topic: str, answers: Sequence[str]) -> float:
    """Of the answers that are right."""
    return sum(answered == scene.answer(topic) for answered, scene in zip(answers, scenes)) / len(scenes)
