// The inner loops in AVX2, FMA and F16C.

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
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "lanes_avx2.h"

#define ZEROCORE_LANES avx2
#include "loops_table.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__
