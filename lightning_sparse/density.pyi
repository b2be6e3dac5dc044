from lightning_sparse.methods.density import *
