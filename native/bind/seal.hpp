#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <netfold/seal/sealer.hpp>

// A key as Python holds it. Throws nb::value_error for another length.
netfold::seal::Key key_of(const nanobind::bytes& bytes);
std::vector<netfold::seal::Key> keys_of(const std::vector<nanobind::bytes>& keys);
