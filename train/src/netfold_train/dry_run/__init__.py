"""Run a recipe's or a torch module's pass on fake tensors, which have a shape and no memory, and report what it does.

    recipe    `validate` makes its model and data, and finds what does not fit. `explain` plans it: `layers` measures
              layers, `traffic` counts the messages of a step, `render` prints the plan.
    module    `trace_module` makes the planner's model of it: the work of each leaf module, in order of execution.
              `module_spec` parses modules and inputs.

        model = trace_module(parse_module("package.module:factory"), [parse_input("32x3x224x224")])

`tracer` records every operation of a pass for both. The forward pass must not depend on values (`if x.sum() > 0`), and
custom kernels need a fake implementation.
May use: torch, train, plan. Only cli imports it.
Invariant: nothing is started, and no process group is left.
Tests: `pytest train/tests/train/test_explain* train/tests/train/test_trace.py train/tests/train/test_recipe_checks.py`.
"""

from netfold_train.dry_run.module_spec import Input, TraceError, parse_input, parse_module
from netfold_train.dry_run.traced import trace_module

__all__ = ["Input", "TraceError", "parse_input", "parse_module", "trace_module"]
