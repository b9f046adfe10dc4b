"""Which parameters are gathered and reduced together. Pure: looks at modules, changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

Units = Iterable[type[nn.Module] | str] | Callable[[str, nn.Module], bool] | None


@dataclass
class UnitPlan:
    """A unit to be made.

    Attributes:
        name: the name of its module in the model; '' is the root; 'first..last' of merged ones.
        modules: the modules whose forward needs the unit, in the order of registration.
        params: (name in the model, parameter) pairs, in the order of registration.
    """

    name: str
    modules: list[nn.Module]
    params: list[tuple[str, nn.Parameter]] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Bytes of the parameters, without padding."""
        return sum(p.numel() * p.element_size() for _, p in self.params)

    def flats(self) -> list[list[tuple[str, nn.Parameter]]]:
        """The parameters that share a flat buffer: of one dtype, all trainable or all frozen.

        Frozen parameters get buffers of their own, so that they cost no gradient memory.
        """
        groups: dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
        for name, param in self.params:
            groups.setdefault((param.dtype, param.requires_grad), []).append((name, param))
        return list(groups.values())


def plan_units(
    model: nn.Module,
    units: Units = None,
    bucket_bytes: int = 0,
    taken: Callable[[nn.Parameter], bool] = lambda _: False,
) -> list[UnitPlan]:
    """Splits a model's parameters into units; the root comes first, perhaps without parameters.

    Args:
        units: module classes, names of modules, or a predicate `(name, module) -> bool`. None: the
            classes named by a Hugging Face model's `_no_split_modules`, else the modules whose
            class repeats in a ModuleList or Sequential.
        bucket_bytes: with automatic units, neighbours are merged up to this size.
        taken: parameters to leave out.

    Raises:
        ValueError: if `units` matches no module.
    """
    names = _automatic(model) if units is None else _chosen(model, units)
    modules = dict(model.named_modules())
    plans = {name: UnitPlan(name, [modules[name]]) for name in ["", *names]}
    for paths, param in _occurrences(model).values():
        if not taken(param):
            plans[_owner(paths, plans)].params.append((paths[0], param))
    root, *rest = plans.values()
    rest = [plan for plan in rest if plan.params]
    return [root, *(_merge(rest, bucket_bytes) if units is None else rest)]


def _chosen(model: nn.Module, units: Units) -> list[str]:
    """Names of the modules that the user's `units` selects."""
    candidates = [(name, module) for name, module in model.named_modules() if name]
    if callable(units) and not isinstance(units, type):
        wanted = "the predicate"
        chosen = [name for name, module in candidates if units(name, module)]
    else:
        items = [units] if isinstance(units, type | str) else list(units)
        names, classes = _names_and_classes(items)
        for name in names.difference(name for name, _ in candidates):
            raise ValueError(
                f"units: expected names of modules, got {name!r}; the model has "
                f"{_examples(candidates)}"
            )
        wanted = ", ".join(getattr(item, "__name__", str(item)) for item in items) or "nothing"
        chosen = [n for n, module in candidates if n in names or isinstance(module, classes)]
    if not chosen:
        raise ValueError(
            f"units: expected to match at least one module, got no match for {wanted}; the model "
            f"has {_examples(candidates)}"
        )
    modules = dict(candidates)
    for name in chosen:
        if type(modules[name]).forward is nn.Module.forward:
            raise ValueError(
                f"units: expected modules with a forward, got {name!r} "
                f"({type(modules[name]).__name__}), which has none; name the modules in it"
            )
    return chosen


def _names_and_classes(items: list[object]) -> tuple[set[str], tuple[type, ...]]:
    names = {item for item in items if isinstance(item, str)}
    classes = tuple(i for i in items if isinstance(i, type) and issubclass(i, nn.Module))
    for item in items:
        if item not in names and item not in classes:
            raise ValueError(
                "units: expected module classes, module names or a predicate "
                f"(name, module) -> bool, got {item!r}"
            )
    return names, classes


def _examples(candidates: Sequence[tuple[str, nn.Module]]) -> str:
    some = [f"{name!r} ({type(module).__name__})" for name, module in candidates[:8]]
    return ", ".join(some) + (", ..." if len(candidates) > 8 else "") or "no modules below the root"


def _automatic(model: nn.Module) -> list[str]:
    """The repeated blocks of a model."""
    named: set[str] = set()
    for module in model.modules():
        named.update(getattr(module, "_no_split_modules", None) or ())
    chosen: list[str] = []

    def below(name: str) -> bool:
        return any(name == unit or name.startswith(unit + ".") for unit in chosen)

    for name, module in model.named_modules():
        if name and below(name):
            continue
        if named:
            if name and type(module).__name__ in named:
                chosen.append(name)
        elif isinstance(module, nn.ModuleList | nn.Sequential):
            children = [
                (f"{name}.{child_name}".lstrip("."), child)
                for child_name, child in module.named_children()
                if any(True for _ in child.parameters())
            ]
            counts = Counter(type(child) for _, child in children)
            chosen += [child_name for child_name, child in children if counts[type(child)] > 1]
    return chosen


def _occurrences(model: nn.Module) -> dict[int, tuple[list[str], nn.Parameter]]:
    """Every name of each parameter; a tied one has several."""
    found: dict[int, tuple[list[str], nn.Parameter]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(param), ([], param))[0].append(name)
    return found


def _owner(paths: list[str], plans: dict[str, UnitPlan]) -> str:
    """The innermost unit that contains every occurrence of a parameter."""
    common = paths[0].split(".")[:-1]
    for path in paths[1:]:
        parts = path.split(".")[:-1]
        same = 0
        while same < min(len(common), len(parts)) and common[same] == parts[same]:
            same += 1
        common = common[:same]
    while common and ".".join(common) not in plans:
        common.pop()
    return ".".join(common)


def _merge(plans: list[UnitPlan], bucket_bytes: int) -> list[UnitPlan]:
    """Joins neighbours of one parent while they fit together into `bucket_bytes`."""
    merged: list[UnitPlan] = []
    first_name = ""
    for plan in plans:
        last = merged[-1] if merged else None
        siblings = first_name.rpartition(".")[0] == plan.name.rpartition(".")[0]
        if last is not None and siblings and last.bytes + plan.bytes <= bucket_bytes:
            last.name = f"{first_name}..{plan.name}"
            last.modules += plan.modules
            last.params += plan.params
        else:
            merged.append(plan)
            first_name = plan.name
    return merged
