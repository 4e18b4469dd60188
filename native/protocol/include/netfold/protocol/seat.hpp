// Where a worker may send from: the address of a hello with the nonce that it was given over the control connection.
//
//   hello                                 before the job starts     afterwards
//   another job's, or incarnation's       dropped (foreign)         dropped (foreign)
//   not with this worker's nonce          dropped (worker)          dropped (worker)
//   from the address that was noted       returned                  returned
//   from another address                  noted, returned           dropped (source)
//
// So nothing is ever sent to an address that has not shown a nonce, and once counting has begun an address stays. A
// value; `Address` is whatever the transport calls one.
#pragma once

#include <netfold/protocol/packet.hpp>

#include <optional>

namespace netfold::protocol {

template <class Address>
struct Seat {
  std::uint64_t nonce = 0;
  std::optional<Address> address;

  // A hello that names this worker came from `source`. none: return it there.
  Drop handle_hello(const Header& hello, std::uint32_t job, std::uint32_t incarnation, bool started,
                    const Address& source) {
    if (hello.job != job || hello.incarnation != incarnation) return Drop::foreign;
    if (hello.counter != nonce) return Drop::worker;
    if (!started) address = source;
    return is_at(source) ? Drop::none : Drop::source;
  }
  bool is_at(const Address& source) const { return address && *address == source; }
};

}  // namespace netfold::protocol
