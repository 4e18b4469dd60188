"""Predictions of one request with something changed: other clusters and networks, more of a resource, more aggregators,
switches behind other links, more or fewer ranks."""
