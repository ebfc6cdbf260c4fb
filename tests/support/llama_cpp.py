"""llama.cpp as the oracle of GGUF files: built once from its Python package's source, asked in a process of its own.

`make test-full` builds it into build/llama-cpp (cmake and a C++ compiler; six minutes on two cores). Run as a script by
that environment's Python, this file is the other end: a request in JSON on stdin, the answer in a file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

VERSION = "0.3.36"
FOLDER = Path(__file__).resolve().parents[2] / "build" / "llama-cpp"
# Code for any processor of this kind, and the library alone.
OPTIONS = (
    "-DGGML_NATIVE=OFF -DLLAVA_BUILD=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_TESTS=OFF "
    "-DLLAMA_BUILD_SERVER=OFF"
)


def environment() -> Path:
    """The Python that has llama_cpp; made when it is not there, or of another version."""
    python, built = FOLDER / "bin" / "python", FOLDER / f"built-{VERSION}"
    if not built.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", FOLDER], check=True)
        package = ["--no-binary", "llama-cpp-python", f"llama-cpp-python=={VERSION}"]
        env = {**os.environ, "CMAKE_ARGS": OPTIONS, "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1)}
        subprocess.run([python, "-m", "pip", "install", "--quiet", *package], check=True, env=env)
        built.touch()
    return python


def ask(file: Path, **request: Any) -> dict[str, Any]:
    """greedy=[ids], count=n: the n likeliest next tokens of each; logits=[ids]: all of them, as arrays; tokens=[texts]:
    ids; chats=[messages]: the template's text and its ids; ends=True: the ids that end an answer."""
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.npz"
        given = json.dumps({"file": str(file), "answer": str(answer), **request})
        # -I: this folder is not on its path, where `llama_cpp` would be this very file.
        subprocess.run([environment(), "-I", __file__], input=given, text=True, check=True)
        with np.load(answer) as found:
            out = json.loads(str(found["json"]))
            return out | {"logits": [found[f"logits{n}"] for n in range(len(request.get("logits", ())))]}


def _serve() -> None:
    import numpy as np
    from llama_cpp import Llama, llama_vocab_is_eog
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    asked = json.load(sys.stdin)
    # fp32 keys and values: by default they are rounded to half precision. One thread: the tests use the others.
    model = Llama(
        asked["file"], n_ctx=512, n_batch=512, n_threads=1, n_threads_batch=1, type_k=0, type_v=0, flash_attn=False,
        logits_all=True, verbose=False,
    )  # fmt: skip

    def scores(ids: list[int], so_far: int = 0) -> Any:
        if not so_far:
            model.reset()
        model.eval(ids)
        return model.scores[so_far : so_far + len(ids)]

    def likeliest(ids: list[int]) -> list[int]:
        out, step = [], ids
        while len(out) < asked["count"]:
            out.append(int(scores(step, len(ids) + len(out) - 1 if out else 0)[-1].argmax()))
            step = out[-1:]
        return out

    def tokens(text: str) -> list[int]:
        return list(model.tokenize(text.encode(), add_bos=False, special=True))

    out: dict[str, Any] = {
        "greedy": [likeliest(ids) for ids in asked.get("greedy", ())],
        "tokens": [tokens(text) for text in asked.get("tokens", ())],
        "ends": [id for id in range(model.n_vocab()) if llama_vocab_is_eog(model._model.vocab, id)]
        if "ends" in asked
        else [],
    }
    if "chats" in asked:
        words = {name: model.detokenize([id], special=True).decode() for name, id in
                 (("bos_token", model.token_bos()), ("eos_token", model.token_eos()))}  # fmt: skip
        render = Jinja2ChatFormatter(model.metadata["tokenizer.chat_template"], **words)
        texts = [render(messages=messages).prompt for messages in asked["chats"]]
        out |= {"texts": texts, "chats": [tokens(text) for text in texts]}
    arrays = {f"logits{n}": scores(ids).copy() for n, ids in enumerate(asked.get("logits", ()))}
    np.savez(asked["answer"], json=json.dumps(out), **arrays)


if __name__ == "__main__":
    _serve()
