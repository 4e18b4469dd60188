"""A torch module as the planner takes it: what each of its leaf modules asks for, in order of execution.

    model = traced(parse_module("package.module:factory"), [parse_input("32x3x224x224")])

It runs once forward and back on fake tensors, which have a shape and no memory: nothing is allocated or computed. So
its forward pass may not ask for a number (`if x.sum() > 0`), and custom kernels need a fake version of their own.

    asked    modules and inputs as people write them    watch    what runs, part by part
"""

from netfold.train.trace.module_spec import Input, TraceError, parse_input, parse_module
from netfold.train.trace.traced import trace_module

__all__ = ["Input", "TraceError", "parse_input", "parse_module", "trace_module"]
