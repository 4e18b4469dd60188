// Where a worker sends from: the address that it named over the control connection, once a hello came from there.
//
//   hello                                       becomes
//   another job's, or incarnation's             dropped (foreign)
//   from another address than its worker named  dropped (source)
//   without its worker's tag, where there are   dropped (unauthenticated)
//   not with this worker's nonce                dropped (worker)
//   any other                                   the address is noted, the hello returned
//
// So nothing is ever sent to an address that its worker did not name and that has not shown the nonce: who hears a
// hello on the wire and sends it from elsewhere gets nothing, and takes nobody's place. A value; `Address` is whatever
// the transport calls one.
#pragma once

#include <netfold/protocol/packet.hpp>

#include <optional>

namespace netfold::protocol {

template <class Address>
struct AddressValidation {
  std::uint64_t nonce = 0;
  std::optional<Address> expected;  // what its worker named
  std::optional<Address> address;   // the same, once proved

  // A hello that names this worker came from `source`. `authentic`: asked for its tag, where all before is right. none:
  // return it there.
  template <class Authentic>
  Drop handle_hello(const Header& hello, std::uint32_t job, std::uint32_t incarnation, const Address& source,
                    const Authentic& authentic) {
    if (hello.job != job || hello.incarnation != incarnation) return Drop::foreign;
    if (!expected || !(*expected == source)) return Drop::source;
    if (!authentic()) return Drop::unauthenticated;
    if (hello.packet_number != nonce) return Drop::worker;
    address = source;
    return Drop::none;
  }
  bool is_validated(const Address& source) const { return address && *address == source; }
};

}  // namespace netfold::protocol
