"""The command line of train_gpt.py: names, defaults, and errors that say what would be right."""

import argparse
import math
import os
from argparse import Namespace
from pathlib import Path

import text


def parse_options() -> tuple[Namespace, text.Text]:
    """The options and the text that they name; a mistake ends every rank with exit status 2."""
    parser = _parser()
    options = parser.parse_args()
    try:
        _check_numbers(options)
        data = text.load(options.data)
        _check_text(options, data)
    except ValueError as mistake:
        parser.error(str(mistake))
    return options, data


class _Parser(argparse.ArgumentParser):
    def _print_message(self, message: str, file=None) -> None:
        """All that a parser prints (help, errors) goes through here: one rank is enough."""
        if os.environ.get("RANK", "0") == "0":
            super()._print_message(message, file)


def _parser() -> argparse.ArgumentParser:
    """The options; the defaults train for three minutes or less on two ranks of one thread each."""
    parser = _Parser(
        description="Trains a byte-level GPT, its training state sharded over the ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument_group("text").add_argument
    add("--data", type=Path, help="text file or folder (default: Python's own standard library)")
    add("--prompt", default="def ", help="what the sample at the end continues")
    add("--sample", type=int, default=400, help="bytes to generate at the end")

    add = parser.add_argument_group("sharding").add_argument
    stages = "0: nothing is sharded, 1: optimizer state, 2: gradients too, 3: parameters too"
    add("--stage", type=int, default=3, choices=(0, 1, 2, 3), help=stages)
    precisions = "bf16, fp16: computes and sends in it, keeps gradients and optimizer state in fp32"
    add("--precision", default="fp32", choices=("fp32", "bf16", "fp16"), help=precisions)

    add = parser.add_argument_group("model").add_argument
    add("--layers", type=int, default=4, help="number of blocks")
    add("--dim", type=int, default=128, help="width")
    add("--heads", type=int, default=4, help="attention heads of a block")
    add("--seq", type=int, default=128, help="bytes of text in a sequence")

    add = parser.add_argument_group("training").add_argument
    add("--batch", type=int, default=16, help="sequences in a micro-batch of one rank")
    add("--grad-accum", type=int, default=1, help="micro-batches in a step")
    add("--steps", type=int, default=400, help="optimizer steps")
    add("--lr", type=float, default=5e-3, help="highest learning rate")
    add("--warmup", type=int, default=50, help="steps up to it; then a cosine down to a tenth")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--seed", type=int, default=1234, help="of the weights, the order of text, the sample")

    add = parser.add_argument_group("checkpoints").add_argument
    folder = "folder to save the run in; if it has some of it, the run goes on from there"
    add("--checkpoint-dir", type=Path, help=folder)
    add("--save-every", type=int, default=100, help="steps between two checkpoints")
    add("--keep", type=int, default=2, help="how many checkpoints stay")

    add = parser.add_argument_group("output").add_argument
    add("--log-every", type=int, default=20, help="steps between two lines")
    add("--eval-every", type=int, default=100, help="steps between two validations")
    add("--eval-bytes", type=int, default=2**16, help="held-out bytes that a validation reads")
    check = "fail unless validation ends below so many bits per byte and the table's sides agree"
    add("--check", type=float, metavar="BITS", help=check)
    return parser


def _check_numbers(options: Namespace) -> None:
    least = dict.fromkeys(("layers", "dim", "heads", "seq", "batch", "grad_accum"), 1)
    least |= {"save_every": 1, "keep": 1, "log_every": 1, "eval_bytes": 1, "warmup": 0, "sample": 0}
    # The bytes that a step sends are measured on one that does not begin with a validation.
    least |= {"steps": 2, "eval_every": 2}
    for name, minimum in least.items():
        value = getattr(options, name)
        if value < minimum:
            raise ValueError(
                f"--{name.replace('_', '-')}: expected at least {minimum}, got {value}"
            )
    for name in ("lr", "clip"):
        value = getattr(options, name)
        if not 0 < value < math.inf:
            raise ValueError(f"--{name}: expected a number above 0, got {value}")
    # Rotary position embedding turns pairs of a head's features.
    if options.dim % (2 * options.heads):
        raise ValueError(
            f"--dim: expected a multiple of 2 * --heads = {2 * options.heads}, got {options.dim}"
        )
    if not options.prompt:
        raise ValueError("--prompt: expected at least one character, got none")


def _check_text(options: Namespace, data: text.Text) -> None:
    # A sequence and the byte after its end.
    for part, content in (("to train on", data.train), ("held out", data.valid)):
        if len(content) <= options.seq:
            raise ValueError(
                f"--seq: expected less than the {len(content):,} bytes {part} of {data.source}, "
                f"got {options.seq}"
            )
