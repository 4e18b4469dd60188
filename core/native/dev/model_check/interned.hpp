// Values that are kept once each, by key, and numbered in the order in which they were added.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <unordered_map>
#include <utility>

namespace netfold::model_check {

using Id = std::uint32_t;
inline constexpr Id kNoId = 0xffffffff;

template <class T>
void append(std::string& key, const T& value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof value);
}

template <class Value>
class Interned {
 public:
  // Returns the number of the value with that key, which is added if it is new. References stay valid.
  Id add(std::string key, Value value) {
    const auto [at, added] = ids_.try_emplace(std::move(key), static_cast<Id>(values_.size()));
    if (added) values_.push_back(std::move(value));
    return at->second;
  }
  Id find(const std::string& key) const {
    const auto at = ids_.find(key);
    return at == ids_.end() ? kNoId : at->second;
  }
  const Value& operator[](Id id) const { return values_[id]; }
  std::size_t size() const { return values_.size(); }

 private:
  std::deque<Value> values_;
  std::unordered_map<std::string, Id> ids_;
};

}  // namespace netfold::model_check
