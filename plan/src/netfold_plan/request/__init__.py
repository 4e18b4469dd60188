"""A request to the planner from a file, from options, or from both; every error names its place."""

from netfold_plan.request.request import Request, RequestError, parse_request, read_job

__all__ = ["Request", "RequestError", "parse_request", "read_job"]
