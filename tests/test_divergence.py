"""Ranks that part: every one ends with the same error, which names who, where and when, in time."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import drills
import pytest
import sharded
from drills import TIMEOUT
from ranks import Pool

from zerocore.diagnosis import ModelState, Raised, RankState, Step, first_divergence

SLACK_SECONDS = 6.0  # of a loaded machine
START_SECONDS = 240.0  # what it may take to start several processes on one
HERE = pathlib.Path(__file__).parent

# (drill, argument): what the verdict says; ranks that live on.
SAYS = {
    ("skips_a_unit", 3): r"used unit 'blocks.2'.* in forward 3.*used unit 'blocks.1' in forward 3"
    r"|rank 0 used unit 'blocks.1', rank 1 unit 'blocks.2'",
    ("other_order", 3): r"used unit 'blocks.1' in forward 3.*used unit 'blocks.0' in forward 3"
    r"|rank 0 used unit 'blocks.0', rank 1 unit 'blocks.1'",
    ("one_batch_fewer", 2): r"rank 1 is alive but does not take part: it has done nothing for .* "
    r"since the step after forward 3, while rank 0 waits for .* forward 4",
    ("one_batch_fewer", 3): r"rank 1 is alive but does not take part: it has done nothing for .* "
    r"since the step after forward 3, while rank 0 waits for .* in forward 4",
    ("raises_and_goes_on", 0): r"rank 1 went on after BadBatchError: label out of range in the "
    r"forward of unit 'blocks.1' \(forward 4\), which rank 0 did not see",
    ("raises_and_goes_on", 2): r"rank 1 went on after BadBatchError: label out of range in the "
    r"forward of unit 'blocks.1' \(forward 4\), which rank 0 did not see",
    ("raises_and_goes_on", 3): r"rank 1 went on after BadBatchError: label out of range in the "
    r"forward of unit 'blocks.1' \(forward 4\), which rank 0 did not see",
    ("backward_raises_and_goes_on", 0): r"rank 1 went on after an exception in the backward of "
    r".* \(of forward 4\), which rank 0 did not see",
    ("backward_raises_and_goes_on", 3): r"rank 1 went on after an exception in the backward of "
    r".* \(of forward 4\), which rank 0 did not see",
    ("sleeps", 0): r"rank 1 is alive but .* it is in the forward of unit 'blocks.1' \(forward 3\)",
    ("sleeps", 3): r"rank 1 is alive but .* it is in the forward of unit 'blocks.1' \(forward 3\) "
    r".*while rank 0 waits for",
    ("clips_alone", 2): r"rank 0 waits for zerocore.clip_grad_norm_ after forward 3 .*; rank 1 "
    r"waits for the all-gather of the root unit in forward 4 .*: they wait for different things",
    ("clips_alone", 3): r"(rank 0 came to zerocore.clip_grad_norm_ after forward 3, but rank 1 "
    r"|rank 1 used .* but rank 0 came to zerocore.clip_grad_norm_ after forward 3)",
    ("saves_alone", 3): r"rank 0 came to the all-gather of full parameters of the root unit after "
    r"forward 2|but rank 0 came to the all-gather of full parameters of the root unit",
    ("saves_optimizer_alone", 2): r"rank 0 waits for zerocore.optimizer_state_dict after "
    r"forward 2 .*; rank 1 waits for .* in forward 3 .*: they wait for different things",
    ("never_shards", 3): r"rank 1 never called zerocore.shard with these ranks",
    ("shards_differently", "stage"): r"rank 0 has options .*stage=3.* rank 1 has options .*stage=2",
    ("shards_differently", "dtype"): r"rank 0 has parameter .*float32.* rank 1 has .*float64",
    ("shards_differently", "parameters"): r"rank 0 has unit 'blocks.0..blocks.2' .* rank 1 has",
}
LOGGED = [("skips_a_unit", 3), ("sleeps", 0), ("raises_and_goes_on", 3), ("clips_alone", 3)]
LATE = ("one_batch_fewer", "sleeps", "never_shards")  # the odd rank wakes up after the others' end


def in_time(name, rank, ended):
    late = TIMEOUT if name in LATE and rank == 1 else 0.0
    return ended.seconds < TIMEOUT + late + SLACK_SECONDS


def agrees(verdict, text):
    """Without what is measured in seconds: logs are written later than answers."""
    return re.sub(r"[\d.]+ s\b", "", verdict) == re.sub(r"[\d.]+ s\b", "", text)


@pytest.fixture(scope="module")
def endings(tmp_path_factory):
    """How each drill of SAYS ended on each rank; most of it is waiting, so pools run at once."""
    folder = tmp_path_factory.mktemp("drills")
    pools = [Pool(2) for _ in range(4)]
    todo = list(SAYS)

    def work(pool):
        done = {}
        # What is imported late is there afterwards.
        pool.run(sharded.train, drills.JOB, "zerocore", 3, 1, seconds=START_SECONDS)
        while todo:
            name, argument = todo.pop()
            log_dir = str(folder / f"{name}-{argument}") if (name, argument) in LOGGED else ""
            store = str(folder / f"store-{name}-{argument}")
            outcome = pool.run(drills.in_a_new_world, name, argument, store, log_dir)
            done[name, argument] = [drills.Ended(*ended) for ended in outcome]
        return done

    try:
        with ThreadPoolExecutor(len(pools)) as workers:
            results = {k: v for done in workers.map(work, pools) for k, v in done.items()}
    finally:
        for pool in pools:
            pool.close()
    return folder, results


@pytest.mark.parametrize("name, argument", SAYS, ids=[f"{n}-{a}" for n, a in SAYS])
def test_every_rank_says_the_same(endings, name, argument):
    both = endings[1][name, argument]
    for rank, ended in enumerate(both):
        assert ended.error, f"rank {rank} ended well"
        assert re.search(SAYS[name, argument], ended.verdict), f"rank {rank}: {ended.text}"
        assert in_time(name, rank, ended), (rank, ended.seconds, ended.text)
    assert both[0].verdict == both[1].verdict


@pytest.mark.parametrize("name, argument", LOGGED, ids=[f"{n}-{a}" for n, a in LOGGED])
def test_logs_alone_say_it_too(endings, name, argument):
    folder, results = endings
    said = diagnose(folder / f"{name}-{argument}")
    assert re.search(SAYS[name, argument], said), said
    assert results[name, argument]


def diagnose(folder, status=1):
    command = [sys.executable, "-m", "zerocore", "diagnose", str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=START_SECONDS, cwd=HERE.parent
    )
    assert done.returncode == status, done.stderr
    return done.stdout.strip() or done.stderr


def launch(name, stage, folder, size=2, tcp=False):
    """The ranks of one drill as programs."""
    folder.mkdir()
    env = os.environ | {"WORLD_SIZE": str(size), "ZEROCORE_LOG_DIR": str(folder / "logs")}
    if tcp:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    command = [sys.executable, str(HERE / "drills.py"), name, str(stage), str(folder)]
    paths = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    return [
        subprocess.Popen(
            command,
            env=env | {"RANK": str(rank), "PYTHONPATH": paths},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


# (drill, stage): size, over TCP, what the verdict says, who survives, and exit codes of the others.
DEATHS = {
    ("raises_and_dies", 2): (
        2,
        True,
        r"rank 1 ended with an exception, BadBatchError: label out of range in the forward of "
        r"unit 'blocks.1' \(forward 3\)",
        {1: 1},
    ),
    ("backward_raises_and_dies", 3): (
        2,
        False,
        r"rank 1 ended with an exception, ArithmeticError: in backward; .* forward 3, while",
        {1: 1},
    ),
    ("is_killed", 3): (
        3,
        True,
        r"no answer from rank 1.*while rank [02] waits for .*unit 'blocks.[12]' in",
        {1: -signal.SIGKILL},
    ),
    ("is_stopped", 2): (2, True, r"no answer from rank 1.*while rank 0 waits for", {1: None}),
    ("ends_early", 3): (
        2,
        True,
        r"rank 1 ended the script; before, it had done nothing for .* since the step after "
        r"forward 3, while rank 0 waits for .*forward 4",
        {1: 0},
    ),
    ("first_is_killed", 3): (
        2,
        True,
        r"no answer from rank 0|rank 0.* does not answer",
        {0: -signal.SIGKILL},
    ),
    ("in_a_hybrid_mesh", 3): (
        4,
        False,
        r"rank 1 is alive but does not take part: it has done nothing for .* since the step after "
        r"forward 2",
        {},
    ),
}


@pytest.fixture(scope="module")
def deaths(tmp_path_factory):
    """Programs and folders of each drill of DEATHS, one drill after the other but for waits."""
    folder = tmp_path_factory.mktemp("deaths")

    def finish(key):
        name, stage = key
        size, tcp, _, others = DEATHS[key]
        processes = launch(name, stage, folder / f"{name}-{stage}", size, tcp)
        deadline = time.monotonic() + START_SECONDS
        errors = {}
        try:
            for rank, process in enumerate(processes):
                if others.get(rank, 0) is None:
                    continue
                errors[rank] = process.communicate(timeout=deadline - time.monotonic())[1]
        finally:
            for process in processes:
                process.kill()  # the stopped one, or all that hang
                process.wait()
        return folder / f"{name}-{stage}", {r: processes[r].returncode for r in errors}, errors

    with ThreadPoolExecutor(2) as workers:
        return dict(zip(DEATHS, workers.map(finish, DEATHS), strict=True))


@pytest.mark.parametrize("key", DEATHS, ids=[f"{n}-{s}" for n, s in DEATHS])
def test_survivors_say_who_is_gone(deaths, key):
    folder, codes, errors = deaths[key]
    size, _, says, others = DEATHS[key]
    verdicts = set()
    for rank in range(size):
        if rank in others:
            if others[rank] is not None:
                assert codes[rank] == others[rank], errors[rank]
            continue
        assert codes[rank] == 1, errors[rank]
        ended = drills.Ended(*json.loads((folder / f"rank{rank}.json").read_text()))
        assert ended.error == "DistBackendError", ended
        assert re.search(says, ended.verdict), ended.text
        late = TIMEOUT if key[0] == "in_a_hybrid_mesh" and rank == 1 else 0.0
        assert ended.seconds < TIMEOUT + late + SLACK_SECONDS, ended
        verdicts.add(ended.verdict)
    assert len(verdicts) == 1


@pytest.mark.parametrize("key", [("raises_and_dies", 2), ("is_killed", 3), ("ends_early", 3)])
def test_logs_of_the_dead_say_it_too(deaths, key):
    said = diagnose(deaths[key][0] / "logs")
    assert re.search(DEATHS[key][2].split("(?:")[0], said), said


@pytest.mark.parametrize(
    "name, stage, says, status",
    [
        ("raises_and_dies", 3, r"rank 1 .*BadBatchError: label out of range", 1),
        (
            "is_killed",
            2,
            # The second, if the launcher took its time to notice.
            r"no rank has written why it ended.* rank 0 .*; rank 1 |no answer from rank 1",
            1,
        ),
        ("ends_well", 3, r"all 2 ranks ended by themselves", 0),
    ],
)
def test_logs_of_ranks_under_torchrun(tmp_path, name, stage, says, status):
    """The launcher hosts the store, and kills what is left when a rank has died: the logs stay."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, str(HERE / "drills.py"), name, str(stage), str(tmp_path)]
    paths = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": paths, "ZEROCORE_LOG_DIR": str(tmp_path)}
    env["DRILL_SECONDS"] = "60"  # the launcher ends all at once, however slow they are
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, env=env)
    assert (done.returncode != 0) == (status != 0), done.stderr
    if name == "raises_and_dies":
        assert "BadBatchError: label out of range" in done.stderr
    said = diagnose(tmp_path, status)
    assert re.search(says, said), said


def test_a_crash_explains_logs_that_were_cut_off():
    crash = Raised("BadBatchError", "label out of range", None, "", 0, 0)
    states = {0: RankState("lost", {}), 1: RankState("crashed", {}, crash)}
    said = first_divergence(states)
    assert "rank 1 ended with an exception, BadBatchError: label out of range" in said


def test_a_rank_that_recomputes_is_in_that_unit():
    place = [8, "", "backward", 1.0, 3, 0, -1]
    steps = [
        Step(1, "begin", "compute", "blocks.1", *place),
        Step(2, "begin", "recompute", "blocks.0", *place),
        Step(3, "end", "recompute", "blocks.0", *place),
    ]
    assert ModelState(2.0, 0, steps[:2]).computes().unit == "blocks.0"
    assert ModelState(2.0, 0, steps).computes().unit == "blocks.1"


def test_logs_that_are_none(tmp_path):
    assert "expected rank0.jsonl and others in" in diagnose(tmp_path, 2)
    (tmp_path / "rank0.jsonl").write_text('{"a": 1}\n')
    assert "expected a log of zerocore in" in diagnose(tmp_path, 2)
