"""What the subcommands' options have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """An argparse type: a whole number of at least `least` and, where given, at most `most`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
        if most is not None and value > most:
            raise argparse.ArgumentTypeError(f"must be at most {most}, got {text!r}")
        return value

    return parse


def list_of(parse: Callable[[str], Item]) -> Callable[[str], tuple[Item, ...]]:
    """An argparse type: at least one item, separated by commas, each of them once."""

    def parse_all(text: str) -> tuple[Item, ...]:
        return tuple(dict.fromkeys(parse(part.strip()) for part in text.split(",")))

    return parse_all


def one_of(names: Sequence[str]) -> Callable[[str], str]:
    """An argparse type: one of these names."""

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(names)}, got {text!r}")
        return text

    return parse


def size_in_bytes(multiple_of: int) -> Callable[[str], int]:
    """An argparse type: a number of bytes as '4096', '64K', '25M' or '1G' (of 1,024), a multiple of `multiple_of`."""

    def parse(text: str) -> int:
        digits, unit = (text[:-1], text[-1:].upper()) if text[-1:].upper() in _UNITS else (text, "")
        nbytes = int(digits) * _UNITS[unit] if digits.isdecimal() else 0
        if nbytes < multiple_of or nbytes % multiple_of:
            raise argparse.ArgumentTypeError(
                f"must be bytes, as 4096, 64K or 25M, and a multiple of {multiple_of}, got {text!r}"
            )
        return nbytes

    return parse
