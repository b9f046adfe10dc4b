// sum_shards against a loop over elements.

#include "kernel_cases.h"
#include "kernels/reduce.h"

namespace zerocore::test {
namespace {

// Element i of out after the sum, in the arithmetic that the header promises.
double expected_element(const Buffer& out, const std::vector<Buffer>& shards, int64_t i,
                        bool accumulate) {
  const DType dtype = shards[0].dtype();
  static Buffer one[] = {{DType::f32, 1}, {DType::bf16, 1}, {DType::f16, 1}, {DType::f64, 1}};
  Buffer& rounded = one[static_cast<int>(dtype)];  // holds a value in the shards' dtype
  if (dtype == DType::f64) {
    double sum = shards[0].get(i);
    for (size_t k = 1; k < shards.size(); ++k) sum += shards[k].get(i);
    rounded.set(0, sum);
  } else {
    float sum = static_cast<float>(shards[0].get(i));
    for (size_t k = 1; k < shards.size(); ++k) sum += static_cast<float>(shards[k].get(i));
    rounded.set(0, sum);
  }
  const double value = rounded.get(0);
  if (!accumulate) {
    return value;
  }
  if (out.dtype() == DType::f64 || dtype == DType::f64) {
    return out.get(i) + value;
  }
  return static_cast<float>(out.get(i)) + static_cast<float>(value);
}

void check_sum(DType from, DType to, int64_t n, int64_t count, bool accumulate,
               std::mt19937& random) {
  std::vector<Buffer> shards;
  std::vector<const void*> pointers;
  for (int64_t k = 0; k < count; ++k) {
    shards.emplace_back(from, n, static_cast<int64_t>(random() % 17));
    shards.back().fill(random);
  }
  for (const Buffer& shard : shards) {
    pointers.push_back(shard.data());
  }
  Buffer start(to, n, static_cast<int64_t>(random() % 17));
  start.fill(random);
  Buffer expected = start;
  for (int64_t i = 0; i < n; ++i) {
    expected.set(i, expected_element(start, shards, i, accumulate));
  }
  for (const kernels::Parallel& parallel : ways(n)) {
    Buffer out = start;
    kernels::sum_shards(out.data(), to, pointers.data(), count, from, n, accumulate, parallel);
    check_same_bits(out, expected, "sum_shards");
  }
  if (from == to) {  // into one of the shards
    const size_t own = random() % shards.size();
    Buffer in_place = shards[own];
    for (int64_t i = 0; i < n; ++i) {
      in_place.set(i, expected_element(shards[own], shards, i, accumulate));
    }
    kernels::sum_shards(shards[own].data(), to, pointers.data(), count, from, n, accumulate,
                        ways(n).back());
    check_same_bits(shards[own], in_place, "sum_shards in place");
  }
}

void test_sums() {
  std::mt19937 random(1);
  for (const DType from : kDTypes) {
    for (const DType to : kDTypes) {
      for (const int64_t n : sizes()) {
        const int64_t count = 1 + static_cast<int64_t>(random() % 5);
        check_sum(from, to, n, count, false, random);
        check_sum(from, to, n, count, true, random);
      }
    }
  }
}

}  // namespace
}  // namespace zerocore::test

int main() { zerocore::test::on_every_isa(zerocore::test::test_sums); }
