"""A question to the planner, from a file, from options, or from both: checked, and what is wrong said by its place."""

from netfold.plan.request.file import read_job
from netfold.plan.request.request import Request, RequestError, parse_request

__all__ = ["Request", "RequestError", "parse_request", "read_job"]
