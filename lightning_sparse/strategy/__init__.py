"""Lightning strategies: one mixin each for Trainer and Fabric, and one thin class of each for every Lightning package.

Importing this registers the strategy names in every Lightning package that is installed.
"""

from lightning_sparse import packages

if packages.LIGHTNING in packages.installed():
    import lightning_sparse.strategy.fabric
    import lightning_sparse.strategy.lightning
if packages.PYTORCH_LIGHTNING in packages.installed():
    import lightning_sparse.strategy.lightning_fabric
    import lightning_sparse.strategy.pytorch_lightning  # noqa: F401
