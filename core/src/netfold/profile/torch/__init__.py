"""Records of torch's own processes: what torch.distributed and the optimizers did, with any backend.

`source` reads them while a recording runs, `window` takes them from torch's profiler, and `records` makes
netfold's records of them. May import torch and profile.
"""
