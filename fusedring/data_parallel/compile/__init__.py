"""Gradients inside graphs that torch.compile made."""
