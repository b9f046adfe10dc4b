// sum_shards of the CUDA kernels against the CPU's.

#include "cuda_cases.h"
#include "kernels/reduce.h"

namespace zerocore::test {
namespace {

namespace cuda = kernels::cuda;

struct Shards {
  std::vector<Buffer> buffers;
  std::vector<const void*> pointers;

  Shards(DType dtype, int64_t n, int64_t count, std::mt19937& random) {
    for (int64_t k = 0; k < count; ++k) {
      buffers.emplace_back(dtype, n, static_cast<int64_t>(random() % 3 == 0 ? 0 : random() % 17));
      buffers.back().fill(random);
    }
    for (const Buffer& buffer : buffers) {
      pointers.push_back(buffer.data());
    }
  }
};

void check_sum(DType from, DType to, int64_t n, int64_t count, bool accumulate,
               std::mt19937& random) {
  const TestQueue queue;
  Shards shards(from, n, count, random);
  Buffer start(to, n, static_cast<int64_t>(random() % 17));
  start.fill(random);
  Buffer expected = start;
  kernels::sum_shards(expected.data(), to, shards.pointers.data(), count, from, n, accumulate,
                      kernels::serial());
  Buffer out = start;
  take_bytes();
  cuda::sum_shards(out.data(), to, shards.pointers.data(), count, from, n, accumulate, queue);
  const Bytes bytes = take_bytes();
  check_same_bits(out, expected, "sum_shards");
  const int64_t out_bytes = n * kernels::element_size(to);
  CHECK_EQ(bytes.loaded,
           n * count * kernels::element_size(from) + (accumulate ? out_bytes : int64_t{0}));
  CHECK_EQ(bytes.stored, out_bytes);

  if (from == to) {  // into one of the shards
    const size_t own = random() % shards.buffers.size();
    Buffer in_place = shards.buffers[own];
    kernels::sum_shards(in_place.data(), to, shards.pointers.data(), count, from, n, accumulate,
                        kernels::serial());
    cuda::sum_shards(shards.buffers[own].data(), to, shards.pointers.data(), count, from, n,
                     accumulate, queue);
    check_same_bits(shards.buffers[own], in_place, "sum_shards in place");
  }
}

void test_sums() {
  std::mt19937 random(1);
  for (const DType from : kDTypes) {
    for (const DType to : kDTypes) {
      for (const int64_t n : cuda_sizes()) {
        const int64_t count = 1 + static_cast<int64_t>(random() % 6);
        check_sum(from, to, n, count, random() % 2 == 0, random);
      }
    }
  }
}

void test_many_shards() {
  std::mt19937 random(2);
  for (const int64_t count : {64, 65, static_cast<int>(cuda::kMaxShards)}) {
    check_sum(DType::bf16, DType::f32, 2500, count, true, random);
    check_sum(DType::bf16, DType::bf16, 300, count, false, random);
  }
}

// The sign of zero, infinities, and what is not finite stays that.
void test_special_values() {
  const TestQueue queue;
  for (const DType dtype : kDTypes) {
    const double values[] = {-0.0, 0.0, INFINITY, -INFINITY, 1e-40, -1e-310, NAN, 5e-8};
    const int64_t n = static_cast<int64_t>(std::size(values));
    Buffer shard(dtype, n), other(dtype, n);
    for (int64_t i = 0; i < n; ++i) {
      shard.set(i, values[i]);
      other.set(i, i < 2 ? -0.0 : values[i]);
    }
    for (const int64_t count : {1, 2}) {
      const void* shards[] = {shard.data(), other.data()};
      Buffer out(dtype, n), expected(dtype, n);
      kernels::sum_shards(expected.data(), dtype, shards, count, dtype, n, false,
                          kernels::serial());
      cuda::sum_shards(out.data(), dtype, shards, count, dtype, n, false, queue);
      check_same_bits(out, expected, "special values");
    }
  }
}

}  // namespace
}  // namespace zerocore::test

int main() {
  using namespace zerocore::test;
  if (kThreadsEngine) {  // no barriers: one case is enough
    std::mt19937 random(1);
    check_sum(DType::bf16, DType::f32, 4100, 5, true, random);
    return 0;
  }
  in_every_order([] {
    test_sums();
    test_many_shards();
    test_special_values();
  });
}
