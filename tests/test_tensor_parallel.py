"""Models of which some parameters are DTensors of tensor parallelism: 2 x 2 ranks."""

import math

import pytest
import reference
import sharded
import torch
import torch.distributed as dist
import torch.nn.functional as F
from reference import assembled
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import zerocore

NORMS = (1.0, 2.0, math.inf, 3.0)
WORDS, WIDTH = 37, 8  # 37 words are not even over two ranks
STEPS = 2


class Block(nn.Module):
    """[B, T, WIDTH] to the same: attention and a multilayer perceptron."""

    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 24)
        self.down = nn.Linear(24, WIDTH)

    def forward(self, x):
        """As many heads as this rank has; a head is 2 wide."""
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (-1, 2)).transpose(1, 2) for f in (self.q, self.k, self.v))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(heads.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """[B, T] words to [B, T, WORDS] logits; the embedding and the head share their weight."""

    def __init__(self, checkpointed=None):
        super().__init__()
        self.checkpointed = checkpointed  # None, or use_reentrant
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(6, WIDTH))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        """Logits."""
        x = self.words(x) + self.places
        for block in self.blocks:
            if self.checkpointed is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointed)
        return self.head(self.norm(x))


def build(seed=0, **options):
    torch.manual_seed(seed)
    return Model(**options)


def batch(part, step):
    generator = torch.Generator().manual_seed(100 * step + part)
    text = torch.randint(WORDS, (3, 7), generator=generator)
    return text[:, :-1], text[:, 1:]


def loss_of(model, part, step):
    x, y = batch(part, step)
    return F.cross_entropy(model(x).float().flatten(0, 1), y.flatten())


def make_mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def parallelize(model, tp, sequence=True, local=True):
    """Megatron's plan; `sequence`: the norms compute on parts of the sequence."""
    words = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, tp, {"words": words})
    parallelize_module(model, tp, {"head": ColwiseParallel(output_layouts=Replicate())})
    model.head.weight = model.words.weight
    for block in model.blocks:
        h = Replicate()
        if sequence:
            h = Shard(1)
            for norm in ("norm1", "norm2"):
                split = PrepareModuleInput(
                    input_layouts=Replicate(), desired_input_layouts=Shard(1)
                )
                parallelize_module(block, tp, {norm: split})
                parallelize_module(block, tp, {norm: SequenceParallel(use_local_output=True)})
        column = {name: ColwiseParallel(input_layouts=h) for name in "qkv"}
        column["up"] = ColwiseParallel(input_layouts=h, use_local_output=local)
        row = {"o": RowwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, tp, column | row)
    return model


def places_of(model):
    """Of the DTensors by name: the dimension that is sharded, None for a replicated one."""
    places = {}
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            (place,) = param.placements
            places[name] = place.dim if isinstance(place, Shard) else None
    return places


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, eps=reference.EPS, weight_decay=0.1)


def plain(dtype=torch.float32, steps=STEPS):
    """One process on both parts: losses, gradients, norms, and the parameters at the end."""
    model = build().to(dtype)
    opt = adamw(model.parameters())
    losses, gradients, norms = [], {}, []
    for step in range(steps):
        opt.zero_grad()
        parts = [loss_of(model, part, step) / 2 for part in range(2)]
        for loss in parts:
            loss.backward()
        losses.append([2 * loss.item() for loss in parts])
        gradients |= {f"{step} {n}": p.grad.clone() for n, p in model.named_parameters()}
        norms.append(
            [torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, n).item() for n in NORMS]
        )
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
    return losses, gradients, norms, reference.clones(model.state_dict())


def train_all(cases):
    """The reports of all cases; a case is a dict of options."""
    mesh = make_mesh()
    return [train(mesh, **case) for case in cases]


