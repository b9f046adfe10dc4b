// Layout arithmetic for 1 to 64 ranks with random sizes.

#include <random>
#include <stdexcept>

#include "check.h"
#include "runtime/layout.h"

namespace zerocore::test {
namespace {

std::vector<int64_t> random_numels(std::mt19937& random) {
  std::vector<int64_t> numels(random() % 12);
  for (int64_t& numel : numels) {
    const int64_t limits[] = {1, 4, 40, 2000, 100000};
    numel = static_cast<int64_t>(random()) % limits[random() % 5];
  }
  return numels;
}

// Every parameter starts aligned, behind the one before it, with less than one alignment of
// padding.
int64_t check_offsets(const Layout& layout, const std::vector<int64_t>& numels) {
  CHECK_EQ(layout.parameters(), static_cast<int64_t>(numels.size()));
  int64_t end = 0;
  for (int64_t p = 0; p < layout.parameters(); ++p) {
    CHECK_EQ(layout.numel(p), numels[static_cast<size_t>(p)]);
    CHECK_EQ(layout.offset(p), layout.offsets()[static_cast<size_t>(p)]);
    CHECK_EQ(layout.offset(p) % kAlignment, 0);
    CHECK(layout.offset(p) >= end && layout.offset(p) < end + kAlignment);
    end = layout.offset(p) + layout.numel(p);
  }
  return end;
}

// The ranks' parts of a parameter follow each other and cover it, each where the flat buffer says.
void check_ownership(const Layout& layout) {
  for (int64_t p = 0; p < layout.parameters(); ++p) {
    int64_t next = 0;
    for (int64_t rank = 0; rank < layout.shards(); ++rank) {
      const Range owned = layout.owned(p, rank);
      const Range within = layout.within_shard(p, rank);
      CHECK_EQ(owned.size(), within.size());
      CHECK(owned.size() >= 0);
      if (owned.size() == 0) continue;
      CHECK_EQ(owned.begin, next);
      CHECK(within.begin >= 0 && within.end <= layout.shard_numel());
      CHECK_EQ(layout.offset(p) + owned.begin, rank * layout.shard_numel() + within.begin);
      next = owned.end;
    }
    CHECK_EQ(next, layout.numel(p));
  }
}

void test_random_layouts() {
  std::mt19937 random(1);
  for (int64_t shards = 1; shards <= 64; ++shards) {
    for (int round = 0; round < 40; ++round) {
      const std::vector<int64_t> numels = random_numels(random);
      const int64_t replicas = round % 3 == 0 ? 1 + static_cast<int64_t>(random() % 8) : 1;
      const Layout layout(numels, shards, replicas);
      const int64_t end = check_offsets(layout, numels);
      const int64_t unit = kAlignment * replicas;
      CHECK_EQ(layout.shards(), shards);
      CHECK_EQ(layout.total(), shards * layout.shard_numel());
      CHECK_EQ(layout.shard_numel() % unit, 0);
      CHECK(layout.total() >= end);
      // No smaller shard would do.
      CHECK(layout.shard_numel() == 0 || (layout.shard_numel() - unit) * shards < end + kAlignment);
      check_ownership(layout);
    }
  }
}

void test_empty_and_small() {
  const Layout none({}, 4);
  CHECK_EQ(none.total(), 0);
  const Layout empty({0, 0}, 3);
  CHECK_EQ(empty.total(), 0);
  CHECK(empty.owned(1, 2) == Range{});
  const Layout one({1}, 4);  // one element: the first rank has it, all shards are padded
  CHECK_EQ(one.shard_numel(), kAlignment);
  CHECK_EQ(one.owned(0, 0).size(), 1);
  CHECK_EQ(one.owned(0, 3).size(), 0);
}

void test_errors() {
  CHECK_THROWS(std::invalid_argument, "got 0 and 1", Layout({1}, 0));
  CHECK_THROWS(std::invalid_argument, "got 2 and 0", Layout({1}, 2, 0));
  CHECK_THROWS(std::invalid_argument, "expected a size of at least 0, got -5", Layout({3, -5}, 2));
}

}  // namespace
}  // namespace zerocore::test

int main() {
  zerocore::test::test_random_layouts();
  zerocore::test::test_empty_and_small();
  zerocore::test::test_errors();
}
