"""Predicted peaks of memory, beside what the allocator gives out."""

import gc

import pytest
import torch
from allocated import Allocated
from test_planner import MIXED, example_module

import zerocore
from zerocore import registry
from zerocore.planner.activity import trace_step
from zerocore.planner.peak import message_bytes, peak_of
from zerocore.planner.schedule import rehearse
from zerocore.planner.setting import Setting
from zerocore.planner.sizes import ModelSizes
from zerocore.units import plan_units

VOCABULARY, BATCH, SEQ = 256, 12, 128
WITHIN = 0.05


def example():
    gpt = example_module()
    return gpt.GPT(layers=4, dim=128, heads=4, seq=SEQ), [gpt.Block]


def llama():
    # eager: for tensors without values this library makes masks that its other kernels do without
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        attn_implementation="eager",
    )
    return transformers.LlamaForCausalLM(config), None


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=128, n_layer=4, n_head=4, n_positions=SEQ, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config), None


MODELS = {"example": example, "llama": llama, "gpt2": gpt2}


def logits(output):
    return output if isinstance(output, torch.Tensor) else output.logits


def loss_of(output, targets):
    return torch.nn.functional.cross_entropy(
        logits(output).float().flatten(0, 1), targets.flatten()
    )


def predicted(kind, stage, precision, size):
    model, units = MODELS[kind]()
    targets = torch.zeros(BATCH, SEQ, dtype=torch.long)
    activity = trace_step(
        model,
        plan_units(model, units, 0),
        lambda: ((torch.zeros(BATCH, SEQ, dtype=torch.long),), {}),
        MIXED[precision],
        loss=lambda output: loss_of(output, targets),
    )
    sizes = ModelSizes.of(model, units, 0)
    setting = Setting.of(stage, size, mixed_precision=MIXED[precision])
    peak = peak_of(sizes, setting, rehearse(sizes, setting, activity.calls), activity)
    return peak, sum(message_bytes(sizes, setting, unit) for unit in range(len(sizes.units)))


def measured(kind, stage, precision):
    gc.collect()  # what was allocated before and is freed meanwhile would count
    tokens = torch.randint(VOCABULARY, (BATCH, SEQ))
    with Allocated() as allocated:
        model, units = MODELS[kind]()
        zerocore.shard(model, stage, units=units, bucket_bytes=0, mixed_precision=MIXED[precision])
        optimizer = zerocore.AdamW(model.parameters())
        for step in range(3):
            with torch.profiler.record_function(f"step {step}"):
                loss_of(model(tokens), tokens).backward()
                optimizer.step()
                optimizer.zero_grad()
    _, messages = registry.sharded_as(model).core.kept()
    del model, optimizer
    return allocated.peak("step 2"), messages


def peaks(kind, stage, precision):
    expected, all_messages = predicted(kind, stage, precision, torch.distributed.get_world_size())
    peak, messages = measured(kind, stage, precision)
    return expected, all_messages, peak, messages


CASES = [
    *[("example", stage, precision) for stage in range(4) for precision in MIXED],
    *[("llama", stage, precision) for stage, precision in [(0, None), (3, "bf16")]],
    *[("gpt2", stage, precision) for stage, precision in [(0, "bf16"), (2, None), (3, None)]],
]


@pytest.mark.parametrize(("kind", "stage", "precision"), CASES)
def test_peaks(ranks, kind, stage, precision):
    if kind != "example":
        pytest.importorskip("transformers")
    for expected, all_messages, got, messages in ranks(2, peaks, kind, stage, precision):
        # More messages are under way at once where another rank is late.
        assert 0 < messages <= all_messages
        total = expected.bytes - expected.messages + messages
        assert abs(total / got - 1) < WITHIN, f"predicted {total:,}, measured {got:,}"


def test_a_traced_model_is_as_before():
    model, units = example()
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    for _ in range(2):
        activity = trace_step(
            model,
            plan_units(model, units, 0),
            lambda: ((torch.zeros(2, 8, dtype=torch.long),), {}),
        )
    for name, param in model.named_parameters():
        identity, value = before[name]
        assert id(param) == identity and torch.equal(param, value) and param.grad is None
    assert not any(module._forward_hooks for module in model.modules())
    products = sum(p.numel() for p in model.parameters() if p.dim() == 2) - 256 * 128
    attention = 4 * 4 * 2 * 2 * 2 * 8 * 8 * 32  # layers, heads, batch; 2 products of [8, 32, 8]
    parts = zip(activity.calls, activity.costs, strict=True)
    forward = sum(cost.flops for call, cost in parts if call.phase == "forward")
    assert forward == 2 * products * 2 * 8 + attention


class Looks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) * (2 if x.sum().item() > 0 else 1)


def test_models_that_look_at_values_are_refused():
    model = Looks()
    with pytest.raises(ValueError, match="expected a model that runs on tensors without values"):
        trace_step(model, plan_units(model), lambda: ((torch.zeros(2, 4),), {}))
    assert model.layer.weight.sum().isfinite()


class Remembers(torch.nn.Module):
    """Changes what it has in its forward."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.count = torch.zeros(1)
        self.register_buffer("late", None)

    def forward(self, x):
        self.count += 1
        self.late = x.detach().clone()
        self.mask = torch.ones(4)
        self.eval()
        return self.layer(x) * self.mask


def test_what_a_forward_keeps_is_gone_after_tracing():
    model = Remembers()
    seen = []
    handle = model.layer.register_forward_hook(lambda *_: seen.append(1))
    trace_step(model, plan_units(model), lambda: ((torch.zeros(2, 4),), {}))
    assert model.count == 0 and model.late is None and not hasattr(model, "mask") and model.training
    assert seen == [1]
    handle.remove()
    model(torch.zeros(2, 4))
    assert seen == [1] and model.count == 1


class Raises(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        raise RuntimeError


def test_a_forward_that_raises_is_told():
    model = Raises()
    with pytest.raises(ValueError, match="got RuntimeError: no message"):
        trace_step(model, plan_units(model), lambda: ((torch.zeros(2, 4),), {}))
