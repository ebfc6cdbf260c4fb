"""The checks before training: labels, end tokens, leaks, gradients, template, disk, device. Each failure has its fix.

`erniekit doctor RECIPE` (doctor_command.py) runs only these; every training run starts with them (`doctor: off` skips
them).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import groupby, pairwise
from math import prod
from pathlib import Path

import torch

from erniekit.checkpoint.model_folder import ModelFolder
from erniekit.config import RunConfig
from erniekit.data.collate import one_document, with_future
from erniekit.data.tokenizer import Tokenizer
from erniekit.data.types import IGNORE, TEXT, Batch
from erniekit.errors import ErnieKitError
from erniekit.log import colour_on, emit, paint
from erniekit.lora.inject import is_lora
from erniekit.model_contract import spread
from erniekit.models.layers.router import Router
from erniekit.models.vision_parts import part_of
from erniekit.optim.adamw import AdamW
from erniekit.optim.in_backward import facts_of, seen_gradients
from erniekit.parallel.compiled import eager
from erniekit.parallel.gradients import local
from erniekit.parallel.sharding_table import plain
from erniekit.printable import counted
from erniekit.recipes import own_loss
from erniekit.recipes.built import Built
from erniekit.recipes.check import MOVED_BY_ROUNDING, Check
from erniekit.recipes.datasets import TrainData
from erniekit.recipes.preview import joined
from erniekit.recipes.stage import Prepare, TrainingStage

LEAK_TOKENS = 24  # of each document in the leak probe
GRADIENT_TOKENS = 512
MOST_REPEATED = 3  # tokens in a row that are shown one by one
SAMPLED_ROWS = 200  # samples looked at for end tokens
WEIGHTS = "weights"  # the name of a check that only a model with NaN or infinity fails


class DoctorError(ErnieKitError):
    """A run that would have wasted its time."""


def before_training(
    stage: TrainingStage,
    cfg: RunConfig,
    built: Built,
    optimizer: AdamW,
    data: TrainData,
    tokenizer: Tokenizer,
    first: Batch,
    prepare: Prepare | None = None,
) -> list[Check]:
    """Runs every check, prints one line for those that passed and one for each that did not; raises on failure."""
    labels_shown = first.labels if stage.labels_are_tokens else torch.full_like(first.labels, IGNORE)
    emit(sample_lines(replace(first, labels=labels_shown), tokenizer))
    for line in stage.picture_lines(built, data):
        emit(f"         {line}")
    checks: list[Callable[[], Check]] = [lambda: labels(data)]
    if stage.chats:
        checks += [lambda: end_is_trained(data, tokenizer), lambda: template(stage.prompts(cfg, data, tokenizer))]
    if stage.separates_documents(cfg):
        checks.append(lambda: no_leak(built))
    checks += stage.more_checks(built, tokenizer, first)
    checks += [
        lambda: gradients(built, optimizer, first, prepare, stage.own_loss),
        lambda: disk(cfg, built, optimizer),
        lambda: vocabulary(built.folder.config.vocab_size, tokenizer),
    ]
    with eager():  # every check has a batch of its own shape
        done = []
        for check in checks:
            done.append(check())
            if done[-1].name == WEIGHTS and not done[-1].ok:  # all that follows would be of NaN
                break
    passed = [c for c in done if c.ok]
    emit(f"checks   {paint('ok', 'green')}: " + "; ".join(c.text for c in passed))
    failed = [c for c in done if not c.ok]
    if failed:
        raise DoctorError(
            "; ".join(f"{c.name}: {c.text}" for c in failed),
            where="doctor",
            fix="; ".join(c.fix for c in failed) + " (doctor: off skips these checks)",
        )
    return done


def sample_lines(batch: Batch, tokenizer: Tokenizer, limit: int = 90) -> str:
    """One example as the model sees it: trained tokens green (or in brackets), the rest dim."""
    if batch.modality is not None:
        limit += int((batch.modality[0, : int(batch.cu_seqlens[1])] != TEXT).sum())
    end = min(int(batch.cu_seqlens[1]), limit)
    ids, labels = batch.input_ids[0, :end].tolist(), batch.labels[0, :end].tolist()
    # labels[i] is the target of position i, so token i+1 is shown as trained; the last target is shown itself.
    tokens = [*ids, labels[-1]] if labels[-1] != IGNORE else ids
    trained = [False] + [label != IGNORE for label in labels]
    out, run, state = [], "", False
    whole = joined(list(zip(tokenizer.pieces(tokens), trained)))
    for piece, on in _repeats_counted(whole):
        if on != state:
            out.append(_styled(run, state))
            run, state = "", on
        run += piece
    out.append(_styled(run, state))
    more = " ..." if int(batch.cu_seqlens[1]) > limit else ""
    text = "".join(out).replace("\n", "\\n")
    return f"sample   {text}{more}"


def _repeats_counted(pieces: Iterable[tuple[str, int]]) -> Iterator[tuple[str, bool]]:
    """A picture's placeholders as one piece with their number."""
    for (piece, on), same in groupby(pieces):
        count = len(list(same))
        if count > MOST_REPEATED:
            yield f"{piece} x {count} ", bool(on)
        else:
            yield from ((piece, bool(on)) for _ in range(count))


