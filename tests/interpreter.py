"""Triton as the ranks of tests have it: made for its interpreter, and that in a third of the time.

The server of ranks imports this before it forks the first one (ranks.py). Triton makes its language, and every kernel,
for a GPU or for the interpreter when that is imported. A rank that is to be without the interpreter does not see the
variable.
"""

import functools
import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import triton.language as tl
from triton.runtime import interpreter

from fusedring.kernels import direct, ring  # noqa: F401

del os.environ["TRITON_INTERPRET"]


@functools.cache
def languages(function: Any) -> list[Any]:
    """Those modules of Triton's that the function names, and the interpreter therefore changes."""
    return [module for module in (tl, tl.core) if any(value is module for value in function.__globals__.values())]


def call(self: interpreter.InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    """As Triton's own, for a function that a kernel calls.

    Triton's looks through all of its language at each call, to put what the interpreter does in the place of every
    operation. Mostly it is there already, since the kernel was called.
    """
    if any(tl.core.is_builtin(language.arange) for language in languages(self.fn)):
        interpreter._patch_lang(self.fn)
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


interpreter.InterpretedFunction.__call__ = call
