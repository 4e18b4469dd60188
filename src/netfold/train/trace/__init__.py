"""A torch module as the planner's model: the work of each leaf module, in order of execution.

    model = trace_module(parse_module("package.module:factory"), [parse_input("32x3x224x224")])

The module runs forward and backward on fake tensors, which have a shape and no memory. So its forward pass must not
depend on values (`if x.sum() > 0`), and custom kernels need a fake implementation.

    module_spec    parse modules and inputs    tracer    record the operations of each part    traced    make the model
"""

from netfold.train.trace.module_spec import Input, TraceError, parse_input, parse_module
from netfold.train.trace.traced import trace_module

__all__ = ["Input", "TraceError", "parse_input", "parse_module", "trace_module"]
