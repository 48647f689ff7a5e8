"""The small model, the training loop and the timings that the command line and benchmarks/ share."""
