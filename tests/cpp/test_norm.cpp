// sumsq against a sum in long double, and against itself with other threads and instruction sets.

#include <cmath>

#include "kernel_cases.h"
#include "kernels/norm.h"

namespace zerocore::test {
namespace {

void test_sums() {
  std::mt19937 random(1);
  for (const DType dtype : kDTypes) {
    for (const int64_t n : sizes()) {
      for (const int64_t shift : {0, 1, 9}) {
        Buffer x(dtype, n, shift);
        x.fill(random);
        long double expected = 0;
        for (int64_t i = 0; i < n; ++i) {
          expected += static_cast<long double>(x.get(i)) * x.get(i);
        }
        kernels::SumSquares first{-1.0, true};
        on_every_isa([&] {
          for (const kernels::Parallel& parallel : ways(n)) {
            const kernels::SumSquares result = kernels::sumsq(x.data(), dtype, n, parallel);
            CHECK(!result.non_finite);
            CHECK(std::fabs(result.sum - static_cast<double>(expected)) <= 1e-13 * expected);
            first = first.sum < 0 ? result : first;
            CHECK_EQ(result.sum, first.sum);
          }
        });
      }
    }
  }
}

void test_non_finite_anywhere() {
  for (const DType dtype : kDTypes) {
    for (const int64_t n : {1, 17, 40, 8200}) {
      for (int64_t i = 0; i < n; i += n > 100 ? 97 : 1) {
        for (const double bad : {static_cast<double>(INFINITY), static_cast<double>(-INFINITY),
                                 static_cast<double>(NAN)}) {
          Buffer x(dtype, n, 1);
          for (int64_t k = 0; k < n; ++k) {
            x.set(k, 1.0);
          }
          x.set(i, bad);
          CHECK(kernels::sumsq(x.data(), dtype, n, kernels::serial()).non_finite);
        }
      }
    }
  }
}

void test_overflow_is_not_non_finite() {
  Buffer x(DType::f64, 50);
  for (int64_t i = 0; i < 50; ++i) {
    x.set(i, 1e200);
  }
  const kernels::SumSquares result = kernels::sumsq(x.data(), DType::f64, 50, kernels::serial());
  CHECK(std::isinf(result.sum));
  CHECK(!result.non_finite);
}

}  // namespace
}  // namespace zerocore::test

int main() {
  zerocore::test::test_sums();
  zerocore::test::on_every_isa([] {
    zerocore::test::test_non_finite_anywhere();
    zerocore::test::test_overflow_is_not_non_finite();
  });
}
