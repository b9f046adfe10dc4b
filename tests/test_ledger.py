"""zerocore.ledger: what a rank holds, by category and dtype, as stats and the tensors say."""

import models
import pytest
import reference
import sharded
import torch
import torch.distributed as dist
from torch import nn

import zerocore

LOW = torch.bfloat16


def checked(model, opt):
    """The ledger as a dict, which agrees with the stats and with itself."""
    ledger = zerocore.ledger(model, opt)
    resident = dict(zerocore.stats(model, opt).resident)
    assert {name: ledger.bytes_of(name) for name in resident} == resident
    assert ledger.bytes_of("windows") == zerocore.stats(model).windows.bytes
    assert ledger.windows_peak == zerocore.stats(model).windows.peak
    assert ledger.total == sum(row.bytes for row in ledger.rows)
    for row in ledger.rows:
        assert row.bytes_per_parameter == row.bytes / ledger.parameters
        assert row.bytes > 0 or row.predicted > 0
    assert len({row[:2] for row in ledger.rows}) == len(ledger.rows)
    assert ledger.predicted == sum(row.predicted for row in ledger.rows)
    parts = {row.category for row in ledger.rows if row.bytes != row.predicted}
    assert {line.split()[0] for line in ledger.differences} == parts
    return {row[:2]: row.bytes for row in ledger.rows if row.bytes}


def batch_norms(stage):
    """Rows after a step, with those of the forward at stage 3, in bf16."""
    policy = zerocore.MixedPrecision(LOW, buffer=LOW, output=torch.float32)
    model = sharded.shard("cnn", stage, mixed_precision=policy)
    opt = zerocore.AdamW(model.parameters())
    inside = []
    model.conv2.register_forward_hook(lambda *_: inside.append(checked(model, opt)))
    for number in range(2):  # the first does not know the order of units yet
        sharded.step(model, opt, "cnn", number)
    units = zerocore.stats(model).units.values()
    sizes = [sum(u.parameters for u in units), sum(u.padded for u in units)]
    ledger = zerocore.ledger(model, opt)
    assert not ledger.differences and ledger.windows_peak == ledger.windows_peak_predicted
    predicted = {row[:2]: row.predicted for row in ledger.rows}
    return checked(model, opt), inside[0], (*sizes, sum(u.shard for u in units)), predicted


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_rows_are_the_formulas(ranks, stage):
    for rows, inside, (real, whole, shard), predicted in ranks(2, batch_norms, stage):
        assert real == sum(p.numel() for p in models.build("cnn").parameters())
        expected = {} if stage == 3 else {("parameters", LOW): 2 * whole}
        statistics = 2 * (5 + 7)
        expected |= {
            ("master", torch.float32): 4 * shard,
            ("gradients", torch.float32): 4 * shard,
            ("moments", torch.float32): 8 * shard,
            ("buffers", LOW): 2 * statistics,
            ("buffers", torch.float32): 4 * statistics,
            ("buffers", torch.int64): 2 * 8,
        }
        assert rows == expected == predicted
        assert (("windows", LOW) in inside) == (stage == 3)


