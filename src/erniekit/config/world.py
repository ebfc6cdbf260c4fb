"""What follows from the number of ranks, known only when a run starts: its accumulation and its global batch.

The recipes call `for_world` once the layout is fitted, before ranks start and again inside each; rules/ share the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from erniekit.config.note import Note
from erniekit.errors import ConfigError

if TYPE_CHECKING:
    from erniekit.config.run import RunConfig


def for_world(cfg: RunConfig, data_ranks: int) -> RunConfig:
    """The run on a number of ranks that read different packs: a global_batch_size that was given is kept to by the
    accumulation; else it is what batch_size, the ranks and the accumulation make. Pre-training keeps to it even where
    both were given: its recipes name the accumulation of one cluster."""
    t = cfg.train
    both = cfg.given("gradient_accumulation_steps") and t.stage != "PT"
    if cfg.given("global_batch_size") and not both:
        name, old, each = "gradient_accumulation_steps", t.gradient_accumulation_steps, t.batch_size * data_ranks
        new = accumulation_for(t.global_batch_size or each, t.batch_size, data_ranks, cfg.origin("global_batch_size"))
        reason = f"global_batch_size {t.global_batch_size} / (batch_size {t.batch_size} x data ranks {data_ranks})"
        note = Note(name, old, new, reason)
    else:
        size = t.batch_size * data_ranks * max(1, t.gradient_accumulation_steps)
        reason = "batch_size x data ranks x gradient_accumulation_steps"
        note = Note("global_batch_size", t.global_batch_size, size, reason, quiet=not cfg.given("global_batch_size"))
    out = cfg.derive(note)
    p = cfg.parallel
    check_interleaving(p.pipeline_parallel_degree, p.virtual_pp_degree, out.train.gradient_accumulation_steps)
    return out


def accumulation_for(
    global_batch_size: int, batch_size: int, data_ranks: int, where: str = "global_batch_size, batch_size"
) -> int:
    """Micro-batches of a step; stops with the nearest numbers that work when they do not come out even."""
    each = batch_size * data_ranks
    if global_batch_size % each == 0:
        return global_batch_size // each
    below = global_batch_size // each * each
    wholes = " or ".join(str(size) for size in (below, below + each) if size)
    fix = f"global_batch_size: {wholes}"
    share, rest = divmod(global_batch_size, data_ranks)
    if not rest:
        near = min((b for b in range(1, share + 1) if share % b == 0), key=lambda b: (abs(b - batch_size), b))
        fix += f", or batch_size: {near}"
    spread = f" x {data_ranks} data ranks = {each}" if data_ranks > 1 else ""
    raise ConfigError(
        f"global_batch_size is {global_batch_size}, not a multiple of batch_size {batch_size}{spread}",
        where=where,
        fix=fix,
    )


def check_interleaving(pp: int, virtual: int, micro_batches: int, where: str = "gradient_accumulation_steps") -> None:
    """Interleaved stages take micro-batches in groups of one a pipeline device."""
    if pp < 2 or virtual < 2 or micro_batches < 1 or micro_batches % pp == 0:
        return
    below = micro_batches // pp * pp
    wholes = " or ".join(str(count) for count in (below, below + pp) if count)
    raise ConfigError(
        f"gradient_accumulation_steps is {micro_batches}, not a multiple of pipeline_parallel_degree {pp}, as "
        f"virtual_pp_degree {virtual} needs",
        where=where,
        fix=f"gradient_accumulation_steps: {wholes}, or virtual_pp_degree: 1",
    )
