// Element types of the kernels and their conversions, one value at a time.
//
// The conversions define the bits: the vector paths (lanes_*.h) must give the same ones, NaNs
// included.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define ZEROCORE_HOST_DEVICE __host__ __device__
#else
#define ZEROCORE_HOST_DEVICE
#endif

namespace zerocore::kernels {

enum class DType : int8_t { f32, bf16, f16, f64 };

constexpr int kDTypeCount = 4;

struct BFloat16 {
  uint16_t bits;
};

struct Half {
  uint16_t bits;
};

// 16 bytes that are only copied.
struct Element16 {
  uint64_t low, high;
};

// Values of type T are computed in f64 if this is true, else in fp32.
template <class T>
struct IsDouble {
  static constexpr bool value = false;
};
template <>
struct IsDouble<double> {
  static constexpr bool value = true;
};

constexpr int64_t element_size(DType dtype) {
  return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2;
}

constexpr const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "float32";
    case DType::bf16:
      return "bfloat16";
    case DType::f16:
      return "float16";
    default:
      return "float64";
  }
}

ZEROCORE_HOST_DEVICE inline uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

ZEROCORE_HOST_DEVICE inline float float_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

ZEROCORE_HOST_DEVICE inline float to_float(float value) { return value; }

ZEROCORE_HOST_DEVICE inline float to_float(BFloat16 value) {
  return float_from_bits(static_cast<uint32_t>(value.bits) << 16);
}

// A signalling NaN becomes quiet, as the F16C instruction does it. CUDA's instructions for halves
// give the same bits but for NaNs.
ZEROCORE_HOST_DEVICE inline float to_float(Half value) {
#if defined(__CUDA_ARCH__)
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(value.bits));
  return out;
#else
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t exponent = (value.bits >> 10) & 0x1fu;
  const uint32_t mantissa = value.bits & 0x3ffu;
  if (exponent == 0x1f) {
    const uint32_t quiet = mantissa != 0 ? 0x400000u : 0u;
    return float_from_bits(sign | 0x7f800000u | quiet | (mantissa << 13));
  }
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exact in fp32
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return float_from_bits(sign | float_bits(magnitude));
  }
  return float_from_bits(sign | ((exponent + 112) << 23) | (mantissa << 13));
#endif
}

// Round to nearest even; every NaN becomes 0x7fc0, as c10::BFloat16 has it.
ZEROCORE_HOST_DEVICE inline BFloat16 to_bfloat16(float value) {
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return BFloat16{0x7fc0u};
  }
  return BFloat16{static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

// Round to nearest even; a NaN keeps its sign and the top of its payload and becomes quiet (F16C).
ZEROCORE_HOST_DEVICE inline Half to_half(float value) {
#if defined(__CUDA_ARCH__)
  Half out;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
  return out;
#else
  const uint32_t bits = float_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return Half{static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu))};
  }
  if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    return Half{static_cast<uint16_t>(sign | 0x7c00u)};
  }
  if (magnitude < 0x38800000u) {  // below 2^-14: subnormal, in units of 2^-24
    // Adding 0.5 puts those units at the end of the fp32 mantissa: the addition itself rounds to
    // even.
    const float shifted = float_from_bits(magnitude) + 0.5f;
    return Half{static_cast<uint16_t>(sign | (float_bits(shifted) - 0x3f000000u))};
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return Half{static_cast<uint16_t>(sign | ((rounded - (112u << 23)) >> 13))};
#endif
}

}  // namespace zerocore::kernels
