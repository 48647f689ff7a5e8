"""`fusedring.spawn` from a script, a prompt, and with functions that fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

import fusedring


def sum_of_ranks(word: str) -> tuple[int, torch.Tensor, str]:
    tensor = torch.full((3,), float(dist.get_rank() + 1))
    return dist.get_rank(), fusedring.all_reduce(tensor, op="sum"), word


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise KeyError("no such thing")
    fusedring.all_reduce(torch.ones(3))


def return_a_lambda() -> object:
    return lambda: 0


def test_every_rank_returns_something():
    before = signal.getsignal(signal.SIGINT)
    results = fusedring.spawn(sum_of_ranks, 2, "hello", timeout=60)
    assert [(rank, word) for rank, _, word in results] == [(0, "hello"), (1, "hello")]
    assert all(torch.equal(tensor, torch.full((3,), 3.0)) for _, tensor, _ in results)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_rank_that_failed_first_is_named():
    with pytest.raises(fusedring.RanksFailedError, match="rank 1: KeyError: 'no such thing'") as caught:
        fusedring.spawn(fail_on_rank_1, 2, timeout=60)
    assert "in fail_on_rank_1" in "".join(caught.value.__notes__)
    with pytest.raises(fusedring.RanksFailedError, match="rank 0: ended with exit code 7"):
        fusedring.spawn(os._exit, 1, 7, timeout=60)


def test_what_cannot_be_pickled_is_told():
    with pytest.raises(fusedring.RanksFailedError, match="what the function returned cannot be pickled"):
        fusedring.spawn(return_a_lambda, 1, timeout=60)
    with pytest.raises(fusedring.RanksFailedError, match=r"cannot be started: .*pickle"):
        fusedring.spawn(sum_of_ranks, 1, lambda: 0, timeout=60)


def test_wrong_arguments_start_nothing():
    with pytest.raises(ValueError, match="ranks must be a whole number, at least 1, got 0"):
        fusedring.spawn(sum_of_ranks, 0, "hello")
    with pytest.raises(ValueError, match=r"cannot be imported .* Write it at the top of a \.py file"):
        fusedring.spawn(lambda: 0, 2)
    with pytest.raises(ValueError, match="expected a function, got 'sum'"):
        fusedring.spawn("sum", 2)
    with pytest.raises(ValueError, match="timeout must be a positive number"):
        fusedring.spawn(sum_of_ranks, 2, "hello", timeout=0)


def test_a_function_of_a_prompt_is_refused():
    code = "import fusedring\ndef train(): pass\nfusedring.spawn(train, 2)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "was defined in a notebook or at a prompt" in done.stderr
    assert "%%writefile" in done.stderr


def test_a_script_without_a_guard_is_told(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import fusedring\ndef train(): pass\nfusedring.spawn(train, 1)\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert 'put that under if __name__ == "__main__":' in done.stderr


def test_the_old_name_works_and_says_the_new_one_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # as a user's interpreter shows it
        for ranks in (1, 0):
            with suppress(ValueError):  # no ranks at all
                results = fusedring.launch(str.upper, ranks, "hello", timeout=60)
    assert results == ["HELLO"]
    (warning,) = caught
    assert warning.category is FutureWarning
    assert "fusedring.spawn" in str(warning.message)
    assert warning.filename == __file__


def test_no_module_hides_what_the_package_exports():
    code = """
import importlib, pkgutil, types
import fusedring
for module in pkgutil.walk_packages(fusedring.__path__, "fusedring."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert not [name for name in fusedring.__all__ if isinstance(getattr(fusedring, name), types.ModuleType)]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
