"""transformers' own model classes in a plain training loop, tuned: its best attention, fused AdamW, layers compiled.

Base of the other peers. A preference pair is two rows, as its ecosystem does it, and only answers reach the head.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from erniekit.bench.data import PeerRows
from erniekit.bench.recipe import LEARNING_RATE
from erniekit.bench.runner import Runner, StepNumbers
from erniekit.bench.weights import fill, peer_tensors, plain_parameter, require_filled
from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.data.types import IGNORE

BETA = 0.1  # of DPO: the default of the key
BETAS, EPS, DECAY, CLIP = (0.9, 0.95), 1e-8, 0.1, 1.0  # speed does not depend on them


class Transformers(Runner):
    name = "hf"
    compiled = False
    masters = False  # fp32 weights and moments behind the 16-bit weights, as ours
    best_attention = False  # FlashAttention-4 where transformers can use it
    thrifty = False  # layers are computed again in the backward pass, though the workload does not require it

    def build(self) -> None:
        task, work = self.task, self.task.workload
        self.packed = work.rows.mean > 0
        self.flash4 = self.best_attention and flash4_serves(task.device)
        self.model: Any = self.adapted(self.plain_model())
        self.reference: Any = None
        if work.stage == "DPO" and not work.lora and not self.cached:
            self.reference = self.plain_model().eval().requires_grad_(False)
        self.model.train()
        again = work.recompute or self.thrifty
        if again:
            self.recompute()
        notes = (("FlashAttention-4", self.flash4), ("layers recomputed", again))
        self.note = ", ".join(note for note, on in notes if on)
        if self.compiled:
            self.compile_layers()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.trained = trained
        self.updated = [p.detach().float() for p in trained] if self.masters else trained
        fused = task.device.type == "cuda" or all(p.dtype == torch.float32 for p in self.updated)
        self.optimizer = torch.optim.AdamW(self.updated, LEARNING_RATE, BETAS, EPS, DECAY, fused=fused)
        self.kept: dict[int, torch.Tensor] = {}
        if self.cached:
            for place, data in enumerate(task.steps):
                with torch.no_grad():
                    self.kept[place] = self.answer_sums(self.model, data.rows.to(task.device))

    @property
    def cached(self) -> bool:
        return self.task.workload.keys.get("reference_logps") == "cached"

    # --- the model ---

    def plain_model(self) -> Any:
        """A model of transformers' with the benchmark's weights, without ever initialising its own."""
        import transformers

        task, work = self.task, self.task.workload
        folder = ModelFolder(task.folder, weights=False)
        written = folder.spec.write_config(folder.config, "hf", str(task.dtype).removeprefix("torch."))
        config = transformers.AutoConfig.for_model(**written)
        config.use_cache = False
        options: dict[str, Any] = {"attn_implementation": self.attention(), "dtype": task.dtype}
        if folder.config.moe is not None:
            config._experts_implementation = "grouped_mm"
        with torch.device("meta"):
            model: Any = transformers.AutoModelForCausalLM.from_config(config, **options)
        layout = "hf_fused" if folder.config.moe is not None else "hf"
        tensors = peer_tensors(folder, layout, task.dtype, task.device, task.options.seed, work.skew)
        fill(model, tensors, self.parameter)
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(task.device)
        if folder.config.tie_word_embeddings:
            model.lm_head.weight = model.model.embed_tokens.weight
        require_filled(model)
        return model

    def parameter(self, name: str, tensor: torch.Tensor, trained: bool) -> nn.Parameter:
        """As the model holds it."""
        return plain_parameter(name, tensor, trained)

    def attention(self) -> str:
        if self.flash4:
            return "flash_attention_4"
        flex = self.packed and self.task.device.type == "cuda"  # a CPU has no backward for it
        return "flex_attention" if flex else "sdpa"

    def documents(self, rows: PeerRows) -> dict[str, Any]:
        """The arguments that give the model a row's document bounds."""
        given: dict[str, Any] = {} if rows.positions is None else {"position_ids": rows.positions}
        if self.flash4 and rows.bounds is not None:  # else it would look for them in every layer, and wait for the card
            given |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), rows.bounds)
            given |= dict.fromkeys(("max_length_q", "max_length_k"), rows.longest)
        return given

    def adapted(self, model: Any) -> Any:
        """With adapters, where the peer has them."""
        return model

    def compile_layers(self) -> None:
        """The reference's too: rounded otherwise, a first step would not lose ln 2."""
        for model in (self.model, self.reference):
            for layer in () if model is None else _layers(model):
                layer.compile()
        self.head_loss = torch.compile(_head_loss)

    def recompute(self) -> None:
        self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def save_memory(self) -> bool:
        thriftier = not (self.task.workload.recompute or self.thrifty)
        self.thrifty = True
        return thriftier

    # --- one step ---

    def step(self, number: int) -> StepNumbers:
        place = number % len(self.task.steps)
        rows = self.task.steps[place].rows.to(self.task.device)
        found = self.preference(rows, place) if rows.scored else StepNumbers(self.loss(rows))
        found.loss.backward()
        norm = nn.utils.clip_grad_norm_(self.trained, CLIP, foreach=True)
        self.update()
        return StepNumbers(found.loss.detach(), {**found.numbers, "grad_norm": norm.detach()})

    def update(self) -> None:
        if self.masters:
            for master, weight in zip(self.updated, self.trained):
                assert weight.grad is not None
                master.grad, weight.grad = weight.grad.float(), None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.masters:
            torch._foreach_copy_([p.data for p in self.trained], self.updated)

    def loss(self, rows: PeerRows) -> torch.Tensor:
        """The mean over trained tokens."""
        given = self.documents(rows)
        if not self.compiled:
            out: torch.Tensor = self.model(input_ids=rows.ids, labels=rows.unshifted, use_cache=False, **given).loss
            return out
        hidden = self.model.model(input_ids=rows.ids, use_cache=False, **given).last_hidden_state
        loss: torch.Tensor = self.head_loss(hidden.flatten(0, 1), self.model.lm_head.weight, rows.labels.flatten())
        return loss

    # --- preferences ---

    def preference(self, rows: PeerRows, place: int) -> StepNumbers:
        sums = self.answer_sums(self.model, rows)
        reference = self.kept.get(place)
        if reference is None:
            with torch.no_grad(), self.as_reference() as model:
                reference = self.answer_sums(model, rows)
        margin = (sums - reference).view(-1, 2)
        loss = -F.logsigmoid(BETA * (margin[:, 0] - margin[:, 1])).mean()
        each = sums.detach().view(-1, 2).mean(0)
        return StepNumbers(loss, {"logps/chosen": each[0], "logps/rejected": each[1]})

    @contextlib.contextmanager
    def as_reference(self) -> Iterator[Any]:
        yield self.reference

    def answer_sums(self, model: Any, rows: PeerRows) -> torch.Tensor:
        """fp32 [rows]: log-probability of each row's answer."""
        logits = model(input_ids=rows.ids, logits_to_keep=rows.scored, use_cache=False).logits
        labels = rows.labels[:, -rows.scored :]
        losses = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="none")
        return -losses.view_as(labels).sum(1)

    # --- the interface of any runner ---

    @torch.no_grad()
    def probe_logits(self) -> torch.Tensor:
        with torch.compiler.set_stance("force_eager"):
            out: torch.Tensor = self.model(input_ids=self.task.probe(), use_cache=False).logits
        return out[0].float()

    def trainable(self) -> int:
        return sum(p.numel() for p in self.trained)


