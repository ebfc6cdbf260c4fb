"""How many tokens a second `erniekit server` gives 1, 8 and 64 clients over HTTP, and when each gets its first.

    python benchmarks/serve_speed.py [--model 0.3b | 21b | tiny | DIR] [--layers N] [--device auto]
    python benchmarks/serve_speed.py --steps      what a recorded step takes, by size, without HTTP
    python benchmarks/serve_speed.py --http       what HTTP alone sustains: an engine that makes tokens up
    python benchmarks/serve_speed.py --adapters 8 several adapters at once against one

Weights are random, drawn on the device and written to a temporary folder (0.3b: 0.7 GB; 21b: 44 GB, fewer with
--layers). Clients stream, are processes of their own, and count by the usage that the server tells at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from made_up_tokens import MadeUpTokens
from server_process import running

SHAPES = {"0.3b": "ernie-4.5-0.3b", "21b": "ernie-4.5-21b-a3b"}
PROCESSES = 4  # of clients


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0.3b", help="0.3b, 21b, tiny or a model folder")
    parser.add_argument("--layers", type=int, default=0, help="so many of the model's")
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=512, help="of each answer")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--http", action="store_true")
    parser.add_argument("words", nargs="*", help="more key=value words for the server")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(options, Path(folder))
        if options.steps:
            result: dict[str, Any] = steps(model, options)
        elif options.http:
            result = over_http(model, options)
        else:
            with running(str(model), words_of(model, options, Path(folder))) as address:
                result = measure(address, options)
    print(json.dumps(result, indent=1))
    return 0


# --- the model


def make_model(options: argparse.Namespace, folder: Path) -> Path:
    if options.model not in (*SHAPES, "tiny"):
        return Path(options.model)
    from erniekit.demo.tiny import make_tiny_model, make_tokenizer

    if options.model == "tiny" or options.http:
        return make_tiny_model(folder / "tiny")
    import torch

    from erniekit.checkpoint.model_writer import write_model
    from erniekit.data.tokenizer import load_tokenizer
    from erniekit.devices import pick
    from erniekit.models import MODELS
    from erniekit.models.init import initial_value
    from erniekit.models.released import released

    raw = released(SHAPES[options.model])
    assert raw is not None
    if options.layers:
        raw |= {"num_hidden_layers": options.layers}
        if "moe_layer_end_index" in raw:
            raw["moe_layer_end_index"] = options.layers - 1
    target, spec = folder / options.model, MODELS.get(raw["model_type"])
    target.mkdir()
    make_tokenizer(target)
    spelled = load_tokenizer(target).vocab_size
    config = spec.read_config(raw, "hf", not raw["tie_word_embeddings"], str(target))
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in spec.build(config).named_parameters()}
    device = pick(options.device, False).handle

    def weight(name: str) -> torch.Tensor:
        value = initial_value(name, shapes[name], 0, config.init_std, device)
        if name == "embed.weight":
            value[spelled:] *= 0.1  # what is said can be spelled, so that streams carry text
        return value.to(spec.dtype_of(name, torch.bfloat16)).cpu()

    write_model(target, config, weight)
    return target


def make_adapters(model: Path, folder: Path, count: int) -> list[str]:
    """Folders of random adapters of rank 16 on every linear."""
    import torch

    from erniekit.api_load import find_model
    from erniekit.lora.adapter import adapter_of
    from erniekit.lora.adapter_files import write_adapter
    from erniekit.lora.inject import inject, lora_state
    from erniekit.lora.settings import LoRASettings

    weights = find_model(model).weights
    tree = weights.build()
    settings = LoRASettings(16, 32.0)
    inject(tree, settings, 0)
    out = []
    for k in range(count):
        torch.manual_seed(k)
        with torch.no_grad():
            for name, value in lora_state(tree).items():
                if name.endswith(".B"):
                    value.normal_(std=0.02)
        write_adapter(folder / f"a{k}", adapter_of(tree, settings, base=str(model)), tree)
        out.append(f"a{k}={folder / f'a{k}'}")
    return out


def words_of(model: Path, options: argparse.Namespace, folder: Path) -> list[str]:
    words = [f"max_num_seqs={max(options.clients)}", "port=0", f"device={options.device}", "max_queue=256"]
    if options.adapters:
        words.append("lora_modules=" + ",".join(make_adapters(model, folder, options.adapters)))
    return [*words, *options.words]


# --- clients


class Answer(asyncio.Protocol):
    """One streamed request over a socket of its own."""

    def __init__(self, request: bytes, done: asyncio.Future[None]) -> None:
        self.request, self.done = request, done
        self.first = 0.0
        self.tail, self.events, self.size = b"", 0, 0

    def connection_made(self, transport: Any) -> None:
        transport.write(self.request)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if not self.first and b"data: " in data:
            self.first = time.perf_counter()
        self.events += data.count(b"data: ")
        self.size += len(data)
        self.tail = (self.tail + data)[-2000:]
        if b"[DONE]" in self.tail or b'"error"' in self.tail:
            self.transport.close()
            if not self.done.done():
                self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)

    @property
    def tokens(self) -> int:
        at = self.tail.rfind(b'"completion_tokens":')
        if at < 0:
            raise SystemExit(f"an answer broke off: {self.tail[-300:]!r}")
        return int(self.tail[at:].split(b":")[1].split(b",")[0])


def request_of(number: int, options: argparse.Namespace, tokens: int, model: str) -> bytes:
    rng = random.Random(f"{number}/{tokens}/{time.perf_counter_ns()}")  # nobody begins alike: nothing is shared
    ids = [rng.randrange(5, 1000) for _ in range(options.prompt)]
    body = json.dumps(
        {
            "model": model, "prompt": ids, "max_tokens": tokens, "ignore_eos": True, "stream": True, "seed": number,
            "temperature": options.temperature, "top_p": options.top_p, "stream_options": {"include_usage": True},
        }
    ).encode()  # fmt: skip
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


async def ask(
    address: tuple[str, int], number: int, options: argparse.Namespace, tokens: int, model: str = "default"
) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    began, done = time.perf_counter(), loop.create_future()
    _, answer = await loop.create_connection(lambda: Answer(request_of(number, options, tokens, model), done), *address)
    await done
    ended = time.perf_counter()
    return {"began": began, "first": answer.first, "ended": ended, "tokens": answer.tokens, "events": answer.events}


def client_process(address: Any, numbers: list[int], options: Any, tokens: int, names: list[str], pipe: Any) -> None:
    async def go() -> list[dict[str, float]]:
        return list(await asyncio.gather(*(ask(address, n, options, tokens, names[n % len(names)]) for n in numbers)))

    pipe.send(asyncio.run(go()))


def together(
    address: tuple[str, int], clients: int, options: argparse.Namespace, tokens: int, names: list[str]
) -> list[Any]:
    """Processes with so many clients in all, started; (process, pipe) of each."""
    fork = multiprocessing.get_context("spawn")
    out = []
    for k in range(min(PROCESSES, clients)):
        here, there = fork.Pipe()
        numbers = list(range(k, clients, min(PROCESSES, clients)))
        process = fork.Process(target=client_process, args=(address, numbers, options, tokens, names, there))
        process.start()
        out.append((process, here))
    return out


def collected(started: list[Any]) -> list[dict[str, float]]:
    found = [answer for _, pipe in started for answer in pipe.recv()]
    for process, _ in started:
        process.join()
    return found


def rate(answers: list[dict[str, float]]) -> dict[str, float]:
    """From the first client's request to the last answer's end, and between first tokens and ends."""
    whole = max(a["ended"] for a in answers) - min(a["began"] for a in answers)
    tokens = sum(a["tokens"] for a in answers)
    each = [(a["tokens"] - 1) / (a["ended"] - a["first"]) for a in answers]
    return {
        "tokens_per_s": round(tokens / whole, 1),
        "tokens_per_s_of_one": round(statistics.median(each), 1),
        "first_token_ms": round(1e3 * statistics.median(a["first"] - a["began"] for a in answers), 1),
        "tokens_per_event": round(tokens / sum(a["events"] for a in answers), 2),
    }


def measure(address: tuple[str, int], options: argparse.Namespace) -> dict[str, Any]:
    names = [f"a{k}" for k in range(options.adapters)]
    out: dict[str, Any] = {"model": str(options.model), "tokens": options.tokens, "prompt": options.prompt}

    def report(name: str, value: Any) -> None:
        out[name] = value
        print(f"{name}: {value}", file=sys.stderr, flush=True)  # what is measured by now, should the rest not end

    asyncio.run(ask(address, 0, options, 32))
    quiet = []
    for k in range(10):
        answer = asyncio.run(ask(address, 1000 + k, options, 4))
        quiet.append(answer["first"] - answer["began"])
    report("first_token_ms_alone", round(1e3 * statistics.median(quiet), 1))
    for clients in options.clients:
        if names:  # steps without adapters are recorded when the first of each size comes
            collected(together(address, clients, options, 32, ["default"]))
        report(f"{clients} clients", rate(collected(together(address, clients, options, options.tokens, ["default"]))))
    if names:
        most = max(options.clients)
        report("one adapter", rate(collected(together(address, most, options, options.tokens, names[:1]))))
        report(f"{len(names)} adapters", rate(collected(together(address, most, options, options.tokens, names))))
    most = max(options.clients)
    if most > 1:
        others = together(address, most - 1, options, 4 * options.tokens, ["default"])
        time.sleep(2.0)  # for the clients' processes to start: they are no part of what is measured
        busy = []
        for k in range(10):
            answer = asyncio.run(ask(address, 2000 + k, options, 4))
            busy.append(answer["first"] - answer["began"])
        report("first_token_ms_under_load", round(1e3 * statistics.median(busy), 1))
        out["first_token_ratio"] = round(statistics.median(busy) / statistics.median(quiet), 2)
        collected(others)
    with urlopen("http://{}:{}/metrics".format(*address)) as page:
        found = re.findall(r"^erniekit_(proposed_tokens_total|acceptance_ratio) (.+)$", page.read().decode(), re.M)
    out |= {name: float(value) for name, value in found}  # of num_speculative_tokens
    out["cores"], out["load"] = os.cpu_count(), round(os.getloadavg()[0], 1)
    return out


# --- parts alone


def steps(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A step's time on the device and the host's for launching it, by rows; and of chunks of prompts."""
    import torch

    from erniekit.config import load
    from erniekit.devices import pick
    from erniekit.serve.loaded_models import find_models, load_models

    words = [str(model), f"max_num_seqs={max(options.clients)}", f"device={options.device}", *options.words]
    cfg = load(words, "server")
    device = pick(None if options.device == "auto" else options.device, False)
    engine = load_models(cfg, find_models(cfg)).engine
    if engine.recorded is None:
        raise SystemExit("this device records no steps")
    deadline = time.monotonic() + 300
    recorded, name = engine.recorded, next(iter(engine.models))
    while len(recorded._works) < len(recorded.batches) + len(recorded.chunks) and time.monotonic() < deadline:
        time.sleep(0.1)
    out: dict[str, Any] = {}
    with torch.inference_mode():
        for kind, sizes in (("batch", recorded.batches), ("chunk", recorded.chunks)):
            for size in sizes:
                replay, _ = recorded._work(name, kind, size, True)
                device.synchronise()
                began = time.perf_counter()
                for _ in range(50):
                    replay()
                launched = time.perf_counter() - began
                device.synchronise()
                took = time.perf_counter() - began
                out[f"{kind} {size}"] = {"step_ms": round(20 * took, 3), "host_ms": round(20 * launched, 3)}
    engine.stop()
    return out


