"""zerocore: sharded data parallelism for PyTorch (ZeRO stages 0 to 3) behind one call."""

import os
import sys
from itertools import pairwise

import torch  # noqa: F401  (its libraries must be loaded before the extension)


def _is_command() -> bool:
    """Whether this is `zerocore` or `python -m zerocore`: `env` tells what is wrong."""
    as_module = sys.argv[:1] == ["-m"] and ("-m", "zerocore") in pairwise(sys.orig_argv)
    return as_module or os.path.basename("".join(sys.argv[:1])) == "zerocore"


try:
    from zerocore import _C  # noqa: F401
except ImportError as error:
    if not _is_command():
        raise ImportError(
            f"zerocore: expected its compiled extension zerocore._C, got: {error}. Build it with "
            "`pip install --no-build-isolation .` (or `-e .`) in the repository, with the torch "
            "that you use installed; it must be built again when torch changes."
        ) from error
else:
    from zerocore.api import info, ledger, no_sync, shard, stats
    from zerocore.backend import Backend, backend
    from zerocore.checkpoint import latest, load, save
    from zerocore.deferred import deferred
    from zerocore.ema import EMA
    from zerocore.ledger import Ledger
    from zerocore.norm import clip_grad_norm_
    from zerocore.optim import AdamW
    from zerocore.optimizer_state import load_optimizer_state_dict, optimizer_state_dict
    from zerocore.policy import MixedPrecision
    from zerocore.sampler import ResumableSampler
    from zerocore.scaler import GradScaler
    from zerocore.state import full_state_dict, gathered
    from zerocore.stats import Stats
    from zerocore.tracing.recorder import trace

__all__ = [
    "EMA",
    "AdamW",
    "Backend",
    "GradScaler",
    "Ledger",
    "MixedPrecision",
    "ResumableSampler",
    "Stats",
    "backend",
    "clip_grad_norm_",
    "deferred",
    "full_state_dict",
    "gathered",
    "info",
    "latest",
    "ledger",
    "load",
    "load_optimizer_state_dict",
    "no_sync",
    "optimizer_state_dict",
    "save",
    "shard",
    "stats",
    "trace",
]
