"""The pre-norm decoder every model here assembles: embedding, layers, norm, head. Single device; no ranks.

B batch, L length, H hidden, V vocab.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from erniekit.kernels.cross_entropy import CHUNK
from erniekit.kernels.embedding_noise import with_noise
from erniekit.kernels.packed_attention import for_kernel
from erniekit.kernels.rope import cos_sin, cos_sin_of_axes, inverse_frequencies
from erniekit.model_contract import OutputHead, TokenEmbedding, Tower
from erniekit.models.config import DecoderConfig
from erniekit.models.layers.attention import Attention, Context, InnerAttention
from erniekit.models.layers.head import LocalHead
from erniekit.models.layers.mlp import MLP
from erniekit.models.layers.modal import ModalMoE, lengths_of
from erniekit.models.layers.moe import MoE
from erniekit.models.layers.mtp import NextToken
from erniekit.models.layers.norm import RMSNorm, norm_of_sum
from erniekit.parallel.plan import column, experts, experts_in, heads, heads_in, row, vocab

# How these weights shard; everything not named here is replicated.
PLAN = {
    "embed": vocab(),
    "*.attn.qkv": heads(),
    "*.attn.out": heads_in(),
    "*.experts.gate_up": experts(parts=2),
    "*.experts.down": experts_in(),
    "*.gate_up": column(parts=2),
    "*.down": row(),
    "head": vocab(),
    "head_bias": vocab(),
}


class DecoderLayer(nn.Module):
    """number: its place among the layers, which decides whether it has experts; None is dense."""

    here = True

    def __init__(self, config: DecoderConfig, number: int | None = None) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.sparse = number is not None and config.sparse(number)
        self.mlp: nn.Module
        if number is not None and self.sparse:
            assert config.moe is not None
            self.mlp = MoE(config, number) if config.moe.vision is None else ModalMoE(config, number)
        else:
            self.mlp = MLP(config.hidden_size, config.intermediate_size, config.mlp_bias)

    def attend(self, x_BLH: torch.Tensor, ctx: Context) -> tuple[torch.Tensor, torch.Tensor]:
        """x, and what attention adds to it."""
        x_BLH, h_BLH = norm_of_sum(self.attn_norm, x_BLH)
        return x_BLH, self.attn(h_BLH, ctx)

    def forward(self, x_BLH: torch.Tensor, ctx: Context) -> torch.Tensor:
        x_BLH, h_BLH = norm_of_sum(self.mlp_norm, *self.attend(x_BLH, ctx))
        result: torch.Tensor = x_BLH + (self.mlp(h_BLH, ctx) if self.sparse else self.mlp(h_BLH))
        return result


def _embedding(count: int, width: int) -> nn.Embedding:
    """On the meta device nothing is drawn: there torch would import its compiler (seconds) to draw nothing."""
    weight = torch.empty(count, width)
    return nn.Embedding(count, width, _weight=weight) if weight.is_meta else nn.Embedding(count, width)


class LocalEmbedding(nn.Module):
    """The whole vocabulary is here."""

    def forward(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, weight)


class Decoder(nn.Module):
    """A SpreadModel of model_contract.py."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.length_step = 1  # of text and vision tokens; more where layers are recorded (parallel/cuda_graphs.py)
        self.embedding: TokenEmbedding = LocalEmbedding()
        self.embed = _embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mtp = nn.ModuleList(NextToken(config, DecoderLayer(config)) for _ in range(config.mtp_layers))
        if config.labels:
            self.score = nn.Linear(config.hidden_size, len(config.labels), bias=False)
        elif not config.tie_word_embeddings:
            self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.head_bias)
        elif config.head_bias:
            self.head_bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.output: OutputHead = LocalHead()
        self.row_slice = (0, 1)  # which slice of every row is here, of how many (sequence parallelism)
        self.first = self.last = True  # a pipeline stage may be neither
        self.mtp_weight = 0.0  # of the losses further ahead; 0: those layers rest
        self.records: list[dict[tuple[str, int], Any]] | None = None  # one a micro-batch, where they are read

    def held_layers(self) -> Iterator[tuple[int, Any]]:
        return ((number, layer) for number, layer in enumerate(self.layers) if layer.here)

    def blocks(self) -> Iterator[Any]:
        yield from (layer for _, layer in self.held_layers())
        yield from (ahead.block for ahead in self.mtp)

    def embed_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """[B, L] -> [B, L, H]."""
        embedded: torch.Tensor = self.embedding(ids, self.embed.weight)
        return embedded

    def embed_batch(self, ids: torch.Tensor, more: Any) -> torch.Tensor:
        """What the layers start from, [B, L, H]: the tokens' embeddings, in training with the batch's noise, and the
        features of towers in their places."""
        x_BLH = self.embed_ids(ids)
        noise = None if more is None else more.noise
        if noise is not None and self.training and torch.is_grad_enabled():
            rank, ranks = self.row_slice
            x_BLH = with_noise(x_BLH, *(of_row.chunk(ranks, dim=1)[rank] for of_row in noise))
        for tower in self.towers().values():
            x_BLH = tower.put_into(x_BLH, more)
        return x_BLH

    def towers(self) -> Mapping[str, Tower]:
        """What stands in front of the layers, by name (layers/tower.py)."""
        return {}

    def front(self) -> Iterator[nn.Module]:
        """Blocks in front of the layers, on the first stage, each gathered by itself where weights are spread."""
        if self.first:
            for tower in self.towers().values():
                yield from tower.blocks()

    def head_weight(self) -> torch.Tensor:
        """[V, H]; the embedding itself when tied. Of a model with a score head [labels, H]."""
        if self.config.labels:
            return self.score.weight
        return self.embed.weight if self.config.tie_word_embeddings else self.head.weight

    def head_bias_or_none(self) -> torch.Tensor | None:
        if not self.config.head_bias or self.config.labels:
            return None
        return self.head_bias if self.config.tie_word_embeddings else self.head.bias

    def head_logits(self, normed: torch.Tensor) -> torch.Tensor:
        """[..., H] behind the model's norm -> [..., V], of a model with a score head [..., labels]."""
        logits: torch.Tensor = self.output.logits(normed, self.head_weight(), self.head_bias_or_none())
        return logits

    def context(
        self,
        positions: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        max_doc: int | None = None,
        more: Any = None,
    ) -> Context:
        """What all layers share for one batch."""
        c = self.config
        freq = inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling, positions.device, self.angle_dtype())
        shared, real, modality = (None, None, None) if more is None else (more.shared, more.real, more.modality)
        record: dict[tuple[str, int], Any] | None = None
        if self.records is not None and torch.is_grad_enabled():
            self.records.append(record := {})
        if c.mrope is None:
            cos, sin = cos_sin(positions, freq)
        else:
            axes = positions if positions.dim() == 3 else positions[..., None].expand(*positions.shape, 3)
            cos, sin = cos_sin_of_axes(axes, freq, c.mrope)
            positions = axes[..., 0]
        kernel, packs = None, None
        if self.attends_itself():
            group = c.num_heads // c.num_kv_heads
            kernel, packs = for_kernel(cu_seqlens, max_doc, shared, positions, group, c.head_dim)
        lengths = None if modality is None else lengths_of(modality, more.vision_tokens, self.length_step)
        members = None if more is None or record is None else more.members
        return Context(cos, sin, cu_seqlens, max_doc, shared, real, record, kernel, packs, modality, lengths, members)

    def angle_dtype(self) -> torch.dtype:
        """Of rotary positions: fp32, also where weights are 16-bit; a model in float64 has them in float64."""
        return torch.float64 if next(self.parameters()).dtype == torch.float64 else torch.float32

    def attends_itself(self) -> bool:
        """False where the inner attention was replaced: a server's, over its cache, needs no kernels from here."""
        inner = (layer.attn.inner for _, layer in self.held_layers())
        return all(isinstance(each, InnerAttention) and each.with_positions for each in inner)

    def run_layers(self, x_BLH: torch.Tensor, ctx: Context) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if ctx.record is None:
                x_BLH = layer(x_BLH, ctx)
                continue
            # A record of its own: compiled layers are one program, which has no layer's number.
            own: dict[str, Any] = {}
            x_BLH = layer(x_BLH, ctx._replace(record=own))
            ctx.record.update({(name, number): value for name, value in own.items()})
        return x_BLH

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        max_doc: int | None = None,
        labels: torch.Tensor | None = None,
        ignore: int = -100,
        chunk: int = CHUNK,
        more: Any = None,
        per_token: bool = False,
        scale: float | None = None,
        embedded: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Token ids [B, L] -> logits [B, L, V], or with labels [B, L] the SUM of their losses (fp32), times scale; with
        per_token the loss of each position [B, L], zero where ignored.

        A pipeline stage that lacks the embedding takes hidden states instead; one that lacks the head returns them.
        more: data.types.More, what only some batches have. scale: see kernels/cross_entropy.py. embedded [B, L, H]
        takes the place of the ids' embeddings, where some positions hold what is no token.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])
        ctx = self.context(positions, cu_seqlens, max_doc, more)
        x_BLH = tokens if not self.first else self.embed_batch(tokens, more) if embedded is None else embedded
        x_BLH = self.run_layers(x_BLH, ctx)
        if not self.last:
            return x_BLH
        h_BLH = self.norm(x_BLH)
        if labels is None:
            return self.head_logits(h_BLH)
        if per_token:
            weight, bias = self.head_weight(), self.head_bias_or_none()
            count = None if more is None else more.trained
            return self.output.token_losses(h_BLH, weight, labels, bias, ignore, chunk, count)
        loss = self.answers_loss(h_BLH, labels, ignore, chunk, scale, ctx, more)
        future = None if more is None else more.future
        if future is not None and self.mtp_weight and ctx.record is not None:
            further = self.losses_ahead(x_BLH, future, ctx, ignore, chunk, scale)
            loss = loss + (further - further.detach())  # trained on, never part of the reported loss
        return loss

    def answers_loss(
        self, h_BLH: torch.Tensor, labels: torch.Tensor, ignore: int, chunk: int, scale: float | None, ctx: Context,
        more: Any,
    ) -> torch.Tensor:  # fmt: skip
        """The SUM of the labels' losses, times scale."""
        count = None if more is None else more.trained
        weight, bias = self.head_weight(), self.head_bias_or_none()
        loss: torch.Tensor = self.output.loss(h_BLH, weight, labels, bias, ignore, chunk, count, scale)
        return loss

    def losses_ahead(
        self, x_BLH: torch.Tensor, future: Any, ctx: Context, ignore: int, chunk: int, scale: float | None = None
    ) -> torch.Tensor:
        """The weighted SUM of what each further layer loses, times scale; x is the trunk's state before its norm."""
        share = self.mtp_weight / len(self.mtp)
        inner = None if scale is None else scale * share
        weight, bias = self.head_weight(), self.head_bias_or_none()
        total = torch.zeros((), device=x_BLH.device)
        for depth, ahead in enumerate(self.mtp):
            labels, count = future.labels[..., depth], future.trained[depth] if future.trained else None
            x_BLH = ahead(self.embed_ids(future.ids[..., depth]), x_BLH, ctx)
            loss = self.output.loss(self.norm(x_BLH), weight, labels, bias, ignore, chunk, count, inner)
            if ctx.record is not None:
                recorded = loss.detach() if inner is None else loss.detach() / inner
                ctx.record["mtp_loss", depth] = (recorded, (labels != ignore).sum())
            total = total + loss
        return total * share if inner is None else total


if TYPE_CHECKING:  # the contract, checked where it is kept
    from erniekit.model_contract import DecoderBlock, SpreadModel

    def _block(layer: DecoderLayer) -> DecoderBlock:
        return layer

    def _model(model: Decoder) -> SpreadModel:
        return model
