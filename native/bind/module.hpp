#pragma once

#include <nanobind/nanobind.h>

void bind_arrays(nanobind::module_& m);
void bind_kernels(nanobind::module_& m);
void bind_transport(nanobind::module_& m);
void bind_protocol(nanobind::module_& m);
void bind_auth(nanobind::module_& m);
void bind_engine(nanobind::module_& m);
void bind_failover(nanobind::module_& m);
void bind_shares(nanobind::module_& m);
void bind_fabric(nanobind::module_& m);
void bind_dataplane(nanobind::module_& m);
