"""A training that saves often and resumes from its newest checkpoint: for tests that interrupt it.

Run with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: interrupted_run.py FOLDER STEPS
"""

import hashlib
import pathlib
import sys

import models
import torch
import torch.distributed as dist
from torch.nn import functional as F

import zerocore

SAVE_EVERY = 2
KEEP = 2


def main():
    folder, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    model = zerocore.shard(models.build("transformer"), 3)
    optimizer = zerocore.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7)
    torch.manual_seed(100 + dist.get_rank())  # of the batches, as of dropout: saved and restored
    begin, savings = 0, []
    if (newest := zerocore.latest(folder)) is not None:
        extra = zerocore.load(newest, model, optimizer)
        schedule.load_state_dict(extra["schedule"])
        begin = extra["step"]
    tell(f"begins at {begin}")
    for step in range(begin, steps):
        tokens, target = models.JOBS["transformer"].batch(torch.default_generator)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), target.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % SAVE_EVERY == 0:
            in_background = step % 4 == 1
            saved = zerocore.save(
                folder / f"step-{step + 1}",
                model,
                optimizer,
                async_=in_background,
                keep=KEEP,
                schedule=schedule,
                step=step + 1,
            )
            savings = [saved] if in_background else []
        tell(f"did step {step + 1}")
    state = [model.state_dict(), zerocore.optimizer_state_dict(model, optimizer)["state"]]
    tell(f"ends with {digest(state)} {loss.item()!r}")
    for saving in savings:
        saving.result()
    dist.destroy_process_group()


def digest(value):
    """Of all bits of the tensors in nested dicts and lists."""
    sha = hashlib.sha256()

    def add(value):
        if isinstance(value, torch.Tensor):
            sha.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            keys = sorted(value) if isinstance(value, dict) else range(len(value))
            for key in keys:
                add(value[key])

    add(value)
    return sha.hexdigest()


def tell(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
