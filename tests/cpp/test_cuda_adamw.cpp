// fused_adamw of the CUDA kernels against the CPU's.

#include "adamw_cases.h"
#include "cuda_cases.h"

namespace zerocore::test {
namespace {

namespace cuda = kernels::cuda;

constexpr DType kNarrow[] = {DType::f32, DType::bf16, DType::f16};

// Both from the same start; returns the bytes that the CUDA kernel moved.
Bytes check_step(const State& start, const std::vector<AdamWSegment>& segments,
                 const float* grad_scale, const float* found_inf, const Counts& counts) {
  const TestQueue queue;
  const int64_t count = static_cast<int64_t>(segments.size());
  State expected = start, actual = start;
  Counts expected_counts = counts, actual_counts = counts;
  kernels::fused_adamw(expected.tensors(grad_scale, found_inf, expected_counts.steps.data()),
                       segments.data(), count, kernels::serial());
  take_bytes();
  cuda::fused_adamw(actual.tensors(grad_scale, found_inf, actual_counts.steps.data()),
                    segments.data(), count, queue);
  check_same_state(actual, expected);
  CHECK(actual_counts.values == expected_counts.values);
  return take_bytes();
}

int64_t elements_of(const std::vector<AdamWSegment>& segments) {
  int64_t out = 0;
  for (const AdamWSegment& segment : segments) {
    out += segment.stop - segment.start;
  }
  return out;
}

void check_random(int64_t n, int64_t shift, DType grad, DType low,
                  const std::vector<AdamWSegment>& segments, std::mt19937& random) {
  const State start(n, shift, grad, low, random);
  const float scale = 0.37f, zero = 0.0f;
  const Bytes bytes = check_step(start, segments, &scale, &zero, Counts(segments.size(), random));
  const int64_t elements = elements_of(segments);
  CHECK_EQ(bytes.loaded, elements * (12 + kernels::element_size(grad)));
  CHECK_EQ(bytes.stored, elements * (12 + (low == DType::f32 ? 0 : kernels::element_size(low))));
}

void test_sizes_and_alignments() {
  std::mt19937 random(1);
  for (const DType grad : kNarrow) {
    for (const DType low : kNarrow) {
      for (const int64_t n : cuda_sizes(grad == DType::bf16 && low == DType::bf16)) {
        const int64_t shift = random() % 3 == 0 ? 0 : static_cast<int64_t>(random() % 17);
        check_random(n, shift, grad, low, {{0, n, random_hyper(random)}}, random);
      }
      for (const int64_t n : {100, 3000, 12000}) {
        check_random(n, 3, grad, low, random_segments(n, random), random);
      }
    }
  }
}

// More than one launch holds; step counts are shared over launches.
void test_many_segments() {
  std::mt19937 random(2);
  const int64_t count = kThreadsEngine ? 60 : 500;
  std::vector<AdamWSegment> segments;
  int64_t at = 1;
  for (int64_t k = 0; k < count; ++k) {
    const int64_t size = k % 50 == 7 ? 2500 : static_cast<int64_t>(random() % 9);
    segments.push_back({at, at + size, random_hyper(random)});
    at += size + static_cast<int64_t>(random() % 2);
  }
  check_random(at + 3, 1, DType::bf16, DType::bf16, segments, random);
}

void test_large() {
  std::mt19937 random(4);
  const int64_t n = (int64_t{1} << 20) + 3;
  check_random(n, 0, DType::bf16, DType::bf16,
               {{1, 5, random_hyper(random)},
                {5, 700001, random_hyper(random)},
                {700001, n, random_hyper(random)}},
               random);
}

void test_found_inf_changes_nothing() {
  std::mt19937 random(5);
  const TestQueue queue;
  const State start(3000, 3, DType::f16, DType::bf16, random);
  const AdamWSegment segment{0, 3000, random_hyper(random)};
  const float scale = INFINITY;
  for (const float flag : {1.0f, -1.0f, NAN}) {
    State actual = start;
    float count = 7.0f;
    float* const steps[] = {&count};
    take_bytes();
    cuda::fused_adamw(actual.tensors(&scale, &flag, steps), &segment, 1, queue);
    CHECK_EQ(take_bytes().stored, int64_t{0});
    check_same_state(actual, start);
    CHECK_EQ(count, 7.0f);
  }
}

void test_empty_segments_only_count() {
  std::mt19937 random(6);
  const State start(10, 0, DType::f32, DType::f32, random);
  const Counts counts(3, random);
  const std::vector<AdamWSegment> segments(3, AdamWSegment{4, 4, random_hyper(random)});
  const Bytes bytes = check_step(start, segments, nullptr, nullptr, counts);
  CHECK_EQ(bytes.loaded + bytes.stored, int64_t{0});
  check_step(start, {}, nullptr, nullptr, Counts(0, random));
}

// Counts far into a training, and values at the edges of fp32.
void test_special_values() {
  std::mt19937 random(7);
  State start(64, 1, DType::f32, DType::f16, random);
  const double values[] = {INFINITY, -INFINITY, 1e-42, -1e-42, 3e38, 0.0, -0.0, 65520.0};
  for (int64_t i = 0; i < 64; ++i) {
    start.grad.set(i, values[i % 8]);
    start.param.set(i, values[i / 8]);
    start.exp_avg_sq.set(i, std::fabs(values[(i + i / 8) % 8]));
  }
  for (const float taken : {0.0f, 99999.0f, 16777216.0f}) {
    Counts counts(1, random);
    counts.values[0] = taken;
    const TestQueue queue;
    const AdamWSegment segment{0, 64, {1e-3, 0.9, 0.999, 1e-8, 0.1, true}};
    State expected = start, actual = start;
    Counts expected_counts = counts;
    kernels::fused_adamw(expected.tensors(nullptr, nullptr, expected_counts.steps.data()), &segment,
                         1, kernels::serial());
    cuda::fused_adamw(actual.tensors(nullptr, nullptr, counts.steps.data()), &segment, 1, queue);
    CHECK_EQ(counts.values[0], expected_counts.values[0]);
    for (int64_t i = 0; i < 64; ++i) {  // which NaN arithmetic makes is the machine's choice
      const double a = actual.param.get(i), b = expected.param.get(i);
      CHECK(std::isnan(a) ? std::isnan(b) : a == b);
      const double c = actual.low.get(i), d = expected.low.get(i);
      CHECK(std::isnan(c) ? std::isnan(d) : c == d);
    }
  }
}

}  // namespace
}  // namespace zerocore::test

int main() {
  using namespace zerocore::test;
  if (kThreadsEngine) {
    test_many_segments();
    test_found_inf_changes_nothing();
    return 0;
  }
  in_every_order([] {
    test_sizes_and_alignments();
    test_many_segments();
    test_found_inf_changes_nothing();
    test_empty_segments_only_count();
    test_special_values();
  });
  test_large();
}
