#include <netfold/collective/message_matcher.hpp>

namespace netfold::collective {

void MessageMatcher::post(Receive receive) {
  if (receive.source == kAnySource) ++posted_to_any_;
  receive.order = ++order_;
  posted_[{receive.tag, receive.source}].push_back(std::move(receive));
}

std::optional<MessageMatcher::Receive> MessageMatcher::take_posted(int source, int tag) {
  const auto named = posted_.find({tag, source});
  const auto any = posted_.find({tag, kAnySource});
  auto found = named;
  if (named == posted_.end() || (any != posted_.end() && any->second.front().order < named->second.front().order)) {
    found = any;
  }
  if (found == posted_.end()) return std::nullopt;
  Receive receive = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) posted_.erase(found);
  if (receive.source == kAnySource) --posted_to_any_;
  return receive;
}

bool MessageMatcher::withdraw(int source, int tag, Ticket ticket) {
  const auto found = posted_.find({tag, source});
  if (found == posted_.end()) return false;
  if (std::erase_if(found->second, [&](const Receive& each) { return each.ticket == ticket; }) == 0) return false;
  if (found->second.empty()) posted_.erase(found);
  return true;
}

MessageMatcher::Ticket MessageMatcher::posted_from(int source) const {
  for (const auto& [key, queue] : posted_) {
    if (key.second == source) return queue.front().ticket;
  }
  return 0;
}

MessageMatcher::Message& MessageMatcher::keep(int source, const FrameHeader& header, std::size_t value_bytes) {
  auto& queue = kept_[{header.tag, source}];
  queue.push_back({header, std::vector<std::byte>(value_bytes), ++order_});
  if (queue.size() == 1) first_kept_.emplace(ByOrder{header.tag, order_}, source);
  return queue.back();
}

std::optional<int> MessageMatcher::source_of_kept(int source, int tag) const {
  if (source != kAnySource) return kept_.contains({tag, source}) ? std::optional(source) : std::nullopt;
  const auto first = first_kept_.lower_bound(ByOrder{tag, 0});
  return first == first_kept_.end() || first->first.first != tag ? std::nullopt : std::optional(first->second);
}

void MessageMatcher::drop_kept(int source, int tag) {
  const auto found = kept_.find({tag, source});
  auto& queue = found->second;
  first_kept_.erase(ByOrder{tag, queue.front().order});
  queue.pop_front();
  if (queue.empty()) {
    kept_.erase(found);
  } else {
    first_kept_.emplace(ByOrder{tag, queue.front().order}, source);
  }
}

std::string MessageMatcher::similar_kept(int source, int tag) const {
  constexpr int kMostNamed = 4;
  std::string text;
  int named = 0;
  for (const auto& [key, queue] : kept_) {
    if (key.first != tag && key.second != source && source != kAnySource) continue;
    text +=
        (named == 0 ? "rank " : ", from rank ") + std::to_string(key.second) + " with tag " + std::to_string(key.first);
    if (++named == kMostNamed) break;
  }
  return text;
}

}  // namespace netfold::collective
