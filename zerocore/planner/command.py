"""`zerocore plan`: what a model needs at each stage, and which one to take."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerocore import policy
from zerocore.numerals import count, positive
from zerocore.planner import reasons, tables
from zerocore.planner.activity import Activity, trace_step
from zerocore.planner.advice import Workload, candidates, fits, recommend
from zerocore.planner.calibration import measure_machine
from zerocore.planner.guess import gpt_of
from zerocore.planner.machine import Machine
from zerocore.planner.setting import Setting
from zerocore.planner.sizes import ModelSizes
from zerocore.policy import MixedPrecision
from zerocore.units import plan_units

MOMENTS = {"adamw": 2, "sgd-momentum": 1, "sgd": 0}
BUSY = 1.2  # spread of times from which on a machine does something else meanwhile
SHOWN = 4  # candidates in the table of times, beside the plain ones


def add(commands: argparse._SubParsersAction) -> None:
    """The subcommand and its options."""
    about = "what a model needs at each stage, how long a step takes, and which stage to take"
    command = commands.add_parser("plan", help=about, description=f"Prints {about}.")
    command.set_defaults(run=run)
    _add_model(command.add_argument_group("the model").add_argument)
    add = command.add_argument_group("memory").add_argument
    add("--memory", type=positive, metavar="BYTES", help="that a rank has: which stages fit")
    _add_machine(command.add_argument_group("the machine, for times and advice").add_argument)


def _add_model(add: Callable[..., Any]) -> None:
    add("--params", type=count, metavar="N", help="a number of parameters, such as 7e9")
    add(
        "--model",
        metavar="PACKAGE:FACTORY",
        help="what builds it, for exact bytes: 'gpt:GPT(4, 128)'",
    )
    add("--units", nargs="+", metavar="CLASS", help="names of the classes of units (the blocks)")
    add("--blocks", type=count, metavar="N", help="with --params: how many blocks it has")
    group = "ranks that share a copy (hybrid sharding); default: all"
    add("--group", type=count, metavar="N", help=group)
    add("--world", type=count, metavar="N", help="number of ranks")
    add("--dtype", choices=("bf16", "fp32"), default="bf16", help="of computation (%(default)s)")
    grads = "with bf16: dtype in which gradients are added up (%(default)s)"
    add("--accumulate", choices=("fp32", "bf16"), default="fp32", help=grads)
    add("--optimizer", choices=tuple(MOMENTS), default="adamw", help="(%(default)s)")
    what = "counts activations: BxT, token ids of that shape; or a function that gives the inputs"
    add("--activations", metavar="BxT|PACKAGE:FUNCTION", help=what)
    add("--device", choices=("gpu", "cpu"), default="gpu", help="that ranks have (%(default)s)")


def _add_machine(add: Callable[..., Any]) -> None:
    add("--flops", type=positive, metavar="F", help="flop/s that a rank achieves")
    add("--network", type=positive, metavar="B", help="bytes/s that a node sends, one direction")
    inside = "bytes/s that a rank sends inside its node, one direction"
    add("--intra", type=positive, metavar="B", help=inside)
    add("--gpus-per-node", type=count, default=8, metavar="N", help="(%(default)s)")
    add(
        "--latency",
        type=positive,
        default=9.6e-6,
        metavar="S",
        help="s of a step of a ring between nodes (%(default)s)",
    )
    add("--tokens", type=positive, metavar="N", help="of a rank in a step")
    calibrate = "measures this machine for CPU ranks, and writes FILE"
    add("--calibrate", type=Path, metavar="FILE", help=calibrate)
    add("--machine", type=Path, metavar="FILE", help="what --calibrate wrote")


def run(options: argparse.Namespace) -> int:
    """0; 1 if nothing fits into the memory; 2 for options that do not go together."""
    try:
        if options.calibrate is not None:
            return calibrate(options.calibrate)
        _check(options)
        return plan(options)
    except (ValueError, OSError, ImportError) as error:
        print(f"zerocore plan: {error}", file=sys.stderr)
        return 2


def calibrate(path: Path) -> int:
    """Measures this machine."""
    path.touch()  # known at once if it cannot be written
    machine, spread = measure_machine()
    path.write_text(json.dumps(dataclasses.asdict(machine), indent=2) + "\n")
    print(f"{machine}\nwritten to {path}")
    if spread > BUSY:
        print(
            f"zerocore plan: --calibrate: the times of one product differ by {spread - 1:.0%}: "
            "this machine was busy; measure again while nothing else runs",
            file=sys.stderr,
        )
    return 0


def _check(options: argparse.Namespace) -> None:
    if (options.params is None) == (options.model is None):
        raise ValueError("expected one of --params and --model, got " + _how_many(options))
    if options.world is None:
        raise ValueError("--world: expected the number of ranks, got none")
    for name in ("units", "activations"):
        if getattr(options, name) is not None and options.model is None:
            raise ValueError(f"--{name}: expected it with --model, got it with --params")
    if options.blocks is not None and options.params is None:
        raise ValueError("--blocks: expected it with --params, got it with --model")
    rates = [name for name in ("flops", "network", "intra") if getattr(options, name) is not None]
    if rates and options.machine is not None:
        raise ValueError(f"--machine: expected it without --{rates[0]}, got both")
    if len(rates) in (1, 2):
        given = " and ".join(f"--{name}" for name in rates)
        raise ValueError(f"expected --flops, --network and --intra together, got {given} only")
    timed = rates or options.machine is not None
    if options.tokens is not None and options.activations is not None:
        raise ValueError("--tokens: expected it without --activations, which has them, got both")
    if timed and options.tokens is None and options.activations is None:
        raise ValueError("--tokens: expected the number of tokens of a rank in a step, got none")


def _how_many(options: argparse.Namespace) -> str:
    return "both" if options.params is not None else "none"


def plan(options: argparse.Namespace) -> int:
    """Prints the tables that the options ask for."""
    work = _workload(options)
    plain = candidates(work, search=False)
    title = f"{work.sizes.parameters:,} parameters on {work.ranks} ranks, {options.dtype}"
    print(f"{title}, {options.optimizer}\n")
    for section in _sections(options, work, plain):
        print(section + "\n")
    if len(work.sizes.units) <= 2 and options.units is None:
        print(
            "All blocks are merged into one unit (up to bucket_bytes=25 MiB): at stage 3 it is "
            "gathered as a whole. --units names blocks to be units of their own.\n"
        )
    chosen = None
    if work.machine is not None or work.memory is not None:
        found = candidates(work) if work.machine is not None else plain
        chosen = recommend(work, found)
        if work.machine is not None:
            best = sorted(found, key=lambda candidate: candidate.seconds)
            others = [c for c in best if c not in plain and fits(work, c)]
            shown = [*plain, *others[:SHOWN]]
            print("predicted: each stage, then the fastest others that fit\n")
            print(tables.times(work, shown) + "\n")
        print(reasons.recommendation(work, chosen, plain) + "\n")
    print("This assumes:")
    for line in reasons.assumptions(work, options.params is not None, work.activity is not None):
        print(f"- {line}")
    return 1 if work.memory is not None and chosen is None else 0


def _sections(options: argparse.Namespace, work: Workload, plain: list) -> Iterator[str]:
    if options.params is not None:
        yield (
            "between steps, bytes of a rank per parameter and in GB (classic: arXiv 1910.02054, "
            "figure 1)\n\n"
            + tables.recipes(options.params, work.base.shards, options.dtype, work.moments)
            + "\n\nStage 1 while a full gradient waits for its reduction (no_sync), as in "
            "the paper;\nwithout accumulation it holds what stage 2 does."
        )
    if options.model is not None:
        yield tables.ledgers(work, plain)
        if work.activity is not None:
            yield f"saved by the forward for the backward: {work.activity.saved:,} bytes"
        yield tables.communication(work, plain)
    if work.memory is not None:
        yield tables.memory(work, plain)


def _workload(options: argparse.Namespace) -> Workload:
    mixed = None
    if options.dtype == "bf16":
        accumulate = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.accumulate]
        mixed = MixedPrecision(torch.bfloat16, accumulate=accumulate)
    gpu = options.device == "gpu"
    base = Setting.of(
        3,
        options.world,
        options.group,
        mixed_precision=mixed,
        launch_bytes=policy.launch_bytes("nccl" if gpu else "gloo"),
        keeps=not gpu,
    )
    activity = None
    if options.params is not None:
        sizes = gpt_of(options.params, options.blocks)
    else:
        model = _build(options.model)
        units = _unit_classes(model, options.units)
        sizes = ModelSizes.of(model, units)
        if options.activations is not None:
            activity = _activity(model, units, options.activations, mixed)
    return Workload(
        sizes,
        base,
        MOMENTS[options.optimizer],
        _machine(options),
        options.tokens or 0.0,
        activity,
        options.memory,
        tuple(options.units or ()),
    )


def _machine(options: argparse.Namespace) -> Machine | None:
    if options.machine is not None:
        try:
            facts = json.loads(options.machine.read_text())
            return Machine(**facts).with_ranks(options.world)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"--machine: expected a file that --calibrate wrote, got {options.machine}: {error}"
            ) from error
    if options.flops is None:
        return None
    return Machine(
        flops=options.flops,
        network=options.network,
        intra=options.intra,
        latency=options.latency,
        ranks_per_node=min(options.gpus_per_node, options.world),
    )


def _function(option: str, name: str) -> Callable[..., Any]:
    """What `package.module:function` names, perhaps with arguments that are literals.

    Modules in the current folder are found too.
    """
    name, arguments = _arguments(option, name)
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ValueError(f"{option}: expected PACKAGE:FUNCTION, got {name!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{option}: expected {part!r} in {module}, got a module without it")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{option}: expected a function, got {name} = {found!r}")
    return functools.partial(found, *arguments)


def _arguments(option: str, name: str) -> tuple[str, tuple]:
    """'gpt:GPT(4, 128)' is 'gpt:GPT' and (4, 128)."""
    name, bracket, rest = name.partition("(")
    if not bracket:
        return name, ()
    inner = rest.rstrip().removesuffix(")")
    try:
        if inner == rest.rstrip():
            raise SyntaxError("no bracket")
        return name, ast.literal_eval(f"({inner},)") if inner.strip() else ()
    except (SyntaxError, ValueError):
        raise ValueError(
            f"{option}: expected arguments that are numbers or texts in brackets, got ({rest}"
        ) from None


def _build(name: str) -> nn.Module:
    """The model, on the meta device."""
    factory = _function("--model", name)
    try:
        with torch.device("meta"):
            model = factory()
    except Exception as error:
        raise ValueError(
            f"--model: expected {name} to build a model on the meta device, got "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"--model: expected {name} to return an nn.Module, got {model!r}")
    return model


def _unit_classes(model: nn.Module, names: list[str] | None) -> list[type[nn.Module]] | None:
    if names is None:
        return None
    classes = {type(module).__name__: type(module) for module in model.modules()}
    for name in names:
        if name not in classes:
            raise ValueError(
                f"--units: expected classes of the model's modules, got {name!r}; it has "
                f"{', '.join(sorted(classes))}"
            )
    return [classes[name] for name in names]


def _activity(model: nn.Module, units: Any, inputs: str, mixed: MixedPrecision | None) -> Activity:
    plans = plan_units(model, units, 25 * 2**20)
    shape = inputs.split("x")
    if len(shape) == 2 and all(part.isdecimal() and int(part) > 0 for part in shape):
        batch, tokens = map(int, shape)
        return trace_step(model, plans, lambda: _tokens(model, batch, tokens), mixed)
    function = _function("--activations", inputs)

    def call() -> tuple[tuple, dict]:
        made = function()
        return ((), made) if isinstance(made, dict) else (_as_tuple(made), {})

    return trace_step(model, plans, call, mixed)


def _as_tuple(value: Any) -> tuple:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _tokens(model: nn.Module, batch: int, tokens: int) -> tuple[tuple, dict]:
    """Token ids, as labels too where the model takes these."""
    ids = torch.zeros(batch, tokens, dtype=torch.long)
    names = inspect.signature(model.forward).parameters
    return (ids,), {"labels": ids} if "labels" in names else {}
