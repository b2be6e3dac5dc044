from lightning_sparse.methods.sparsifiers import *
