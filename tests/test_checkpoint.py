"""Checkpoints: saved at any stage and number of ranks, loaded at any other."""

import pytest
from checkpoints import assert_same_state, loaded, trained_and_saved

# Of the places to save at, each has a stage, a mesh, a precision and an optimizer of its own.
SAVED = {
    "stage 3 on 3": (3, {"job": "odd", "stage": 3}),
    "stage 0 on 2": (2, {"job": "odd", "stage": 0, "kind": "adamw"}),
    "stage 1 on 2, bf16": (2, {"job": "transformer", "stage": 1, "precision": "bf16"}),
    "stage 2 on 4, hybrid": (4, {"job": "cnn", "stage": 2, "kind": "sgd", "mesh": (2, 2)}),
    "stage 3 on 1, fp64": (1, {"job": "mixed64", "stage": 3}),
    "stage 3 on 4, hybrid": (4, {"job": "transformer", "stage": 3, "mesh": (2, 2)}),
}
LOADED = [
    (1, {"stage": 3}),
    (2, {"stage": 0}),
    (3, {"stage": 2}),
    (4, {"stage": 3, "mesh": (2, 2)}),
]


@pytest.mark.parametrize("where", SAVED)
def test_a_checkpoint_loads_anywhere(ranks, tmp_path, where):
    size, options = SAVED[where]
    path = tmp_path / "checkpoint"
    saved = ranks(size, trained_and_saved, path, **options)
    before = {"precision": "fp32"} | options
    kept = {key: before[key] for key in ("job", "kind", "precision") if key in before}
    for other, elsewhere in LOADED:
        results = ranks(other, loaded, path, **kept, **elsewhere)
        for rank, (found, loss_found, _, extra) in enumerate(results):
            # Running statistics are each rank's own, if there are as many.
            state, loss, _ = saved[rank if other == size else 0]
            assert_same_state(found, state)
            assert extra["epoch"] == 3 and ("rank" in extra) == (size in (1, other))
            assert loss_found == pytest.approx(loss, rel=1e-6)
    # Where it was saved, training goes on with the same bits.
    again = ranks(size, loaded, path, **options)
    for (found, _, losses, _), (own, _, expected) in zip(again, saved, strict=True):
        assert_same_state(found, own)
        assert losses == expected
    assert [extra["rank"] for *_, extra in again] == list(range(size))
