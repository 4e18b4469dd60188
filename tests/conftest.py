"""Its place puts this folder on the path, so that tests of every room can say `from ranks import run_ranks`."""
