// fused_adamw against the arithmetic of one element in fp32 (the same bits) and in f64 (close to
// it).

#include <cmath>

#include "adamw_cases.h"

namespace zerocore::test {
namespace {

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
