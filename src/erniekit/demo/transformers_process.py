"""The exported model in plain transformers, in a process of its own: `python -m erniekit.demo.transformers_process`.

Started first by recipes/demo.py, so that the slow import is over when the export is there. One JSON line a question.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from erniekit.demo import ProofFailed


class TransformersProcess:
    """The parent's side: `query(folder, ...)` waits for the answer of the process below."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._stderr = log.open("w", encoding="utf-8")
        offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "erniekit.demo.transformers_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={**os.environ, **offline},
        )

    def query(self, folder: Path, ids: list[int], prompt: list[int], ends: list[int], logits: Path) -> dict[str, Any]:
        """The logits of `ids` go to the file `logits`; back come the greedy answer to `prompt` and the version."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        request = {"folder": str(folder), "ids": ids, "prompt": prompt, "ends": ends, "logits": str(logits)}
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: the empty line below shows it
        line = stdout.readline()
        if not line:
            raise ProofFailed(f"transformers could not read {folder}", where=str(self._log), fix="its log says why")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._stderr.close()


def answer(request: dict[str, Any]) -> dict[str, Any]:
    import torch
    import transformers
    from safetensors.torch import save_file

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(request["folder"])
    with torch.no_grad():
        save_file({"logits": model(torch.tensor([request["ids"]])).logits[0]}, request["logits"])
        prompt = torch.tensor([request["prompt"]])
        generated = model.generate(prompt, do_sample=False, max_new_tokens=48, eos_token_id=request["ends"])
    ids = generated[0, prompt.shape[1] :].tolist()
    return {"ids": ids, "version": transformers.__version__, "class": type(model).__name__}


def main() -> None:
    from transformers import AutoModelForCausalLM  # noqa: F401  (the import is what takes its time)
    from transformers.models.ernie4_5 import modeling_ernie4_5  # noqa: F401

    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
