// What the tests of fused_adamw on CPU and CUDA share: states, step counts, segments.
#pragma once

#include <cmath>

#include "kernel_cases.h"
#include "kernels/adamw.h"

namespace zerocore::test {

using kernels::AdamWHyper;
using kernels::AdamWSegment;

struct State {
  Buffer param, grad, exp_avg, exp_avg_sq, low;
  bool has_low;

  State(int64_t n, int64_t shift, DType grad_dtype, DType low_dtype, std::mt19937& random)
      : param(DType::f32, n, shift),
        grad(grad_dtype, n, (shift * 3) % 16),
        exp_avg(DType::f32, n, (shift * 5) % 16),
        exp_avg_sq(DType::f32, n, shift),
        low(low_dtype == DType::f32 ? DType::bf16 : low_dtype, n, (shift * 7) % 16),
        has_low(low_dtype != DType::f32) {
    param.fill(random);
    grad.fill(random);
    exp_avg.fill(random, 0.1);
    exp_avg_sq.fill(random);
    for (int64_t i = 0; i < n; ++i) {
      exp_avg_sq.set(i, std::fabs(exp_avg_sq.get(i)) * 0.01);
    }
  }

  kernels::AdamWTensors tensors(const float* grad_scale, const float* found_inf,
                                float* const* steps) {
    return {param.as<float>(),
            grad.data(),
            grad.dtype(),
            exp_avg.as<float>(),
            exp_avg_sq.as<float>(),
            has_low ? low.data() : nullptr,
            low.dtype(),
            grad_scale,
            found_inf,
            steps};
  }
};

inline void check_same_state(const State& actual, const State& expected) {
  check_same_bits(actual.param, expected.param, "param");
  check_same_bits(actual.exp_avg, expected.exp_avg, "exp_avg");
  check_same_bits(actual.exp_avg_sq, expected.exp_avg_sq, "exp_avg_sq");
  check_same_bits(actual.low, expected.low, "low_precision");
  check_same_bits(actual.grad, expected.grad, "grad");
}

// Step counts of segments, of which every third shares the first one.
struct Counts {
  std::vector<float> values;
  std::vector<float*> steps;

  Counts(size_t segments, std::mt19937& random) : values(segments) {
    for (float& value : values) {
      value = static_cast<float>(random() % 20);
    }
    share();
  }
  Counts(const Counts& other) : values(other.values) { share(); }

  void check_advanced(const Counts& before) const {
    for (size_t i = 0; i < values.size(); ++i) {
      const bool in_use = i == 0 || i % 3 != 0;
      CHECK_EQ(values[i], before.values[i] + (in_use ? 1.0f : 0.0f));
    }
  }

 private:
  void share() {
    for (size_t i = 0; i < values.size(); ++i) {
      steps.push_back(&values[i % 3 == 0 ? 0 : i]);
    }
  }
};

inline AdamWHyper random_hyper(std::mt19937& random) {
  const auto uniform = [&] { return std::uniform_real_distribution<double>(0.0, 1.0)(random); };
  AdamWHyper h;
  h.lr = 1e-3 + 0.1 * uniform();
  h.beta1 = random() % 4 == 0 ? 0.3 * uniform() : 0.8 + 0.19 * uniform();
  h.beta2 = 0.9 + 0.099 * uniform();
  h.eps = random() % 2 == 0 ? 1e-8 : 1e-3;
  h.weight_decay = random() % 3 == 0 ? 0.0 : 0.2 * uniform();
  h.decoupled = random() % 3 != 0;
  return h;
}

// Ascending segments with gaps, some of them empty.
inline std::vector<AdamWSegment> random_segments(int64_t n, std::mt19937& random) {
  std::vector<AdamWSegment> segments;
  int64_t at = 0;
  while (at <= n && segments.size() < 40) {
    at += random() % 2 == 0 ? 0 : static_cast<int64_t>(random() % 30);
    const int64_t longest = random() % 3 == 0 ? n / 2 + 1 : 40;
    const int64_t stop = at + static_cast<int64_t>(random() % static_cast<uint64_t>(longest));
    if (stop > n) break;
    segments.push_back({at, stop, random_hyper(random)});
    at = stop;
  }
  return segments;
}

}  // namespace zerocore::test
