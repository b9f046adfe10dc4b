"""What a run shows while it works. Every rank calls this; only rank 0 prints."""

import math
import time

import torch
import torch.distributed as dist

import zerocore


def say(line: str) -> None:
    """Prints on rank 0 at once, also into a pipe."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def average(value: float) -> float:
    """The mean of every rank's value, the same on all of them."""
    total = torch.tensor(value, device=zerocore.backend().device)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


class Progress:
    """Prints a line every few steps, and each validation.

    Args:
        steps: how many steps the run has.
        every: steps between two lines.
        tokens_per_step: of all ranks together.
        start: steps that were done before.
    """

    def __init__(self, steps: int, every: int, tokens_per_step: int, start: int = 0) -> None:
        self._steps = steps
        self._start = start
        self._every = every
        self._tokens_per_step = tokens_per_step
        self._begin = time.perf_counter()
        self._line_begin = self._begin  # moved forward by validation: speed is that of training
        self._line_steps = 0
        self._line_loss = 0.0

    def validated(self, step: int, bits: float, seconds: float) -> None:
        """A validation before step `step` gave `bits` per byte and took `seconds`."""
        say(f"step {step:5d}/{self._steps}  validation {bits:.3f} bits per byte")
        self._line_begin += seconds

    def stepped(self, step: int, loss: float, window_peak: int, bytes_sent: int) -> None:
        """`step` steps are done; the last had this rank's `loss` in nats and sent so many bytes."""
        self._line_steps += 1
        self._line_loss += loss
        if step % self._every and step != self._steps:
            return
        now = time.perf_counter()
        speed = self._line_steps * self._tokens_per_step / (now - self._line_begin)
        left = (now - self._begin) / (step - self._start) * (self._steps - step)
        mean = average(self._line_loss / self._line_steps)
        say(
            f"step {step:5d}/{self._steps}  loss {mean:.3f}  bits/byte {mean / math.log(2):.3f}  "
            f"{speed:8,.0f} tokens/s  {left:4.0f} s left  "
            f"window peak {mebibytes(window_peak)}  sent {mebibytes(bytes_sent)}/step"
        )
        self._line_begin, self._line_steps, self._line_loss = now, 0, 0.0


def mebibytes(count: int) -> str:
    """A number of bytes for people."""
    return f"{count / 2**20:.2f} MiB"
