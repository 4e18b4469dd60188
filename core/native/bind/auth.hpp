// Secrets and keys as Python holds them. Each function throws nb::value_error for a wrong length or name.
#pragma once

#include <netfold/auth/packet_authenticator.hpp>
#include <netfold/auth/records.hpp>

#include "module.hpp"

// security, secret to send with, secret to receive with; None: plain bytes.
using PythonSecrets = std::optional<std::tuple<std::string, nb::bytes, nb::bytes>>;

netfold::auth::Security security_of(const std::string& name);
netfold::auth::StreamSecrets secrets_of(const PythonSecrets& secrets);
netfold::auth::Key key_of(const nb::bytes& bytes);
std::vector<netfold::auth::Key> keys_of(const std::vector<nb::bytes>& keys);
