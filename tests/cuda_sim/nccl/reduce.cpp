#include "reduce.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "segment.h"

namespace fake_nccl {
namespace {

template <class T>
T load(T x) {
  return x;
}
float load(__half x) { return __half2float(x); }
float load(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T, class A>
T store(A x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return T(x);
  }
}

// Calls f with a null pointer of the C++ type.
template <class F>
void with_type(ncclDataType_t dtype, F f) {
  switch (dtype) {
    case ncclInt8:
      return f(static_cast<int8_t*>(nullptr));
    case ncclUint8:
      return f(static_cast<uint8_t*>(nullptr));
    case ncclInt32:
      return f(static_cast<int32_t*>(nullptr));
    case ncclUint32:
      return f(static_cast<uint32_t*>(nullptr));
    case ncclInt64:
      return f(static_cast<int64_t*>(nullptr));
    case ncclUint64:
      return f(static_cast<uint64_t*>(nullptr));
    case ncclFloat16:
      return f(static_cast<__half*>(nullptr));
    case ncclFloat32:
      return f(static_cast<float*>(nullptr));
    case ncclFloat64:
      return f(static_cast<double*>(nullptr));
    case ncclBfloat16:
      return f(static_cast<__nv_bfloat16*>(nullptr));
    default:
      die("arithmetic on %s is not supported", dtype_name(dtype));
  }
}

template <class A>
A combine(ncclRedOp_t op, A a, A b) {
  switch (op) {
    case ncclProd:
      return A(a * b);
    case ncclMax:
      return std::max(a, b);
    case ncclMin:
      return std::min(a, b);
    default:
      return A(a + b);  // sum, avg and PreMulSum
  }
}

}  // namespace

size_t element_bytes(ncclDataType_t dtype) {
  switch (dtype) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      die("unknown data type %d", int(dtype));
  }
}

const char* dtype_name(ncclDataType_t dtype) {
  static const char* const names[] = {"int8",    "uint8",    "int32",      "uint32",
                                      "int64",   "uint64",   "float16",    "float32",
                                      "float64", "bfloat16", "float8e4m3", "float8e5m2"};
  return size_t(dtype) < sizeof names / sizeof *names ? names[dtype] : "(unknown type)";
}

bool is_floating(ncclDataType_t dtype) { return dtype >= ncclFloat16; }

double value_of(ncclDataType_t dtype, const void* x) {
  double value = 0;
  with_type(dtype, [&](auto* type) {
    value = double(load(*static_cast<decltype(type)>(const_cast<void*>(x))));
  });
  return value;
}

void scale(ncclDataType_t dtype, void* x, size_t count, double factor) {
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    using A = decltype(load(T()));
    T* values = static_cast<T*>(x);
    for (size_t i = 0; i < count; ++i) values[i] = store<T>(A(load(values[i]) * A(factor)));
  });
}

void reduce(ncclDataType_t dtype, ncclRedOp_t op, const std::vector<const void*>& inputs, void* out,
            size_t count) {
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    using A = decltype(load(T()));
    for (size_t i = 0; i < count; ++i) {
      A sum = load(static_cast<const T*>(inputs[0])[i]);
      for (size_t r = 1; r < inputs.size(); ++r)
        sum = combine<A>(op, sum, load(static_cast<const T*>(inputs[r])[i]));
      // The average of floats is a sum of values that were scaled beforehand.
      if (op == ncclAvg && !is_floating(dtype)) sum = A(sum / A(inputs.size()));
      static_cast<T*>(out)[i] = store<T>(sum);
    }
  });
}

}  // namespace fake_nccl
