"""A rank that loads its part of a model never has more in memory than that part: 2 GiB of weights, 4 ranks.

The weights are a file without contents (a hole of zeros): it takes no disk, and reading it takes memory all the same.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 15, "num_attention_heads": 16, "num_key_value_heads": 4,
    "max_position_embeddings": 2048, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip
GIB = 2**30
LAYOUTS = {
    "tp4": ({"tensor_parallel_degree": 4}, 2),
    # fully_shard keeps fp32: twice the bytes of the file
    "tp2 x fsdp2": ({"tensor_parallel_degree": 2, "sharding_parallel_degree": 2, "sharding": "stage3"}, 4),
}


def make_model(folder: Path) -> int:
    """An HF folder whose one file has all tensors in bf16; returns their bytes."""
    from erniekit.models import find

    spec = find(CONFIG)
    config = spec.read_config(CONFIG, "hf", True, "config.json")
    import torch

    with torch.device("meta"):
        state = spec.build(config).bfloat16().state_dict()
    header, at = {}, 0
    for entry in spec.names(config, "hf"):
        for name, tensor in zip(entry.theirs, entry.write(state[entry.ours])):
            header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [at, at + tensor.numel() * 2]}
            at += tensor.numel() * 2
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + at)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return at


def peak() -> int:
    """Bytes. VmHWM counts from this process's start; getrusage from its parent's."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024


def load_and_measure(model: str, keys: list[str]) -> None:
    import torch

    from erniekit.checkpoint.model_folder import ModelFolder
    from erniekit.config import load
    from erniekit.devices import pick
    from erniekit.parallel.world import open_world
    from erniekit.recipes.build import build

    torch.set_num_threads(1)
    cfg = load([f"model_name_or_path={model}", "fine_tuning=Full", "train_dataset_path=none", *keys])
    world = open_world(cfg.parallel, "cpu")
    world.max(0.0)  # connections are made
    before = peak()
    built = build(cfg, ModelFolder(Path(model)), pick("cpu", True), torch.bfloat16, world)
    held = sum(t.numel() * t.element_size() for t in (getattr(p, "_local_tensor", p) for _, p in built.parameters()))
    print(json.dumps([held, peak() - before]), flush=True)
    world.max(0.0)
    os._exit(0)


@pytest.mark.parametrize("layout", [pytest.param("tp4", marks=pytest.mark.full), "tp2 x fsdp2"])
def test_a_rank_loads_its_part_and_hardly_more(tmp_path: Path, layout: str) -> None:
    total = make_model(tmp_path)
    assert 1.9 * GIB < total < 2.3 * GIB
    keys, item = LAYOUTS[layout]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "4"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + os.getpid() % 2000)}
    command = [sys.executable, __file__, str(tmp_path), *(f"{k}={v}" for k, v in keys.items())]
    ranks = [
        subprocess.Popen(command, env={**env, "RANK": str(r), "LOCAL_RANK": str(r)}, stdout=subprocess.PIPE, text=True)
        for r in range(4)
    ]
    measured = [json.loads(rank.communicate(timeout=120)[0].splitlines()[-1]) for rank in ranks]
    for held, grown in measured:
        assert total * item // 2 / 4 <= held < total * item // 2 / 4 * 1.1, "a quarter, and norms whole"
        assert grown < held + 0.15 * GIB, "two chunks of 32 MiB, and what torch itself needs"


if __name__ == "__main__":
    load_and_measure(sys.argv[1], sys.argv[2:])
