// control::decode: any bytes are a value that means the same once it is written and read again, or no value.
#include <netfold/control/msgpack.hpp>

#include "machine_input.hpp"

using namespace netfold::control;
using netfold::fuzz::expect;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  // A copy of that length, so that the sanitizer sees a read beyond the end.
  netfold::fuzz::Input input({reinterpret_cast<const std::byte*>(data), size});
  const std::vector<std::byte> bytes = input.take(size);
  try {
    const auto written = encode(decode(bytes));
    expect(written.size() <= 2 * bytes.size(), "only a float of 32 bits becomes longer: 5 bytes, then 9");
    expect(encode(decode(written)) == written, "a value that is written is the one that was read");
  } catch (const ProtocolError&) {
    // No value.
  }
  return 0;
}
