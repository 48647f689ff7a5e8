"""What `fusedring bench`, `demo` and `doctor` measure, and how it is timed; benchmarks/ shares it."""
