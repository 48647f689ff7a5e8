"""The version, and those that the tests were run with: on its own, so that packaging needs no torch to read it."""

__version__ = "0.1.0"

OLDEST_TORCH = "2.11"
TESTED_TORCH = ("2.13", "2.14")
TESTED_TRITON = ("3.7", "3.8")
