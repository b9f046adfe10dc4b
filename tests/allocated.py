"""What the allocator of the CPU gives out to the thread that trains."""

from __future__ import annotations

from typing import Any

from torch.profiler import ProfilerActivity, profile


class Allocated:
    """Bytes that were allocated inside a with block and not freed, at every moment of it."""

    def __enter__(self) -> Allocated:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        events = self._profile.profiler.kineto_results.events()
        self._changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        self._marks = {
            e.name(): (e.start_ns(), e.end_ns()) for e in events if e.is_user_annotation()
        }

    def peak(self, mark: str) -> int:
        """Most bytes at once inside `torch.profiler.record_function(mark)`."""
        begin, end = self._marks[mark]
        now = most = 0
        for time, change in self._changes:
            if time > begin:
                most = max(most, now)
            if time > end:
                break
            now += change
        return most