def train(
    mesh, stage, kind="zerocore", sequence=True, local=True, checkpointed=None, steps=STEPS, **kw
):
    """What `plain` gives, on this rank: gradients as Pieces, the state with full plain tensors."""
    part = mesh["dp"].get_local_rank()
    model = parallelize(build(checkpointed=checkpointed), mesh["tp"], sequence, local)
    names, places = [n for n, _ in model.named_parameters()], places_of(model)
    zerocore.shard(model, stage, mesh=mesh["dp"], **kw)
    assert [n for n, _ in model.named_parameters()] == names
    assert model.head.weight is model.words.weight
    assert not places_of(model)
    if kind == "zerocore":
        opt = zerocore.AdamW(
            model.parameters(), lr=1e-2, eps=reference.EPS, weight_decay=0.1, max_grad_norm=0.5
        )
    else:
        opt = adamw(model.parameters())
    losses, gradients, norms = [], {}, []
    for step in range(steps):
        opt.zero_grad()
        loss = loss_of(model, part, step)
        loss.backward()
        losses.append(loss.item())
        assert not places_of(model)
        gradients |= sharded.pieces(model, f"{step} ")
        norms.append([zerocore.clip_grad_norm_(model, 1e9, n).item() for n in NORMS])
        if kind != "zerocore":
            zerocore.clip_grad_norm_(model, 0.5)
        opt.step()
        if kind == "zerocore":
            assert opt.grad_norm.item() == norms[-1][1]
    state = zerocore.full_state_dict(model)
    assert places_of_state(state) == places | {"head.weight": 0}
    state = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state.items()}
    return losses, gradients, norms, state, places


def places_of_state(state):
    return {
        name: getattr(tensor.placements[0], "dim", None)
        for name, tensor in state.items()
        if isinstance(tensor, DTensor)
    }


def whole_gradients(reports):
    """Gradients of the whole model from the pieces of ranks (dp, tp) = (0, 0), (0, 1), (1, 0)..."""
    places = reports[0][4]
    halves = [assembled([reports[tp][1], reports[2 + tp][1]]) for tp in range(2)]
    whole = {}
    for name in halves[0]:
        place = places.get(name.split()[1])
        if place is None:  # copies: plain, or a replicated DTensor
            assert halves[0][name].equal(halves[1][name]), name
            whole[name] = halves[0][name]
        else:
            whole[name] = place, [half[name] for half in halves]
    return whole


def distance(found, expected):
    """Relative L2 distance over all tensors."""
    square = norm = 0.0
    for name, tensor in expected.items():
        other = found[name]
        if isinstance(other, tuple):
            dim, halves = other
            shapes = [half.shape for half in tensor.chunk(2, dim)]
            other = torch.cat([h.view(s) for h, s in zip(halves, shapes, strict=True)], dim)
        difference = other.view(tensor.shape).double() - tensor.double()
        square += difference.square().sum().item()
        norm += tensor.double().square().sum().item()
    return math.sqrt(square / norm)


CASES = {
    "torch 0": {"stage": 0, "kind": "torch"},
    "zerocore 2": {"stage": 2},
    "zerocore 3": {"stage": 3},
    "torch 3": {"stage": 3, "kind": "torch", "sequence": False, "reshard_after_forward": False},
    "DTensors between units": {"stage": 3, "local": False, "units": [nn.Linear, nn.LayerNorm]},
    "recomputed": {"stage": 3, "checkpointed": False},
    "recomputed, reentrant": {"stage": 3, "checkpointed": True, "sequence": False},
}


