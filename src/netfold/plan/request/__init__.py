"""A question to the planner, from a file, from options, or from both: checked, and what is wrong said by its place."""

from netfold.plan.request.file import read_job
from netfold.plan.request.request import RequestError, Request, parse_request

__all__ = ["RequestError", "Request", "parse_request", "read_job"]
