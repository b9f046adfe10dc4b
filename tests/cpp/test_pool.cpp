// The pool: reuse, the budget, and a random schedule of leases and releases on several threads.

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <new>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "runtime/pool.h"

namespace zerocore::test {
namespace {

// The heap, counted. The pool calls it under its lock, so it needs none (a race here is the
// pool's).
class CountedMemory : public Memory {
 public:
  ~CountedMemory() override { CHECK_EQ(blocks_.size(), 0u); }

  Lease allocate(int64_t bytes) override {
    if (held_ + bytes > limit) throw std::bad_alloc();
    void* block = std::malloc(static_cast<size_t>(bytes));
    CHECK(block != nullptr);
    blocks_[block] = bytes;
    held_ += bytes;
    most_ = std::max(most_, held_);
    ++allocations_;
    return {block, bytes, {}, -1};
  }
  void deallocate(const Lease& block) override {
    CHECK_EQ(blocks_.count(block.data), 1u);
    held_ -= blocks_[block.data];
    blocks_.erase(block.data);
    std::free(block.data);
  }

  int64_t limit = std::numeric_limits<int64_t>::max();

  int64_t held() const { return held_; }
  int64_t most() const { return most_; }
  int allocations() const { return allocations_; }

 private:
  std::map<void*, int64_t> blocks_;
  int64_t held_ = 0;
  int64_t most_ = 0;
  int allocations_ = 0;
};

void test_blocks_are_used_again() {
  CountedMemory memory;
  Pool pool(memory, 0);
  const Lease a = *pool.try_lease(100);
  const Lease b = *pool.try_lease(200);
  CHECK_EQ(pool.leased(), 300);
  pool.release(a);
  CHECK_EQ(pool.kept(), 100);
  const Lease again = *pool.try_lease(100);
  CHECK_EQ(again.data, a.data);
  CHECK_EQ(memory.allocations(), 2);
  CHECK_EQ(pool.kept(), 0);
  pool.release(again);
  pool.release(b);
  CHECK_EQ(pool.peak(), 300);
  // What is kept makes room for another size, so memory stays at its peak.
  const Lease large = *pool.try_lease(250);
  CHECK(memory.held() <= 300);
  pool.reset_peak();
  CHECK_EQ(pool.peak(), 250);
  pool.release(large);
  pool.trim();
  CHECK_EQ(pool.kept(), 0);
  CHECK_EQ(memory.held(), 0);
}

void test_blocks_that_are_not_kept() {
  CountedMemory memory;
  Pool pool(memory, 0, /*keep=*/false);
  const Lease a = *pool.try_lease(100);
  const Lease b = *pool.try_lease(100);
  pool.release(a);
  CHECK_EQ(memory.held(), 100);
  CHECK_EQ(pool.kept(), 0);
  pool.release(b);
  CHECK_EQ(memory.held(), 0);
  CHECK_EQ(pool.peak(), 200);
}

void test_budget() {
  CountedMemory memory;
  Pool pool(memory, 1000);
  CHECK_EQ(pool.budget(), 1000);
  CHECK(!pool.try_lease(1001).has_value());
  const Lease a = *pool.try_lease(600);
  CHECK(!pool.try_lease(401).has_value());
  const Lease b = *pool.try_lease(400);
  CHECK(!pool.try_lease(1).has_value());
  pool.release(a);
  const Lease c = *pool.try_lease(500);  // the kept 600 have to go first
  CHECK_EQ(memory.held(), 900);
  pool.release(b);
  pool.release(c);
  CHECK_EQ(memory.most(), 1000);
}

void test_kept_blocks_make_room_where_memory_is_out() {
  CountedMemory memory;
  memory.limit = 1000;
  Pool pool(memory, 0);
  const Lease a = *pool.try_lease(600);
  const Lease b = *pool.try_lease(400);
  pool.release(a);
  // 1,000 bytes were leased at once, so the pool would keep the 600.
  const Lease c = *pool.try_lease(500);
  CHECK_EQ(memory.held(), 900);
  bool failed = false;
  try {
    pool.try_lease(200);
  } catch (const std::bad_alloc&) {
    failed = true;
  }
  CHECK(failed);
  CHECK_EQ(pool.leased(), 900);
  pool.release(b);
  pool.release(c);
}

// Each thread leases and returns blocks, and finds in them what it wrote.
void churn(Pool& pool, int seed) {
  std::mt19937 random(static_cast<unsigned>(seed));
  const int64_t sizes[] = {64, 64, 128, 200, 1000, 3000};
  std::vector<std::pair<Lease, unsigned char>> held;
  for (int i = 0; i < 4000; ++i) {
    if (random() % 2 == 0 && held.size() < 5) {
      const int64_t bytes = sizes[random() % 6];
      if (const std::optional<Lease> lease = pool.try_lease(bytes)) {
        CHECK_EQ(lease->bytes, bytes);
        const unsigned char mark = static_cast<unsigned char>(random());
        std::memset(lease->data, mark, static_cast<size_t>(bytes));
        held.emplace_back(*lease, mark);
      }
    } else if (!held.empty()) {
      const size_t k = random() % held.size();
      const auto [lease, mark] = held[k];
      const unsigned char* bytes = static_cast<const unsigned char*>(lease.data);
      for (int64_t b = 0; b < lease.bytes; ++b) {
        CHECK_EQ(static_cast<int>(bytes[b]), static_cast<int>(mark));
      }
      pool.release(lease);
      held.erase(held.begin() + static_cast<int64_t>(k));
    }
    if (i % 500 == 0) pool.trim();
    if (pool.budget() > 0) CHECK(pool.leased() <= pool.budget());
  }
  for (const auto& [lease, mark] : held) pool.release(lease);
}

void test_threads(int64_t budget) {
  CountedMemory memory;
  {
    Pool pool(memory, budget);
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&pool, t] { churn(pool, t); });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK_EQ(pool.leased(), 0);
    CHECK_EQ(pool.kept(), memory.held());
    CHECK(memory.most() <= (budget > 0 ? budget : pool.peak()));
    CHECK(pool.peak() > 3000);
  }
  CHECK_EQ(memory.held(), 0);
}

}  // namespace
}  // namespace zerocore::test

int main() {
  zerocore::test::test_blocks_are_used_again();
  zerocore::test::test_blocks_that_are_not_kept();
  zerocore::test::test_budget();
  zerocore::test::test_kept_blocks_make_room_where_memory_is_out();
  zerocore::test::test_threads(0);
  zerocore::test::test_threads(5000);
}
