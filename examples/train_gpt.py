"""Trains a byte-level GPT with its training state sharded over the ranks by zerocore.

    torchrun --nproc-per-node 2 examples/train_gpt.py --stage 3

One process alone works too: python examples/train_gpt.py

With --checkpoint-dir, a run that was interrupted goes on from its last checkpoint when it is
started again, also on another number of ranks. torchrun --max-restarts starts it by itself.
"""

import math
import os
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext

import ledger
import text
import torch
import torch.distributed as dist
from checkpoints import Checkpoints
from gpt import GPT, Block
from options import parse_options
from progress import Progress, average, say
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

import zerocore


def main() -> None:
    """Reads the options and the text, then trains on every rank."""
    options, data = parse_options()
    init_process_group()
    try:
        run(options, data)
    finally:
        dist.destroy_process_group()


def init_process_group() -> None:
    """The default group, of the ranks that torchrun has started, or of this process alone."""
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    backend = zerocore.backend().name  # nccl on GPUs, hccl on NPUs, else gloo
    if not dist.is_torchelastic_launched():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    # Restarts may share a store, in which they would find the addresses of the ranks that died.
    store, rank, world_size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"restart {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def run(options: Namespace, data: text.Text) -> None:
    """The whole job, on this rank."""
    torch.manual_seed(options.seed)
    model = GPT(options.layers, options.dim, options.heads, options.seq)
    parameters = sum(p.numel() for p in model.parameters())
    # From here on this rank stores its part of the model only (what part, the stage tells). All
    # the rest is the training script that the plain model would have.
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(options.precision)
    mixed = zerocore.MixedPrecision(param=narrow, output=torch.float32) if narrow else None
    zerocore.shard(model, stage=options.stage, units=[Block], mixed_precision=mixed)
    optimizer = zerocore.AdamW(
        parameter_groups(model), lr=options.lr, betas=(0.9, 0.95), max_grad_norm=options.clip
    )
    say(f"text: {data.source}; {len(data.train):,} bytes to train on, {len(data.valid):,} held out")
    say(
        f"model: {parameters:,} parameters in {options.precision}, stage {options.stage} on "
        f"{dist.get_world_size()} ranks, {bytes_per_step(options):,} bytes of text per step\n"
    )
    measured = train(model, optimizer, data, options)
    bits = evaluate(model, data.valid, options)
    say(f"\nvalidation after {options.steps} steps: {bits:.3f} bits per byte")
    if options.sample:
        show_sample(model, options)
    agrees = measured is None or show_ledger(model, *measured, options)
    if options.check is not None and (bits >= options.check or not agrees):
        say(
            f"--check: expected less than {options.check} bits per byte and measurements equal to "
            f"predictions, got {bits:.3f} and {'equal' if agrees else 'different'} measurements"
        )
        raise SystemExit(1)


def parameter_groups(model: GPT) -> list[dict]:
    """Matrices decay, norms do not: a shard has as many dimensions as the parameter it is of."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]


def train(
    model: GPT, optimizer: zerocore.AdamW, data: text.Text, options: Namespace
) -> tuple[dict[str, int], dict[str, int]] | None:
    """Runs the steps that are left; returns the bytes that a rank held and sent in one of them.

    They are by name; None if no step was left to measure.
    """
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, options)
    )
    # fp16 has no room for small gradients: the loss is scaled up, the optimizer scales them down.
    scaler = zerocore.GradScaler(enabled=options.precision == "fp16")
    sequences = text.Sequences(data.train, options.seq)
    sampler = zerocore.ResumableSampler(sequences, batch_size=options.batch, seed=options.seed)
    parts = {"schedule": schedule, "scaler": scaler, "sampler": sampler}
    checkpoints = Checkpoints(
        options.checkpoint_dir,
        options.save_every,
        options.steps,
        options.keep,
        model,
        optimizer,
        parts,
    )
    start = checkpoints.resume()
    progress = Progress(options.steps, options.log_every, bytes_per_step(options), start)
    batches = training_batches(sequences, sampler, options)
    stats = zerocore.stats(model)
    measured, sent = None, Counter()
    for step in range(start, options.steps):
        validate = step % options.eval_every == 0
        if validate:
            begin = time.perf_counter()
            bits = evaluate(model, data.valid, options)
            progress.validated(step, bits, time.perf_counter() - begin)
            stats.reset()  # what a validation gathers is no part of a training step
        before = bytes_sent(model)
        loss = accumulate_gradients(model, batches, sampler, scaler, options)
        held = dict(zerocore.stats(model, optimizer).resident, windows=stats.windows.peak)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedule.step()
        # At stages 1 and 2 the next forward pass gathers what a step changed. When that pass was
        # a validation's, this step had nothing to gather: it is not the one to report.
        if not validate:
            sent = bytes_sent(model) - before
            measured = held, dict(sent)
        progress.stepped(step + 1, loss, stats.windows.peak, sent.total())
        checkpoints.stepped(step + 1)
    return measured


def accumulate_gradients(
    model: GPT,
    batches: Iterator,
    sampler: zerocore.ResumableSampler,
    scaler: zerocore.GradScaler,
    options: Namespace,
) -> float:
    """Forward and backward of each micro-batch of a step; returns this rank's mean loss in nats."""
    loss = 0.0
    for micro in range(options.grad_accum):
        inputs, targets = next(batches)
        # Stages 0 and 1 have room for a whole gradient anyway: they add the micro-batches up here
        # and reduce once. Stages 2 and 3 reduce each micro-batch, to hold no more than a shard.
        wait = options.stage <= 1 and micro < options.grad_accum - 1
        with zerocore.no_sync(model) if wait else nullcontext():
            micro_loss = cross_entropy(model(inputs), targets) / options.grad_accum
            scaler.scale(micro_loss).backward()
        sampler.advance()
        loss += micro_loss.item()
    return loss


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean loss in nats of logits [batch, seq, 256] against the bytes [batch, seq]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten().to(logits.device))


