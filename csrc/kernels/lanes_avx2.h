// The lanes (lanes_portable.h, [Note: lanes]) in AVX2, FMA and F16C: two registers of eight fp32
// values. Include inside the target region of isa_avx2.cpp only.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "dtype.h"

namespace zerocore::kernels::avx2 {

struct F32 {
  using Value = F32;  // for adamw_element
  using Scalar = float;
  static constexpr int kSize = 16;
  __m256 a, b;

  static F32 load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
  static F32 load(const BFloat16* from) { return {widen(from), widen(from + 8)}; }
  static F32 load(const Half* from) {
    return {_mm256_cvtph_ps(load128(from)), _mm256_cvtph_ps(load128(from + 8))};
  }
  static F32 splat(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }

  void store(float* to) const {
    _mm256_storeu_ps(to, a);
    _mm256_storeu_ps(to + 8, b);
  }
  template <class T>
  void store(T* to) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), round_to(to));
  }
  template <class T>
  void stream(T* to) const {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), round_to(to));
  }
  static void end_stream() { _mm_sfence(); }

  static F32 add(F32 x, F32 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
  static F32 sub(F32 x, F32 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
  static F32 mul(F32 x, F32 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  static F32 div(F32 x, F32 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
  static F32 fma(F32 x, F32 y, F32 z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
  }
  static F32 sqrt(F32 x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }

 private:
  template <class T>
  static __m128i load128(const T* from) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  }
  static __m256 widen(const BFloat16* from) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(from)), 16));
  }
  __m256i round_to(const BFloat16*) const {
    const __m256i packed = _mm256_packus_epi32(rounded(a), rounded(b));  // 0-3 8-11 4-7 12-15
    return _mm256_permute4x64_epi64(packed, 0xd8);
  }
  __m256i round_to(const Half*) const {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return _mm256_set_m128i(_mm256_cvtps_ph(b, kNearest), _mm256_cvtps_ph(a, kNearest));
  }
  // to_bfloat16 of each value, in the low half of its 32 bits.
  static __m256i rounded(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i high = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(high, _mm256_set1_epi32(0x7fc0), nan);
  }
};

struct F64 {
  using Scalar = double;
  static constexpr int kSize = 16;
  __m256d v[4];

  static F64 widen(F32 x) {
    return {{_mm256_cvtps_pd(_mm256_castps256_ps128(x.a)),
             _mm256_cvtps_pd(_mm256_extractf128_ps(x.a, 1)),
             _mm256_cvtps_pd(_mm256_castps256_ps128(x.b)),
             _mm256_cvtps_pd(_mm256_extractf128_ps(x.b, 1))}};
  }
  static F32 narrow(F64 x) {
    return {_mm256_set_m128(_mm256_cvtpd_ps(x.v[1]), _mm256_cvtpd_ps(x.v[0])),
            _mm256_set_m128(_mm256_cvtpd_ps(x.v[3]), _mm256_cvtpd_ps(x.v[2]))};
  }
  template <class T>
  static F64 load(const T* from) {
    return widen(F32::load(from));
  }
  static F64 load(const double* from) {
    return {{_mm256_loadu_pd(from), _mm256_loadu_pd(from + 4), _mm256_loadu_pd(from + 8),
             _mm256_loadu_pd(from + 12)}};
  }
  static F64 splat(double value) {
    const __m256d x = _mm256_set1_pd(value);
    return {{x, x, x, x}};
  }
  void store(double* to) const {
    for (int i = 0; i < 4; ++i) _mm256_storeu_pd(to + 4 * i, v[i]);
  }
  template <class T>
  void store(T* to) const {
    narrow(*this).store(to);
  }

  static F64 add(F64 x, F64 y) {
    for (int i = 0; i < 4; ++i) x.v[i] = _mm256_add_pd(x.v[i], y.v[i]);
    return x;
  }
  static F64 mul(F64 x, F64 y) {
    for (int i = 0; i < 4; ++i) x.v[i] = _mm256_mul_pd(x.v[i], y.v[i]);
    return x;
  }
  static F64 fma(F64 x, F64 y, F64 z) {
    for (int i = 0; i < 4; ++i) x.v[i] = _mm256_fmadd_pd(x.v[i], y.v[i], z.v[i]);
    return x;
  }
};

}  // namespace zerocore::kernels::avx2
