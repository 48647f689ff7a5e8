"""What carries out one launch: on host memory, under the interpreter, on a GPU, by the group's own backend."""
