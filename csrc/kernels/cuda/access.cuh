// Memory accesses of up to 16 bytes, and the values they carry.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/dtype.h"

namespace zerocore::kernels::cuda {

constexpr int kThreads = 256;  // of every block
constexpr int kAccess = 16;    // bytes: the widest access of a thread

// How many elements of the wider of two types one access holds: the narrower type moves in smaller
// accesses, so that neighbouring threads always touch neighbouring memory.
template <class A, class B = A>
constexpr int kLanes = kAccess / static_cast<int>(sizeof(A) > sizeof(B) ? sizeof(A) : sizeof(B));

template <class T, int N>
struct alignas(sizeof(T) * N) Vector {
  T at[N];
};

// Elements before the first one at a multiple of 16 bytes.
template <class T>
int64_t unaligned(const T* data) {
  return static_cast<int64_t>((0 - reinterpret_cast<uintptr_t>(data)) % kAccess / sizeof(T));
}

// Bytes of the arrays that kernels read and write: tests count them.
#if defined(ZEROCORE_COUNT_BYTES)
void count_loaded(int64_t bytes);
void count_stored(int64_t bytes);
#else
__device__ inline void count_loaded(int64_t) {}
__device__ inline void count_stored(int64_t) {}
#endif

// One access to an address that allows it. On the CPU it is memcpy: GCC 12 merges a plain one with
// those of the other branch of its caller and takes all of them to be aligned.
template <class V, class T>
__device__ inline void read_whole(V& out, const T* from) {
#if defined(__CUDA_ARCH__)
  out = *reinterpret_cast<const V*>(from);
#else
  memcpy(&out, from, sizeof(V));
#endif
}

template <class V, class T>
__device__ inline void write_whole(T* to, const V& value) {
#if defined(__CUDA_ARCH__)
  *reinterpret_cast<V*>(to) = value;
#else
  memcpy(to, &value, sizeof(V));
#endif
}

// One access where the address allows it, else one per element. All threads of a warp take the same
// way: their addresses differ by multiples of the access.
template <int N, class T>
__device__ inline Vector<T, N> load(const T* from) {
  count_loaded(N * sizeof(T));
  Vector<T, N> out;
  if (reinterpret_cast<uintptr_t>(from) % sizeof(out) == 0) {
    read_whole(out, from);
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      out.at[k] = from[k];
    }
  }
  return out;
}

template <int N, class T>
__device__ inline void store(T* to, const Vector<T, N>& value) {
  count_stored(N * sizeof(T));
  if (reinterpret_cast<uintptr_t>(to) % sizeof(value) == 0) {
    write_whole(to, value);
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      to[k] = value.at[k];
    }
  }
}

template <class T>
__device__ inline T load(const T* from) {
  count_loaded(sizeof(T));
  return *from;
}

template <class T>
__device__ inline void store(T* to, T value) {
  count_stored(sizeof(T));
  *to = value;
}

// What values of In and Out are computed in.
template <bool kDouble>
struct ScalarFor {
  using Type = float;
};
template <>
struct ScalarFor<true> {
  using Type = double;
};
template <class In, class Out = In>
using Scalar = typename ScalarFor<IsDouble<In>::value || IsDouble<Out>::value>::Type;

// To the type that values of T are computed in: exact.
__device__ inline double widened(double value) { return value; }
template <class T>
__device__ inline float widened(T value) {
  return to_float(value);
}

// To T, to nearest even; f64 to a 16-bit type by way of fp32.
template <class T>
struct Round {
  template <class Value>
  __device__ static T from(Value value) {
    return static_cast<T>(value);
  }
};
template <>
struct Round<BFloat16> {
  template <class Value>
  __device__ static BFloat16 from(Value value) {
    return to_bfloat16(static_cast<float>(value));
  }
};
template <>
struct Round<Half> {
  template <class Value>
  __device__ static Half from(Value value) {
    return to_half(static_cast<float>(value));
  }
};

}  // namespace zerocore::kernels::cuda
