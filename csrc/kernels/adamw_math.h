// The arithmetic of one AdamW step on one element, shared by every instruction set and by device
// code.
//
// Every operation is rounded once and written out (fma where it is fused, separate where it is
// not), in the order of torch.optim.AdamW's single-tensor path, so all implementations give the
// same bits. Compile with -ffp-contract=off (nvcc: -fmad=false): a compiler that fuses a
// multiplication and an addition by itself changes them.
#pragma once

#include <cmath>

#include "dtype.h"

#if defined(__FAST_MATH__)
#error \
    "expected IEEE arithmetic, got -ffast-math: the bits of a step would depend on the instruction set"
#endif

namespace zerocore::kernels {

// A product that no compiler may fuse with an addition.
ZEROCORE_HOST_DEVICE inline double rounded_product(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

// Hyperparameters of one segment.
struct AdamWHyper {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  bool decoupled;  // true: AdamW; false: Adam with an L2 term in the gradient
};

// What the elements need of them, computed in f64 and rounded once to fp32. Value: float or a
// vector of them.
template <class Value>
struct AdamWCoefficients {
  Value param_factor;  // 1 - lr * weight_decay if decoupled, else 1
  Value l2;            // weight_decay if not decoupled
  Value lerp_weight;   // of (grad - exp_avg)
  Value beta2;
  Value one_minus_beta2;
  Value root_correction2;  // sqrt(1 - beta2^step)
  Value eps;
  Value negative_step;  // -lr / (1 - beta1^step)
  bool has_l2;
  bool lerp_from_grad;  // lerp starts at the nearer end: exact at both ends
};

// base^exponent for what a step needs: the same bits on host and device, where the libraries' pow
// differ in the last one. A whole exponent is taken by squaring, in pairs of f64 (the value and
// what rounding left of it), so the result is the exact power but for the last rounding.
ZEROCORE_HOST_DEVICE inline double power(double base, double exponent) {
  constexpr double kLargest = 4294967296.0;  // of the exponents: no step count comes near it
  if (!(exponent >= 0.0 && exponent < kLargest && exponent == floor(exponent) && base >= 0.0 &&
        base <= 1.0)) {
    return pow(base, exponent);
  }
  struct Pair {
    double high, low;
    ZEROCORE_HOST_DEVICE Pair times(const Pair& b) const {
      const double product = rounded_product(high, b.high);
      double rest = ::fma(high, b.high, -product);
      rest = ::fma(high, b.low, rest);
      rest = ::fma(low, b.high, rest);
      const double sum = product + rest;
      return Pair{sum, rest - (sum - product)};
    }
  };
  Pair result{1.0, 0.0};
  Pair square{base, 0.0};
  for (uint64_t n = static_cast<uint64_t>(exponent); n != 0; n >>= 1) {
    if (n & 1) {
      result = result.times(square);
    }
    square = square.times(square);
  }
  return result.high;
}

// Of step number `step`, counted from 1.
ZEROCORE_HOST_DEVICE inline AdamWCoefficients<float> adamw_coefficients(const AdamWHyper& hyper,
                                                                        double step) {
  AdamWCoefficients<float> out;
  const double decay = hyper.decoupled ? rounded_product(hyper.lr, hyper.weight_decay) : 0.0;
  out.param_factor = static_cast<float>(1.0 - decay);
  out.has_l2 = !hyper.decoupled && hyper.weight_decay != 0.0;
  out.l2 = out.has_l2 ? static_cast<float>(hyper.weight_decay) : 0.0f;
  const float weight = static_cast<float>(1.0 - hyper.beta1);
  out.lerp_from_grad = !(::fabsf(weight) < 0.5f);
  out.lerp_weight = out.lerp_from_grad ? weight - 1.0f : weight;
  out.beta2 = static_cast<float>(hyper.beta2);
  out.one_minus_beta2 = static_cast<float>(1.0 - hyper.beta2);
  out.root_correction2 = static_cast<float>(::sqrt(1.0 - power(hyper.beta2, step)));
  out.eps = static_cast<float>(hyper.eps);
  out.negative_step = static_cast<float>(-(hyper.lr / (1.0 - power(hyper.beta1, step))));
  return out;
}

// Ops gives the type of a value (Ops::Value) and correctly rounded mul, add, sub, div, fma (a * b +
// c) and sqrt on it. grad is the gradient after unscaling and clipping.
template <class Ops>
ZEROCORE_HOST_DEVICE inline void adamw_element(typename Ops::Value& param,
                                               typename Ops::Value& exp_avg,
                                               typename Ops::Value& exp_avg_sq,
                                               typename Ops::Value grad,
                                               const AdamWCoefficients<typename Ops::Value>& c) {
  using Value = typename Ops::Value;
  if (c.has_l2) {
    grad = Ops::fma(param, c.l2, grad);
  }
  const Value decayed = Ops::mul(param, c.param_factor);
  const Value difference = Ops::sub(grad, exp_avg);
  exp_avg = Ops::fma(c.lerp_weight, difference, c.lerp_from_grad ? grad : exp_avg);
  exp_avg_sq = Ops::fma(Ops::mul(c.one_minus_beta2, grad), grad, Ops::mul(exp_avg_sq, c.beta2));
  const Value root = Ops::div(Ops::sqrt(exp_avg_sq), c.root_correction2);
  const Value denominator = Ops::add(root, c.eps);
  param = Ops::add(decayed, Ops::div(Ops::mul(c.negative_step, exp_avg), denominator));
}

// Ops on one float, for host and device.
struct ScalarOps {
  using Value = float;
#if defined(__CUDA_ARCH__)
#define ZEROCORE_ROUNDED(intrinsic, host) return intrinsic
#else
#define ZEROCORE_ROUNDED(intrinsic, host) return host
#endif
  ZEROCORE_HOST_DEVICE static float mul(float a, float b) {
    ZEROCORE_ROUNDED(__fmul_rn(a, b), a * b);
  }
  ZEROCORE_HOST_DEVICE static float add(float a, float b) {
    ZEROCORE_ROUNDED(__fadd_rn(a, b), a + b);
  }
  ZEROCORE_HOST_DEVICE static float sub(float a, float b) {
    ZEROCORE_ROUNDED(__fsub_rn(a, b), a - b);
  }
  ZEROCORE_HOST_DEVICE static float div(float a, float b) {
    ZEROCORE_ROUNDED(__fdiv_rn(a, b), a / b);
  }
  ZEROCORE_HOST_DEVICE static float fma(float a, float b, float c) {
    ZEROCORE_ROUNDED(__fmaf_rn(a, b, c), std::fma(a, b, c));
  }
  ZEROCORE_HOST_DEVICE static float sqrt(float a) { ZEROCORE_ROUNDED(__fsqrt_rn(a), std::sqrt(a)); }
#undef ZEROCORE_ROUNDED
};

}  // namespace zerocore::kernels
