"""Files of the package that cannot be imported without what is optional have no doctests to run where it is missing."""

from importlib.util import find_spec

NEEDS = {
    "triton": ["lightning_sparse/ops/triton/*.py"],
    "transformers": ["lightning_sparse/huggingface.py", "lightning_sparse/integrations/transformers.py"],
    "ray": ["lightning_sparse/ray.py", "lightning_sparse/integrations/ray.py"],
    "lightning": ["lightning_sparse/integrations/lightning.py"],
    "pytorch_lightning": [
        f"lightning_sparse/integrations/{name}.py" for name in ("pytorch_lightning", "lightning_fabric")
    ],
}
collect_ignore_glob = [file for package, files in NEEDS.items() if find_spec(package) is None for file in files]
