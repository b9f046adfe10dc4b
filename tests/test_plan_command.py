"""`zerocore plan`: the published tables, exact models, memory, advice, and what it refuses."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from zerocore.__main__ import main
from zerocore.planner.recipe import recipes_of

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
GPT = ["--model", "gpt:GPT(2, 32, 2, 16)", "--units", "Block"]
MACHINE = ["--network", "400e9", "--intra", "450e9", "--flops", "400e12", "--tokens", "4096"]


@pytest.fixture
def plan(capsys, monkeypatch):
    """Runs the command; (status, what it printed, errors)."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def run(*arguments):
        try:
            status = main(["plan", *arguments])
        except SystemExit as error:  # argparse's
            status = error.code
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def gigabytes(text, column):
    """The figures of a recipe, stage by stage."""
    rows = [line for line in text.splitlines() if re.match(r"[0-3]  ", line)]
    return [float(re.findall(r"([\d,.]+) GB", row)[column].replace(",", "")) for row in rows[:4]]


def test_the_published_tables(plan):
    status, text, _ = plan("--params", "7e9", "--world", "8")
    assert status == 0
    assert gigabytes(text, 0) == [112, 38.5, 26.25, 14]
    assert gigabytes(text, 1) == [112, 38.5, 26.25, 12.25]  # 14/N at stage 3
    assert gigabytes(text, 2) == [126, 52.5, 28, 14]  # fp32 gradients
    # arXiv 1910.02054, figure 1, to the digits that it shows
    text = plan("--params", "7.5e9", "--world", "64")[1]
    assert [round(figure, 1) for figure in gigabytes(text, 0)] == [120, 31.4, 16.6, 1.9]
    text = plan("--params", "1e9", "--world", "4", "--dtype", "fp32")[1]
    assert gigabytes(text, 0) == [16, 10, 7, 4]


def test_recipes_are_the_formulas():
    classic, own, wide = recipes_of("bf16")
    for n in (1, 2, 8, 64):
        assert [classic.per_parameter(s, n) for s in range(4)] == pytest.approx(
            [16, 4 + 12 / n, 2 + 14 / n, 16 / n]
        )
        assert [own.per_parameter(s, n) for s in range(4)] == pytest.approx(
            [16, 4 + 12 / n, 2 + 14 / n, 14 / n]
        )
        assert [wide.per_parameter(s, n) for s in range(4)] == pytest.approx(
            [18, 6 + 12 / n, 2 + 16 / n, 16 / n]
        )


def test_a_model_by_its_factory(plan):
    status, text, _ = plan(*GPT, "--world", "2", "--dtype", "fp32", "--device", "cpu")
    assert status == 0
    # 41,088 parameters, fp32; padding to 16 a parameter and 32 a unit: none here.
    size = int(re.match(r"([\d,]+) parameters", text)[1].replace(",", ""))
    held = {
        line.split("  ")[0]: [int(n.replace(",", "")) for n in re.findall(r"[\d,]+", line)]
        for line in text.splitlines()
        if line.startswith(("parameters", "gradients", "moments"))
    }
    assert held["parameters"] == [4 * size, 4 * size, 4 * size, 2 * size]
    assert held["gradients"] == [4 * size, 2 * size, 2 * size, 2 * size]
    assert held["moments"] == [8 * size, 4 * size, 4 * size, 4 * size]


def test_activations_and_memory(plan):
    arguments = (*GPT, "--world", "2", "--device", "cpu", "--activations", "4x16")
    status, text, _ = plan(*arguments, "--memory", "1e9")
    assert status == 0 and "Recommended: stage 0." in text and text.count(" fits ") == 4
    status, text, _ = plan(*arguments, "--memory", "1e5")
    assert status == 1 and "Nothing fits" in text and text.count("does not fit") == 4
    without = plan(*arguments[:-2])[1]

    def peak(text):
        return [
            int(n.replace(",", "")) for n in re.findall(r"[\d,]+", re.search("peak .*", text)[0])
        ]

    # At stage 0 a rank keeps at least the logits of 4 x 16 tokens in bf16.
    assert peak(text)[0] > peak(without)[0] + 4 * 16 * 256 * 2


