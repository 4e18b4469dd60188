// netfold._native.seal: whether packets can be authenticated here, and the tag of one.
#include "seal.hpp"

#include <nanobind/stl/string.h>
#include <netfold/protocol/packet.hpp>

#include <cstring>

#include "module.hpp"

namespace nb = nanobind;
namespace protocol = netfold::protocol;
namespace seal = netfold::seal;

seal::Key key_of(const nb::bytes& bytes) {
  seal::Key key;
  if (bytes.size() != key.size()) throw nb::value_error("a packet key has 16 bytes");
  std::memcpy(key.data(), bytes.c_str(), key.size());
  return key;
}

std::vector<seal::Key> keys_of(const std::vector<nb::bytes>& keys) {
  std::vector<seal::Key> out;
  out.reserve(keys.size());
  for (const nb::bytes& key : keys) out.push_back(key_of(key));
  return out;
}

void bind_seal(nb::module_& m) {
  nb::module_ s = m.def_submodule("seal");
  s.attr("KEY_BYTES") = seal::kKeyBytes;
  s.attr("TAG_BYTES") = seal::kTagBytes;
  s.def("missing", &seal::missing, "Why packets cannot be authenticated on this host; empty where they can.");
  s.def(
      "tagged",
      [](const nb::bytes& key, const nb::bytes& packet) {
        if (packet.size() < protocol::kHeaderBytes) throw nb::value_error("a packet has a header");
        std::vector<std::byte> out(packet.size() + seal::kTagBytes);
        std::memcpy(out.data(), packet.c_str(), packet.size());
        const iovec piece{out.data(), packet.size()};
        seal::Sealer(key_of(key))
            .tag(protocol::nonce_of(out.data(), packet.size()), {&piece, 1}, out.data() + packet.size());
        return nb::bytes(reinterpret_cast<const char*>(out.data()), out.size());
      },
      nb::arg("key"), nb::arg("packet"), "The packet with its tag behind it.");
}