def over_http(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    import threading

    import uvicorn

    from erniekit.data.tokenizer import load_tokenizer
    from erniekit.net.connections import limited
    from erniekit.net.listen import bind
    from erniekit.serve.api import ApiSettings, make_app
    from erniekit.serve.request_parsing import SamplingDefaults, ServedModel

    tokenizer = load_tokenizer(model)
    served = ServedModel("default", tokenizer, frozenset({tokenizer.eos_id}), 1 << 20, tokenizer.vocab_size)
    out: dict[str, Any] = {}
    for burst in (1, 4):
        sock = bind("127.0.0.1", 0)
        address = sock.getsockname()[:2]
        app = make_app(MadeUpTokens(burst), {"default": served}, ApiSettings(SamplingDefaults()))  # type: ignore[arg-type]
        config, sock = limited(app, sock, lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        for clients in options.clients:
            found = collected(together(address, clients, options, options.tokens, ["default"]))
            span = max(a["ended"] for a in found) - min(a["first"] for a in found)
            tokens = sum(a["tokens"] for a in found)
            out[f"{clients} clients, {burst} a step"] = {
                "tokens_per_s": round(tokens / span),
                "us_per_event": round(1e6 * span / sum(a["events"] for a in found), 1),
                "tokens_per_event": round(tokens / sum(a["events"] for a in found), 2),
            }
        server.should_exit = server.force_exit = True
        thread.join(10)
        sock.close()
    return out


if __name__ == "__main__":
    sys.exit(main())
