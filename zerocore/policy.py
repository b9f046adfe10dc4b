"""What a stage means, and in which dtypes things happen: values, not code paths."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True)
class Lifetimes:
    """Which state of a ZeRO stage exists once over all ranks, and how long the rest lives.

    Stages as in "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
    (arXiv 1910.02054, section 5). Stage 0 is the case of a shard group of one rank whose replicas
    are all the others.

    Attributes:
        sharded: optimizer state and reduced gradients are split over the shard group.
        full_parameters_stay: the full parameters live always; otherwise only in a window around
            the computation of their unit.
        full_gradients_expected: full local gradients that wait for their reduction are part of the
            stage's memory (they appear under `zerocore.no_sync` only).
    """

    sharded: bool
    full_parameters_stay: bool
    full_gradients_expected: bool


STAGES = {
    0: Lifetimes(sharded=False, full_parameters_stay=True, full_gradients_expected=True),
    1: Lifetimes(sharded=True, full_parameters_stay=True, full_gradients_expected=True),
    2: Lifetimes(sharded=True, full_parameters_stay=True, full_gradients_expected=False),
    3: Lifetimes(sharded=True, full_parameters_stay=False, full_gradients_expected=False),
}


# Bytes of buffers up to which collectives of NCCL and HCCL share a launch. A launch costs some tens
# of microseconds, in which links move about this much: below it, starting is what takes time.
LAUNCH_BYTES = 4 * 2**20


def launch_bytes(backend: str) -> int:
    """The same for any backend; 0: each has its own, as gloo's exchanges of messages do."""
    return 0 if backend == "gloo" else LAUNCH_BYTES


_FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class MixedPrecision:
    """Computation in a narrow dtype over a master copy of the trainable parameters.

    Only floating tensors are ever cast: integer, bool and complex parameters and buffers keep their
    dtype and their bytes. Parameters that are frozen when `zerocore.shard` is called keep their
    dtype as well (they are cast in their window).

    Attributes:
        param: dtype of the full parameters that modules compute with, and of floating inputs of the
            model, which are cast to it.
        reduce: dtype in which gradients travel; sums are taken in fp32 and rounded to it once.
            None: the same as `param`.
        buffer: dtype of floating buffers while modules compute, and of what modules write to them.
            The values are kept, saved and loaded in the buffers' own dtype, and so are batch norm's
            updates of its running statistics. None: the buffers' own.
        output: dtype to which floating outputs of the model are cast. None: left as they are.
        accumulate: dtype of gradients that are added up over micro-batches: of the main gradient,
            and of the full local one that `zerocore.no_sync` keeps.
        master: dtype in which trainable parameters are kept and stepped (and so, of the optimizer's
            moments); parameters of a wider one stay in theirs. None: no master copy, parameters are
            kept in `param` itself.

    Raises:
        ValueError: if a dtype is not bfloat16, float16, float32 or float64.
    """

    param: torch.dtype = torch.bfloat16
    reduce: torch.dtype | None = None
    buffer: torch.dtype | None = None
    output: torch.dtype | None = None
    accumulate: torch.dtype = torch.float32
    master: torch.dtype | None = torch.float32

    def __post_init__(self) -> None:
        for field in fields(self):
            dtype = getattr(self, field.name)
            optional = field.name not in ("param", "accumulate")
            if dtype is None and optional:
                continue
            if dtype not in _FLOATING:
                raise ValueError(
                    f"MixedPrecision({field.name}=...): expected torch.bfloat16, float16, float32 "
                    f"or float64{' or None' if optional else ''}, got {dtype!r}"
                )
