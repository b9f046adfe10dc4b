"""A model of a number of parameters, where there is none to look at."""

from __future__ import annotations

import torch

from zerocore.planner.sizes import FlatSize, ModelSizes, UnitSize

WIDTH_PER_BLOCK = 128  # GPT-3 has 12288 / 96, and loss hardly depends on it (see `gpt_of`)
MOST_BLOCKS = 2000  # they are looked at one by one


def gpt_of(parameters: int, blocks: int | None = None) -> ModelSizes:
    """Equal blocks without anything else.

    A block of width d has 12 d^2 parameters, four d x d matrices of attention and two of d x 4d
    (arXiv 2001.08361, section 2.1). As many blocks as give a width of 128 for each: models of the
    same size train nearly as well at ratios of width and depth between 50 and 300 (figure 5 there).

    Args:
        blocks: their number; None: by that ratio.

    Raises:
        ValueError: for less than one parameter in a block, or more than MOST_BLOCKS.
    """
    if blocks is None:
        blocks = max(1, round((parameters / (12 * WIDTH_PER_BLOCK**2)) ** (1 / 3)))
    if parameters < blocks or blocks < 1:
        raise ValueError(
            f"--params: expected at least one parameter for each of {blocks} blocks, got "
            f"{parameters}"
        )
    if blocks > MOST_BLOCKS:
        raise ValueError(f"--params: expected at most {MOST_BLOCKS} blocks, got {blocks}")
    share, more = divmod(parameters, blocks)
    units = [UnitSize("", ())]
    for i in range(blocks):
        size = share + (i < more)
        flat = FlatSize((size,), torch.float32, trainable=True)
        units.append(UnitSize(f"blocks.{i}", (flat,), size, last=i, first_trained=i))
    return ModelSizes(tuple(units))
