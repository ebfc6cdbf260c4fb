"""Records what TRL computes for KTO, a reward model and distillation, for the tests of the same losses here.

Needs trl (1.16.0 made the files beside this), transformers and torch: python tests/data/trl/record.py
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import torch
import trl
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.utils import add_fused_lm_head

HERE = Path(__file__).resolve().parent
CONFIG = dict(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=False, pad_token_id=0,
    bos_token_id=1, eos_token_id=2, initializer_range=0.3,
)  # fmt: skip
# prompt, answer, verdict; the lengths differ, so that padding would show
ROWS = [
    ([5, 6, 7], [8, 9, 2], True),
    ([10, 11], [12, 13, 14, 15, 2], False),
    ([16, 17, 18, 19], [20, 2], True),
    ([21], [22, 23, 24, 2], True),
]
PAIRS = [([5, 6, 7], [8, 9, 2], [10, 2]), ([10, 11], [12, 2], [13, 14, 15, 2]), ([21], [22, 23, 2], [24, 2])]
MARGINS = [0.5, 0.0, 1.5]


class Accelerator:
    device = torch.device("cpu")

    def gather_for_metrics(self, value: Any) -> Any:
        return value

    gather = gather_for_metrics


def trainer(**fields: Any) -> SimpleNamespace:
    metrics = defaultdict(lambda: defaultdict(list))
    return SimpleNamespace(accelerator=Accelerator(), _metrics=metrics, _total_train_tokens=0, _tp_size=1, **fields)


def padded(sequences: list[list[int]]) -> torch.Tensor:
    width = max(map(len, sequences))
    return torch.tensor([ids + [0] * (width - len(ids)) for ids in sequences])


def reference_of(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The policy with every matrix a tenth larger: near it, and not it."""
    other = LlamaForCausalLM(model.config)
    other.load_state_dict({k: v * 1.1 if v.dim() > 1 else v for k, v in model.state_dict().items()})
    return other


def gradients(model: torch.nn.Module) -> dict[str, float]:
    return {name: float(p.grad.norm()) for name, p in model.named_parameters() if p.grad is not None}


def kto(model: LlamaForCausalLM) -> dict[str, Any]:
    out = {"rows": ROWS, "runs": []}
    for beta, good, bad in ((0.1, 1.0, 1.0), (0.5, 1.33, 0.75)):
        model.zero_grad()
        reference = reference_of(model)
        for each in (model, reference):
            add_fused_lm_head(each, outputs=("log_probs", "entropy", "mean_logits"))
        answers = [answer for _, answer, _ in ROWS]
        batch: dict[str, torch.Tensor] = {"label": torch.tensor([label for _, _, label in ROWS])}
        for prefix, given in (("", answers), ("KL_", answers[-1:] + answers[:-1])):
            lengths = [(len(p), len(p) + len(a)) for (p, _, _), a in zip(ROWS, given)]
            ids = padded([p + a for (p, _, _), a in zip(ROWS, given)])
            place = torch.arange(ids.shape[1])
            batch[f"{prefix}input_ids"] = ids
            batch[f"{prefix}attention_mask"] = torch.stack([(place < end).long() for _, end in lengths])
            batch[f"{prefix}completion_mask"] = torch.stack(
                [((place >= start) & (place < end)).long() for start, end in lengths]
            )
        fake = trainer(
            model=model, ref_model=reference, calculate_KL=True, aux_loss_enabled=False, precompute_ref_logps=False,
            args=SimpleNamespace(gradient_checkpointing_kwargs=None), beta=beta, loss_type="kto",
            desirable_weight=good, undesirable_weight=bad,
        )  # fmt: skip
        fake._compute_kl_logps = MethodType(KTOTrainer._compute_kl_logps, fake)
        loss = KTOTrainer._compute_loss(fake, model, batch, False)
        loss.backward()
        told = {name: values[-1] for name, values in fake._metrics["train"].items()}
        keep = ("kl", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected")
        out["runs"].append(
            {"beta": beta, "desirable_weight": good, "undesirable_weight": bad, "loss": float(loss),
             "metrics": {name: told[name] for name in keep}, "gradients": gradients(model)}
        )  # fmt: skip
    return out


def reward(model: LlamaForCausalLM) -> dict[str, Any]:
    score = [[round(0.1 * ((7 * i) % 11 - 5), 1) for i in range(CONFIG["hidden_size"])]]
    scorer = LlamaForSequenceClassification(LlamaConfig(**CONFIG, num_labels=1))
    scorer.model.load_state_dict(model.model.state_dict())
    scorer.score.weight.data = torch.tensor(score)
    out = {"pairs": PAIRS, "margins": MARGINS, "score": score, "runs": []}
    for margins, centre in ((False, None), (True, None), (True, 0.01)):
        scorer.zero_grad()
        sequences = [p + c for p, c, _ in PAIRS] + [p + r for p, _, r in PAIRS]
        ids = padded(sequences)
        mask = torch.stack([(torch.arange(ids.shape[1]) < len(s)).long() for s in sequences])
        inputs = {"input_ids": ids, "attention_mask": mask}
        if margins:
            # The trainer hands its inputs to the model, which takes no margin: as its data collator's signature does.
            inputs["margin"] = torch.tensor(MARGINS)
        fake = trainer(model=scorer, args=SimpleNamespace(center_rewards_coefficient=centre))

        def call(margin: Any = None, **more: Any) -> Any:
            return scorer(**more)

        loss = RewardTrainer.compute_loss(fake, call, inputs)
        loss.backward()
        told = {name: values[-1] for name, values in fake._metrics["train"].items() if isinstance(values[-1], float)}
        out["runs"].append(
            {"with_margins": margins, "center_rewards_coefficient": centre, "loss": float(loss),
             "metrics": told, "gradients": gradients(scorer)}
        )  # fmt: skip
    return out


def distillation(model: LlamaForCausalLM) -> dict[str, Any]:
    rows = [prompt + answer for prompt, answer, _ in ROWS]
    starts = [len(prompt) for prompt, _, _ in ROWS]
    ids = padded(rows)
    labels = torch.full_like(ids, -100)
    for k, (row, start) in enumerate(zip(rows, starts)):
        labels[k, start - 1 : len(row) - 1] = ids[k, start : len(row)]
    teacher = reference_of(model)
    out = {"rows": rows, "starts": starts, "runs": []}
    for beta, temperature in ((0.0, 1.0), (0.0, 2.0), (1.0, 1.0), (1.0, 0.5)):
        model.zero_grad()
        with torch.no_grad():
            theirs = teacher(ids).logits
        # Rows are padded behind, so that no mask is needed for the places that count.
        loss = GKDTrainer.generalized_jsd_loss(model(ids).logits, theirs, labels, beta, temperature)
        loss.backward()
        out["runs"].append(
            {"beta": beta, "temperature": temperature, "loss": float(loss), "gradients": gradients(model)}
        )
    return out


def main() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    model.train()
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, HERE / "model.safetensors")
    model.config.save_pretrained(HERE)
    recorded = {"trl": trl.__version__, "kto": kto(model)}
    plain = LlamaForCausalLM(model.config)
    plain.load_state_dict(model.state_dict())
    recorded |= {"reward": reward(plain), "distillation": distillation(plain)}
    (HERE / "recorded.json").write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
