"""A recipe made small: its structure and its kind of layout as they are, its model and its numbers tiny, so that real
processes on a CPU train it in a minute. For `erniekit rehearse --shrunken`, and for the test that trains every shipped
recipe."""

from __future__ import annotations

import glob
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from erniekit.checkpoint.model_writer import write_model
from erniekit.config import RunConfig, refuse_not_yet_supported
from erniekit.data.index_command import index_command
from erniekit.demo import shapes
from erniekit.demo.tiny import TRAIN, VOCAB, demo_text, make_tokenizer
from erniekit.demo.tiny_vision import make_tiny_vision
from erniekit.errors import ConfigError, PlanError
from erniekit.log import emit
from erniekit.models import MODELS
from erniekit.models.init import init_weights
from erniekit.parallel.layout import CONFIG_KEYS, EXPERT_AXES, Layout
from erniekit.parallel.world import EXPERTS_OVER
from erniekit.printable import counted
from erniekit.recipes.planning import raw_shape
from erniekit.result import REMOVED

STEPS, LENGTH, LAYERS = 2, 256, 6
PICTURES = 16  # that are drawn where a recipe's own are not here
PP, TP, SHARDING, DP = (CONFIG_KEYS[axis] for axis in ("pp", "tp", "fsdp", "dp"))
DEGREES = (PP, TP, SHARDING, DP, CONFIG_KEYS["cp"])  # of two that are equally large the first is halved
SMALL = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=8,
    num_key_value_heads=4, max_position_embeddings=1024,
)  # fmt: skip
SMALL_VISION: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=LAYERS,
    moe_num_experts=[8, 8], moe_intermediate_size=[32, 16], moe_k=3, moe_layer_end_index=[LAYERS - 1] * 2,
    vision_config=dict(depth=2, hidden_size=32, num_heads=2, mlp_ratio=2, patch_size=14),
)  # fmt: skip
# Of stages for whose rows nothing of the demo can stand in.
ROWS = {"DPO": "preference pairs", "RM": "preference pairs", "KTO": "judged answers", "CLS": "texts and their classes"}
# Its ranks are processes of this machine, whatever the recipe, or a job script, says of others.
HERE = ("nnodes=1", "node_rank=0", "master=127.0.0.1")
SMALL_EXPERTS = dict(moe_num_experts=8, moe_k=3, moe_intermediate_size=32)


