// Where each parameter of a flat buffer lies: offsets, padding, and the equal shard of each rank.
#pragma once

#include <cstdint>
#include <vector>

namespace zerocore {

// A half-open range of elements.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const Range& other) const { return begin == other.begin && end == other.end; }
};

// Every parameter starts at a multiple of this many elements: 64 bytes of fp32, 32 of bf16, so the
// views that modules compute with are aligned for vector loads in any dtype.
constexpr int64_t kAlignment = 16;

// The flat buffer of a few parameters, cut into equal shards.
//
//   parameters   |--- p0 ---|pad|------- p1 -------|pad|- p2 -|   pad   |
//   offsets      0              offset(1)              offset(2)        total()
//   shards       |      rank 0      |      rank 1      |      rank 2    |
//                0             shard_numel()      2 * shard_numel()
//
// A pure value of (sizes, shards, replicas): no processes are needed to ask about any of them.
class Layout {
 public:
  // numels: elements of each parameter (zero is allowed). shards: ranks that share the buffer.
  // replicas: ranks that hold the same shard; the shard is padded so that they can split it evenly.
  // Throws std::invalid_argument for a negative size or a count below one.
  Layout(std::vector<int64_t> numels, int64_t shards, int64_t replicas = 1);

  int64_t parameters() const { return static_cast<int64_t>(numels_.size()); }
  int64_t shards() const { return shards_; }
  int64_t numel(int64_t parameter) const { return numels_.at(parameter); }
  int64_t offset(int64_t parameter) const { return offsets_.at(parameter); }
  const std::vector<int64_t>& offsets() const { return offsets_; }
  int64_t shard_numel() const { return shard_numel_; }
  int64_t total() const { return shard_numel_ * shards_; }

  // The elements of the flattened parameter that the rank holds; {0, 0} or {numel, numel} if none.
  Range owned(int64_t parameter, int64_t rank) const;
  // Where those elements lie in the rank's shard.
  Range within_shard(int64_t parameter, int64_t rank) const;

 private:
  std::vector<int64_t> numels_;
  std::vector<int64_t> offsets_;
  int64_t shards_;
  int64_t shard_numel_ = 0;
};

}  // namespace zerocore
