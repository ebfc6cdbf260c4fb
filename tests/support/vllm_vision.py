"""vLLM's CPU build given pictures and videos: its answers, and what it made of the weights, ids and positions.

Run as a script by the Python that has vLLM (support/vllm_cpu.py), this file is the other end of `see`.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CPU = Path(__file__).with_name("vllm_cpu.py")


def see(folders: list[Path], prompts: list[dict[str, Any]], count: int, **options: Any) -> list[dict[str, Any]]:
    """prompts: {"prompt": text with vLLM's placeholders, "image": picture files, "video": files of frames (npy)}.

    Of each folder what `vllm_cpu.answers` gives, and "positions" (by prompt: its ids, [3][n], the delta of what is
    generated), "visual" (ids that it sent to the vision experts), "offered" and "loaded" (names of tensors and of
    parameters filled), "parameters" (a file beside the folder); or {"error": why it is not served}.
    """
    from support.vllm_cpu import run

    return run(__file__, {"models": [[str(f)] for f in folders], "prompts": prompts, "count": count, "more": options})


def _repair() -> None:
    """Two faults of vLLM 0.32 that are of its CPU build alone. The rope of this model has no CPU method: the inherited
    one calls it with an argument too many. And its CPU router leaves the correction bias out where experts are not in
    groups; with all experts in one group the same router adds it."""
    from vllm.model_executor.layers.fused_moe.router import cpu_router
    from vllm.model_executor.layers.rotary_embedding.ernie45_vl_rope import Ernie4_5_VLRotaryEmbedding as Rope

    def forward_cpu(self: Any, positions: Any, query: Any, key: Any = None, offsets: Any = None) -> Any:
        assert offsets is None
        return self.forward_native(positions, query, key)

    made = cpu_router.CPURouter.__init__

    def __init__(self: Any, **given: Any) -> None:
        if given["e_score_correction_bias"] is not None and not given["use_grouped_topk"]:
            given |= {"use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1}
        made(self, **given)

    Rope.forward_cpu = forward_cpu
    cpu_router.CPURouter.__init__ = __init__


def _watch(noted: dict[str, Any], file: str) -> None:
    """Weights, positions and choice of experts, noted as they are made; parameters are repacked for the CPU later."""
    from safetensors.torch import save_file
    from vllm.model_executor.models.ernie45_vl import Ernie4_5_VLMoeForConditionalGeneration as Model

    load, place, mask = Model.load_weights, Model.get_mrope_input_positions, Model._set_visual_token_mask

    def load_weights(self: Any, weights: Any) -> set[str]:
        def counted() -> Iterator[tuple[str, Any]]:
            for name, value in weights:
                noted["offered"].append(name)
                yield name, value

        for value in self.parameters():
            value.data.fill_(float("nan"))  # what no tensor fills is seen
        filled: set[str] = load(self, counted())
        noted["loaded"] = sorted(filled)
        save_file({name: value.detach().clone() for name, value in self.named_parameters()}, file)
        return filled

    def get_mrope_input_positions(self: Any, input_tokens: list[int], mm_features: Any) -> Any:
        found = place(self, input_tokens, mm_features)
        noted["positions"].append([list(map(int, input_tokens)), found[0].tolist(), int(found[1])])
        return found

    def _set_visual_token_mask(self: Any, input_ids: Any) -> None:
        mask(self, input_ids)
        if self.visual_token_mask is not None:
            noted["visual"] |= set(input_ids[self.visual_token_mask[:, 0]].tolist())

    Model.load_weights, Model.get_mrope_input_positions = load_weights, get_mrope_input_positions
    Model._set_visual_token_mask = _set_visual_token_mask


def _given(prompt: dict[str, Any]) -> dict[str, Any]:
    """As `LLM.generate` takes it."""
    import numpy as np
    from PIL import Image

    media: dict[str, Any] = {}
    if files := prompt.get("image"):
        media["image"] = [Image.open(file) for file in files]
    for file in prompt.get("video", ()):
        frames = np.load(file)
        n = len(frames)
        told = {"fps": 2.0, "duration": n / 2, "total_num_frames": n, "frames_indices": list(range(n))}
        media.setdefault("video", []).append((frames, {**told, "do_sample_frames": False}))
    return {"prompt": prompt["prompt"], **({"multi_modal_data": media} if media else {})}


def _serve() -> None:
    import vllm  # noqa: F401 - once, before the first fork

    base = runpy.run_path(str(CPU))
    asked = json.load(sys.stdin)
    _repair()

    def answer(folder: str) -> dict[str, Any]:
        noted: dict[str, Any] = {"positions": [], "visual": set(), "offered": []}
        file = f"{folder}.parameters.safetensors"
        _watch(noted, file)
        limits = {"image": 2, "video": 1}
        model = base["engine"](folder, "float32", trust_remote_code=True, limit_mm_per_prompt=limits, **asked["more"])
        noted["positions"].clear()  # of prompts it made up to measure memory
        told = base["answers"](model, [_given(prompt) for prompt in asked["prompts"]], asked["count"])
        return {**told, **noted, "visual": sorted(noted["visual"]), "parameters": file}

    base["serve_each"](asked, answer)


if __name__ == "__main__":
    _serve()
