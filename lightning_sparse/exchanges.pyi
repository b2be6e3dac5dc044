from lightning_sparse.methods.exchanges import *
