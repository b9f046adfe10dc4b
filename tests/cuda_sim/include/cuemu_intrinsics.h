// The device functions that kernels use, on top of an engine's sync_threads and warp_exchange. Add
// here what is missing.
#pragma once
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "cuemu_engine.h"

namespace cuemu {

template <class T>
uint64_t pack(T value) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <class T>
T unpack(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

template <class T>
T shuffle(uint32_t mask, T value, int source) {
  return unpack<T>(
      warp_exchange(mask, pack(value), [&](uint64_t* slots) { return slots[source & 31]; }));
}

template <class T, class Combine>
T atomic_update(T* p, Combine combine) {
  std::atomic_ref<T> target(*p);
  T old = target.load(std::memory_order_relaxed);
  while (!target.compare_exchange_weak(old, combine(old), std::memory_order_relaxed)) {
  }
  return old;
}

template <class Combine>
uint64_t fold(uint32_t mask, uint64_t* slots, uint64_t start, Combine combine) {
  for (int i = 0; i < 32; ++i) {
    if (mask >> i & 1) start = combine(start, slots[i]);
  }
  return start;
}

}  // namespace cuemu

// ---- barriers and fences ----

inline void __syncthreads() { cuemu::sync_threads(); }
inline void __syncwarp(unsigned mask = ~0u) {
  cuemu::warp_exchange(mask, 0, [](uint64_t*) { return uint64_t(0); });
}
#ifdef CUEMU_THREADS
inline void __threadfence() {
}  // blocks run one after the other, and ThreadSanitizer knows no fences
#else
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
#endif
inline void __threadfence_block() { __threadfence(); }
inline void __threadfence_system() { __threadfence(); }

// ---- warp collectives ----

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  int lane = int(cuemu::current_thread->lane);
  return cuemu::shuffle(mask, value, (lane & ~(width - 1)) + (source & (width - 1)));
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  int lane = int(cuemu::current_thread->lane);
  return cuemu::shuffle(mask, value,
                        (lane & (width - 1)) + int(delta) < width ? lane + int(delta) : lane);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  int lane = int(cuemu::current_thread->lane);
  return cuemu::shuffle(mask, value, (lane & (width - 1)) >= int(delta) ? lane - int(delta) : lane);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32) {
  int lane = int(cuemu::current_thread->lane), source = lane ^ flip;
  return cuemu::shuffle(mask, value,
                        (source & ~(width - 1)) == (lane & ~(width - 1)) ? source : lane);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return unsigned(cuemu::warp_exchange(mask, predicate != 0, [&](uint64_t* slots) {
    uint64_t bits = 0;
    for (int i = 0; i < 32; ++i) bits |= (mask >> i & 1) ? slots[i] << i : 0;
    return bits;
  }));
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) == mask;
}
inline unsigned __activemask() { return cuemu::current_thread->warp->alive; }
inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
  return unsigned(cuemu::warp_exchange(mask, value, [&](uint64_t* slots) {
    return cuemu::fold(mask, slots, 0, [](uint64_t a, uint64_t b) { return a + b; });
  }));
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  return unsigned(cuemu::warp_exchange(mask, value, [&](uint64_t* slots) {
    return cuemu::fold(mask, slots, 0, [](uint64_t a, uint64_t b) { return a > b ? a : b; });
  }));
}

// ---- atomics ----

template <class T>
T atomicAdd(T* p, std::type_identity_t<T> value) {
  return cuemu::atomic_update(p, [&](T old) { return T(old + value); });
}
template <class T>
T atomicMax(T* p, std::type_identity_t<T> value) {
  return cuemu::atomic_update(p, [&](T old) { return old > value ? old : value; });
}
template <class T>
T atomicMin(T* p, std::type_identity_t<T> value) {
  return cuemu::atomic_update(p, [&](T old) { return old < value ? old : value; });
}
template <class T>
T atomicOr(T* p, std::type_identity_t<T> value) {
  return cuemu::atomic_update(p, [&](T old) { return T(old | value); });
}
template <class T>
T atomicExch(T* p, std::type_identity_t<T> value) {
  return std::atomic_ref<T>(*p).exchange(value);
}
template <class T>
T atomicCAS(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  std::atomic_ref<T>(*p).compare_exchange_strong(expected, value);
  return expected;  // the old value in either case
}
inline unsigned atomicInc(unsigned* p, unsigned limit) {
  return cuemu::atomic_update(p, [&](unsigned old) { return old >= limit ? 0 : old + 1; });
}

// ---- loads and arithmetic ----

template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
void __stcs(T* p, T value) {
  *p = value;
}

inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return std::countl_zero(unsigned(x)); }
