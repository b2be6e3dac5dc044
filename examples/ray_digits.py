"""The digits on Ray Train: workers that Ray starts, on this machine or on a cluster, and that may fail.

    python examples/ray_digits.py --fast                             # two workers on this machine
    python examples/ray_digits.py --workers 8 --gpus --storage s3://bucket/runs --address auto     # on a cluster

Needs `pip install 'ray[train]' lightning`. A worker that dies is started again up to three times, with the weights and
the residuals of the latest epoch that was reported.
"""

import argparse
import os
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_one_worker(told: dict) -> None:
    import lightning.pytorch as pl
    from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer

    from lightning_sparse.ray import RaySparseDDPStrategy

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            import torch

            self.layers = torch.nn.Sequential(
                torch.nn.Flatten(), torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)
            )

        def training_step(self, batch, index):  # type: ignore[no-untyped-def]
            import torch

            images, labels = batch
            loss = torch.nn.functional.cross_entropy(self.layers(images), labels)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):  # type: ignore[no-untyped-def]
            import torch

            return torch.optim.AdamW(self.parameters(), lr=2e-3)

    def digits():  # type: ignore[no-untyped-def]
        import torch
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        data = torch.utils.data.TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
        return torch.utils.data.DataLoader(data, 32, shuffle=True)

    trainer = prepare_trainer(
        pl.Trainer(
            max_epochs=told["epochs"],
            strategy=RaySparseDDPStrategy(density=told["density"]),
            plugins=[RayLightningEnvironment()],
            callbacks=[RayTrainReportCallback()],
            devices="auto",
            accelerator="auto",
            enable_checkpointing=False,
            enable_progress_bar=False,
            logger=False,
        )
    )
    checkpoint = ray.train.get_checkpoint()  # of a run that failed, or None
    if checkpoint is None:
        trainer.fit(Net(), digits())
    else:
        with checkpoint.as_directory() as folder:
            trainer.fit(Net(), digits(), ckpt_path=os.path.join(folder, "checkpoint.ckpt"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--density", type=float, default=0.01, help="share of the gradient that is sent")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="one GPU for each worker")
    parser.add_argument("--storage", default=str(Path("ray_digits").resolve()), help="folder or URL of all nodes")
    parser.add_argument("--address", help="of a cluster, such as auto; without it, one is started here")
    parser.add_argument("--fast", action="store_true", help="2 epochs")
    args = parser.parse_args()

    ray.init(args.address) if args.address else ray.init(num_cpus=args.workers, include_dashboard=False)
    result = TorchTrainer(
        train_one_worker,
        train_loop_config={"epochs": 2 if args.fast else 20, "density": args.density},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpus),
        run_config=RunConfig(name="digits", storage_path=args.storage, failure_config=FailureConfig(max_failures=3)),
    ).fit()
    print(f"loss {result.metrics['loss']:.3f} after epoch {result.metrics['epoch']}; checkpoint in {result.checkpoint}")


if __name__ == "__main__":
    main()
