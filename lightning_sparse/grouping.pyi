from lightning_sparse.methods.grouping import *
