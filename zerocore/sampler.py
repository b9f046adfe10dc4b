"""A sampler for DataLoader that goes on exactly where training stopped, on any number of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from zerocore import world

_NAME = "zerocore.ResumableSampler"


class ResumableSampler(Sampler[int]):
    """Gives each rank its part of one global order of samples, and remembers how far training is.

        sampler = zerocore.ResumableSampler(dataset, batch_size=8)
        loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=2)
        for epoch in range(sampler.epoch, epochs):
            sampler.set_epoch(epoch)
            for batch in loader:
                ...  # forward, backward, perhaps a step
                sampler.advance()

    An epoch's order depends on `seed` and the epoch alone, and is that of torch's
    DistributedSampler. Ranks take turns within each global batch of `batch_size` samples for every
    rank. So what k steps consume is the same whatever the number of ranks, as long as the global
    batch is, and a run that goes on with another number of ranks goes on with the very next sample.

    Consumed is what the training loop says it has trained on, by `advance()`: a loader with workers
    asks for indices long before their batches are used. `state_dict()` is the same on all ranks and
    counts consumed samples only; after `load_state_dict()`, a new iteration begins right after
    them. Save it where a checkpoint of the model is consistent: between optimizer steps. Give the
    loader `generator=torch.Generator()`: otherwise each new iteration of it takes a number from
    torch's default generator, and what is random in the model goes on differently after a load.

    With torchdata's StatefulDataLoader, save the loader's state instead, which holds this one: it
    counts what the loader has returned, and it loads on another number of ranks too.

    Args:
        dataset: has a length, or is one.
        shuffle: False: epochs are in the order of the dataset.
        seed: of the order, the same on all ranks.
        batch_size: samples of a rank in a batch; give the loader the same.
        num_replicas, rank: how many ranks share the samples, and which of them this is; None: those
            of the default process group, or one alone.
        drop_last: leaves out an epoch's last global batch if it is not full; give the loader the
            same. Otherwise ranks share it evenly, and where that does not work out get samples
            from the beginning of the epoch's order, which are not counted as consumed.

    Raises:
        ValueError, TypeError: for arguments out of range.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
    ) -> None:
        default_rank, default_size = world.default_place()
        self._length = dataset if isinstance(dataset, int) else len(dataset)
        self._ranks = default_size if num_replicas is None else num_replicas
        self._rank = default_rank if rank is None else rank
        self._batch_size = batch_size
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        numbers = {"length": self._length, "batch_size": batch_size, "num_replicas": self._ranks}
        for name, value in numbers.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{_NAME}: expected {name} of at least 1, got {value!r}")
        if not 0 <= self._rank < self._ranks:
            raise ValueError(
                f"{_NAME}: expected rank to be from 0 to {self._ranks - 1}, got {self._rank}; give "
                "num_replicas and rank, or neither"
            )
        self._batch = batch_size * self._ranks  # of all ranks together
        if drop_last and self._length < self._batch:
            raise ValueError(
                f"{_NAME}: expected at least one full batch of {batch_size} samples on each of "
                f"{self._ranks} ranks with drop_last, got {self._length} samples"
            )
        self._epoch = 0
        self._consumed = 0  # samples of the epoch, by all ranks
        self._loaded = False  # and not iterated over since
        self._iteration: _Iteration | None = None  # the latest one of this epoch
        self._idle = 0  # iterations in a row that ended with nothing consumed

    @property
    def epoch(self) -> int:
        """The epoch of the next sample."""
        return self._epoch

    @property
    def consumed(self) -> int:
        """Samples of this epoch that all ranks together have trained on."""
        return self._consumed

    def __len__(self) -> int:
        """Indices that this rank gets in an epoch from its beginning."""
        batches, rest = divmod(self._length, self._batch)
        last = 0 if self._drop_last else -(-rest // self._ranks)
        return batches * self._batch_size + last

    def __iter__(self) -> Iterator[int]:
        """The rest of the epoch: indices of this rank, from the first unconsumed sample on."""
        self._check_last_iteration()
        self._loaded = False
        self._iteration = _Iteration(self, self._epoch, self._consumed)
        return self._iteration

    def set_epoch(self, epoch: int) -> None:
        """Begins another epoch, unless it is the current one, which goes on.

        An epoch whose samples are all consumed is followed by the next one without this call.
        """
        if epoch == self._epoch:
            return
        if self._loaded and epoch < self._epoch:
            warnings.warn(
                f"{_NAME}.set_epoch: expected at least epoch {self._epoch}, which was loaded, got "
                f"{epoch}: training begins anew; loop over epochs from sampler.epoch on",
                stacklevel=2,
            )
        self._check_last_iteration()
        self._start(epoch, 0)

    def advance(self, batches: int = 1) -> None:
        """Counts batches that this rank, and every other one, has trained on.

        To be called after each batch of the loader, also within gradient accumulation.

        Raises:
            ValueError: for more batches than the iteration has given out.
        """
        given = self._iteration.batches_given if self._iteration is not None else 0
        if not 0 <= batches <= given:
            raise ValueError(
                f"{_NAME}.advance: expected at most the {given} batches of {self._batch_size} "
                "samples that were given out and not counted yet, got "
                f"{batches}; call it once after each batch, with the batch_size of the loader"
            )
        self._idle = 0
        self._consumed = min(self._consumed + batches * self._batch, self._length)
        self._settle()

    def state_dict(self) -> dict[str, Any]:
        """The progress, and what must be the same to go on from it; equal on all ranks."""
        return {
            "epoch": self._epoch,
            "consumed": self._consumed,
            "length": self._length,
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a state, perhaps of another number of ranks or another batch size.

        Raises:
            ValueError: for a state of another dataset or order. Nothing has changed then.
        """
        mine = self.state_dict()
        if set(state) != set(mine):
            raise ValueError(
                f"{_NAME}.load_state_dict: expected the keys {sorted(mine)}, got {sorted(state)}"
            )
        for name in ("length", "shuffle", "seed"):
            if state[name] != mine[name]:
                raise ValueError(
                    f"{_NAME}.load_state_dict: expected {name} {mine[name]}, got {state[name]}: "
                    "the order of samples would be another one"
                )
        epoch, consumed = state["epoch"], state["consumed"]
        if epoch < 0 or not 0 <= consumed <= self._length:
            raise ValueError(
                f"{_NAME}.load_state_dict: expected at most {self._length} consumed samples of "
                f"an epoch, got {consumed} of epoch {epoch}"
            )
        self._start(epoch, consumed)
        self._loaded = True

    def _start(self, epoch: int, consumed: int) -> None:
        self._epoch, self._consumed = epoch, consumed
        self._iteration = None
        self._idle = 0
        self._settle()

    def _settle(self) -> None:
        """Goes to the next epoch if this one has no more samples to give."""
        left = self._length - self._consumed
        if left == 0 or (self._drop_last and left < self._batch):
            self._epoch, self._consumed = self._epoch + 1, 0
            self._iteration = None

    def _check_last_iteration(self) -> None:
        """Tells if all samples were given out, and training does not seem to count them."""
        last, self._iteration = self._iteration, None
        if last is None or not last.exhausted:
            return
        text = (
            f"{_NAME}: expected advance() after each batch, got none for the last "
            f"{self._length - self._consumed} samples of epoch {self._epoch}, which were all given "
            "out; give the loader the sampler's batch_size and drop_last"
        )
        self._idle += 1
        if self._idle > 1 and last.start == self._consumed:
            # A loader that drops the last batch would ask for it for ever.
            raise RuntimeError(text)
        warnings.warn(f"{text}. They come again", stacklevel=3)

    def _resume(self, epoch: int, consumed: int, iteration: _Iteration) -> None:
        """What a stateful loader has returned is consumed, and `iteration` goes on from there."""
        self._start(epoch, consumed)
        if (self._epoch, self._consumed) == (epoch, consumed):
            self._iteration = iteration

    def _order(self, epoch: int) -> torch.Tensor:
        """The samples of an epoch, 1-D."""
        if not self._shuffle:
            return torch.arange(self._length)
        generator = torch.Generator()
        generator.manual_seed(self._seed + epoch)
        return torch.randperm(self._length, generator=generator)


class _Iteration(Iterator[int]):
    """One rank's way through the rest of an epoch; a stateful loader saves it.

    Attributes:
        start: samples of the epoch that were consumed before.
        exhausted: whether all indices have been given out.
    """

    def __init__(self, sampler: ResumableSampler, epoch: int, start: int) -> None:
        self._sampler = sampler
        self._begin(epoch, start)

    def _begin(self, epoch: int, start: int) -> None:
        self._epoch = epoch
        self.start = self._end = start  # end: of the global batches that were begun
        self._left: list[int] = []  # this rank's indices of the last of them, last one first
        self.exhausted = False
        self._order = self._sampler._order(epoch)

    def __next__(self) -> int:
        if not self._left:
            self._left = self._next_batch()[::-1]
        if not self._left:
            self.exhausted = True
            raise StopIteration
        return self._left.pop()

    def _next_batch(self) -> list[int]:
        sampler, begin = self._sampler, self._end
        size = min(sampler._batch, sampler._length - begin)
        if size <= 0 or (sampler._drop_last and size < sampler._batch):
            return []
        self._end = begin + size
        each = -(-size // sampler._ranks)
        places = torch.arange(each) * sampler._ranks + sampler._rank + begin
        return self._order[places % sampler._length].tolist()

    @property
    def batches_given(self) -> int:
        """Whole batches of this rank that are not consumed."""
        samples = self._end - self._sampler._consumed
        whole, rest = divmod(samples, self._sampler._batch)
        # The last batch of an epoch may be short.
        return whole + (rest > 0) - (len(self._left) > 0)

    def state_dict(self) -> dict[str, int]:
        """For a stateful loader: where the next batch begins.

        Raises:
            ValueError: within a batch.
        """
        if self._left:
            raise ValueError(
                f"{_NAME}: expected to save a loader whose batch_size is the sampler's, "
                f"{self._sampler._batch_size}, got one that is within a batch of it"
            )
        return {"epoch": self._epoch, "consumed": self._end}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """For a stateful loader, which has loaded the sampler before: goes on from there."""
        self._begin(state["epoch"], state["consumed"])
        self._sampler._resume(state["epoch"], state["consumed"], self)
