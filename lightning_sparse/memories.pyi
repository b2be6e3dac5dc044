from lightning_sparse.methods.memory import *
