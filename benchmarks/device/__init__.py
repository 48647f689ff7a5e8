"""What a GPU has to show: the parts of benchmarks/device_check.py, one module for each.

    a  correctness   every kernel on virtual ranks, to the bit and against float64
    b  stress        thousands of epochs with delays, and a rank that never comes
    c  speed         of all_reduce, against the bytes that it must move
    d  slowdown      of matmuls beside it
    e  training      the wrapper in a lone process
    f  several_gpus  several processes on several GPUs, against NCCL
    g  memcheck      compute-sanitizer on every kernel

With `sheet.dry` the same code runs on the CPU under Triton's interpreter, with tiny sizes; speed is not measured then.
Every part first launches each kernel that it will use as a lone rank: a kernel that is loaded while another waits for
it would wait for ever.
"""