def test_training_equals_one_process(ranks):
    results = ranks(4, train_all, list(CASES.values()))
    losses, gradients, norms, state = plain()
    for number, case in enumerate(CASES):
        reports = [result[number] for result in results]
        for rank, report in enumerate(reports):
            expected = [both[rank // 2] for both in losses]
            assert report[0] == pytest.approx(expected, rel=1e-6), case
            assert report[2] == reports[0][2], f"{case}: the norm differs between ranks"
            assert torch.tensor(report[2]).allclose(torch.tensor(norms), rtol=1e-6, atol=0), case
            assert distance(report[3], state) < 1e-6, case
        assert distance(whole_gradients(reports), gradients) < 1e-6, case


def states(seeds):
    """State dicts before and after shard(), and after loads; all with DTensors."""
    mesh = make_mesh()
    tp = mesh["tp"]
    unsharded = parallelize(build(seeds[0]), tp).state_dict()
    model = zerocore.shard(parallelize(build(seeds[0]), tp), 3, mesh=mesh["dp"])
    other = zerocore.shard(parallelize(build(seeds[1]), tp), 2, mesh=mesh["dp"])
    params = dict(model.named_parameters())
    state = model.state_dict()
    found = [state]
    other.load_state_dict(state)
    found.append(other.state_dict())
    model.load_state_dict(build(seeds[1]).state_dict())  # full and plain
    with zerocore.gathered(model, write=True):
        whole = tp.size() * params["blocks.0.up.weight"].numel()
        model.blocks.load_state_dict(other.blocks.state_dict())
    found.append(model.state_dict())
    assert whole == 24 * WIDTH
    assert all(param is params[name] for name, param in model.named_parameters())
    for state in found:
        assert list(state) == list(unsharded)
        for name, tensor in state.items():
            assert type(tensor) is type(unsharded[name]), name
            assert tensor.shape == unsharded[name].shape, name
            if isinstance(tensor, DTensor):
                assert tensor.placements == unsharded[name].placements, name
                assert tensor.device_mesh == tp
                assert tensor.stride() == unsharded[name].stride()
    first = zerocore.full_state_dict(model, rank0_only=True)
    assert bool(first) == (mesh["dp"].get_local_rank() == 0)
    errors = {}
    for reason, name, wrong in (
        ("placements", "blocks.0.up.weight", distribute_tensor(torch.ones(24, WIDTH), tp)),
        ("mesh", "blocks.0.norm1.weight", distribute_tensor(torch.ones(WIDTH), mesh["dp"])),
        ("part", "blocks.0.up.weight", torch.ones(12, WIDTH)),
    ):
        with pytest.raises(RuntimeError, match=name) as caught:
            model.load_state_dict({name: wrong}, strict=False)
        errors[reason] = str(caught.value)
    return [
        {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in s.items()} for s in found
    ], errors


def test_state_dict_has_dtensors(ranks):
    seeds = (0, 1)
    one, two = (build(seed).state_dict() for seed in seeds)
    mixed = two | {name: tensor for name, tensor in one.items() if name.startswith("blocks")}
    for found, errors in ranks(4, states, seeds):
        for state, expected in zip(found, (one, one, mixed), strict=True):
            reference.assert_same(state, expected)
        assert "redistribute" in errors["placements"]
        assert "redistribute" in errors["mesh"]
        assert "expected the shape (24, 8), got (12, 8)" in errors["part"]


def train_mixed():
    """Losses in bf16, with DTensors between units and not, and a step that overflows on rank 3."""
    mesh = make_mesh()
    part = mesh["dp"].get_local_rank()
    losses = []
    for local in (True, False):
        model = parallelize(build(), mesh["tp"], local=local)
        policy = zerocore.MixedPrecision(torch.bfloat16, reduce=torch.float32)
        units = None if local else [nn.Linear]
        zerocore.shard(model, 3, mesh=mesh["dp"], units=units, mixed_precision=policy)
        opt = zerocore.AdamW(model.parameters(), lr=0.1, max_grad_norm=1.0)
        seen = []
        model.blocks[0].up.register_forward_pre_hook(
            lambda up, _, seen=seen: seen.append((up.weight.dtype, up.weight.placements))
        )
        mine = []
        for _ in range(6):
            opt.zero_grad()
            loss = loss_of(model, part, 0)
            loss.backward()
            opt.step()
            mine.append(loss.item())
        losses.append(mine)
        assert set(seen) == {(torch.bfloat16, (Shard(0),))}
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
    before = reference.clones(dict(model.named_parameters()))
    norms = []
    grad = model.blocks[1].up.weight.grad
    for bad in (math.inf, math.nan):
        for norm_type in (1.0, 2.0, math.inf):
            for p in model.parameters():
                p.grad.fill_(1.0)
            if dist.get_rank() == 3:
                grad[-1] = bad
            if norm_type == 2.0:
                opt.step()  # measures the norm, and leaves everything as it is
            norms.append(zerocore.clip_grad_norm_(model, 1e9, norm_type).item())
    for name, param in model.named_parameters():
        assert param.equal(before[name]), name
    return losses, norms


def test_bf16_and_gradients_that_are_not_finite_on_one_rank(ranks):
    reports = ranks(4, train_mixed)
    exact = plain(steps=1)[0][0]
    for rank, (losses, norms) in enumerate(reports):
        assert losses == reports[rank // 2 * 2][0]  # equal on the ranks of one part
        for mine in losses:
            assert mine[0] == pytest.approx(exact[rank // 2], rel=1e-2)
            assert mine[-1] < mine[0] - 1.0
        assert norms[:3] == [math.inf] * 3
        assert all(math.isnan(norm) for norm in norms[3:])


class Scale(nn.Module):
    """[8] to [8], by a DTensor over two dimensions of a mesh, and a bias."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
        whole = torch.arange(1.0, 9.0)
        if mesh is not None:
            whole = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
        self.weight = nn.Parameter(whole)
        self.weight.note = "kept"
        self.bias = nn.Parameter(torch.ones(8))

    def forward(self, x):
        """The product."""
        if self.mesh is None:
            return self.weight * x + self.bias
        x = DTensor.from_local(x, self.mesh, [Replicate(), Replicate()])
        return (self.weight * x).full_tensor() + self.bias


def norms_on_two_dimensions():
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "a", "b"))
    model = zerocore.shard(Scale(mesh["a", "b"]), 3, mesh=mesh["dp"])
    assert model.weight.note == "kept"
    assert model.weight.shape == (4,)
    model(torch.arange(8.0)).square().sum().backward()
    return [zerocore.clip_grad_norm_(model, 1e9, n).item() for n in NORMS]


def test_norm_with_copies_over_two_dimensions(ranks):
    model = Scale(None)
    model(torch.arange(8.0)).square().sum().backward()
    norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, n).item() for n in NORMS]
    for found in ranks(4, norms_on_two_dimensions):
        assert found == pytest.approx(norms, rel=1e-6)


def refused():
    """What shard() and an old optimizer say; the model is as before, and can be sharded then."""
    mesh = make_mesh()
    dp, tp = mesh["dp"], mesh["tp"]
    model = parallelize(build(), tp)
    old = torch.optim.AdamW(model.parameters())
    before = dict(model.named_parameters())
    said = {}

    def attempt(name, error, mesh=dp, model=model, **options):
        with pytest.raises(error) as caught:
            zerocore.shard(model, mesh=mesh, **options)
        said[name] = str(caught.value)

    attempt("no mesh", ValueError, mesh=None)
    attempt("tp", ValueError, mesh=tp)
    attempt("option", ValueError, stage=4)
    weight = model.blocks[0].up.weight
    weight.grad = torch.zeros_like(weight)
    attempt("gradient", ValueError)
    weight.grad = None
    handle = weight.register_hook(lambda grad: grad)
    attempt("hook", ValueError)
    handle.remove()
    partial = nn.Linear(4, 4)
    partial.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), tp, [Partial()]))
    attempt("partial", NotImplementedError, model=partial)
    crossed = nn.Linear(4, 4)  # the ranks of data parallelism hold different parts
    dim = dp.get_local_rank()
    crossed.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), tp, [Shard(dim)]))
    attempt("crossed", ValueError, model=crossed)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    zerocore.shard(model, mesh=dp)
    loss_of(model, 0, 0).backward()
    with pytest.raises(RuntimeError) as caught:
        old.step()
    said["old optimizer"] = str(caught.value)
    ours = zerocore.AdamW(before.values())
    with pytest.raises(RuntimeError, match="made before zerocore.shard"):
        ours.step()
    torch.optim.AdamW(model.parameters()).step()
    with pytest.raises(ZeroDivisionError):  # a forward that fails leaves no DTensor behind
        model.blocks[1].up.register_forward_hook(lambda *_: 1 / 0)
        loss_of(model, 0, 0)
    assert not places_of(model)
    return said


def test_errors(ranks):
    for said in ranks(4, refused):
        for name in ("no mesh", "tp"):
            assert "'words.weight': [" in said[name]
            assert "pass mesh=mesh['dp']" in said[name]
        assert said["gradient"].startswith("blocks.0.up.weight: expected a parameter without a gra")
        assert said["hook"].startswith("blocks.0.up.weight: expected a DTensor without hooks")
        assert said["partial"].startswith("weight: expected the placements Shard and Replicate")
        assert "expected the same call on every rank" in said["crossed"]
        assert "made before zerocore.shard and holds the DTensor that '" in said["old optimizer"]
