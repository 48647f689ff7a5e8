"""Makes object code of the host engine's compiled functions: `python host_object.py WHAT FILE
[--without-half]`.

WHAT is 'launch', or a dtype and a wire such as 'float32-bfloat16', for the verbs; --without-half for a processor that
does not convert float16. It runs in a process of its own: the
training process then never imports Numba, and whatever ends the compiler does not end the training. Numba translates
(NUMBA_OPT=0 keeps it from optimising each function by itself), then LLVM optimises the whole at once. Nothing but the
functions asked for can be called from outside, so that the error handling around them, which would need Numba's and
Python's runtime, turns out to be unreachable and goes away.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

if __name__ == "__main__" and "fusedring" not in sys.modules:  # the package itself would import torch
    package = ModuleType("fusedring")
    package.__path__ = [str(Path(__file__).resolve().parent.parent / "fusedring")]
    if not (Path(package.__path__[0]) / "kernels").exists():  # an installed package: kernels/ lies within it
        package.__path__ = [str(Path(__file__).resolve().parent.parent)]
    sys.modules["fusedring"] = package

import llvmlite.binding as llvm
from numba import cfunc, types

_WORD = types.int64
LAUNCH = _WORD(_WORD)
VERB = types.void(_WORD, _WORD, _WORD, types.float64, _WORD)


def target_machine():
    """What code is made for: this processor."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="pic",
        codemodel="jitdefault",
        jit=True,
    )


def module_of(functions, signature):
    """The machine, and an optimised LLVM module with these functions, all of one signature, under their own names."""
    machine, whole = target_machine(), None
    for function in functions:
        compiled = cfunc(signature, error_model="numpy")(function)
        module = llvm.parse_assembly(compiled.inspect_llvm())
        for each in module.functions:
            if not each.is_declaration and each.name != compiled.native_name:
                each.linkage = "internal"
        module.get_function(compiled.native_name).name = function.__name__
        if whole is None:
            whole = module
        else:
            whole.link_in(module)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.slp_vectorization = True
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(whole, builder)
    return machine, whole


def functions_of(what, *, has_half):
    """The functions to compile for `what`, and their signature."""
    if what == "launch":
        from fusedring.kernels.host import launch  # its functions are compiled when it is imported

        return (launch,), LAUNCH
    from fusedring.kernels.host_arithmetic import HAS_HALF, verbs

    dtype, wire = what.split("-")
    return verbs(dtype, wire, has_half=has_half and HAS_HALF), VERB


def main() -> None:
    what, file, *options = sys.argv[1:]
    machine, module = module_of(*functions_of(what, has_half="--without-half" not in options))
    Path(file).write_bytes(machine.emit_object(module))


if __name__ == "__main__":
    main()
