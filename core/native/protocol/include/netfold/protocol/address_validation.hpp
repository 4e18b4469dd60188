// A worker's packet address: the address that it named over the control connection, once a hello came from there.
//
//   hello                                        effect
//   of another job, or another incarnation       dropped (foreign)
//   from another address than its worker named   dropped (source)
//   in a job with keys, without its worker's MAC dropped (unauthenticated)
//   without this worker's nonce                  dropped (worker)
//   any other                                    the address is recorded, and the hello returned
//
// So the switch sends nothing to an address that its worker did not name, or that has not shown the nonce. An
// eavesdropper who repeats a hello from another address gets no answer and no worker's place. A value; `Address` is the
// transport's type of address.
#pragma once

#include <netfold/protocol/packet.hpp>

#include <optional>

namespace netfold::protocol {

template <class Address>
struct AddressValidation {
  std::uint64_t nonce = 0;
  std::optional<Address> expected;  // that the worker named
  std::optional<Address> address;   // the same, once verified

  // Handles a hello that names this worker and came from `source`; Drop::none: return it to `source`.
  // `authentic`: called to check the hello's MAC, after the other checks but the nonce's.
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