def _styled(text: str, trained: bool) -> str:
    if not text:
        return ""
    if colour_on():
        return paint(text, "green", "bold") if trained else paint(text, "dim")
    return f"[{text}]" if trained else text


def labels(data: TrainData) -> Check:
    tokens = sum(s.report.tokens for s in data.sources)
    trained = sum(s.report.trained_tokens for s in data.sources)
    share = trained / max(1, tokens)
    return Check(
        "labels",
        trained > 0,
        f"{share:.0%} of tokens trained",
        "no token is trained: check the roles and `label` of the data",
    )


def end_is_trained(data: TrainData, tokenizer: Tokenizer) -> Check:
    """A model that never saw the end of an answer never stops."""
    ends = {tokenizer.eos_id, tokenizer.end_id} - {None}
    for source in data.sources:
        for i in range(min(len(source), SAMPLED_ROWS)):
            if ends & set(source.sample(i).labels.tolist()):
                return Check("end token", True, "the end token is trained")
    return Check(
        "end token",
        False,
        "no answer ends with a trained end token",
        "raise max_seq_len if answers are cut, or check the tokenizer's eos_token",
    )


def no_leak(built: Built) -> Check:
    """Two documents in one row: changing the first must not move one bit of the second's logits. Experts see the tokens
    of both in one product, whose last bit depends on its size: there most positions must stay where they were."""
    vocab, multiple = built.folder.config.vocab_size, built.engine.length_multiple
    half = -(-LEAK_TOKENS // multiple) * multiple
    ids = torch.randint(0, vocab, (1, 2 * half), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[:, :half] = (ids[:, :half] + 1) % vocab
    a, b = (built.engine.answer(two_documents(x, half))[:, half:] for x in (ids, other))
    if not all(built.world.gather(bool(a.isfinite().all() and b.isfinite().all()))):
        return not_finite_weights(built) or Check(
            "logits", False, "the model's logits are not finite, though its weights are", "try compute_type: fp32"
        )
    moved = float((a - b).abs().max())
    if built.folder.config.moe is not None:
        typical = float((a - b).abs().amax(-1).median())
        moved = typical if typical > MOVED_BY_ROUNDING * float(a.std()) else 0.0
    return Check(
        "packing",
        moved == 0.0,
        "packed documents do not see each other" if moved == 0.0 else f"a document leaks into the next by {moved:.1e}",
        "set attention: reference and report this",
    )


def not_finite_weights(built: Built) -> Check | None:
    """All ranks together: a failed check that names a tensor with NaN or infinity; None where there is none."""
    found = []
    for name, param in built.parameters():
        weight = local(param.detach())
        if not bool(weight.isfinite().all()):
            found.append((name, int((~weight.isfinite()).sum()), weight.numel()))
    names = [one for theirs in built.world.gather(found) for one in theirs]
    if not names:
        return None
    name, bad, of = names[0]
    more = len({one[0] for one in names} - {name})
    return Check(
        WEIGHTS,
        False,
        f"the model's own weights give NaN: {name} holds {bad:,} of {of:,} values that are NaN or infinite"
        + (f", and so {counted(more, 'more tensor does', 'more tensors do')}" if more else ""),
        "get the model's files again, or start from another checkpoint",
    )


def two_documents(ids: torch.Tensor, first: int) -> Batch:
    length = ids.shape[1]
    return Batch(
        input_ids=ids,
        labels=torch.full_like(ids, IGNORE),
        positions=torch.cat([torch.arange(first), torch.arange(length - first)])[None],
        cu_seqlens=torch.tensor([0, first, length], dtype=torch.int32),
        max_doc=max(first, length - first),
        num_label_tokens=0,
    )


def gradients(
    built: Built,
    optimizer: AdamW,
    first: Batch,
    prepare: Prepare | None = None,
    loss: own_loss.OwnLoss | None = None,
) -> Check:
    """Every trainable tensor gets one; LoRA's A only moves once B has, so a zero there is right at the start."""
    whole = first.pairs is not None or bool(first.tower_inputs())
    batch = first if whole else longest_document(first, GRADIENT_TOKENS, built.engine.length_multiple)
    batch = with_future(batch, built.mtp_tokens) if built.mtp_tokens else batch
    batch = batch if prepare is None else prepare([batch])[0]
    if built.engine.sync is None:
        with seen_gradients(optimizer) as seen:  # each is freed at once: all of them may not fit
            _one_backward(built, batch)
        formed = set(seen)
    else:
        _one_backward(built, batch)
        formed = set(optimizer.gradients())  # before zeros take the places of those that other ranks have
        built.engine.sync.reduce(optimizer.all_gradients())
        seen = {name: facts_of(local(grad)) for name, grad in optimizer.gradients().items()}
    parameters = dict(built.parameters())
    reached, here = set(), set(optimizer.params)
    # Tokens of pictures carry no loss, so what only they meet in the last layer has a gradient of zeros.
    given = set().union(*built.world.gather(set(first.tower_inputs())))
    towers = spread(built.whole).towers()
    unseen = tuple(prefix for name in towers if name not in given for prefix in towers[name].prefixes)
    for name in optimizer.params:
        partner = parameters.get(name[:-1] + "B") if is_lora(name) and name.endswith(".A") else None
        starts_at_zero = partner is not None and not bool(local(partner).any())
        excused = name in formed and (starts_at_zero or (part_of(name) == "vision" or name.startswith(unseen)))
        if excused or (name in seen and bool(seen[name].any)):
            reached.add(name)
    # A rank may hold only rows of a table that these few tokens do not touch: some rank must have the gradient.
    reached, here = (set().union(*built.world.gather(names)) for names in (reached, here))
    unreached = {name for name in here - reached if not _outside_text(name, built)}
    routers = tuple(set().union(*built.world.gather(set(_routers_of_one(built)))))
    single = {name for name in unreached if name.startswith(routers)}
    silent = sorted(unreached - single)
    finite = all(built.world.gather(all(bool(gradient.finite) for gradient in seen.values())))
    optimizer.zero_grad()
    count = len(here)
    if not finite:
        if (bad := not_finite_weights(built)) is not None:
            return bad
        what, fix = "a gradient is not finite", "try compute_type: fp32"
        if own := own_loss.failed_in(built.engine, loss):
            what += f": the loss function {own} gave it, from finite numbers"
            fix = "bound what it takes the logarithm or root of, or divides by: clamp(min=1e-6)"
        return Check("gradients", False, what, fix)
    return Check(
        "gradients",
        not silent,
        f"gradients reach all {counted(count - len(single), 'trainable tensor')}"
        + (f" ({len(single)} more are of routers with one expert, which have nothing to learn)" if single else "")
        if not silent
        else f"{len(silent)} of {counted(count, 'trainable tensor')} without a gradient, e.g. {silent[0]}",
        "those weights would not be trained: check lora_target_modules and the first rows of the data",
    )


def _routers_of_one(built: Built) -> Iterator[str]:
    """How names begin of weights of routers with a single expert: it gets every token with weight 1, whatever they are,
    so that no gradient is right."""
    for part in built.engine.parts:
        for name, module in part.named_modules():
            if isinstance(module, Router) and module.experts == 1:
                yield plain(f"{name}.")


def _outside_text(name: str, built: Built) -> bool:
    """What vision tokens meet in the last layer: nothing is learnt at their own places, and no layer follows."""
    return name.startswith(f"layers.{built.folder.config.num_layers - 1}.mlp.vision.")


def _one_backward(built: Built, batch: Batch) -> None:
    copies = built.engine.fewest_micro_batches
    built.engine.forward_backward([batch] * copies, [copies * max(1, batch.weight)] * copies)
    built.engine.forget_records()


def longest_document(batch: Batch, count: int, multiple: int = 1) -> Batch:
    """The longest document that has labels, cut to `count` tokens around them and padded to a multiple. Packed text may
    begin with one token of a document, and attention over one token gives queries and keys a gradient of zero."""
    labels, bounds = batch.labels[0], batch.cu_seqlens.tolist()
    labelled = [(a, b) for a, b in pairwise(bounds) if (labels[a:b] != IGNORE).any()]
    start, end = max(labelled, key=lambda at: at[1] - at[0], default=(0, bounds[1]))
    trained = (labels[start:end] != IGNORE).nonzero()
    first_label = int(trained[0]) if len(trained) else 0
    start = max(start, start + first_label - count // 2)
    end = min(end, start + count)
    made = one_document(batch.input_ids[:1, start:end], -(-(end - start) // multiple) * multiple)
    made.labels[:, : end - start] = batch.labels[:1, start:end]
    return replace(made, num_label_tokens=int((made.labels != IGNORE).sum()))


def template(compared: tuple[list[int], list[int]] | None) -> Check:
    """The ids a server sends for the first conversation are the ids training starts it with. compared: both, or None
    where there is no conversation."""
    if compared is None:
        return Check("template", True, "no conversation to compare")
    served, trained = compared
    same = served == trained
    return Check(
        "template",
        same,
        "prompts are rendered as a server will send them"
        if same
        else "training and serving render a prompt differently",
        "the chat template treats a prompt with an answer differently; give the tokenizer another chat_template",
    )


def disk(cfg: RunConfig, built: Built, optimizer: AdamW) -> Check:
    shapes = [built.sharding.shape(name) for name in built.saved_names()]
    weights = sum(prod(shape) for shape in shapes) * built.dtype.itemsize
    states = built.trainable() * optimizer.bytes_a_weight
    one = weights + (0 if cfg.checkpoint.ignore_save_lr_and_optim else states)
    kept = cfg.checkpoint.save_total_limit or 2
    need = int(one * (kept + 1) * 1.1)
    output = Path(cfg.train.output_dir or ".").expanduser().resolve()
    free = shutil.disk_usage(next(place for place in (output, *output.parents) if place.exists())).free
    return Check(
        "disk",
        free > one * 1.1,
        f"the disk has room for {counted(kept, 'checkpoint')} of {one / 1e9:.2g} GB"
        if free > need
        else f"room for {counted(int(free / max(1, one * 1.1)), 'checkpoint')} of {one / 1e9:.2g} GB",
        "free some disk, choose another output_dir, or set ignore_save_lr_and_optim: True",
    )


def vocabulary(rows: int, tokenizer: Tokenizer) -> Check:
    ids = tokenizer.vocab_size
    return Check(
        "vocabulary",
        ids <= rows,
        f"{ids:,} token ids {'fit' if ids <= rows else 'do not fit'} the {rows:,}-row embedding",
        "the tokenizer belongs to another model: check tokenizer_name",
    )


def check_vocabulary(folder: ModelFolder, tokenizer: Tokenizer) -> None:
    """Before data is tokenised: the model would need embedding rows it does not have."""
    check = vocabulary(folder.config.vocab_size, tokenizer)
    if not check.ok:
        where = f"{tokenizer.folder} and {folder.path}"
        fix = f"{check.fix} (doctor: off continues, as long as the data has none of those tokens)"
        raise DoctorError(check.text, where=where, fix=fix)
