#include "adamw.h"

#include <algorithm>
#include <vector>

#include "loops.h"

namespace zerocore::kernels {
namespace {

constexpr int64_t kBlock =
    4096;  // elements: pieces start at multiples, so threads share no cache line
// Elements: from here on a step moves more than caches hold, and a low-precision copy that passes
// by them need not be read from memory before it is written.
constexpr int64_t kStream = 1 << 20;
constexpr int64_t kGrain = 4;  // blocks: below this a thread costs more than it saves

}  // namespace

void fused_adamw(const AdamWTensors& tensors, const AdamWSegment* segments, int64_t count,
                 const Parallel& parallel) {
  if (count == 0 || (tensors.found_inf != nullptr && *tensors.found_inf != 0.0f)) {
    return;
  }
  const int64_t span = segments[count - 1].stop - segments[0].start;
  const AdamWArrays arrays{tensors.param,
                           tensors.grad,
                           tensors.exp_avg,
                           tensors.exp_avg_sq,
                           tensors.low_precision,
                           tensors.grad_scale != nullptr ? *tensors.grad_scale : 1.0f,
                           tensors.low_precision != nullptr && span >= kStream};
  const DType low = tensors.low_precision != nullptr ? tensors.low_precision_dtype : DType::f32;
  const Loops::AdamW step =
      loops().adamw[static_cast<int>(tensors.grad_dtype)][static_cast<int>(low)];

  // All counts are read before one is written: segments may share them.
  std::vector<float> taken(static_cast<size_t>(count));
  std::vector<AdamWCoefficients<float>> coefficients(static_cast<size_t>(count));
  for (size_t i = 0; i < taken.size(); ++i) {
    taken[i] = *tensors.steps[i] + 1.0f;
    coefficients[i] = adamw_coefficients(segments[i].hyper, taken[i]);
  }
  for (size_t i = 0; i < taken.size(); ++i) {
    *tensors.steps[i] = taken[i];
  }

  const int64_t first = segments[0].start / kBlock;
  const int64_t blocks = (segments[count - 1].stop + kBlock - 1) / kBlock - first;
  parallel(blocks, kGrain, [&](int64_t begin, int64_t end) {
    const int64_t start = (first + begin) * kBlock;
    const int64_t stop = (first + end) * kBlock;
    const AdamWSegment* segment =
        std::upper_bound(segments, segments + count, start,
                         [](int64_t at, const AdamWSegment& s) { return at < s.stop; });
    for (; segment != segments + count && segment->start < stop; ++segment) {
      step(arrays, coefficients[static_cast<size_t>(segment - segments)],
           std::max(start, segment->start), std::min(stop, segment->stop));
    }
  });
}

}  // namespace zerocore::kernels
