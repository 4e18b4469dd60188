#pragma once

#include "module.hpp"

void bind_model_check(nb::module_& m);
void bind_delay_link(nb::module_& m);
void bind_control(nb::module_& m);
