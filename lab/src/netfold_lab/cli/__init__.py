"""`netfold bench`, `netfold rack` and `netfold demo`."""