def smaller(degrees: dict[str, int], most: int) -> dict[str, int]:
    """The degrees halved in turn, the largest first, until they fit; what was spread stays spread."""
    out = dict(degrees)
    while math.prod(out.values()) > most:
        largest = max(out, key=lambda name: out[name])
        if out[largest] <= 2:
            raise PlanError(
                f"a layout spread over {counted(sum(n > 1 for n in out.values()), 'axis', 'axes')} needs "
                f"{math.prod(out.values())} ranks",
                where=f"--shrunken {most}",
                fix=f"--shrunken {math.prod(out.values())}",
            )
        out[largest] = max(2, out[largest] // 2)
    return out


def degrees_of(cfg: RunConfig, most: int, layout: Layout | None = None) -> dict[str, int]:
    """Of the run as it is: the recipe's, or of its layout on a number of ranks, where those that are left replicate it.
    most: of ranks that a degree is made for that takes all there are."""
    if layout is not None:
        return {name: getattr(layout, axis) for name in DEGREES for axis, key in CONFIG_KEYS.items() if key == name}
    spread = 2 ** sum(cfg[name] > 1 for name in DEGREES)
    left = 2 if 2 * spread <= most else 1
    return {name: left if cfg[name] < 1 else cfg[name] for name in DEGREES}


def small_run(
    cfg: RunConfig, most: int, output: Path, cache: Path, layout: Layout | None = None
) -> tuple[int, dict[str, Any]]:
    """How many ranks, and the keys that make a run of the recipe small, whatever its model and its data."""
    kind = cfg.precision.compute_type
    own = degrees_of(cfg, most, layout)
    degrees = smaller(own, most)
    keys: dict[str, Any] = {
        **degrees,
        "gradient_accumulation_steps": max(2, degrees[PP]),
        "max_steps": STEPS,
        "warmup_steps": 1,
        "max_evaluate_steps": 2,
        "per_device_eval_batch_size": 1,
        # Packed bases are fp32 on a CPU by themselves.
        "compute_type": kind if cfg.lora.packed_base or kind == "fp8" else "fp32",
        "device": "cpu",
        "report_to": "none",
        "output_dir": output,
        "cache_dir": cache,
        "dataset_num_proc": 1,
        "dataloader_num_workers": 1,
        "prefetch_factor": 1,
        "no_recompute_layers": "[0]" if cfg.memory.no_recompute_layers else "[]",
    }
    if cfg.parallel.sep_parallel_degree > 1:  # of which context_parallel_degree is the one that counts
        keys["sep_parallel_degree"] = 1
    if cfg.parallel.expert_parallel_degree > 1:
        keys["expert_parallel_degree"] = _expert_degree(cfg, own, degrees)
    if cfg.parallel.expert_tensor_parallel_degree > 1:  # which is that of tensor parallelism
        keys["expert_tensor_parallel_degree"] = degrees[TP]
    if cfg.parallel.pp_seg_method:  # as there: the last stage, which has the head, is not the largest
        keys["pp_seg_method"] = {2: "[0,4,9]", 3: "[0,3,6,9]", 4: "[0,3,5,7,9]"}.get(degrees[PP], "uniform")
    return math.prod(degrees.values()), keys


def _expert_degree(cfg: RunConfig, own: Mapping[str, int], degrees: Mapping[str, int]) -> int:
    """Over all ranks that experts can be dealt to, where the recipe's are or nothing is sharded."""
    pool = [CONFIG_KEYS[axis] for axis in EXPERT_AXES[EXPERTS_OVER[cfg.moe.moe_group]]]
    over_all = cfg.parallel.expert_parallel_degree >= math.prod(own[name] for name in pool)
    return math.prod(degrees[name] for name in pool) if over_all or degrees[SHARDING] == 1 else degrees[SHARDING]


def small_pre_training(cfg: RunConfig, keys: Mapping[str, Any], tokenizer: Path, corpus: Path) -> dict[str, Any]:
    """More keys of a run that starts from a config.json and nothing else: its model is made small by its own means."""
    small = {f"model_config.{name}": value for name, value in SMALL.items()}
    if "llama" not in str(cfg.model.model_name_or_path):
        small |= {f"model_config.{name}": value for name, value in SMALL_EXPERTS.items()}
    weights = (cfg.data.input_dir or "").split()[::2] if " " in (cfg.data.input_dir or "") else []
    packs = keys[DP] * keys[SHARDING] * keys["gradient_accumulation_steps"] * cfg.train.batch_size
    return {
        **small,
        "tokenizer_name": tokenizer,
        "input_dir": " ".join(f"{weight} {corpus}" for weight in weights) or str(corpus),
        "max_seq_length": 64,
        "global_batch_size": packs,
    }


def small_shape(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with small sizes. What distinguishes models stays: shared experts, dense first layers, a tied head,
    heads that are wider than the hidden size would make them."""
    out = {**raw, **SMALL}
    wide = raw.get("head_dim") and raw["head_dim"] * raw["num_attention_heads"] != raw["hidden_size"]
    if raw.get("head_dim"):
        out["head_dim"] = SMALL["hidden_size"] // SMALL["num_attention_heads"] * (2 if wide else 1)
    if raw.get("moe_num_experts"):
        out |= SMALL_EXPERTS
        out["moe_layer_end_index"] = LAYERS - 1
        out["moe_layer_start_index"] = min(raw.get("moe_layer_start_index", 0), LAYERS - 2)
    return out


def write_small_model(raw: Mapping[str, Any], folder: Path) -> None:
    """Random weights of a model of that shape in Paddle's layout, as the recipes' models are, and a tokenizer."""
    spec = MODELS.get(raw["model_type"])
    config = spec.read_config(dict(raw), "hf", not raw["tie_word_embeddings"], str(folder))
    model = spec.build(config)
    init_weights(model, 0, 0.1)
    folder.mkdir()
    write_model(folder, config, model.state_dict().__getitem__, layout="paddle")
    make_tokenizer(folder)


def write_small_vision(raw: Mapping[str, Any], folder: Path) -> None:
    """Of a vision-language model what distinguishes it: shared experts, dense first layers, a tied head."""
    same = {name: raw[name] for name in ("moe_num_shared_experts", "tie_word_embeddings") if name in raw}
    starts = [min(start, LAYERS - 2) for start in raw["moe_layer_start_index"]]
    make_tiny_vision(folder, layout="paddle", **SMALL_VISION, **same, moe_layer_start_index=starts)


def small_pictures() -> dict[str, Any]:
    """More keys of a run on pictures: few pixels, few frames."""
    frames = dict(video_min_frames=4, video_max_frames=4)
    return dict(max_pixels=9408, media_num_proc=1, **frames)


def write_small_corpus(tokenizer: Path, prefix: Path) -> None:
    text = prefix.with_suffix(".jsonl")
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in demo_text()), encoding="utf-8")
    index_command([str(text), "--model_name_or_path", str(tokenizer), "--output", str(prefix), "--num_proc", "1"])


def train_shrunken(cfg: RunConfig, arguments: list[str], most: int, layout: Layout | None = None) -> int:
    """Trains a small model of the recipe, by the command itself; its exit code: 2 where it was refused, else 0 or 1.
    layout: of the run on a number of ranks; else the recipe's degrees are the run's."""
    refuse_not_yet_supported(cfg)
    with tempfile.TemporaryDirectory(prefix="erniekit-shrunken-") as place:
        folder = Path(place)
        ranks, keys = small_run(cfg, most, folder / "out", folder / "cache", layout)
        raw, own = raw_shape(cfg)
        raw = {**raw, **(cfg.model.model_config or {})}
        if raw.get("vision_config"):
            write_small_vision(raw, folder / "model")
        else:
            model = {"num_nextn_predict_layers": cfg.model.num_nextn_predict_layers or 0}
            write_small_model({**small_shape(raw), **model}, folder / "model")
        if cfg.train.stage == "PT":
            write_small_corpus(folder / "model", folder / "corpus")
            keys |= small_pre_training(cfg, keys, folder / "model", folder / "corpus")
        else:
            keys |= {"max_seq_len": 4 * LENGTH, **_data(cfg, folder)}
        if cfg.train.stage == "VL-SFT":
            keys |= small_pictures()
        if cfg.train.stage != "PT" or own is None:
            keys["model_name_or_path"] = folder / "model"
        if cfg.distill.teacher_model_name_or_path:  # its own shape does not matter to what is tried here
            keys["teacher_model_name_or_path"] = folder / "model"
        typed = [*arguments, *(f"{name}={value}" for name, value in keys.items())]
        typed += [f"nproc_per_node={ranks}", f"log_dir={folder / 'log'}", *HERE]
        emit(f"rehearse shrunken: {counted(STEPS, 'step')} on {counted(ranks, 'real rank')}{_how(keys, most)}")
        env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), REMOVED: "1"}
        code = subprocess.run([sys.executable, "-m", "erniekit", "train", *typed], env=env, check=False).returncode
    emit("result   it trains" if code == 0 else f"result   it stopped with exit code {code}: see above")
    return code if code in (0, 2) else 1


def _how(keys: Mapping[str, Any], most: int) -> str:
    """How the ranks are laid out, or why there is one where more were allowed."""
    if shown := ", ".join(f"{name}={keys[name]}" for name in DEGREES if keys[name] > 1):
        return f": {shown}"
    return f" of up to {most}: the recipe's degrees are 1; --ranks {most} makes replicas" if most > 1 else ""


def _data(cfg: RunConfig, folder: Path) -> dict[str, str]:
    """The recipe's own files, or where they are not here those of the demo; pictures are drawn into `folder`."""
    keys: dict[str, str] = {}
    seen = cfg.train.stage == "VL-SFT"
    for key in ("train_dataset_path", "eval_dataset_path"):
        files = cfg[key] or ()
        if all(_is_here(file) for file in files):
            continue
        if cfg.train.stage in ROWS:
            missing = next(file for file in files if not _is_here(file))
            fix = f"{key}=FILE with {ROWS[cfg.train.stage]}"
            raise ConfigError(f"no file {missing}", where=cfg.origin(key), fix=fix)
        stand_in = shapes.write_pictures(folder, key, shapes.scenes(PICTURES, seed=0)) if seen else TRAIN
        keys[key] = ",".join([str(stand_in)] * len(files))
        kind = key.replace("path", "type")
        keys[kind] = ",".join(["erniekit"] * len(files))
    return keys


def _is_here(entry: str) -> bool:
    """A file, a folder, or a pattern that some file matches."""
    place = Path(entry).expanduser()
    return place.exists() or bool(glob.glob(str(place), recursive=True))
