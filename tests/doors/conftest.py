"""Doors to other libraries are tested with the real packages, in an environment of their own: `make test-doors`."""

from importlib.util import find_spec

NEEDS = {
    "test_huggingface.py": "transformers",
    "test_accelerate.py": "accelerate",
    "test_overlap.py": "transformers",
    "test_ray.py": "ray",
}
collect_ignore = [file for file, package in NEEDS.items() if find_spec(package) is None]
