// Inner loop of pack: scale and cast. Compiled per instruction set (see lanes_portable.h).
#pragma once

#include "tail.h"

namespace zerocore::kernels::ZEROCORE_LANES {

template <bool kDouble>
struct LanesFor {
  using Type = F32;
};
template <>
struct LanesFor<true> {
  using Type = F64;
};

template <class In, class Out>
void convert(void* out_data, const void* in_data, int64_t n, double scale) {
  using V = typename LanesFor<IsDouble<In>::value || IsDouble<Out>::value>::Type;
  Out* out = static_cast<Out*>(out_data);
  const In* in = static_cast<const In*>(in_data);
  const V factor = V::splat(static_cast<typename V::Scalar>(scale));
  int64_t i = 0;
  for (; i + V::kSize <= n; i += V::kSize) {
    V::mul(V::load(in + i), factor).store(out + i);
  }
  if (i < n) {
    const Padded<In> from(in + i, n - i);
    Padded<Out> to;
    V::mul(V::load(from.values), factor).store(to.values);
    to.copy_to(out + i, n - i);
  }
}

template <class In>
constexpr void fill_convert(Loops::Convert (&row)[kDTypeCount]) {
  row[0] = convert<In, float>;
  row[1] = convert<In, BFloat16>;
  row[2] = convert<In, Half>;
  row[3] = convert<In, double>;
}

}  // namespace zerocore::kernels::ZEROCORE_LANES