def every_kind():
    """Rows of a nested model with frozen, integer and double parameters, and its table."""
    torch.manual_seed(0)
    model = nn.Sequential(models.Mixed(torch.float64), nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].requires_grad_(False)
    zerocore.shard(model[2], 0, mixed_precision=zerocore.MixedPrecision(output=torch.float32))
    zerocore.shard(model, 1)
    opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], foreach=True)
    before = checked(model, None)
    model(torch.randn(2, 7)).sum().backward()
    with zerocore.no_sync(model):
        model(torch.randn(2, 7)).sum().backward()
    kept = checked(model, opt)
    shown = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    gradients = reference.clones(shown)
    assert checked(model, opt) == kept
    reference.assert_same(
        {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, gradients
    )  # asking changed nothing
    opt.zero_grad()
    model(torch.randn(2, 7)).sum().backward()
    opt.step()
    return before, kept, checked(model, opt), str(zerocore.ledger(model, opt))


def test_every_kind_is_counted(ranks):
    for before, kept, after, table in ranks(2, every_kind):
        dtypes = [torch.float32, torch.float64, torch.int64, torch.bool, LOW]
        assert {dtype for category, dtype in before if category == "parameters"} == set(dtypes)
        assert set(before) - {("parameters", dtype) for dtype in dtypes} == {
            ("master", torch.float32)
        }
        for dtype in (torch.float32, torch.float64):
            assert kept["gradients", dtype] > after["gradients", dtype] > 0
            assert after["moments", dtype] > 0
        assert all(after[key] == before[key] for key in before)
        lines = table.splitlines()
        titles = ["category", "dtype", "predicted", "measured", "bytes", "per", "parameter"]
        assert lines[1].split() == titles
        assert len({len(line) for line in lines[1 : lines.index("")]}) == 1, "aligned"
        for (category, dtype), size in after.items():
            words = [category, str(dtype).removeprefix("torch."), f"{size:,}"]
            assert any(line.split()[:2] + line.split()[3:4] == words for line in lines), words
        assert any(
            line.split()[:1] + line.split()[2:3] == ["total", f"{sum(after.values()):,}"]
            for line in lines
        )


def errors():
    model = sharded.shard("transformer", 3)
    found = []
    for call in (
        lambda: zerocore.ledger(nn.Linear(2, 2)),
        lambda: zerocore.ledger(model).bytes_of("grads"),
    ):
        try:
            call()
        except ValueError as error:
            found.append(str(error))
    return found, dist.get_rank()


def test_errors(ranks):
    for (unsharded, category), _ in ranks(2, errors):
        assert "zerocore.ledger" in unsharded and "Linear" in unsharded
        assert "gradients" in category and "'grads'" in category


OPTIMIZERS = {
    "zerocore": zerocore.AdamW,
    "torch": torch.optim.AdamW,
    "amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
}


def while_gathered(stage, name, precision):
    """The ledgers between steps, and while all parameters are gathered."""
    policy = precision and zerocore.MixedPrecision(precision, output=torch.float32)
    model = sharded.shard("transformer", stage, mixed_precision=policy)
    opt = OPTIMIZERS[name](model.parameters())
    for number in range(2):
        sharded.step(model, opt, "transformer", number)
    before = zerocore.ledger(model, opt)
    with zerocore.gathered(model):
        inside = zerocore.ledger(model, opt)
    shown = sum(zerocore.stats(model).units[name].padded for name in zerocore.stats(model).units)
    return before, inside, zerocore.ledger(model, opt), 4 * shown


@pytest.mark.parametrize(("stage", "precision"), [(0, None), (2, LOW), (3, None), (3, LOW)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_and_gathered_parameters(ranks, stage, precision, name):
    for before, inside, after, shown in ranks(2, while_gathered, stage, name, precision):
        assert not before.differences and before.rows == after.rows
        assert inside.bytes_of("moments") == before.bytes_of("moments")
        assert inside.predicted == before.predicted
        # At stage 0 there is nothing to gather; a master copy that is sharded is gathered in fp32.
        gathered = 0 if stage == 0 else shown
        assert inside.bytes_of("windows") == gathered
        assert bool(inside.differences) == bool(gathered)


def not_an_optimizer():
    model = sharded.shard("transformer", 3)
    opt = zerocore.AdamW(model.parameters())
    found = []
    for wrong in ([opt, opt], "adam"):
        for call in (zerocore.ledger, zerocore.stats):
            try:
                call(model, wrong)
            except ValueError as error:
                found.append(str(error))
    return found


def test_what_is_no_optimizer_is_refused(ranks):
    for found in ranks(2, not_an_optimizer):
        assert len(found) == 4
        assert all("expected one torch.optim.Optimizer or None" in text for text in found)
