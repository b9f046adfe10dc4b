#include "norm.h"

#include <algorithm>
#include <vector>

#include "loops.h"

namespace zerocore::kernels {
namespace {

constexpr int64_t kBlock =
    8192;  // elements of one partial sum: fixed, so that the order of summation is
constexpr int64_t kGrain = 4;  // blocks

struct Partial {
  double sum = 0.0;
  bool non_finite = false;
};

}  // namespace

SumSquares sumsq(const void* data, DType dtype, int64_t numel, const Parallel& parallel) {
  const Loops::SumSq block_sum = loops().sumsq[static_cast<int>(dtype)];
  const char* bytes = static_cast<const char*>(data);
  const int64_t size = element_size(dtype);
  std::vector<Partial> partials(static_cast<size_t>((numel + kBlock - 1) / kBlock));
  parallel(static_cast<int64_t>(partials.size()), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t start = block * kBlock;
      Partial& partial = partials[static_cast<size_t>(block)];
      partial.sum =
          block_sum(bytes + start * size, std::min(kBlock, numel - start), &partial.non_finite);
    }
  });
  SumSquares total{0.0, false};
  for (const Partial& partial : partials) {
    total.sum += partial.sum;
    total.non_finite = total.non_finite || partial.non_finite;
  }
  return total;
}

}  // namespace zerocore::kernels
