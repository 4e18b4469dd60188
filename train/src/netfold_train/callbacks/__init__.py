"""The callbacks of a run, one file each. `selection` chooses them, and `run_folder` chooses where they write.

`metrics_file` writes the source of everything that `netfold_train.runs` makes afterwards.
"""
