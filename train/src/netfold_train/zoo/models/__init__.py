"""Models by name, one file a kind; the names are in train/models/__init__.py."""
