// Nanoseconds to compute the MAC of a packet, gathered from header and values as a worker does. Each argument is a
// length in bytes. Each line of output is `bytes median_ns lowest_ns highest_ns` over runs. A check computes and compares
// a MAC.
#include <netfold/auth/packet_authenticator.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

int main(int count, char** arguments) {
  constexpr int kRuns = 31;
  constexpr int kPackets = 4000;
  constexpr std::size_t kHeaderBytes = 48;
  netfold::auth::PacketAuthenticator authenticator(netfold::auth::Key{});
  netfold::auth::Nonce nonce{};
  std::byte mac[netfold::auth::kMacBytes];
  for (int i = 1; i < count; ++i) {
    std::vector<std::byte> packet(std::strtoul(arguments[i], nullptr, 10));
    const iovec parts[2] = {{packet.data(), kHeaderBytes},
                             {packet.data() + kHeaderBytes, packet.size() - kHeaderBytes}};
    std::vector<double> runs;
    for (int run = 0; run < kRuns; ++run) {
      const auto began = std::chrono::steady_clock::now();
      for (int turn = 0; turn < kPackets; ++turn) {
        std::memcpy(nonce.data(), &turn, sizeof turn);
        authenticator.mac(nonce, parts, mac);
      }
      const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - began;
      runs.push_back(took.count() / kPackets);
    }
    std::sort(runs.begin(), runs.end());
    std::printf("%zu %.1f %.1f %.1f\n", packet.size(), runs[kRuns / 2], runs.front(), runs.back());
  }
}
