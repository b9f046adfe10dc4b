// The conversions of single values against their definition: the nearest value, ties to the even
// one.

#include <cmath>
#include <random>
#include <vector>

#include "check.h"
#include "kernels/dtype.h"

namespace zerocore::test {
namespace {

using kernels::BFloat16;
using kernels::Half;

// The value of a 16-bit pattern, from its fields alone.
double decode(uint16_t bits, int exponent_bits) {
  const int mantissa_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const double mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa != 0 ? NAN : sign * INFINITY;
  }
  const double fraction = mantissa / (1 << mantissa_bits);
  return sign * (exponent == 0 ? std::ldexp(fraction, 1 - bias)
                               : std::ldexp(1.0 + fraction, exponent - bias));
}

double value_of(BFloat16 x) { return kernels::to_float(x); }
double value_of(Half x) { return kernels::to_float(x); }
BFloat16 convert(float x, BFloat16) { return kernels::to_bfloat16(x); }
Half convert(float x, Half) { return kernels::to_half(x); }

template <class T>
void check_widening(int exponent_bits) {
  for (int pattern = 0; pattern < 65536; ++pattern) {
    const T x{static_cast<uint16_t>(pattern)};
    const double expected = decode(x.bits, exponent_bits);
    if (std::isnan(expected)) {
      CHECK(std::isnan(value_of(x)));
    } else {
      CHECK_EQ(value_of(x), expected);
      CHECK_EQ(std::signbit(value_of(x)), std::signbit(expected));
      CHECK_EQ(convert(kernels::to_float(x), T{}).bits, x.bits);
    }
  }
}

// Compares with the two neighbours of the result. Patterns of one sign are ordered like their
// values.
template <class T>
void check_rounding(float value, int exponent_bits) {
  const T result = convert(value, T{});
  if (std::isnan(value)) {
    CHECK(std::isnan(value_of(result)));
    return;
  }
  CHECK_EQ(std::signbit(value_of(result)), std::signbit(value));
  const uint16_t infinity =
      static_cast<uint16_t>(((1 << exponent_bits) - 1) << (15 - exponent_bits));
  const int magnitude = result.bits & 0x7fff;
  const double target = std::fabs(static_cast<double>(value));
  // Infinity stands where the next finite value would be: that is how IEEE 754 rounds to it.
  const auto position = [&](int pattern) {
    return pattern == infinity ? std::ldexp(1.0, 1 << (exponent_bits - 1))
                               : decode(static_cast<uint16_t>(pattern), exponent_bits);
  };
  CHECK(magnitude <= infinity);
  if (std::isinf(value)) {
    CHECK_EQ(magnitude, infinity);
    return;
  }
  const double distance = std::fabs(position(magnitude) - target);
  for (const int neighbour : {magnitude - 1, magnitude + 1}) {
    if (neighbour < 0 || neighbour > infinity) {
      continue;
    }
    const double other = std::fabs(position(neighbour) - target);
    CHECK(distance < other || (distance == other && magnitude % 2 == 0) ||
          (magnitude == infinity && target > position(infinity)));
  }
}

void check_value(float value) {
  for (const float x : {value, -value}) {
    check_rounding<BFloat16>(x, 8);
    check_rounding<Half>(x, 5);
  }
}

void test_rounding() {
  for (int pattern = 0; pattern < 0x7c00; ++pattern) {  // every tie of fp16 and its neighbours
    const Half low{static_cast<uint16_t>(pattern)};
    const float next = pattern + 1 == 0x7c00
                           ? 65536.0f
                           : kernels::to_float(Half{static_cast<uint16_t>(pattern + 1)});
    const float tie = (kernels::to_float(low) + next) / 2;
    check_value(tie);
    check_value(std::nextafter(tie, 0.0f));
    check_value(std::nextafter(tie, INFINITY));
  }
  for (uint32_t pattern = 0; pattern < 0x7f80; ++pattern) {  // and of bf16
    for (const uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      check_value(kernels::float_from_bits(pattern << 16 | low));
    }
  }
  std::mt19937 random(1);
  for (int i = 0; i < 1000000; ++i) {
    check_value(kernels::float_from_bits(static_cast<uint32_t>(random())));
  }
  check_value(INFINITY);
}

}  // namespace
}  // namespace zerocore::test

int main() {
  zerocore::test::check_widening<zerocore::kernels::BFloat16>(8);
  zerocore::test::check_widening<zerocore::kernels::Half>(5);
  zerocore::test::test_rounding();
}
