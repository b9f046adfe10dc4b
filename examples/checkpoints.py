"""Saves a training run as it goes, and takes it up again where the last checkpoint was made."""

from pathlib import Path
from typing import Any

from progress import say
from torch import nn

import zerocore


class Checkpoints:
    """Those of one run, in a folder. Every rank calls the same methods.

    Args:
        folder: None saves nothing.
        every: steps between two of them; the last step is saved too.
        steps: of the whole run.
        keep: how many stay.
        model, optimizer: sharded.
        parts: what else has a state that changes in training, by name.
    """

    def __init__(
        self,
        folder: Path | None,
        every: int,
        steps: int,
        keep: int,
        model: nn.Module,
        optimizer: zerocore.AdamW,
        parts: dict[str, Any],
    ) -> None:
        self._folder, self._every, self._steps, self._keep = folder, every, steps, keep
        self._model, self._optimizer, self._parts = model, optimizer, parts

    def resume(self) -> int:
        """Loads the newest checkpoint, if there is one; how many steps were done before."""
        newest = zerocore.latest(self._folder) if self._folder is not None else None
        if newest is None:
            return 0
        extra = zerocore.load(newest, self._model, self._optimizer)
        for name, part in self._parts.items():
            part.load_state_dict(extra[name])
        say(f"goes on after step {extra['step']}, from {newest}\n")
        return extra["step"]

    def stepped(self, step: int) -> None:
        """Saves after `step` steps, if it is time to."""
        if self._folder is None or (step % self._every and step != self._steps):
            return
        path = self._folder / f"step-{step:08d}"
        zerocore.save(path, self._model, self._optimizer, keep=self._keep, step=step, **self._parts)
