// fused_adamw against the arithmetic of one element in fp32 (the same bits) and in f64 (close to
// it).

#include <cmath>

#include "kernel_cases.h"
#include "kernels/adamw.h"

namespace zerocore::test {
namespace {

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

void check_same_state(const State& actual, const State& expected) {
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

// One element at a time: in fp32 by the shared arithmetic, in f64 by the textbook.
void naive_step(State& s, const std::vector<AdamWSegment>& segments, float grad_scale,
                const Counts& counts) {
  for (size_t k = 0; k < segments.size(); ++k) {
    const AdamWSegment& segment = segments[k];
    const AdamWHyper& h = segment.hyper;
    const int step = static_cast<int>(*counts.steps[k]) + 1;
    const double correction1 = 1.0 - std::pow(h.beta1, step);
    const double correction2 = 1.0 - std::pow(h.beta2, step);
    const kernels::AdamWCoefficients<float> c = kernels::adamw_coefficients(h, step);
    CHECK_EQ(c.root_correction2, static_cast<float>(std::sqrt(correction2)));
    CHECK_EQ(c.negative_step, static_cast<float>(-(h.lr / correction1)));
    for (int64_t i = segment.start; i < segment.stop; ++i) {
      float p = static_cast<float>(s.param.get(i));
      float m = static_cast<float>(s.exp_avg.get(i));
      float v = static_cast<float>(s.exp_avg_sq.get(i));
      const float g = static_cast<float>(s.grad.get(i)) * grad_scale;
      double grad = g;
      double param = p;
      if (h.decoupled) {
        param -= h.lr * h.weight_decay * param;
      } else {
        grad += h.weight_decay * param;
      }
      const double mean = h.beta1 * m + (1.0 - h.beta1) * grad;
      const double square = h.beta2 * v + (1.0 - h.beta2) * grad * grad;
      const double rate = h.lr / correction1 / (std::sqrt(square / correction2) + h.eps);
      param -= rate * mean;
      // What the roundings are relative to: the terms, not their sums.
      const double grad_size = std::fabs(g) + h.weight_decay * std::fabs(p);
      const double mean_size = std::fabs(m) + grad_size;
      const double param_size = std::fabs(p) + rate * mean_size;

      kernels::adamw_element<kernels::ScalarOps>(p, m, v, g, c);
      CHECK(std::fabs(m - mean) <= 1e-6 * mean_size);
      CHECK(std::fabs(v - square) <= 1e-6 * (square + grad_size * grad_size));
      CHECK(std::fabs(p - param) <= 2e-6 * param_size);
      s.param.set(i, p);
      s.exp_avg.set(i, m);
      s.exp_avg_sq.set(i, v);
      if (s.has_low) {
        s.low.set(i, p);
      }
    }
  }
}

AdamWHyper random_hyper(std::mt19937& random) {
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
std::vector<AdamWSegment> random_segments(int64_t n, std::mt19937& random) {
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

void check_step(int64_t n, int64_t shift, DType grad, DType low, std::vector<AdamWSegment> segments,
                std::mt19937& random) {
  const State start(n, shift, grad, low, random);
  const float scale = 0.37f, zero = 0.0f;
  State expected = start;
  const Counts counts(segments.size(), random);
  naive_step(expected, segments, scale, counts);
  for (const kernels::Parallel& parallel : ways(n)) {
    State actual = start;
    Counts advanced = counts;
    kernels::fused_adamw(actual.tensors(&scale, &zero, advanced.steps.data()), segments.data(),
                         static_cast<int64_t>(segments.size()), parallel);
    check_same_state(actual, expected);
    advanced.check_advanced(counts);
  }
}

void test_sizes_and_alignments() {
  std::mt19937 random(1);
  for (const DType grad : {DType::f32, DType::bf16, DType::f16}) {
    for (const DType low : {DType::f32, DType::bf16, DType::f16}) {
      for (const int64_t n : sizes()) {
        const int64_t shift = static_cast<int64_t>(random() % 17);
        check_step(n, shift, grad, low, {{0, n, random_hyper(random)}}, random);
      }
      for (const int64_t n : {100, 3000, 20000}) {
        check_step(n, 3, grad, low, random_segments(n, random), random);
      }
    }
  }
}

// Large enough for the copy to be written past the caches, from an odd address on.
void test_streamed_copy() {
  std::mt19937 random(4);
  const int64_t n = (int64_t{1} << 20) + 37;
  for (const DType low : {DType::bf16, DType::f16}) {
    check_step(n, 5, DType::bf16, low,
               {{1, 5, random_hyper(random)}, {5, n - 2, random_hyper(random)}}, random);
  }
}

void test_found_inf_changes_nothing() {
  std::mt19937 random(2);
  const State start(1000, 3, DType::f16, DType::bf16, random);
  const AdamWSegment segment{0, 1000, random_hyper(random)};
  const float scale = INFINITY;
  for (const float flag : {1.0f, -1.0f, NAN}) {
    State actual = start;
    float count = 7.0f;
    float* const steps[] = {&count};
    kernels::fused_adamw(actual.tensors(&scale, &flag, steps), &segment, 1, kernels::serial());
    check_same_state(actual, start);
    CHECK_EQ(count, 7.0f);
  }
}

void test_defaults() {
  std::mt19937 random(3);
  const std::vector<AdamWSegment> segments = {{0, 500, random_hyper(random)}};
  State actual(500, 0, DType::f32, DType::f32, random);
  State expected = actual;
  Counts counts(1, random);
  naive_step(expected, segments, 1.0f, counts);
  const kernels::AdamWTensors tensors = actual.tensors(nullptr, nullptr, counts.steps.data());
  kernels::fused_adamw(tensors, segments.data(), 1, kernels::serial());
  check_same_state(actual, expected);
  kernels::fused_adamw(tensors, segments.data(), 0, kernels::serial());
  check_same_state(actual, expected);
}

}  // namespace
}  // namespace zerocore::test

int main() {
  zerocore::test::on_every_isa([] {
    zerocore::test::test_sizes_and_alignments();
    zerocore::test::test_streamed_copy();
    zerocore::test::test_found_inf_changes_nothing();
    zerocore::test::test_defaults();
  });
}
