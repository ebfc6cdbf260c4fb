"""transformers' own class for ERNIE-4.5-VL with PEFT's adapters on attention: a peer with pictures. Listed in PEERS.

Documents of a row are kept apart by FlashAttention's sequence bounds where it is available, else by a mask.
"""

from __future__ import annotations

from typing import Any

import torch

from erniekit.bench.data import PeerRows
from erniekit.bench.peers.peft import PeftAttention
from erniekit.bench.weights import fill, peer_tensors, require_filled
from erniekit.checkpoint.model_folder import ModelFolder


class VisionPeft(PeftAttention):
    name = "peft-vl"

    def plain_model(self) -> Any:
        import transformers

        task = self.task
        folder = ModelFolder(task.folder, weights=False)
        written = folder.spec.write_config(folder.config, "hf_fused", str(task.dtype).removeprefix("torch."))
        config = transformers.AutoConfig.for_model(**written)
        config.text_config.use_cache = False
        config.text_config._experts_implementation = "grouped_mm"
        # The tower by SDPA: transformers hands the bounds of the documents on to it, where FlashAttention has its own.
        ways = {"": self.attention(), "text_config": self.attention(), "vision_config": "sdpa"}
        options: dict[str, Any] = {"attn_implementation": ways, "dtype": task.dtype}
        with torch.device("meta"):
            model: Any = transformers.AutoModelForImageTextToText.from_config(config, **options)
        fill(model, peer_tensors(folder, "hf_fused", task.dtype, task.device, task.options.seed, skew=False))
        self._rotations(model, config)
        if folder.config.tie_word_embeddings:
            model.lm_head.weight = model.model.language_model.embed_tokens.weight
        require_filled(model)
        shape = folder.config.vision
        assert shape is not None
        size = shape.patch**2
        self.mean, self.std = (
            torch.tensor(values, device=task.device).repeat_interleave(size) for values in (shape.mean, shape.std)
        )
        return model

    def _rotations(self, model: Any, config: Any) -> None:
        """Tables that are computed, not read."""
        text = model.model.language_model
        text.rotary_emb = type(text.rotary_emb)(config=config.text_config).to(self.task.device)
        tower = model.model.vision_tower
        tower.rotary_pos_emb = type(tower.rotary_pos_emb)(config.vision_config).to(self.task.device)

    def attention(self) -> str:
        return "flash_attention_4" if self.flash4 else "sdpa"

    def documents(self, rows: PeerRows) -> dict[str, Any]:
        given: dict[str, Any] = {}
        length = rows.ids.shape[1]
        if rows.vision is not None and rows.positions is not None and rows.modality is not None:
            pixels = (rows.vision.patches.float() / 255 - self.mean) / self.std
            kinds = rows.modality.int()
            place = torch.zeros_like(kinds).view(-1).index_fill(0, rows.vision.places, 1).view_as(kinds)
            given = dict(
                position_ids=rows.positions.permute(2, 0, 1), moe_mm_token_type_ids=kinds, mm_token_type_ids=place,
                pixel_values=pixels.to(self.task.dtype), image_grid_thw=rows.vision.grids.to(rows.ids.device),
            )  # fmt: skip
        if rows.bounds is None or len(rows.bounds) == 2:
            return given
        if self.flash4:
            given |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), rows.bounds)
            given |= dict.fromkeys(("max_length_q", "max_length_k"), int(rows.longest))
            return given
        where = torch.arange(length, device=rows.ids.device)
        document = torch.bucketize(where, rows.bounds[1:], right=True)
        mask = (document[:, None] == document) & (where[:, None] >= where)
        return given | {"attention_mask": mask[None, None]}
