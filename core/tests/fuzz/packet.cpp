// PacketView::parse: any bytes are a packet whose header comes out as it went in, or no packet.
#include "machine_input.hpp"

using namespace netfold::protocol;
using netfold::fuzz::expect;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  netfold::fuzz::Input input({reinterpret_cast<const std::byte*>(data), size});
  const std::vector<std::byte> bytes = input.take(size);
  const auto view = PacketView::parse(bytes);
  if (!view) return 0;
  expect(bytes.size() >= kHeaderBytes, "a packet has a header");
  expect(view->payload().size() == bytes.size() - kHeaderBytes, "values are what follows the header");
  std::vector<std::byte> again(kHeaderBytes);
  write_header(view->header(), again.data());
  expect(std::equal(again.begin(), again.end(), bytes.begin()), "a header that is written is the one that was read");
  const auto nonce = nonce_of(bytes.data(), bytes.size());
  expect(nonce[0] == bytes[3] && std::equal(nonce.begin() + 4, nonce.end(), bytes.begin() + 24),
         "a nonce is the flags, the length and the packet number");
  return 0;
}
