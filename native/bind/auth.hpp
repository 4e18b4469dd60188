// Secrets and keys as Python holds them. Each function throws nb::value_error for a wrong length or name.
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

// security, secret to send with, secret to receive with; None: plain bytes.
using PythonSecrets = std::optional<std::tuple<std::string, nanobind::bytes, nanobind::bytes>>;

netfold::auth::StreamSecrets secrets_of(const PythonSecrets& secrets);
netfold::auth::Key key_of(const nanobind::bytes& bytes);
std::vector<netfold::auth::Key> keys_of(const std::vector<nanobind::bytes>& keys);
