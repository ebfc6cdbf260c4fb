"""0.3B to Q8_0, as a user types it: the time and the memory it may take."""

from __future__ import annotations

import os
import resource
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from erniekit.checkpoint.model_writer import write_model
from erniekit.demo.tiny import VOCAB, make_tokenizer
from erniekit.models import MODELS
from erniekit.models.config import DecoderConfig
from support.memory import MEMORY

PIECES = 101_310  # of ERNIE-4.5's tokenizer


def sized(number: int) -> bytes:
    """A protobuf length."""
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ERNIE-4.5-0.3B in bf16, with as many pieces as it has."""
    folder = tmp_path_factory.mktemp("model")
    config = DecoderConfig(
        family="ernie4_5", vocab_size=103424, hidden_size=1024, intermediate_size=3072, num_layers=18, num_heads=16,
        num_kv_heads=2, head_dim=128, rms_norm_eps=1e-5, rope_theta=5e5, rope_style="pairs", tie_word_embeddings=True,
        max_positions=131072,
    )  # fmt: skip
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in MODELS.get("ernie4_5").build(config).state_dict().items()}
    chance = torch.Generator().manual_seed(0)

    def weight(name: str) -> torch.Tensor:
        drawn = torch.randn(shapes[name], generator=chance)
        return (drawn * 0.02 if drawn.ndim > 1 else 1 + drawn * 0.02).to(torch.bfloat16)

    write_model(folder, config, weight)
    make_tokenizer(folder)
    with (folder / "tokenizer.model").open("ab") as file:
        for number in range(VOCAB, PIECES):
            text = f"▁w{number}x".encode()
            piece = b"\x0a" + sized(len(text)) + text + b"\x15" + struct.pack("<f", -float(number))
            file.write(b"\x0a" + sized(len(piece)) + piece)
    return folder


@pytest.mark.full
def test_the_smallest_ernie_takes_20_seconds_and_a_gigabyte(model: Path) -> None:
    program = (
        MEMORY + "import sys\n"
        "from erniekit.cli.main import main\n"
        "assert main(['export', sys.argv[1], 'format=gguf', 'gguf_type=q8_0']) == 0\n"
        "print('memory', memory())\n"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    best = 1e9
    # Processor time of one thread, the least of three: what a clock shows on a free core, whatever else runs here.
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-c", program, str(model)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert int(done.stdout.split()[-1]) <= 1e9
    size = (model / "gguf-q8_0" / "model-Q8_0.gguf").stat().st_size
    assert size == pytest.approx(360e6 * 8.5 / 8, rel=0.05)
    assert best <= 20, f"{best:.1f} s"
