// Sixteen values at a time in plain C++: the meaning of every operation of the lanes.
//
// [Note: lanes] F32 and F64 are sixteen fp32 and f64 values, whatever registers a machine has: so
// loops, tails and the order of sums are the same on every instruction set. Each lanes_*.h defines
// the two in a namespace of its own, and the loops (*_loops.h) are compiled once per namespace. No
// file of theirs includes or calls anything of the standard library: an inline function compiled
// here with wide instructions could be the copy that the linker keeps for all.
#pragma once

#include <cmath>
#include <cstdint>

#include "dtype.h"

namespace zerocore::kernels::portable {

struct F32 {
  using Value = F32;  // for adamw_element
  using Scalar = float;
  static constexpr int kSize = 16;
  float v[16];

  template <class T>
  static F32 load(const T* from) {
    F32 out;
    for (int i = 0; i < 16; ++i) out.v[i] = to_float(from[i]);
    return out;
  }
  static F32 splat(float value) {
    F32 out;
    for (int i = 0; i < 16; ++i) out.v[i] = value;
    return out;
  }
  void store(float* to) const {
    for (int i = 0; i < 16; ++i) to[i] = v[i];
  }
  void store(BFloat16* to) const {
    for (int i = 0; i < 16; ++i) to[i] = to_bfloat16(v[i]);
  }
  void store(Half* to) const {
    for (int i = 0; i < 16; ++i) to[i] = to_half(v[i]);
  }

  // A store to a multiple of 32 bytes that leaves the caches alone where the machine can do that,
  // and the call that ends a series of them.
  template <class T>
  void stream(T* to) const {
    store(to);
  }
  static void end_stream() {}

  static F32 add(F32 a, F32 b) {
    for (int i = 0; i < 16; ++i) a.v[i] += b.v[i];
    return a;
  }
  static F32 sub(F32 a, F32 b) {
    for (int i = 0; i < 16; ++i) a.v[i] -= b.v[i];
    return a;
  }
  static F32 mul(F32 a, F32 b) {
    for (int i = 0; i < 16; ++i) a.v[i] *= b.v[i];
    return a;
  }
  static F32 div(F32 a, F32 b) {
    for (int i = 0; i < 16; ++i) a.v[i] /= b.v[i];
    return a;
  }
  static F32 fma(F32 a, F32 b, F32 c) {
    for (int i = 0; i < 16; ++i) a.v[i] = std::fma(a.v[i], b.v[i], c.v[i]);
    return a;
  }
  static F32 sqrt(F32 a) {
    for (int i = 0; i < 16; ++i) a.v[i] = std::sqrt(a.v[i]);
    return a;
  }
};

struct F64 {
  using Scalar = double;
  static constexpr int kSize = 16;
  double v[16];

  static F64 widen(F32 from) {
    F64 out;
    for (int i = 0; i < 16; ++i) out.v[i] = from.v[i];
    return out;
  }
  static F32 narrow(F64 from) {
    F32 out;
    for (int i = 0; i < 16; ++i) out.v[i] = static_cast<float>(from.v[i]);
    return out;
  }
  template <class T>
  static F64 load(const T* from) {
    return widen(F32::load(from));
  }
  static F64 load(const double* from) {
    F64 out;
    for (int i = 0; i < 16; ++i) out.v[i] = from[i];
    return out;
  }
  static F64 splat(double value) {
    F64 out;
    for (int i = 0; i < 16; ++i) out.v[i] = value;
    return out;
  }
  void store(double* to) const {
    for (int i = 0; i < 16; ++i) to[i] = v[i];
  }
  template <class T>
  void store(T* to) const {
    narrow(*this).store(to);
  }

  static F64 add(F64 a, F64 b) {
    for (int i = 0; i < 16; ++i) a.v[i] += b.v[i];
    return a;
  }
  static F64 mul(F64 a, F64 b) {
    for (int i = 0; i < 16; ++i) a.v[i] *= b.v[i];
    return a;
  }
  static F64 fma(F64 a, F64 b, F64 c) {
    for (int i = 0; i < 16; ++i) a.v[i] = std::fma(a.v[i], b.v[i], c.v[i]);
    return a;
  }
};

}  // namespace zerocore::kernels::portable
