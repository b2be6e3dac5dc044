"""Strategies and callbacks for Lightning: for Trainer and Fabric, with one thin file for every Lightning package.

Importing this registers the strategy names in every Lightning package that is installed.
"""

from lightning_sparse.integrations import packages

if packages.LIGHTNING in packages.installed():
    import lightning_sparse.integrations.lightning
if packages.PYTORCH_LIGHTNING in packages.installed():
    import lightning_sparse.integrations.lightning_fabric
    import lightning_sparse.integrations.pytorch_lightning  # noqa: F401
