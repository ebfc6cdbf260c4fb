"""How evenly a step used its experts, and the bias that evens it out without a loss (aux-free balancing).

The first hook of a run whose model has experts: recipes/expert_layers.py makes it, and saves come after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed import ProcessGroup

from erniekit.parallel.engine import Engine
from erniekit.parallel.reduce import all_reduce
from erniekit.parallel.sharding import Box
from erniekit.train.hooks import Hook, TrainingLoop

if TYPE_CHECKING:
    from erniekit.train.step import Launched, StepResult

BANKS = ("text", "vision")  # in the order of a layer's loads
Pieces = tuple[torch.Tensor, tuple[Box, ...]]  # this rank's memory of a bias, and where in it which experts are


class ExpertBalance(Hook):
    """After each update: bias += step * sign(mean load - load), from the choices of all ranks' real tokens; the same
    bits on every rank and in every layout, as the counts are whole numbers."""

    def __init__(
        self,
        engine: Engine,
        layers: Sequence[int],
        experts: tuple[int, ...],
        group: ProcessGroup | None,
        step: float = 0.0,
        biases: Mapping[int, Pieces] | None = None,
    ) -> None:
        """layers: those of the whole model that have experts. experts: (E,), or (2, E) of text and vision. group: all
        ranks that saw other tokens or hold other layers. step 0: loads are only reported."""
        self.engine, self.layers, self.group = engine, list(layers), group
        self.step, self.biases = step, dict(biases or {})
        self._none = torch.zeros(len(self.layers), *experts, dtype=torch.int64, device=engine.device)
        self._since_record: torch.Tensor | None = None  # loads since the last record

    def phase(self, name: str) -> None:
        if name == "restore":  # the step that led here does not count
            self.engine.usage.clear()

    def launched(self, trainer: TrainingLoop, step: Launched) -> None:
        loads = self._loads()
        step.bring("loads", loads)
        if self.step:
            self._move(loads, step.good)

    def waits_for(self, trainer: TrainingLoop, step: int) -> bool:
        return False

    def after_step(self, trainer: TrainingLoop, result: StepResult) -> None:
        loads = result.brought["loads"]
        self._since_record = loads if self._since_record is None else self._since_record + loads

    def _loads(self) -> torch.Tensor:
        """int64 [layers, (2,) experts]: how often each was chosen in this step, by all ranks."""
        loads = torch.zeros_like(self._none)
        for row, layer in enumerate(self.layers):
            if layer in self.engine.usage:
                loads[row] = self.engine.usage[layer]
        self.engine.usage.clear()
        if self.group is not None:
            all_reduce(loads, self.group)
        return loads

    @torch.no_grad()
    def _move(self, loads: torch.Tensor, good: torch.Tensor) -> None:
        """good: 0 where the update was skipped."""
        above = loads.sum(-1, keepdim=True) - loads * loads.shape[-1]  # the sign of mean - load, in whole numbers
        moves = above.sign().float() * self.step * good
        for row, layer in enumerate(self.layers):
            if layer in self.biases:
                held, boxes = self.biases[layer]
                for box in boxes:
                    held[box.local_slices] += moves[row].to(held.device)[box.global_slices]

    def metrics(self) -> dict[str, float]:
        """Since the last call: `moe_load`, the busiest expert's load over the mean in the most uneven layer, and
        `moe_dead_experts`, how many were never chosen; of a vision-language model, the load of each bank as well."""
        loads, self._since_record = (self._none if self._since_record is None else self._since_record).double(), None
        uneven = loads.amax(-1) / loads.mean(-1).clamp(min=1e-9)
        banks = uneven.amax(0) if uneven.dim() == 2 else uneven.new_zeros(0)
        unchosen = loads == 0
        if loads.dim() == 3:  # experts of a modality that no token had do not count
            unchosen &= loads.sum(-1, keepdim=True) > 0
        worst, dead, *each = torch.cat((torch.stack((uneven.max(), unchosen.sum().double())), banks)).tolist()
        of_banks = {f"moe_load_{name}": value for name, value in zip(BANKS, each) if value}
        return {"moe_load": worst, "moe_dead_experts": dead, **of_banks}
