"""Fuzzing: what reads bytes that others wrote, given bytes that nobody would write.

    python -m tests.fuzz answers --seconds 600

One harness a reader (`harnesses.py`) and two drivers for all of them: `atheris`, which looks for inputs that reach new
code, where it is installed (extra `fuzz`), and `mutation.py`, which needs nothing. Only errors of the declared kinds
may leave a reader; whatever else does is a crash, and the input is printed. `test_fuzz.py` runs each for a moment.
"""