class CompiledTransformers(Transformers):
    """Whole decoder layers compiled, and the head with its loss: most of what its eager norms and RoPE cost is gone."""

    name = "hf+compile"
    compiled = True

    def save_memory(self) -> bool:
        return False  # checkpointing wraps the layers; compiled ones stay as they are


class CompiledFlash4(CompiledTransformers):
    """The same with FlashAttention-4, which the compiler cannot read: a layer is two compiled parts around it."""

    name = "hf+fa4"
    best_attention = True


@functools.cache
def flash4_serves(device: torch.device) -> bool:
    """Also makes its functions opaque to the compiler wherever transformers calls them."""
    from transformers import modeling_flash_attention_utils as utils
    from transformers.utils import is_flash_attn_4_available

    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9 or not is_flash_attn_4_available():
        return False
    warnings.filterwarnings("ignore", message="Argument aux_data")  # its own compiler's, of its own code
    utils.lazy_import_flash_attention("flash_attention_4")
    for name in ("_flash_fn", "_flash_varlen_fn"):
        setattr(utils, name, torch.compiler.disable(getattr(utils, name)))
    return True


def _layers(model: Any) -> Iterable[nn.Module]:
    return next(m.layers for m in model.modules() if isinstance(getattr(m, "layers", None), nn.ModuleList))


def _head_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, ignore_index=IGNORE)
