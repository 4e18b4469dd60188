"""Who is told of a run, and what they make of it: `selection` says who, `run_folder` where; then a file for each of
them.

`metrics_file` is what all else is made from afterwards; `curves`, `overlap` and `result` are what several of them show.
"""
