"""What continuous batching is worth: tokens/s of 16 clients at once against one after another, on one server.

    python benchmarks/serve.py [--model DIR] [--clients 16] [--tokens 64] [--device cpu]

Both are measured in the same run on the same server, so that their ratio does not depend on what else the machine does.
Without --model a tiny ERNIE is made. The exit code is 1 when the ratio is below --least.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from server_process import running

QUESTION = "tell me a long story about number {}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model folder; a tiny one is made when not given")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3, help="the median counts")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--least", type=float, default=4.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or make_model(Path(folder))
        with running(model, words_of(options)) as address:
            result = measure(address, options)
    print(json.dumps(result, indent=1))
    return int(result["ratio"] < options.least)


def make_model(folder: Path) -> str:
    from erniekit.demo.tiny import make_tiny_model

    return str(make_tiny_model(folder / "tiny"))


def words_of(options: argparse.Namespace) -> list[str]:
    return [
        f"max_num_seqs={options.clients}",
        "port=0",
        f"device={options.device}",
        "max_model_len=1024",
        "use_warmup=1",
    ]


def ask(address: tuple[str, int], number: int, tokens: int, stream: bool = False) -> tuple[int, float]:
    """(tokens said, seconds to the first of them or to the whole answer)."""
    body = {
        "prompt": QUESTION.format(number),
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": stream,
    }
    link = http.client.HTTPConnection(*address, timeout=600)
    began = time.perf_counter()
    link.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = link.getresponse()
    if stream:
        answer.readline()
        first = time.perf_counter() - began
        answer.read()
        return tokens, first
    said = json.loads(answer.read())["usage"]["completion_tokens"]
    return said, time.perf_counter() - began


def rate(address: tuple[str, int], at_once: int, options: argparse.Namespace) -> float:
    """Tokens a second of `clients` requests, so many of them at once."""
    began = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        said = sum(n for n, _ in pool.map(lambda k: ask(address, k, options.tokens), range(options.clients)))
    return said / (time.perf_counter() - began)


def measure(address: tuple[str, int], options: argparse.Namespace) -> dict[str, object]:
    rate(address, options.clients, options)
    rounds = []
    for _ in range(options.rounds):
        alone, together = rate(address, 1, options), rate(address, options.clients, options)
        rounds.append((together / alone, alone, together))
    ratio, alone, together = sorted(rounds)[len(rounds) // 2]
    quiet = statistics.median(ask(address, k, 4, stream=True)[1] for k in range(5))
    with ThreadPoolExecutor(options.clients) as pool:
        others = [pool.submit(ask, address, k, 8 * options.tokens) for k in range(options.clients - 1)]
        time.sleep(0.3)
        busy = ask(address, 99, 4, stream=True)[1]
        whole = statistics.median(f.result()[1] for f in others)
    return {
        "clients": options.clients,
        "tokens": options.tokens,
        "one_at_a_time_tokens_per_s": round(alone, 1),
        "together_tokens_per_s": round(together, 1),
        "ratio": round(ratio, 2),
        "first_token_s_alone": round(quiet, 4),
        "first_token_s_among_others": round(busy, 4),
        "answers_of_those_others_s": round(whole, 3),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }


if __name__ == "__main__":
    sys.exit(main())
