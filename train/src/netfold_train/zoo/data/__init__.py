"""Data sets by name, one file a kind; the names are in train/data/__init__.py."""
