"""Speed and memory of runs from the shipped recipes on an NVIDIA card, with random weights of the real shapes.

    python benchmarks/recipes.py [0.3b] [21b] [13b]

0.3B: SFT in fp32, in bf16, with recompute, compiled, 32K and LoRA. 21B-A3B: LoRA at 8K, SFT and DPO. 13B: eight layers
of the Llama shape, pre-training. The line is of a run's last step.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from device_cases.recipes import LARGE_RECIPES, ONE_RANK, Bench, model_folder, rows, train

from erniekit.bench.workloads import ERNIE_21B, LLAMA_13B


class Figures:
    """Prints what a run logged, and how long it took since the run before."""

    def __init__(self) -> None:
        self.began = time.perf_counter()

    def show(self, name: str, steps: list[dict]) -> None:
        last, now = steps[-1], time.perf_counter()
        print(
            f"== {name}: {[round(s['loss'], 4) for s in steps]} {last['tokens_per_second']:.0f} tok/s "
            f"mfu {last.get('mfu')} {last.get('max_memory_allocated', 0):.1f} GiB "
            f"{last['interval_runtime']:.3f} s/step, all in {now - self.began:.0f} s",
            flush=True,
        )
        self.began = now


def small(folder: Path, figures: Figures) -> None:
    bench = Bench(folder)
    figures.show("card-fp32", bench.run("card-fp32", compute_type="fp32"))
    figures.show("card-bf16", bench.run("card-bf16"))
    figures.show("recompute", bench.run("recompute", max_steps=6, recompute=True))
    figures.show("compile", bench.run("compile", max_steps=6, compile=True))
    figures.show("32k", bench.run("32k", "run_sft_32k.yaml", max_steps=4))
    figures.show("lora", bench.run("lora", "run_sft_lora_8k.yaml", max_steps=10))


def large(folder: Path, figures: Figures) -> None:
    model, (chats, pairs, _) = model_folder(folder, "21b", ERNIE_21B), rows(folder)
    recipe, keys = LARGE_RECIPES / "sft/run_sft_lora_8k.yaml", dict(model_name_or_path=model, train_dataset_path=chats)
    figures.show("21b-lora", train("21b-lora", folder, recipe, **keys, recompute=False))
    recipe, keys = LARGE_RECIPES / "dpo/run_dpo_lora_8k.yaml", {**keys, "train_dataset_path": pairs}
    steps = train("21b-dpo-lora", folder, recipe, **keys, learning_rate=1e-4, recompute=False, **ONE_RANK)
    figures.show("21b-dpo-lora", steps)


def llama(folder: Path, figures: Figures) -> None:
    model, (_, _, texts) = model_folder(folder, "llama", LLAMA_13B), rows(folder)
    words = dict(stage="PT", fine_tuning="Full", max_seq_len=4096, batch_size=4, learning_rate=1e-4, recompute=False)
    keys = dict(model_name_or_path=model, train_dataset_path=texts, compute_type="bf16", split="100")
    figures.show("llama-13b-8-layers", train("llama-13b-8-layers", folder, **words, **keys))


SHAPES = {"0.3b": small, "21b": large, "13b": llama}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", choices=[*SHAPES], help="all when not given")
    for shape in parser.parse_args().shapes or SHAPES:
        with tempfile.TemporaryDirectory() as made:
            SHAPES[shape](Path(made), Figures())


if __name__ == "__main__":
    main()
