"""Settings of all tests."""

from hypothesis import settings

# Examples have no deadline of their own: on a busy machine one can lose its core for longer than any sensible one.
settings.register_profile("fusedring", deadline=None)
settings.load_profile("fusedring")
