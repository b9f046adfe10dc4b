"""Bytes per parameter of mixed-precision training, stage by stage, for a number of parameters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """What a parameter costs without sharding, in bytes.

    Attributes:
        name: what it is called in tables.
        parameter: the copy that modules compute with.
        gradient: the gradient that waits for the step.
        optimizer: master copy and moments.
        kept_shard: bytes per parameter of the shard that stage 3 keeps beside `optimizer`.
    """

    name: str
    parameter: float
    gradient: float
    optimizer: float
    kept_shard: float

    def per_parameter(self, stage: int, ranks: int) -> float:
        """Bytes of a rank for each parameter of the model.

        Stage 1 is counted while a full gradient waits for its reduction, as in the paper
        (arXiv 1910.02054, section 5.1); without accumulation it holds what stage 2 does here.
        """
        if stage == 0:
            return self.parameter + self.gradient + self.optimizer
        if stage == 1:
            return self.parameter + self.gradient + self.optimizer / ranks
        if stage == 2:
            return self.parameter + (self.gradient + self.optimizer) / ranks
        return (self.kept_shard + self.gradient + self.optimizer) / ranks


def recipes_of(dtype: str, moments: int = 2) -> tuple[Recipe, ...]:
    """The known ones of a dtype of computation.

    Classic: arXiv 1910.02054, section 3.1: 2 + 2 + K, with K = 4 for the master copy and 8 for
    Adam's moments in mixed precision; stage 3 keeps a shard of the parameters as well. Here the
    master copy is that shard.

    Args:
        moments: fp32 values that the optimizer keeps for each parameter.
    """
    if dtype == "fp32":
        return (Recipe("fp32", 4, 4, 4 * moments, kept_shard=4),)
    optimizer = 4 + 4 * moments
    return (
        Recipe("classic", 2, 2, optimizer, kept_shard=2),
        Recipe("zerocore, bf16 gradients", 2, 2, optimizer, kept_shard=0),
        Recipe("zerocore, fp32 gradients", 2, 4, optimizer, kept_shard=0),
    )
