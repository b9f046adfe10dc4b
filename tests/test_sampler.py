"""Samples come in one global order, once each, however often and on how many ranks one resumes."""

import itertools
import random
import warnings

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import zerocore
from zerocore import ResumableSampler


class Numbers(torch.utils.data.Dataset):
    """Sample i is i."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


def order_of(epoch, length, seed, shuffle):
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(length, generator=generator) if shuffle else torch.arange(length)
    return order.tolist()


def on_ranks(size, length, **options):
    return [ResumableSampler(length, num_replicas=size, rank=r, **options) for r in range(size)]


def take(iterators, count):
    """The next `count` indices of each rank, in the order of the global stream."""
    parts = [list(itertools.islice(iterator, count)) for iterator in iterators]
    assert len({len(part) for part in parts}) == 1  # no rank waits for another one
    return [index for turn in zip(*parts, strict=True) for index in turn]


@pytest.mark.parametrize("shuffle", [True, False], ids=["shuffled", "in order"])
@pytest.mark.parametrize("length", [1, 7, 12, 101])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_order_is_that_of_distributed_sampler(length, size, shuffle):
    for rank in range(size):
        mine = ResumableSampler(
            length, batch_size=3, shuffle=shuffle, seed=5, num_replicas=size, rank=rank
        )
        torchs = DistributedSampler(range(length), size, rank, shuffle, seed=5)
        for epoch in (0, 1, 7, 3):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # nothing is counted here
                mine.set_epoch(epoch)
            torchs.set_epoch(epoch)
            assert list(mine) == list(torchs)
        assert len(mine) == len(torchs)


class Stream:
    """What an uninterrupted run takes, whatever its batches are."""

    def __init__(self, length, seed, shuffle, drop_last):
        self.length, self.drop_last = length, drop_last
        self.options = (length, seed, shuffle)
        self.epoch = self.place = 0

    def begin(self, batch):
        """Before a batch of all ranks together."""
        left = self.length - self.place
        if left == 0 or (self.drop_last and left < batch):
            self.epoch, self.place = self.epoch + 1, 0

    def next(self, batch, size):
        """The samples of the next batch, and those that fill it up for `size` ranks."""
        order = order_of(self.epoch, *self.options)
        samples = order[self.place : self.place + batch]
        padding = [order[i % self.length] for i in range(-len(samples) % size)]
        return samples, padding


@pytest.mark.parametrize("drop_last", [False, True], ids=["keep last", "drop last"])
def test_stopped_runs_take_the_samples_of_an_uninterrupted_one(drop_last):
    """For any lengths, numbers of ranks, batch sizes, stops and batches that were fetched ahead."""
    chance = random.Random(drop_last)
    resumed = 0
    for _ in range(300):
        length, seed = chance.randint(1, 90), chance.randint(0, 9)
        shuffle = chance.random() < 0.8
        stream, state = Stream(length, seed, shuffle, drop_last), None
        for _ in range(4):
            size, batch_size = chance.randint(1, 5), chance.randint(1, 4)
            batch = size * batch_size
            if drop_last and batch > length:
                continue
            ranks = on_ranks(
                size,
                length,
                batch_size=batch_size,
                shuffle=shuffle,
                seed=seed,
                drop_last=drop_last,
            )
            stream.begin(batch)
            for sampler in ranks if state is not None else ():
                sampler.load_state_dict(state)
                assert (sampler.epoch, sampler.consumed) == (stream.epoch, stream.place)
                resumed += 1
            iterators = [iter(sampler) for sampler in ranks]
            for _ in range(chance.randint(0, 30)):
                got = take(iterators, batch_size)
                if not got:
                    iterators = [iter(sampler) for sampler in ranks]
                    got = take(iterators, batch_size)
                samples, padding = stream.next(batch, size)
                assert got == samples + padding
                for sampler in ranks:
                    sampler.advance()
                stream.place += len(samples)
                stream.begin(batch)
            take(iterators, batch_size * chance.randint(0, 3))  # fetched, and never trained on
            states = [sampler.state_dict() for sampler in ranks]
            assert all(other == states[0] for other in states)
            state = states[0]
            assert (state["epoch"], state["consumed"]) == (stream.epoch, stream.place)
    assert resumed > 500


def loader(sampler, workers, kind=DataLoader, **options):
    return kind(Numbers(100), batch_size=4, sampler=sampler, num_workers=workers, **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_workers_fetch_ahead_is_not_lost(workers):
    """4 -> 1 -> 4 ranks, stopped amid an epoch."""
    seen, state = [], None
    for size, stop in ((4, 3), (1, 5), (4, 2)):
        ranks = on_ranks(size, 100, batch_size=4)
        for sampler in ranks if state is not None else ():
            sampler.load_state_dict(state)
        # Each rank's loader in turn: they do not depend on each other.
        batches = []
        for sampler in ranks:
            mine = []
            for batch in loader(sampler, workers):
                mine.append(batch.tolist())
                sampler.advance()
                if len(mine) == stop:
                    break
            batches.append(mine)
        for turn in zip(*batches, strict=True):
            seen += [index for samples in zip(*turn, strict=True) for index in samples]
        state = ranks[0].state_dict()
        assert [sampler.state_dict() for sampler in ranks] == [state] * size
    assert seen == order_of(0, 100, 0, True)[: len(seen)]
    assert len(seen) == 4 * 4 * 3 + 4 * 5 + 4 * 4 * 2 - 0 == 100


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [3, 25, 30])
def test_a_stateful_loader_saves_what_it_has_returned(workers, stop):
    """25 batches are an epoch of one rank, 7 one of four (with padding)."""
    kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def run(sampler, batches, state=None):
        """[epoch, samples] of each of the next batches, and the state after them."""
        loaded = loader(sampler, workers, kind)
        if state is not None:
            loaded.load_state_dict(state)
        seen = []
        while len(seen) < batches:
            for batch in loaded:
                seen.append(batch.tolist())
                sampler.advance()
                if len(seen) == batches:
                    return seen, loaded.state_dict()
        return seen, loaded.state_dict()

    whole, _ = run(ResumableSampler(100, batch_size=4), 50)
    assert sum(whole, []) == order_of(0, 100, 0, True) + order_of(1, 100, 0, True)
    seen, state = run(ResumableSampler(100, batch_size=4), stop)
    again, _ = run(ResumableSampler(100, batch_size=4), 50 - stop, state)
    assert seen + again == whole
    # On another number of ranks: what is left of the epoch, then the next one.
    left = sum(whole[stop : 25 * (1 + stop // 25)], [])
    parts = [run(sampler, 2, state)[0] for sampler in on_ranks(2, 100, batch_size=4)]
    got = [i for turn in zip(*parts, strict=True) for pair in zip(*turn, strict=True) for i in pair]
    if stop == 25:
        left = sum(whole[25:], [])
    assert got == left[:16]


def test_place_and_number_of_ranks_are_those_of_the_process_group(ranks):
    expected = order_of(0, 10, 0, True)
    for rank, got in enumerate(ranks(2, default_indices)):
        assert got == expected[rank::2]
    assert list(ResumableSampler(10, batch_size=1)) == expected


def default_indices():
    return list(ResumableSampler(Numbers(10), batch_size=1))


def finish(sampler):
    """An epoch, all of it counted."""
    got = []
    for index in sampler:
        got.append(index)
        sampler.advance()
    return got


def test_epochs_follow_each_other_with_and_without_set_epoch():
    alone, told = ResumableSampler(9, batch_size=1), ResumableSampler(9, batch_size=1)
    for epoch in range(3):
        told.set_epoch(epoch)
        assert finish(alone) == finish(told) == order_of(epoch, 9, 0, True)
        assert alone.epoch == told.epoch == epoch + 1
    # Amid an epoch, its own number changes nothing, and another one begins anew.
    iterator = iter(told)
    first = next(iterator)
    told.advance()
    told.set_epoch(3)
    assert told.consumed == 1 and first not in list(told)
    told.advance()
    told.set_epoch(8)
    assert (told.epoch, told.consumed) == (8, 0)


def test_batches_may_be_counted_several_at_a_time():
    sampler = ResumableSampler(10, batch_size=2)
    iterator = iter(sampler)
    order = list(iterator)
    sampler.advance(3)
    assert sampler.consumed == 6
    sampler.advance(0)
    assert list(iter(sampler)) == order[6:]
    sampler.advance(2)
    assert sampler.state_dict()["epoch"] == 1


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"dataset": 0}, "expected length of at least 1, got 0"),
        ({"batch_size": 0}, "expected batch_size of at least 1, got 0"),
        ({"batch_size": 1.5}, "expected batch_size of at least 1, got 1.5"),
        ({"num_replicas": 0}, "expected num_replicas of at least 1, got 0"),
        ({"num_replicas": 2, "rank": 2}, "expected rank to be from 0 to 1, got 2"),
        ({"rank": -1}, "expected rank to be from 0 to 0, got -1"),
        (
            {"dataset": 7, "num_replicas": 2, "rank": 0, "drop_last": True},
            "expected at least one full batch of 4 samples on each of 2 ranks .*, got 7 samples",
        ),
    ],
)
def test_arguments_are_checked(arguments, match):
    with pytest.raises(ValueError, match=f"^zerocore.ResumableSampler: {match}"):
        ResumableSampler(**{"dataset": 10, "batch_size": 4, **arguments})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"length": 9}, "expected length 10, got 9"),
        ({"seed": 3}, "expected seed 0, got 3"),
        ({"shuffle": False}, "expected shuffle True, got False"),
        ({"consumed": 11}, "expected at most 10 consumed samples of an epoch, got 11 of epoch 0"),
        ({"epoch": -1}, "expected .*, got 0 of epoch -1"),
        ({"yielded": 3}, r"expected the keys \['consumed', .*, got .*'yielded'\]"),
    ],
)
def test_states_are_checked(change, match):
    sampler = ResumableSampler(10, batch_size=2)
    state = sampler.state_dict()
    with pytest.raises(ValueError, match=f"^zerocore.ResumableSampler.load_state_dict: {match}"):
        sampler.load_state_dict(state | change)
    assert sampler.state_dict() == state


def test_more_than_was_given_out_cannot_be_counted():
    sampler = ResumableSampler(10, batch_size=4)
    with pytest.raises(ValueError, match="advance: expected at most the 0 batches of 4 samples"):
        sampler.advance()
    iterator = iter(sampler)
    take([iterator], 3)  # a loader whose batches are smaller
    with pytest.raises(ValueError, match="expected at most the 0 batches"):
        sampler.advance()
    take([iterator], 1)
    sampler.advance()
    with pytest.raises(ValueError, match="expected at most the 0 batches"):
        sampler.advance()
    take([iterator], 6)
    sampler.advance()
    with pytest.raises(ValueError, match="expected at most the 1 batches .* got 2"):
        sampler.advance(2)
    sampler.advance()
    assert sampler.epoch == 1
    sampler.load_state_dict(sampler.state_dict())
    with pytest.raises(ValueError, match="expected at most the 0 batches"):
        sampler.advance()


def test_a_loop_that_counts_nothing_is_told():
    sampler = ResumableSampler(10, batch_size=4)
    first = list(sampler)
    with pytest.warns(UserWarning, match=r"expected advance\(\) .* the last 10 samples of epoch 0"):
        assert list(sampler) == first
    with pytest.raises(RuntimeError, match=r"expected advance\(\) after each batch"):
        iter(sampler)


def test_a_loader_that_drops_the_last_batch_alone_does_not_loop_for_ever():
    sampler = ResumableSampler(10, batch_size=4)
    batches = 0
    with (
        pytest.warns(UserWarning, match="batch_size and drop_last"),
        pytest.raises(RuntimeError, match="the last 2 samples of epoch 0"),
    ):
        while batches < 100:
            for _ in DataLoader(Numbers(10), batch_size=4, sampler=sampler, drop_last=True):
                batches += 1
                sampler.advance()
    assert batches == 2


def test_going_back_from_a_loaded_epoch_is_told():
    sampler = ResumableSampler(10, batch_size=5)
    finish_state = {**sampler.state_dict(), "epoch": 3, "consumed": 5}
    sampler.load_state_dict(finish_state)
    with pytest.warns(UserWarning, match="expected at least epoch 3, which was loaded, got 0"):
        sampler.set_epoch(0)
    assert (sampler.epoch, sampler.consumed) == (0, 0)


def test_a_stateful_loader_of_other_batches_is_refused():
    sampler = ResumableSampler(10, batch_size=4)
    iterator = iter(sampler)
    next(iterator)
    with pytest.raises(ValueError, match="batch_size is the sampler's, 4"):
        iterator.state_dict()
    assert zerocore.ResumableSampler is ResumableSampler
