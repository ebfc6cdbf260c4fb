"""What the demos share: a run whose output goes to a file, and proofs of it. Called by demo.py and demo_vision.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from erniekit.demo import ProofFailed
from erniekit.files import own
from erniekit.log import typed


def logged_train(arguments: Sequence[str], log: Path) -> None:
    from erniekit.config import load
    from erniekit.recipes.run import run_train

    with logged("train", arguments, log):
        run_train(load(list(arguments), "train"), ["erniekit", "train", *arguments])


@contextmanager
def logged(command: str, arguments: Sequence[str], log: Path) -> Iterator[None]:
    with own(log).open("w", encoding="utf-8") as out, redirect_stdout(out), redirect_stderr(out):
        print(f"$ {typed(command, *arguments)}", flush=True)
        yield


def require(holds: bool, what: str, where: Path) -> None:
    if not holds:
        raise ProofFailed(
            f"the demo's proof failed: {what}", where=str(where), fix="report it with this folder's logs/"
        )


def describe(folder: Path) -> str:
    from erniekit.checkpoint.model_folder import ModelFolder
    from erniekit.data.tokenizer import load_tokenizer
    from erniekit.models import costs

    config = ModelFolder(folder).config
    tokens = load_tokenizer(folder).vocab_size
    return f"{config.num_layers} layers, {costs.parameters(config):,} weights; a tokenizer of {tokens:,} pieces"


def losses(output: Path) -> list[float]:
    from erniekit.track import jsonl

    return [record["loss"] for record in jsonl.read(output / jsonl.FILE) if "loss" in record]


def loss_fell(output: Path, steps: int, data: Path) -> str:
    curve, rows = losses(output), len(data.read_text(encoding="utf-8").splitlines())
    last = sum(curve[-5:]) / 5
    require(len(curve) == steps, f"{len(curve)} of {steps} steps were logged", output)
    require(last < curve[0] / 5, f"the loss went from {curve[0]:.2f} to {last:.2f} only", output)
    return f"{steps} steps on {rows} conversations: loss {curve[0]:.2f} -> {last:.2f}"
