"""Numbers on a command line: `type=` of argparse."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """A whole number of at least 1, perhaps written as 7e9."""
    try:
        value = int(text) if text.isdecimal() else int(float(text))
    except (ValueError, OverflowError):
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number such as 8 or 7e9, got {text!r}")
    return value


def positive(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return value


def whole(text: str) -> int:
    """0, 1, 2 and so on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number such as 0 or 1, got {text!r}")
    return int(text)
