// Instantiates all inner loops for the lanes of one instruction set. Compiled per instruction set
// (see lanes_portable.h): define ZEROCORE_LANES as the namespace of the lanes and include the
// standard headers they need first.
#pragma once

#include "adamw_loops.h"
#include "norm_loops.h"
#include "pack_loops.h"
#include "reduce_loops.h"

namespace zerocore::kernels::ZEROCORE_LANES {

constexpr Loops all_loops() {
  Loops table{};
  fill_convert<float>(table.convert[0]);
  fill_convert<BFloat16>(table.convert[1]);
  fill_convert<Half>(table.convert[2]);
  fill_convert<double>(table.convert[3]);
  fill_adamw<float>(table.adamw[0]);
  fill_adamw<BFloat16>(table.adamw[1]);
  fill_adamw<Half>(table.adamw[2]);
  table.sumsq[0] = sumsq<float>;
  table.sumsq[1] = sumsq<BFloat16>;
  table.sumsq[2] = sumsq<Half>;
  table.sumsq[3] = sumsq<double>;
  fill_sum_shards<float>(table.sum_shards[0]);
  fill_sum_shards<BFloat16>(table.sum_shards[1]);
  fill_sum_shards<Half>(table.sum_shards[2]);
  fill_sum_shards<double>(table.sum_shards[3]);
  return table;
}

constexpr Loops kLoops = all_loops();

}  // namespace zerocore::kernels::ZEROCORE_LANES
