"""Scripts that check and measure fusedring, and what only they need. None of it is in the wheel.

Files that begin with bench_ are for pytest-benchmark: `pytest benchmarks`.

A file of this folder has one name, `benchmarks.x`, in scripts, tests and processes of their own. Python puts only a
script's own folder on sys.path; so a script that imports another file from here puts the repository there first.
"""
