// The lanes (lanes_portable.h, [Note: lanes]) in AVX-512: one register of sixteen fp32 values.
// Include inside the target region of isa_avx512.cpp only.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "dtype.h"

namespace zerocore::kernels::avx512 {

struct F32 {
  using Value = F32;  // for adamw_element
  using Scalar = float;
  static constexpr int kSize = 16;
  __m512 a;

  static F32 load(const float* from) { return {_mm512_loadu_ps(from)}; }
  static F32 load(const BFloat16* from) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load256(from)), 16))};
  }
  static F32 load(const Half* from) { return {_mm512_cvtph_ps(load256(from))}; }
  static F32 splat(float value) { return {_mm512_set1_ps(value)}; }

  void store(float* to) const { _mm512_storeu_ps(to, a); }
  template <class T>
  void store(T* to) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), round_to(to));
  }
  template <class T>
  void stream(T* to) const {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), round_to(to));
  }
  static void end_stream() { _mm_sfence(); }

  static F32 add(F32 x, F32 y) { return {_mm512_add_ps(x.a, y.a)}; }
  static F32 sub(F32 x, F32 y) { return {_mm512_sub_ps(x.a, y.a)}; }
  static F32 mul(F32 x, F32 y) { return {_mm512_mul_ps(x.a, y.a)}; }
  static F32 div(F32 x, F32 y) { return {_mm512_div_ps(x.a, y.a)}; }
  static F32 fma(F32 x, F32 y, F32 z) { return {_mm512_fmadd_ps(x.a, y.a, z.a)}; }
  static F32 sqrt(F32 x) { return {_mm512_sqrt_ps(x.a)}; }

 private:
  template <class T>
  static __m256i load256(const T* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
  // By integers: the AVX512_BF16 instruction flushes subnormals.
  __m256i round_to(const BFloat16*) const {
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i high = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(high, nan, _mm512_set1_epi32(0x7fc0)));
  }
  __m256i round_to(const Half*) const {
    return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
};

struct F64 {
  using Scalar = double;
  static constexpr int kSize = 16;
  __m512d a, b;

  static F64 widen(F32 x) {
    return {_mm512_cvtps_pd(_mm512_castps512_ps256(x.a)),
            _mm512_cvtps_pd(_mm512_extractf32x8_ps(x.a, 1))};
  }
  static F32 narrow(F64 x) {
    return {
        _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(x.a)), _mm512_cvtpd_ps(x.b), 1)};
  }
  template <class T>
  static F64 load(const T* from) {
    return widen(F32::load(from));
  }
  static F64 load(const double* from) { return {_mm512_loadu_pd(from), _mm512_loadu_pd(from + 8)}; }
  static F64 splat(double value) { return {_mm512_set1_pd(value), _mm512_set1_pd(value)}; }
  void store(double* to) const {
    _mm512_storeu_pd(to, a);
    _mm512_storeu_pd(to + 8, b);
  }
  template <class T>
  void store(T* to) const {
    narrow(*this).store(to);
  }

  static F64 add(F64 x, F64 y) { return {_mm512_add_pd(x.a, y.a), _mm512_add_pd(x.b, y.b)}; }
  static F64 mul(F64 x, F64 y) { return {_mm512_mul_pd(x.a, y.a), _mm512_mul_pd(x.b, y.b)}; }
  static F64 fma(F64 x, F64 y, F64 z) {
    return {_mm512_fmadd_pd(x.a, y.a, z.a), _mm512_fmadd_pd(x.b, y.b, z.b)};
  }
};

}  // namespace zerocore::kernels::avx512
