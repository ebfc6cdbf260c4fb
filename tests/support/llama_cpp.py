"""llama.cpp as the oracle of GGUF files: built once from its Python package's source, asked in a process of its own.

`make test-full` builds it into build/llama-cpp (cmake and a C++ compiler; four minutes of one core). Run as a script
by that environment's Python, this file is the other end: a request in JSON on stdin, the answer in a file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

VERSION = "0.3.36"
FOLDER = Path(__file__).resolve().parents[2] / "build" / "llama-cpp"
OBJECTS = FOLDER / "objects"
LIBRARIES = OBJECTS / "bin"
# Code for any processor of this kind, and as little of it as answers: the package's own build compiles the helpers of
# llama.cpp's programs too (58 of 127 objects), and the products here have hardly more than a thousand rows.
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "CMAKE_C_FLAGS_RELEASE": "-O1 -DNDEBUG",
    "CMAKE_CXX_FLAGS_RELEASE": "-O1 -DNDEBUG",
    "GGML_NATIVE": "OFF",
    "GGML_LLAMAFILE": "OFF",
    "GGML_CPU_REPACK": "OFF",
    "GGML_OPENMP": "OFF",
    "LLAMA_ALL_WARNINGS": "OFF",
    **{f"LLAMA_BUILD_{part}": "OFF" for part in ("COMMON", "EXAMPLES", "TOOLS", "TESTS", "SERVER", "APP")},
}


def environment() -> Path:
    """The Python that has llama_cpp; made when it is not there, or of another version."""
    python, built = FOLDER / "bin" / "python", FOLDER / f"built-{VERSION}"
    if not built.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", FOLDER], check=True)
        pip, env = [python, "-m", "pip", "--quiet"], {**os.environ, "CMAKE_ARGS": "-DLLAMA_BUILD=OFF"}
        package = ["--no-deps", "--no-binary", "llama-cpp-python", f"llama-cpp-python=={VERSION}"]
        subprocess.run([*pip, "download", "--dest", FOLDER, *package], check=True, env=env)
        with tarfile.open(next(FOLDER.glob("*.tar.gz"))) as packed:
            packed.extractall(FOLDER / "source", filter="data")
        (source,) = (FOLDER / "source").iterdir()
        _build(source / "vendor" / "llama.cpp")
        subprocess.run([*pip, "install", source], check=True, env=env)
        built.touch()
    return python


def _build(source: Path) -> None:
    options = [f"-D{name}={value}" for name, value in OPTIONS.items()]
    subprocess.run(["cmake", "-S", source, "-B", OBJECTS, *options], check=True, stdout=subprocess.DEVNULL)
    at_once = str(os.cpu_count() or 1)
    subprocess.run(["cmake", "--build", OBJECTS, "--target", "llama", "--parallel", at_once], check=True)


def ask(file: Path, **request: Any) -> dict[str, Any]:
    """greedy=[ids], count=n: the n likeliest next tokens of each; logits=[ids]: all of them, as arrays; tokens=[texts]:
    ids; chats=[messages]: the template's text and its ids; ends=True: the ids that end an answer."""
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.npz"
        given = json.dumps({"file": str(file), "answer": str(answer), **request})
        # -I: this folder is not on its path, where `llama_cpp` would be this very file.
        python, env = environment(), {**os.environ, "LLAMA_CPP_LIB_PATH": str(LIBRARIES)}
        subprocess.run([python, "-I", __file__], input=given, text=True, check=True, env=env)
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
