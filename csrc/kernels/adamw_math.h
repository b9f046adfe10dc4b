// The arithmetic of one AdamW step on one element, shared by every instruction set and by device
// code.
//
// Every operation is rounded once and written out (fma where it is fused, separate where it is
// not), in the order of torch.optim.AdamW's single-tensor path, so all implementations give the
// same bits. Compile with -ffp-contract=off: a compiler that fuses a multiplication and an addition
// by itself changes them.
#pragma once

#include <cmath>

#include "dtype.h"

#if defined(__FAST_MATH__)
#error \
    "expected IEEE arithmetic, got -ffast-math: the bits of a step would depend on the instruction set"
#endif

namespace zerocore::kernels {

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

// Of step number `step`, counted from 1.
inline AdamWCoefficients<float> adamw_coefficients(const AdamWHyper& hyper, double step) {
  AdamWCoefficients<float> out;
  const double decay = hyper.decoupled ? hyper.lr * hyper.weight_decay : 0.0;
  out.param_factor = static_cast<float>(1.0 - decay);
  out.has_l2 = !hyper.decoupled && hyper.weight_decay != 0.0;
  out.l2 = out.has_l2 ? static_cast<float>(hyper.weight_decay) : 0.0f;
  const float weight = static_cast<float>(1.0 - hyper.beta1);
  out.lerp_from_grad = !(std::fabs(weight) < 0.5f);
  out.lerp_weight = out.lerp_from_grad ? weight - 1.0f : weight;
  out.beta2 = static_cast<float>(hyper.beta2);
  out.one_minus_beta2 = static_cast<float>(1.0 - hyper.beta2);
  out.root_correction2 = static_cast<float>(std::sqrt(1.0 - std::pow(hyper.beta2, step)));
  out.eps = static_cast<float>(hyper.eps);
  out.negative_step = static_cast<float>(-(hyper.lr / (1.0 - std::pow(hyper.beta1, step))));
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
  __device__ static float mul(float a, float b) { return __fmul_rn(a, b); }
  __device__ static float add(float a, float b) { return __fadd_rn(a, b); }
  __device__ static float sub(float a, float b) { return __fsub_rn(a, b); }
  __device__ static float div(float a, float b) { return __fdiv_rn(a, b); }
  __device__ static float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
  __device__ static float sqrt(float a) { return __fsqrt_rn(a); }
#else
  ZEROCORE_HOST_DEVICE static float mul(float a, float b) { return a * b; }
  ZEROCORE_HOST_DEVICE static float add(float a, float b) { return a + b; }
  ZEROCORE_HOST_DEVICE static float sub(float a, float b) { return a - b; }
  ZEROCORE_HOST_DEVICE static float div(float a, float b) { return a / b; }
  ZEROCORE_HOST_DEVICE static float fma(float a, float b, float c) { return std::fma(a, b, c); }
  ZEROCORE_HOST_DEVICE static float sqrt(float a) { return std::sqrt(a); }
#endif
};

}  // namespace zerocore::kernels
