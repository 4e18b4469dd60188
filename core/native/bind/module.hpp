// The first include of every file of the bindings.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;
using namespace nb::literals;
// The call guard of functions that run without the GIL.
using Release = nb::call_guard<nb::gil_scoped_release>;

void bind_arrays(nb::module_& m);
void bind_kernels(nb::module_& m);
void bind_transport(nb::module_& m);
void bind_device(nb::module_& m);
void bind_protocol(nb::module_& m);
void bind_auth(nb::module_& m);
void bind_engine(nb::module_& m);
void bind_failover(nb::module_& m);
void bind_shares(nb::module_& m);
void bind_fabric(nb::module_& m);
void bind_dataplane(nb::module_& m);