def learning_rate_factor(step: int, options: Namespace) -> float:
    """Warm-up from 0 to 1, then a cosine down to a tenth."""
    if step < options.warmup:
        return (step + 1) / options.warmup
    done = (step - options.warmup) / max(1, options.steps - options.warmup)
    return 0.55 + 0.45 * math.cos(math.pi * done)


def training_batches(
    sequences: text.Sequences, sampler: zerocore.ResumableSampler, options: Namespace
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields this rank's share of the sequences, in one random order after another, for ever.

    The text of a step depends on the seed and on how many sequences all ranks together take, not on
    how many ranks they are.
    """
    # Without a generator of its own, each new loop over the loader takes a number from torch's
    # default one, and a run that goes on would have other random numbers from then on.
    own = torch.Generator()
    loader = DataLoader(sequences, batch_size=options.batch, sampler=sampler, generator=own)
    while True:
        yield from loader


def bytes_per_step(options: Namespace) -> int:
    """Bytes of text that all ranks together learn from in one step."""
    return options.batch * options.seq * options.grad_accum * dist.get_world_size()


@torch.no_grad()
def evaluate(model: GPT, data: Tensor, options: Namespace) -> float:
    """Bits per byte on held-out text, the same on every rank; every rank must call it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # As many sequences for each rank: a forward pass that gathers parameters is one of all ranks.
    share = max(1, options.eval_bytes // options.seq // ranks)
    starts = text.even_starts(data, share * ranks, options.seq)[rank::ranks]
    model.eval()
    nats = 0.0
    for part in starts.split(options.batch):
        inputs, targets = text.sequences(data, part, options.seq)
        nats += cross_entropy(model(inputs), targets).item() * len(part)
    model.train()
    return average(nats / share) / math.log(2)


@torch.no_grad()
def show_sample(model: GPT, options: Namespace) -> None:
    """Lets the model write on; every rank must call it, and all ranks draw the same bytes."""
    generator = torch.Generator().manual_seed(options.seed)
    written = list(options.prompt.encode())
    model.eval()
    for _ in range(options.sample):
        context = torch.tensor(written[-options.seq :])
        logits = model(context[None])[0, -1]
        # Somewhat surer than the model is: the bytes that it thinks unlikely are mostly wrong.
        likely = torch.softmax(logits.float().cpu() / 0.8, dim=-1)
        written.append(torch.multinomial(likely, 1, generator=generator).item())
    model.train()
    sample = bytes(written).decode(errors="replace").replace("\0", "\n<end of file>\n")
    rule = "-" * 80
    say(f"\nWhat the model writes after {options.prompt!r}:\n{rule}\n{sample}\n{rule}")


def bytes_sent(model: GPT) -> Counter:
    """What this rank has sent since the last reset of its counts, by kind of collective."""
    collectives = zerocore.stats(model).collectives
    return Counter({kind: count.bytes for kind, count in collectives.items()})


def show_ledger(model: GPT, held: dict, sent: dict, options: Namespace) -> bool:
    """Shows predicted beside measured bytes; returns whether they are equal."""
    units = {name: unit.padded for name, unit in zerocore.stats(model).units.items()}
    # The root's window stays from forward to backward, and so does that of the last block, which
    # backward needs first.
    kept = frozenset({ledger.ROOT, f"blocks.{options.layers - 1}"})
    run = ledger.Run(
        options.stage, dist.get_world_size(), options.grad_accum, options.precision != "fp32", kept
    )
    small = sent.pop("control", 0)  # agreements between ranks, no data of the model
    memory = ledger.rows(ledger.held(run, units), held)
    communication = ledger.rows(ledger.sent(run, units), sent)
    say("\n" + ledger.table("bytes held by a rank", memory))
    say("\n" + ledger.table("bytes sent by a rank in a step", communication))
    say(f"  and {small:,} bytes for agreements between ranks\n")
    return all(row.predicted == row.measured for row in memory + communication)


if __name__ == "__main__":
    main()
