from lightning_sparse.integrations.averages import *
