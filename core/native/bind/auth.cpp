// netfold._native.auth: authentication of packets, and the records of a secure stream.
#include "auth.hpp"

#include <netfold/protocol/packet.hpp>
#include <netfold/transport/tcp/record_stream.hpp>

#include <cstring>

#include "convert.hpp"

namespace auth = netfold::auth;

namespace {

constexpr const char* kSecurities[] = {"none", "authenticate", "encrypt"};

// Copies to an array of the same size.
template <class Array>
Array array_of(const nb::bytes& bytes, const char* wrong_size) {
  Array out;
  if (bytes.size() != out.size()) throw nb::value_error(wrong_size);
  std::memcpy(out.data(), bytes.c_str(), out.size());
  return out;
}

auth::Secret secret_of(const nb::bytes& bytes) {
  return array_of<auth::Secret>(bytes, "a stream's secret has 32 bytes");
}

// One direction of a stream.
template <class Side>
nb::class_<Side> bind_side(nb::module_& m, const char* name, const char* documentation) {
  return nb::class_<Side>(m, name, documentation)
      .def(
          "__init__",
          [](Side* self, const std::string& security, const nb::bytes& secret, std::uint64_t records_per_key) {
            if (records_per_key == 0) throw nb::value_error("records_per_key is 0, expected at least 1");
            new (self) Side(security_of(security), secret_of(secret), records_per_key);
          },
          "security"_a, "secret"_a, "records_per_key"_a = auth::kRecordsPerKey);
}

}  // namespace

auth::Security security_of(const std::string& name) {
  for (int i = 0; i < 3; ++i) {
    if (name == kSecurities[i]) return static_cast<auth::Security>(i);
  }
  throw nb::value_error("security is one of none, authenticate, encrypt");
}

auth::Key key_of(const nb::bytes& bytes) { return array_of<auth::Key>(bytes, "a packet key has 16 bytes"); }

auth::StreamSecrets secrets_of(const PythonSecrets& secrets) {
  if (!secrets) return {};
  const auto& [security, send, receive] = *secrets;
  return {security_of(security), secret_of(send), secret_of(receive)};
}

std::vector<auth::Key> keys_of(const std::vector<nb::bytes>& keys) {
  std::vector<auth::Key> out;
  for (const nb::bytes& key : keys) out.push_back(key_of(key));
  return out;
}

void bind_auth(nb::module_& m) {
  nb::module_ s = m.def_submodule("auth");
  s.attr("KEY_BYTES") = auth::kKeyBytes;
  s.attr("MAC_BYTES") = auth::kMacBytes;
  s.def("unavailable_reason", &auth::unavailable_reason,
        "Why packets cannot be authenticated on this host; empty: they can.");
  s.def(
      "with_mac",
      [](const nb::bytes& key, const nb::bytes& packet) {
        namespace protocol = netfold::protocol;
        if (packet.size() < protocol::kHeaderBytes) throw nb::value_error("the packet is shorter than a header");
        std::vector<std::byte> out = copy_of(packet);
        out.resize(packet.size() + auth::kMacBytes);
        const iovec whole{out.data(), packet.size()};
        auth::PacketAuthenticator(key_of(key))
            .mac(protocol::nonce_of(out.data(), packet.size()), {&whole, 1}, out.data() + packet.size());
        return to_bytes(out);
      },
      "key"_a, "packet"_a, "The packet, followed by its MAC.");

  s.attr("SECRET_BYTES") = auth::kSecretBytes;
  s.attr("RECORD_HEADER_BYTES") = auth::kRecordHeaderBytes;
  s.attr("RECORD_OVERHEAD") = auth::kRecordOverhead;
  s.attr("MAX_RECORD_PAYLOAD") = auth::kMaxRecordPayload;
  s.def("forged_records", &netfold::transport::RecordStream::forged_records,
        "The number of records with a wrong MAC that this process received over connections of its groups.");
  bind_side<auth::RecordProtector>(s, "RecordProtector", "The sending end of one direction of a stream.")
      .def(
          "protect",
          [](auth::RecordProtector& self, const nb::bytes& payload) {
            if (payload.size() > auth::kMaxRecordPayload) throw nb::value_error("a record has up to 65536 bytes");
            std::vector<std::byte> record(payload.size() + auth::kRecordOverhead);
            const iovec whole{const_cast<char*>(payload.c_str()), payload.size()};
            self.protect({&whole, 1}, record.data());
            return to_bytes(record);
          },
          "payload"_a, "The next record.");
  bind_side<auth::RecordUnprotector>(s, "RecordUnprotector", "The receiving end of one direction of a stream.")
      .def(
          "unprotect",
          [](auth::RecordUnprotector& self, const nb::bytes& record) -> nb::object {
            if (record.size() < auth::kRecordOverhead) {
              throw nb::value_error("the record is shorter than a header and a MAC");
            }
            std::vector<std::byte> bytes = copy_of(record);
            const std::size_t payload = auth::RecordUnprotector::payload_bytes(bytes.data());
            if (payload != bytes.size() - auth::kRecordOverhead || !self.unprotect(bytes)) return nb::none();
            return to_bytes({bytes.data() + auth::kRecordHeaderBytes, payload});
          },
          "record"_a, "The record's payload. None: it is not the next record, and no later one can be opened.");
}
