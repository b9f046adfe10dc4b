"""Checkpoints in other formats: to and from safetensors and torch.save files, in little memory.

One process, no process group. Sources (a torch.distributed.checkpoint directory, safetensors files,
torch.save archives) give entries; entries are streamed, part by part, into a file or directory of
another format.
"""

import torch

from zerocore.convert.export import export_checkpoint
from zerocore.convert.hub import SHARD_BYTES
from zerocore.convert.importing import import_checkpoint

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

__all__ = ["DTYPES", "SHARD_BYTES", "export_checkpoint", "import_checkpoint"]