def test_advice(plan):
    status, text, _ = plan("--params", "7e9", "--world", "64", *MACHINE, "--memory", "80e9")
    assert status == 0
    assert "Stage 0 does not fit" in text and "Recommended: stage 1" in text
    assert "rates are achieved ones" in text and "4,096 tokens a rank" in text
    steps = [line.split() for line in text.splitlines() if re.match(r"stage \d .*\d\.\d", line)]
    assert len(steps) >= 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "expected one of --params and --model, got none"),
        (
            ("--params", "7e9", "--model", "gpt:GPT"),
            "expected one of --params and --model, got both",
        ),
        (("--params", "7e9"), "--world: expected the number of ranks"),
        (("--params", "-1", "--world", "2"), "expected a number such as 8 or 7e9, got '-1'"),
        (("--params", "7e9", "--world", "0"), "expected a number such as 8 or 7e9, got '0'"),
        (("--params", "7e9", "--world", "2", "--flops", "1e12"), "together, got --flops only"),
        (("--params", "7e9", "--world", "2", *MACHINE[:6]), "--tokens: expected"),
        (("--params", "7e9", "--world", "2", "--units", "Block"), "--units: expected it with"),
        (
            ("--params", "3", "--world", "2", "--blocks", "9"),
            "at least one parameter for each of 9",
        ),
        (("--model", "gpt", "--world", "2"), "expected PACKAGE:FUNCTION, got 'gpt'"),
        (("--model", "gpt:Nothing", "--world", "2"), "expected 'Nothing' in gpt"),
        (("--model", "nothing_at_all:f", "--world", "2"), "No module named 'nothing_at_all'"),
        (("--model", "gpt:GPT(2", "--world", "2"), "in brackets, got (2"),
        (("--model", "gpt:GPT( )", "--world", "2"), "TypeError"),
        (("--params", "1e17", "--world", "2"), "expected at most 2000 blocks, got 79"),
        (("--model", "gpt:GPT(x)", "--world", "2"), "arguments that are numbers or texts"),
        (("--model", "gpt:VOCABULARY", "--world", "2"), "expected a function"),
        (("--model", "math:sqrt(4)", "--world", "2"), "to return an nn.Module, got 2.0"),
        ((*GPT[:2], "--units", "Layer", "--world", "2"), "got 'Layer'; it has Block, "),
        (
            (*GPT, "--world", "2", "--tokens", "9", "--machine", "/dev/null"),
            "that --calibrate wrote",
        ),
        ((*GPT, "--world", "2", "--activations", "gpt:GPT(1, 2, 3)"), "GPT"),
    ],
)
def test_refused(plan, arguments, words):
    status, _, errors = plan(*arguments)
    assert status == 2
    assert words in errors, errors
    assert "Traceback" not in errors


BIG = """
import resource, sys, time
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        d, kv, inner = 8192, 1024, 28672
        self.norms = nn.ModuleList(nn.RMSNorm(d) for _ in range(2))
        self.parts = nn.ModuleList(
            nn.Linear(a, b, bias=False)
            for a, b in [(d, d), (d, kv), (d, kv), (d, d), (d, inner), (d, inner), (inner, d)]
        )
    def forward(self, x):
        return x

def llama_70b():
    return nn.ModuleDict({
        "embedding": nn.Embedding(128256, 8192),
        "blocks": nn.ModuleList(Block() for _ in range(80)),
        "norm": nn.RMSNorm(8192),
        "head": nn.Linear(8192, 128256, bias=False),
    })

if __name__ == "__main__":
    import torch
    from zerocore.__main__ import main
    start = time.perf_counter()
    status = main(sys.argv[1:])
    seconds = time.perf_counter() - start
    bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"status {status} seconds {seconds} bytes {bytes}")
"""


@pytest.mark.parametrize("how", ["--model", "--params"])
def test_70e9_parameters_on_1024_ranks(tmp_path, how):
    """Under 10 s and 1 GB."""
    (tmp_path / "big.py").write_text(BIG)
    what = ["--model", "big:llama_70b", "--units", "Block"] if how == "--model" else [how, "70e9"]
    arguments = ["plan", *what, "--world", "1024", "--memory", "80e9", *MACHINE]
    paths = [str(tmp_path), str(pathlib.Path(__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, "big.py", *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        check=True,
    )
    facts = re.search(r"status (\d+) seconds (\S+) bytes (\d+)", done.stdout)
    assert facts[1] == "0" and "Recommended: stage 3" in done.stdout
    assert float(facts[2]) < 10 and int(facts[3]) < 1e9
    if how == "--model":
        assert "70,553,706,496 parameters" in done.stdout  # Llama 3 70B's


def test_the_command_that_pip_installs():
    script = pathlib.Path(sys.executable).with_name("zerocore")
    if not script.exists():
        pytest.skip("zerocore is not installed here")
    done = subprocess.run(
        [script, "plan", "--params", "7e9", "--world", "8"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "112.00 GB" in done.stdout
