"""What checkpoints have beside model and optimizer: values of the user's, and random states."""

from __future__ import annotations

import hashlib
import io
import pickle
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def states_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Each value, or what its state_dict() gives. Some of those are collectives."""
    return {
        name: value.state_dict() if callable(getattr(value, "state_dict", None)) else value
        for name, value in values.items()
    }


def packed(name: str, value: Any) -> bytes:
    """A value as torch.save gives it.

    Raises:
        ValueError: if it cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:
        raise ValueError(
            f"{name}: expected a value that can be pickled, or something with state_dict(), got "
            f"{type(value).__name__}: {error}"
        ) from error
    return buffer.getvalue()


def unpacked(name: str, contents: bytes) -> Any:
    """What was packed, on the CPU; a pickle: of a checkpoint that is trusted.

    Raises:
        ValueError: if it cannot be read here.
    """
    try:
        return torch.load(io.BytesIO(contents), map_location="cpu", weights_only=False)
    except Exception as error:
        raise ValueError(
            f"{name}: expected a value that can be unpickled here, got {error!r}"
        ) from error


def fingerprint(value: Any) -> str:
    """Equal for equal values; pickles are not, where objects are shared otherwise."""
    digest = hashlib.sha256()
    _feed(digest, value)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    digest.update(f"<{type(value).__qualname__}".encode())
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta:
        flat = value.detach().cpu().contiguous().reshape(-1)
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(flat.view(torch.uint8).numpy() if flat.numel() else b"")
    elif isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(f"{value.dtype.str}{value.shape}".encode())
        digest.update(value.tobytes())
    elif isinstance(value, Mapping):
        for key, child in value.items():
            _feed(digest, key)
            _feed(digest, child)
    elif isinstance(value, list | tuple):
        for child in value:
            _feed(digest, child)
    elif isinstance(value, int | float | complex | str | bytes | bool | None):
        digest.update(repr(value).encode())
    else:
        digest.update(pickle.dumps(value))
    digest.update(b">")


def random_state(device: torch.device) -> dict[str, Any]:
    """States of the generators of Python, NumPy, torch, and of the rank's device."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Puts the generators into the states that `random_state` gave."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)
