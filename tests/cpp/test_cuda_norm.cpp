// sumsq of the CUDA kernels against the CPU's.

#include <cmath>

#include "cuda_cases.h"
#include "kernels/norm.h"

namespace zerocore::test {
namespace {

namespace cuda = kernels::cuda;

kernels::SumSquares cuda_sumsq(const Buffer& x, const cuda::Queue& queue) {
  std::vector<double> partials(cuda::kSumSqPartials, NAN);
  double out[2] = {NAN, NAN};
  take_bytes();
  cuda::sumsq(out, x.data(), x.dtype(), x.size(), partials.data(), queue);
  const Bytes bytes = take_bytes();
  CHECK_EQ(bytes.loaded, x.size() * kernels::element_size(x.dtype()));
  CHECK_EQ(bytes.stored, int64_t{0});
  CHECK(out[1] == 0.0 || out[1] == 1.0);
  return {out[0], out[1] != 0.0};
}

// The same value at every alignment, on every device and in every order of the threads.
void check_sum(DType dtype, int64_t n, std::mt19937& random) {
  const TestQueue small(1), large(7);
  Buffer first(dtype, n, 0);
  first.fill(random);
  const kernels::SumSquares expected = kernels::sumsq(first.data(), dtype, n, kernels::serial());
  double sum = NAN;
  in_every_order([&] {
    for (const int64_t shift : {0, 1, 6}) {
      Buffer x(dtype, n, shift);
      for (int64_t i = 0; i < n; ++i) {
        x.set(i, first.get(i));
      }
      const kernels::SumSquares result = cuda_sumsq(x, shift == 0 ? small : large);
      CHECK(!result.non_finite);
      CHECK(std::fabs(result.sum - expected.sum) <= 1e-15 * expected.sum);
      sum = std::isnan(sum) ? result.sum : sum;
      CHECK_EQ(result.sum, sum);
    }
  });
}

void test_sums() {
  std::mt19937 random(1);
  for (const DType dtype : cuda_dtypes()) {
    for (const int64_t n : cuda_sizes()) {
      check_sum(dtype, n, random);
    }
  }
  if (!kThreadsEngine) {
    check_sum(DType::bf16, (int64_t{1} << 20) + 3, random);
    check_sum(DType::f32, (int64_t{1} << 22) + 3, random);  // as many blocks as there may be
  }
}

void test_non_finite_anywhere() {
  const TestQueue queue;
  const int64_t n = kThreadsEngine ? 20 : 20000;
  for (const DType dtype : cuda_dtypes()) {
    Buffer x(dtype, n, 1);
    for (int64_t k = 0; k < n; ++k) {
      x.set(k, 1.0);
    }
    int kind = 0;
    for (int64_t i = 0; i < n; i += kThreadsEngine ? 7 : 911) {
      const double bad[] = {INFINITY, -INFINITY, NAN};
      x.set(i, bad[kind++ % 3]);
      CHECK(cuda_sumsq(x, queue).non_finite);
      x.set(i, 1.0);
    }
    CHECK(!cuda_sumsq(x, queue).non_finite);
  }
}

void test_overflow_is_not_non_finite() {
  const TestQueue queue;
  Buffer x(DType::f64, 50);
  for (int64_t i = 0; i < 50; ++i) {
    x.set(i, 1e200);
  }
  const kernels::SumSquares result = cuda_sumsq(x, queue);
  CHECK(std::isinf(result.sum));
  CHECK(!result.non_finite);
}

}  // namespace
}  // namespace zerocore::test

int main() {
  zerocore::test::test_sums();
  zerocore::test::in_every_order([] {
    zerocore::test::test_non_finite_anywhere();
    zerocore::test::test_overflow_is_not_non_finite();
  });
}
