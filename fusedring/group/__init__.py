"""What the ranks of one process group do together, in one order."""
