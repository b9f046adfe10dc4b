"""Checkpoints: directories of torch.distributed.checkpoint, whole or not there at all."""

from zerocore.checkpoint.latest import latest
from zerocore.checkpoint.load import load
from zerocore.checkpoint.save import save

__all__ = ["latest", "load", "save"]
