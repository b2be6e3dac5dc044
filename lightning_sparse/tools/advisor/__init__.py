"""Advice before training: the fastest way to exchange gradients for a model, machine and network."""

from lightning_sparse.tools.advisor.prediction import Measured, Method, Prediction, Scenario
from lightning_sparse.tools.advisor.run import Advice, advise

__all__ = ["Advice", "Measured", "Method", "Prediction", "Scenario", "advise"]
