#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <netfold/auth/packet_authenticator.hpp>
#include <netfold/auth/records.hpp>

#include <optional>
#include <string>
#include <tuple>

// security, secret of what is sent, secret of what is received; None for plain bytes.
using PythonSecrets = std::optional<std::tuple<std::string, nanobind::bytes, nanobind::bytes>>;

// Throws nb::value_error for what is none.
netfold::auth::StreamSecrets secrets_of(const PythonSecrets& secrets);

// A key as Python holds it. Throws nb::value_error for another length.
netfold::auth::Key key_of(const nanobind::bytes& bytes);
std::vector<netfold::auth::Key> keys_of(const std::vector<nanobind::bytes>& keys);
