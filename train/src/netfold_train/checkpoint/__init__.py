"""A run's checkpoints: complete or absent, written beside training, checked before they are loaded.

`state` names the contents. `atomic` makes a folder complete or absent. `recovery` writes it over a group of its own,
and chooses where a run continues. `drift` compares copies of weights before a checkpoint. `initial` starts a run from
other weights, and `export` writes them as safetensors.
"""
