#include "runtime/order.h"

#include <algorithm>
#include <stdexcept>
#include <unordered_map>
#include <utility>

namespace zerocore {

void GatherOrder::begin() {
  visited_.clear();
  position_ = -1;
  passing_ = true;
}

void GatherOrder::visit(int unit) {
  if (passing_ && (visited_.empty() || visited_.back() != unit)) visited_.push_back(unit);
  const int size = static_cast<int>(expected_.size());
  if (position_ >= 0 && position_ < size && expected_[position_] == unit) return;
  // Look ahead first, then from the front: a part of the order may repeat or be left out.
  for (int step = 1; step <= size; ++step) {
    const int candidate = (position_ + step) % size;
    if (expected_[candidate] == unit) {
      position_ = candidate;
      return;
    }
  }
}

void GatherOrder::finish() {
  if (!std::exchange(passing_, false)) return;
  expected_ = visited_;
  previous_.clear();
  std::unordered_map<int, int> last;
  for (int i = 0; i < static_cast<int>(expected_.size()); ++i) {
    const auto [found, first] = last.try_emplace(expected_[i], -1);
    previous_.push_back(std::exchange(found->second, i));
  }
}

std::vector<int> GatherOrder::upcoming(int count) const {
  std::vector<int> units;
  if (position_ < 0) return units;
  units.reserve(expected_.size() - position_);
  for (size_t i = position_ + 1; i < expected_.size(); ++i) {
    if (static_cast<int>(units.size()) == count) break;
    if (previous_[i] < position_) units.push_back(expected_[i]);
  }
  return units;
}

uint64_t GatherOrder::fingerprint() const {
  uint64_t hash = 14695981039346656037ull;
  for (int unit : visited_) {
    hash = (hash ^ static_cast<uint64_t>(unit)) * 1099511628211ull;
  }
  return hash;
}

ReduceOrder::ReduceOrder(int units) : participates_(units, false), ready_(units, false) {
  for (int unit = units - 1; unit >= 0; --unit) agreed_.push_back(unit);
}

void ReduceOrder::begin(std::vector<bool> participates) {
  participates_ = std::move(participates);
  ready_.assign(participates_.size(), false);
  observed_.clear();
  next_ = 0;
}

void ReduceOrder::ready(int unit) {
  ready_.at(unit) = true;
  observed_.push_back(unit);
}

std::vector<int> ReduceOrder::take() {
  std::vector<int> units;
  for (; next_ < agreed_.size(); ++next_) {
    const int unit = agreed_[next_];
    if (!participates_[unit]) continue;
    if (!ready_[unit]) break;
    units.push_back(unit);
  }
  return units;
}

std::vector<int> ReduceOrder::flush(const std::vector<bool>& wanted) {
  std::vector<int> units;
  for (; next_ < agreed_.size(); ++next_) {
    const int unit = agreed_[next_];
    if (participates_[unit] && wanted.at(unit)) units.push_back(unit);
  }
  return units;
}

std::vector<int> ReduceOrder::observed() const {
  std::vector<int> order = observed_;
  for (int unit : agreed_) {
    if (std::find(order.begin(), order.end(), unit) == order.end()) order.push_back(unit);
  }
  return order;
}

void ReduceOrder::adopt(std::vector<int> order) {
  std::vector<int> sorted = order;
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 0; i < sorted.size(); ++i) {
    if (sorted.size() != agreed_.size() || sorted[i] != static_cast<int>(i)) {
      throw std::invalid_argument("reduce order: expected each unit once");
    }
  }
  agreed_ = std::move(order);
}

}  // namespace zerocore
