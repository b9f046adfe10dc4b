// Inner loop of sum_shards. Compiled per instruction set (see lanes_portable.h).
#pragma once

#include "pack_loops.h"
#include "tail.h"

namespace zerocore::kernels::ZEROCORE_LANES {

// Sixteen elements. shard(k) is the address of theirs in shard k.
template <class In, class Out, class Shard>
inline void sum_lanes(Out* out, const Shard& shard, int64_t count, bool accumulate) {
  using Sum = typename LanesFor<IsDouble<In>::value>::Type;
  using V = typename LanesFor<IsDouble<In>::value || IsDouble<Out>::value>::Type;
  Sum sum = Sum::load(shard(0));
  for (int64_t k = 1; k < count; ++k) {
    sum = Sum::add(sum, Sum::load(shard(k)));
  }
  In rounded[16];  // to the shards' dtype: what a reduce-scatter in that dtype delivers
  sum.store(rounded);
  const V value = V::load(rounded);
  (accumulate ? V::add(V::load(out), value) : value).store(out);
}

template <class In>
struct ShardsAt {
  const void* const* shards;
  int64_t i;
  const In* operator()(int64_t k) const { return static_cast<const In*>(shards[k]) + i; }
};

// A padded copy of the last n elements of each shard, made when it is asked for.
template <class In>
struct TailsAt {
  const void* const* shards;
  int64_t i, n;
  Padded<In>* buffer;
  const In* operator()(int64_t k) const {
    *buffer = Padded<In>(static_cast<const In*>(shards[k]) + i, n);
    return buffer->values;
  }
};

template <class In, class Out>
void sum_shards(void* out_data, const void* const* shards, int64_t count, int64_t begin,
                int64_t end, bool accumulate) {
  Out* out = static_cast<Out*>(out_data);
  int64_t i = begin;
  for (; i + 16 <= end; i += 16) {
    sum_lanes<In>(out + i, ShardsAt<In>{shards, i}, count, accumulate);
  }
  if (i < end) {
    const int64_t n = end - i;
    Padded<In> buffer;
    Padded<Out> to(out + i, n);
    sum_lanes<In>(to.values, TailsAt<In>{shards, i, n, &buffer}, count, accumulate);
    to.copy_to(out + i, n);
  }
}

template <class In>
constexpr void fill_sum_shards(Loops::SumShards (&row)[kDTypeCount]) {
  row[0] = sum_shards<In, float>;
  row[1] = sum_shards<In, BFloat16>;
  row[2] = sum_shards<In, Half>;
  row[3] = sum_shards<In, double>;
}

}  // namespace zerocore::kernels::ZEROCORE_LANES
