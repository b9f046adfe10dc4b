// The inner loops in AVX-512.

#if defined(__x86_64__)

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "dtype.h"
#include "loops.h"

// Only what follows is compiled for the wider instructions. The build has no flags per file, and
// with a flag an inline function of a header above could be emitted with them and kept by the
// linker for every processor.
#if defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
    apply_to = function)
#else
// GCC 12 and 13 warn about the undefined pass-through operands inside their own intrinsics (GCC bug
// 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

#include "lanes_avx512.h"

#define ZEROCORE_LANES avx512
#include "loops_table.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__
