"""Engines that are started: their arguments, their presence, and their end with ours. A real process stands in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.config import load
from erniekit.errors import ConfigError
from erniekit.export.run import export
from erniekit.lora.adapter import adapter_of
from erniekit.lora.adapter_files import write_adapter
from erniekit.lora.inject import inject
from erniekit.lora.settings import LoRASettings
from erniekit.serve.engines import EXTERNAL
from erniekit.serve.engines.external import make_target
from erniekit.serve.loaded_models import find_models, vision_settings
from support.clock import until
from support.seeing import seeing_folder
from support.serving import Program, tiny_folder
from support.vl_release_folder import AUTO, copy_code

pytestmark = pytest.mark.xdist_group("server")

# Speaks HTTP, writes down what it was started with, and has a child of its own, as vLLM has.
STAND_IN = """
import http.server, json, os, subprocess, sys, signal, time
args = dict(zip(sys.argv[1::2], sys.argv[2::2]))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
note = {"argv": sys.argv[1:], "pids": [os.getpid(), child.pid], "key": os.environ.get("VLLM_API_KEY")}
open(os.environ["STAND_IN_NOTE"], "w").write(json.dumps(note))
print("loading the model", flush=True)
if os.environ.get("STAND_IN_FAILS"):
    sys.exit("out of memory")
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{}")
    def log_message(self, *words): pass
