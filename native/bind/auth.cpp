// netfold._native.auth: whether packets and streams can be authenticated here, the tag of a packet, records of a
// stream.
#include "auth.hpp"

#include <nanobind/stl/string.h>
#include <netfold/protocol/packet.hpp>
#include <netfold/transport/tcp/record_stream.hpp>

#include <cstring>

#include "module.hpp"

namespace nb = nanobind;
namespace protocol = netfold::protocol;
namespace auth = netfold::auth;

auth::Key key_of(const nb::bytes& bytes) {
  auth::Key key;
  if (bytes.size() != key.size()) throw nb::value_error("a packet key has 16 bytes");
  std::memcpy(key.data(), bytes.c_str(), key.size());
  return key;
}

namespace {

constexpr const char* kSecurities[] = {"none", "authenticate", "encrypt"};

auth::Security security_of(const std::string& name) {
  for (int i = 0; i < 3; ++i) {
    if (name == kSecurities[i]) return static_cast<auth::Security>(i);
  }
  throw nb::value_error("security is one of none, authenticate, encrypt");
}

auth::Secret secret_of(const nb::bytes& bytes) {
  auth::Secret secret;
  if (bytes.size() != secret.size()) throw nb::value_error("a stream's secret has 32 bytes");
  std::memcpy(secret.data(), bytes.c_str(), secret.size());
  return secret;
}

nb::bytes as_bytes(const std::byte* data, std::size_t bytes) {
  return nb::bytes(reinterpret_cast<const char*>(data), bytes);
}

}  // namespace

auth::StreamSecrets secrets_of(const PythonSecrets& secrets) {
  if (!secrets) return {};
  const auto& [security, send, receive] = *secrets;
  return {security_of(security), secret_of(send), secret_of(receive)};
}

std::vector<auth::Key> keys_of(const std::vector<nb::bytes>& keys) {
  std::vector<auth::Key> out;
  out.reserve(keys.size());
  for (const nb::bytes& key : keys) out.push_back(key_of(key));
  return out;
}

void bind_auth(nb::module_& m) {
  nb::module_ s = m.def_submodule("auth");
  s.attr("KEY_BYTES") = auth::kKeyBytes;
  s.attr("MAC_BYTES") = auth::kMacBytes;
  s.def("unavailable_reason", &auth::unavailable_reason,
        "Why packets cannot be authenticated on this host; empty where they can.");
  s.def(
      "with_mac",
      [](const nb::bytes& key, const nb::bytes& packet) {
        if (packet.size() < protocol::kHeaderBytes) throw nb::value_error("a packet has a header");
        std::vector<std::byte> out(packet.size() + auth::kMacBytes);
        std::memcpy(out.data(), packet.c_str(), packet.size());
        const iovec piece{out.data(), packet.size()};
        auth::PacketAuthenticator(key_of(key))
            .mac(protocol::nonce_of(out.data(), packet.size()), {&piece, 1}, out.data() + packet.size());
        return nb::bytes(reinterpret_cast<const char*>(out.data()), out.size());
      },
      nb::arg("key"), nb::arg("packet"), "The packet with its tag behind it.");

  s.attr("SECRET_BYTES") = auth::kSecretBytes;
  s.attr("RECORD_HEADER_BYTES") = auth::kRecordHeaderBytes;
  s.attr("RECORD_OVERHEAD") = auth::kRecordOverhead;
  s.attr("MAX_RECORD_PAYLOAD") = auth::kMaxRecordPayload;
  s.attr("RECORDS_PER_KEY") = auth::kRecordsPerKey;
  s.def("forged_records", &netfold::transport::RecordStream::forged_records,
        "Records with a wrong tag that this process was sent over connections of its groups.");
  nb::class_<auth::RecordProtector>(s, "RecordProtector", "One direction of a stream, at the end that sends.")
      .def(
          "__init__",
          [](auth::RecordProtector* self, const std::string& security, const nb::bytes& secret, std::uint64_t per_key) {
            if (per_key == 0) throw nb::value_error("a key is for one record at least");
            new (self) auth::RecordProtector(security_of(security), secret_of(secret), per_key);
          },
          nb::arg("security"), nb::arg("secret"), nb::arg("records_per_key") = auth::kRecordsPerKey)
      .def(
          "protect",
          [](auth::RecordProtector& self, const nb::bytes& payload) {
            if (payload.size() > auth::kMaxRecordPayload) throw nb::value_error("a record has up to 65536 bytes");
            std::vector<std::byte> record(payload.size() + auth::kRecordOverhead);
            const iovec piece{const_cast<char*>(payload.c_str()), payload.size()};
            self.protect({&piece, 1}, record.data());
            return as_bytes(record.data(), record.size());
          },
          nb::arg("payload"), "The next record.");
  nb::class_<auth::RecordUnprotector>(s, "RecordUnprotector", "One direction of a stream, at the end that receives.")
      .def(
          "__init__",
          [](auth::RecordUnprotector* self, const std::string& security, const nb::bytes& secret,
             std::uint64_t per_key) {
            if (per_key == 0) throw nb::value_error("a key is for one record at least");
            new (self) auth::RecordUnprotector(security_of(security), secret_of(secret), per_key);
          },
          nb::arg("security"), nb::arg("secret"), nb::arg("records_per_key") = auth::kRecordsPerKey)
      .def(
          "unprotect",
          [](auth::RecordUnprotector& self, const nb::bytes& record) -> nb::object {
            if (record.size() < auth::kRecordOverhead) throw nb::value_error("a record has a header and a tag");
            std::vector<std::byte> bytes(record.size());
            std::memcpy(bytes.data(), record.c_str(), bytes.size());
            const std::size_t payload = auth::RecordUnprotector::payload_bytes(bytes.data());
            if (payload != bytes.size() - auth::kRecordOverhead || !self.unprotect(bytes)) return nb::none();
            return as_bytes(bytes.data() + auth::kRecordHeaderBytes, payload);
          },
          nb::arg("record"), "Its payload; None: it is not the next record, and nothing more can be opened.");
}
