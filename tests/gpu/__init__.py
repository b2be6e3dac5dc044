"""What only a CUDA device can answer, in one command: ``make gpu``, or ``python -m tests.gpu``."""