if os.environ.get("STAND_IN_DEAF"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
http.server.HTTPServer((args["--host"], int(args["--port"])), Page).serve_forever()
"""


@pytest.fixture(scope="module")
def model(paddle: Path, tmp_path_factory) -> Path:
    """In Hugging Face's layout, which is what other engines read."""
    from erniekit.checkpoint.model_writer import write_model

    source = ModelFolder(tiny_folder(paddle, tmp_path_factory.mktemp("source") / "tiny"))
    target = tmp_path_factory.mktemp("served") / "tiny"
    write_model(target, source.config, source.build().state_dict().__getitem__, tokenizer_from=source.path)
    return target


@pytest.fixture
def note(tmp_path: Path, monkeypatch) -> Path:
    """A Python path on which a package called vllm is found; what the stand-in writes down goes to this file."""
    place = tmp_path / "site" / "vllm" / "entrypoints" / "openai"
    place.mkdir(parents=True)
    for folder in (place, place.parent, place.parent.parent):
        (folder / "__init__.py").write_text("")
    (place / "api_server.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
    monkeypatch.setenv("STAND_IN_NOTE", str(tmp_path / "note.json"))
    return tmp_path / "note.json"


def gone(pids: list[int]) -> bool:
    return not any(_lives(pid) for pid in pids)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # ended before it was asked, or while it was
        return False


def started(model: Path, *keys: str, env: dict[str, str], tries: int = 3) -> Program:
    """On a free port; another program may take it before the engine does."""
    server = Program(model, "engine=vllm", "port=0", *keys, env=env)
    until(lambda: "ready: " in server.text or server.process.poll() is not None, seconds=120)
    if tries > 1 and "Address already in use" in server.text:
        server.close()
        return started(model, *keys, env=env, tries=tries - 1)
    return server


def test_it_is_started_with_our_keys_followed_and_ended_with_all_its_children(model, note):
    server = started(model, "max_model_len=100", env={"ERNIEKIT_API_KEY": "secret"})
    try:
        url = server.ready()
        assert httpx.get(url + "/health").status_code == 200
        report = json.loads(note.read_text())
        assert report["argv"][:4] == ["--model", str(model), "--served-model-name", "tiny"]
        assert "secret" not in json.dumps(report["argv"]), "every user of the machine can read arguments"
        assert report["key"] == "secret"
        assert "vllm | loading the model" in server.text
        assert server.end(signal.SIGTERM) == 0, server.text
        until(lambda: gone(report["pids"]), seconds=60)
    finally:
        server.close()


def test_it_is_told_how_long_the_engine_may_finish_and_a_second_signal_does_not_wait_for_it(model, note):
    server = started(model, "drain_timeout=60", env={"STAND_IN_DEAF": "1"})
    try:
        server.ready()
        pids = json.loads(note.read_text())["pids"]
        server.process.send_signal(signal.SIGINT)
        line = "stopping: vllm may finish its answers, for 60 s at most; a second Ctrl-C or SIGTERM ends it now"
        until(lambda: line in server.lines)
        began = time.monotonic()
        assert server.end(signal.SIGINT) == 0, server.text
        assert time.monotonic() - began < 30, "not the 60 s of drain_timeout"
        until(lambda: gone(pids), seconds=60)
    finally:
        server.close()


@pytest.mark.full
def test_it_ends_when_we_are_killed_and_cannot_say_so(model, note):
    server = Program(model, "engine=vllm", "port=0", "drain_timeout=0.5", env={"STAND_IN_DEAF": "1"})
    try:
        server.ready()
        pids = json.loads(note.read_text())["pids"]
        assert not gone(pids)
        server.end(signal.SIGKILL)
        until(lambda: gone(pids), seconds=60)
    finally:
        server.close()


@pytest.mark.full
def test_one_that_fails_is_told_with_its_last_words(model, note):
    server = Program(model, "engine=vllm", "port=0", env={"STAND_IN_FAILS": "1"})
    try:
        assert server.process.wait(60) == 2
        until(lambda: "ended by itself with exit code 1" in server.text, seconds=60)
        assert "where: out of memory" in server.text
        assert "Traceback" not in server.text
        until(lambda: gone(json.loads(note.read_text())["pids"]), seconds=60)
    finally:
        server.close()


def arguments(name: str, *words: str, key: str | None = None, folder: Path | None = None) -> list[str]:
    program = EXTERNAL.get(name)
    return program.arguments(make_target(load(list(words), "server"), program, key), folder or Path())


def value(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_vllm_gets_what_was_asked_for_and_keeps_its_own_defaults(model):
    argv = arguments("vllm", str(model), "port=0", "max_num_seqs=3", "temperature=0.5")
    assert value(argv, "--max-num-seqs") == "3"
    assert value(argv, "--max-model-len") == "512", "no more than the model's own positions"
    assert json.loads(value(argv, "--override-generation-config")) == {"temperature": 0.5}
    assert not {"--block-size", "--reasoning-parser", "--quantization", "--enable-lora", "--dtype"} & set(argv)
    argv = arguments("vllm", str(model), "port=0", "block_size=16", "compute_type=fp32", "tool_call_parser=ernie45")
    assert (value(argv, "--block-size"), value(argv, "--dtype")) == ("16", "float32")
    assert value(argv, "--tool-call-parser") == "ernie45"
    assert "--dtype" not in arguments("vllm", str(model), "port=0", "compute_type=wint4/8"), "no word of vLLM's"


def test_proposals_of_the_embedded_engine_are_no_setting_of_another_and_one_line_says_so(model, capsys):
    argv = arguments("vllm", str(model), "port=0", "num_speculative_tokens=2")
    assert not any("specul" in word for word in argv)
    told = capsys.readouterr().err
    assert "vllm's own settings go into engine_args" in told
    assert told.count("num_speculative_tokens") == 1


def test_adapters_go_to_vllm_and_sglang_by_name_and_fastdeploy_has_none(model, tmp_path):
    own = ModelFolder(model).build()
    settings = LoRASettings(12, 24.0)
    inject(own, settings, 0)
    write_adapter(tmp_path / "style", adapter_of(own, settings, base=str(model)), own)
    words = (str(model), "port=0", f"lora_modules=style={tmp_path}/style")
    argv = arguments("vllm", *words)
    assert value(argv, "--lora-modules") == f"style={tmp_path}/style"
    assert value(argv, "--max-lora-rank") == "16", "the next it knows above 12"
    assert value(arguments("sglang", *words), "--lora-paths") == f"style={tmp_path}/style"
    with pytest.raises(ConfigError) as error:
        arguments("fastdeploy", *words)
    assert "erniekit export" in error.value.fix
    served = make_target(load([str(tmp_path / "style"), "port=0"], "server"), EXTERNAL.get("vllm"), None)
    assert (served.name, list(served.adapters)) == ("tiny", ["style"])


def test_sglangs_key_is_in_a_file_only_we_can_read(model, tmp_path):
    argv = arguments("sglang", str(model), "port=0", key='se"cret', folder=tmp_path)
    assert 'se"cret' not in argv
    config = Path(value(argv, "--config"))
    assert config.read_text() == 'api-key: "se\\"cret"\n'
    assert config.stat().st_mode & 0o77 == 0


def test_fastdeploy_gets_erniekits_flags(model):
    argv = arguments("fastdeploy", str(model), "port=0", "quantization=wint4")
    flags = set(argv[::2])
    assert {"--metrics-port", "--engine-worker-queue-port", "--use-warmup", "--kv-cache-ratio"} <= flags
    assert value(argv, "--quantization") == "wint4"
    assert "--reasoning-parser" not in argv, "its default is of the vision models"
    vision = arguments("fastdeploy", str(model), "port=0", "enable_mm=1", "limit_mm_per_prompt={image: 2}")
    assert value(vision, "--reasoning-parser") == "ernie-45-vl"
    assert json.loads(value(vision, "--limit-mm-per-prompt")) == {"image": 2}


RECIPE = """
model_name_or_path: {model}
tensor_parallel_degree: 4
output_dir: None
max_model_len: 32768
port: 0
quantization: wint4
max_num_seqs: 32
enable_mm: true
limit_mm_per_prompt: '{{"image": 100, "video": 100}}'
reasoning_parser: ernie-45-vl
max_num_batched_tokens: 384
max_new_tokens: 8192
top_p: 0.7
temperature: 0.95
"""


def test_the_chat_recipe_of_the_vision_models_reaches_every_engine(tmp_path):
    folder = seeing_folder(tmp_path / "eyes")
    recipe = tmp_path / "run_chat.yaml"
    recipe.write_text(RECIPE.format(model=folder))
    with pytest.raises(ConfigError) as error:
        arguments("vllm", str(recipe))
    assert "save_format=hf" in error.value.fix, "it is in transformers' layout"
    flat = export(folder, None, tmp_path / "flat")
    recipe.write_text(RECIPE.format(model=flat) + "engine_args: --trust-remote-code\n")
    name_code(flat)
    copy_code(flat)
    for engine, limit, parser in (
        ("vllm", "--limit-mm-per-prompt", "ernie45"),
        ("sglang", "--limit-mm-data-per-request", "ernie-45-vl"),
        ("fastdeploy", "--limit-mm-per-prompt", "ernie-45-vl"),
    ):
        argv = arguments(engine, str(recipe))
        assert json.loads(value(argv, limit)) == {"image": 100, "video": 100}
        assert value(argv, "--reasoning-parser") == parser
        assert "384" in argv
    cfg = load([str(recipe)], "server")
    assert vision_settings(cfg, find_models(cfg)[0]).most == {"image": 100, "video": 100}


def name_code(folder: Path, **fields: object) -> None:
    """As settings of a release do."""
    for name, auto in AUTO.items():
        more = fields if name == "config.json" else {}
        told = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
        (folder / name).write_text(json.dumps(told | more | {"auto_map": auto}))


def test_a_vision_model_that_vllm_could_not_read_is_refused_before_it_starts(tmp_path):
    flat = export(seeing_folder(tmp_path / "eyes"), None, tmp_path / "flat")

    def refused(*words: str) -> ConfigError:
        with pytest.raises(ConfigError) as error:
            arguments("vllm", str(flat), "port=0", *words)
        assert error.value.where.startswith(str(flat))
        return error.value

    assert "missing: auto_map: AutoConfig, auto_map: AutoProcessor" in refused("engine_args=--trust-remote-code").what
    name_code(flat)
    assert refused().what.endswith("missing: configuration_ernie4_5_vl.py, processing_ernie4_5_vl.py")
    copy_code(flat)
    assert "engine_args=--trust-remote-code" in refused().fix
    assert value(arguments("vllm", str(flat), "port=0", "engine_args=--trust-remote-code"), "--model") == str(flat)
    name_code(flat, compression_ratio=2.0)
    assert "does not scale positions" in refused("engine_args=--trust-remote-code").what
    name_code(flat, compression_ratio=1.0, moe_use_aux_free=False)
    (flat / "MANIFEST.json").unlink()  # files that are changed on purpose
    with safe_open(flat / "model.safetensors", "pt") as file:
        kept = {name: file.get_tensor(name) for name in file.keys() if "e_score" not in name}  # noqa: SIM118
    save_file(kept, flat / "model.safetensors", {"format": "pt"})
    assert "moe_use_aux_free" in refused("engine_args=--trust-remote-code").what
    assert arguments("sglang", str(flat), "port=0"), "these are rules of vLLM"


def test_paddles_files_are_for_fastdeploy_only(paddle, tmp_path):
    folder = tiny_folder(paddle, tmp_path / "tiny")
    assert value(arguments("fastdeploy", str(folder), "port=0"), "--model") == str(folder)
    with pytest.raises(ConfigError) as error:
        arguments("vllm", str(folder), "port=0")
    assert "Paddle" in error.value.what


def test_the_guard_ends_a_whole_family_when_its_own_parent_dies(tmp_path):
    """The parent of the guard is killed: nobody can send a signal any more, only the pipe tells."""
    from erniekit.serve.engines import supervisor

    family = "import subprocess, sys, os; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
    family += f" open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{p.pid}}'); p.wait()"
    parent = (
        "import subprocess, sys, time; guarded = [sys.executable, sys.argv[1], '1', sys.executable, '-c', sys.argv[2]];"
        " subprocess.Popen(guarded, stdin=subprocess.PIPE, start_new_session=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent, supervisor.__file__, family])
    until(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text().count(" ") == 1)
    time.sleep(0.1)
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    until(lambda: gone(pids), seconds=60)
