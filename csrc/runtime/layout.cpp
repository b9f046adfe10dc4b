#include "runtime/layout.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace zerocore {
namespace {

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

Layout::Layout(std::vector<int64_t> numels, int64_t shards, int64_t replicas)
    : numels_(std::move(numels)), shards_(shards) {
  if (shards < 1 || replicas < 1) {
    throw std::invalid_argument("layout: expected at least one shard and one replica, got " +
                                std::to_string(shards) + " and " + std::to_string(replicas));
  }
  int64_t end = 0;
  offsets_.reserve(numels_.size());
  for (int64_t numel : numels_) {
    if (numel < 0) {
      throw std::invalid_argument("layout: expected a size of at least 0, got " +
                                  std::to_string(numel));
    }
    offsets_.push_back(end);
    end += round_up(numel, kAlignment);
  }
  shard_numel_ = round_up((end + shards - 1) / shards, kAlignment * replicas);
}

Range Layout::owned(int64_t parameter, int64_t rank) const {
  const int64_t first = rank * shard_numel_ - offset(parameter);
  const int64_t size = numel(parameter);
  return {std::clamp<int64_t>(first, 0, size), std::clamp<int64_t>(first + shard_numel_, 0, size)};
}

Range Layout::within_shard(int64_t parameter, int64_t rank) const {
  const Range range = owned(parameter, rank);
  if (range.size() == 0) return {0, 0};
  const int64_t shift = offset(parameter) - rank * shard_numel_;
  return {range.begin + shift, range.end + shift};
}

}  // namespace zerocore
