#include <netfold/collective/halving_doubling.hpp>

namespace netfold::collective {

HalvingDoubling::HalvingDoubling(const Call& call, transport::Mesh& mesh, Team team_of)
    : Streams(call, mesh, std::move(team_of)) {
  const int ranks = team().size();
  const int me = team().position();
  int core = 1;  // Q
  while (core * 2 <= ranks) core *= 2;
  const int extra = ranks - core;
  // The first 2(P-Q) ranks stand in pairs: the even one hands over to the odd one.
  const bool paired = me < 2 * extra;
  const Span whole{0, call.elements()};
  if (paired && me % 2 == 0) {
    send_all(me + 1, whole, {}, false);
    receive_all(me + 1, whole, {}, false);
    seal();
    return;
  }
  const int number = paired ? me / 2 : me - extra;
  const auto position_of = [&](int other) { return other < extra ? 2 * other + 1 : other + extra; };

  Mark stage;
  if (paired) stage = receive_all(me - 1, whole, {}, true);
  std::vector<Span> held{whole};
  for (int bit = 1; bit < core; bit *= 2) {
    const int partner = position_of(number ^ bit);
    const Span low = part(held.back(), 2, 0);
    const Span high = part(held.back(), 2, 1);
    const bool keeps_low = (number & bit) == 0;
    send_all(partner, keeps_low ? high : low, stage, false);
    held.push_back(keeps_low ? low : high);
    stage = receive_all(partner, held.back(), stage, true);
  }
  bool finished = true;  // what leaves now is what its owner, and then everyone, keeps
  for (int bit = core / 2; bit >= 1; bit /= 2) {
    const int partner = position_of(number ^ bit);
    const Span mine = held.back();
    held.pop_back();
    const bool kept_low = (number & bit) == 0;
    send_all(partner, mine, stage, finished);
    stage = receive_all(partner, part(held.back(), 2, kept_low ? 1 : 0), stage, false);
    finished = false;
  }
  if (paired) send_all(me - 1, whole, stage, false);
  seal();
}

Streams::Mark HalvingDoubling::send_all(int position, Span what, Mark after, bool finished) {
  const std::size_t unit = element_bytes();
  const std::size_t pieces = pieces_of(what.count * unit);
  const int stream = to(position);
  Mark last = after;
  for (std::size_t i = 0; i < pieces; ++i) {
    const Span some = part(what, pieces, i);
    last = add(stream, Send{call().outputs[0].data + some.first * unit, some.count * unit, after, finished});
  }
  return last;
}

Streams::Mark HalvingDoubling::receive_all(int position, Span what, Mark after, bool fold) {
  const std::size_t unit = element_bytes();
  const std::size_t pieces = pieces_of(what.count * unit);
  const int stream = from(position);
  Mark last = after;
  for (std::size_t i = 0; i < pieces; ++i) {
    const Span some = part(what, pieces, i);
    std::byte* data = call().outputs[0].data + some.first * unit;
    const Mark mark = add(stream, Receive{data, some.count * unit, fold ? data : nullptr, false, after});
    if (some.count > 0) last = mark;
  }
  return last;
}

}  // namespace netfold::collective
