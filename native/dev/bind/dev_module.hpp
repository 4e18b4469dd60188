#pragma once

#include <nanobind/nanobind.h>

void bind_model_check(nanobind::module_& m);
void bind_delay_link(nanobind::module_& m);
