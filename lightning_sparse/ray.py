"""Ray Train: ``sparse_ddp`` for Lightning's Trainer in Ray's workers.

Example::

    import lightning.pytorch as pl
    from lightning_sparse.ray import RaySparseDDPStrategy
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
    from ray.train.torch import TorchTrainer

    def train_one_worker():
        trainer = prepare_trainer(pl.Trainer(
            strategy=RaySparseDDPStrategy(density=0.01), plugins=[RayLightningEnvironment()],
            callbacks=[RayTrainReportCallback()], devices="auto", accelerator="auto",
            enable_checkpointing=False))
        trainer.fit(model, data)

    TorchTrainer(train_one_worker, scaling_config=ScalingConfig(num_workers=2),
                 run_config=RunConfig(failure_config=FailureConfig(max_failures=3))).fit()
"""

from lightning_sparse.integrations.ray import RaySparseDDPStrategy

__all__ = ["RaySparseDDPStrategy"]
