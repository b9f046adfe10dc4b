#include "runtime/rehearsal.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace zerocore {

Rehearsal::Rehearsal(std::vector<int64_t> bytes, int prefetch, bool persistent,
                     int64_t launch_bytes, int64_t budget)
    : bytes_(std::move(bytes)),
      budget_(budget),
      scheduler_(*this, static_cast<int>(bytes_.size()), prefetch, persistent, launch_bytes),
      open_(bytes_.size(), false) {}

bool Rehearsal::start(int unit) {
  if (!open_[unit]) {
    if (budget_ > 0 && leased_ + bytes(unit) > budget_) return false;
    open_[unit] = true;
    leased_ += bytes(unit);
    peak_ = std::max(peak_, leased_);
  }
  steps_.push_back({"gather", unit});
  return true;
}

void Rehearsal::release(int unit) {
  open_[unit] = false;
  leased_ -= bytes(unit);
  steps_.push_back({"release", unit});
}

void Rehearsal::no_room(int unit) {
  throw std::invalid_argument("max_window_bytes: expected room for unit " + std::to_string(unit) +
                              " of " + std::to_string(bytes(unit)) + " bytes, got " +
                              std::to_string(budget_) + " of which " + std::to_string(leased_) +
                              " are in use");
}

}  // namespace zerocore
