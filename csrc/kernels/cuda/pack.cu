// pack on a CUDA device: the kernel. pack_plan.cuh lays out its table.
//
// HBM bytes per element: its size in the source + its size in out; in a gap, its size in out.
// Measured by tests/cpp/test_cuda_pack.cpp.

#include "access.cuh"
#include "grid.cuh"
#include "kernels/cuda/launch.h"
#include "pack_plan.cuh"

namespace zerocore::kernels::cuda {

// In to Out. The product is rounded in fp32, or in f64 if one of the two is.
template <class In, class Out>
struct Convert {
  Scalar<In, Out> scale;

  explicit __device__ Convert(double factor) : scale(static_cast<Scalar<In, Out>>(factor)) {}
  __device__ Out operator()(In value) const {
    return Round<Out>::from(static_cast<Scalar<In, Out>>(widened(value)) * scale);
  }
};

// The bytes as they are.
template <class T>
struct Copy {
  explicit __device__ Copy(double) {}
  __device__ T operator()(T value) const { return value; }
};

template <class In, class Out, class Function>
__device__ inline void pack_contiguous(const PackTable& table, const PackEntry& entry, Part part,
                                       const Function& convert) {
  constexpr int kN = kLanes<In, Out>;
  constexpr int kCount = kPackTile<Out> / (kThreads * kN);
  const int thread = static_cast<int>(threadIdx.x);
  const In* data = static_cast<const In*>(entry.data);
  Out* out = static_cast<Out*>(table.out);
  const int64_t data_end = entry.start + entry.numel;
  if (part.end - part.begin < kPackTile<Out> || (part.begin < data_end && data_end < part.end)) {
    for (int64_t i = part.begin + thread; i < part.end; i += kThreads) {
      store(out + i, i < data_end ? convert(load(data + (i - entry.start))) : Out{});
    }
    return;
  }
  const int64_t begin = part.begin + thread * kN;
  if (part.begin >= data_end) {
    for (int k = 0; k < kCount; ++k) {
      store<kN>(out + begin + k * kThreads * kN, Vector<Out, kN>{});
    }
    return;
  }
  Vector<In, kN> x[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    x[k] = load<kN>(data + (begin - entry.start) + k * kThreads * kN);
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    Vector<Out, kN> y;
#pragma unroll
    for (int lane = 0; lane < kN; ++lane) {
      y.at[lane] = convert(x[k].at[lane]);
    }
    store<kN>(out + begin + k * kThreads * kN, y);
  }
}

// Where element `index` of a strided source lies. Index: 32 bits wide where that is enough, as
// divisions of 64 bits are slow.
template <class Index>
__device__ inline int64_t place_of(const Dim* dims, int ndim, Index index) {
  int64_t place = 0;
  for (int d = ndim - 1; d > 0; --d) {
    const Index size = static_cast<Index>(dims[d].size);
    place += static_cast<int64_t>(index % size) * dims[d].stride;
    index /= size;
  }
  return place + static_cast<int64_t>(index) * dims[0].stride;
}

template <class In, class Out, class Function>
__device__ inline void pack_strided(const PackTable& table, const PackEntry& entry, Part part,
                                    const Function& convert) {
  const In* from = static_cast<const In*>(entry.data);
  Out* out = static_cast<Out*>(table.out);
  const Dim* dims = table.dims + entry.first_dim;
  for (int64_t i = part.begin + threadIdx.x; i < part.end; i += kThreads) {
    const int64_t index = i - entry.start;
    const int64_t place = entry.numel <= UINT32_MAX
                              ? place_of(dims, entry.ndim, static_cast<uint32_t>(index))
                              : place_of(dims, entry.ndim, index);
    store(out + i, convert(load(from + place)));
  }
}

// One square of a transposed source ([Note: transposed]), by way of shared memory: rows of the
// source are read along its stride of 1, rows of out are written along out's.
template <class In, class Out, class Function>
__device__ inline void pack_transposed(const PackTable& table, const PackEntry& entry, int64_t tile,
                                       void* shared, const Function& convert) {
  In(*square)[kSquare + 1] = static_cast<In(*)[kSquare + 1]>(shared);  // + 1: no bank conflicts
  const Dim* dims = table.dims + entry.first_dim;
  const int last = entry.ndim - 1;
  const int64_t rows = dims[entry.row_dim].size, columns = dims[last].size;
  const int64_t across = (columns + kSquare - 1) / kSquare, down = (rows + kSquare - 1) / kSquare;
  const int64_t column0 = tile % across * kSquare, row0 = tile / across % down * kSquare;
  int64_t batch = tile / (across * down);

  const In* from = static_cast<const In*>(entry.data);
  Out* out = static_cast<Out*>(table.out) + entry.start;
  int64_t row_stride = 0;  // of out
  int64_t step = columns;
  for (int d = last - 1; d >= 0; --d) {
    if (d == entry.row_dim) {
      row_stride = step;
    } else {
      const int64_t index = batch % dims[d].size;
      batch /= dims[d].size;
      from += index * dims[d].stride;
      out += index * step;
    }
    step *= dims[d].size;
  }

  constexpr int kStep = kThreads / kSquare;
  const int fast = static_cast<int>(threadIdx.x) % kSquare;
  const int slow = static_cast<int>(threadIdx.x) / kSquare;
  for (int k = slow; k < kSquare; k += kStep) {
    if (column0 + k < columns && row0 + fast < rows) {
      square[k][fast] = load(from + (column0 + k) * dims[last].stride + row0 + fast);
    }
  }
  __syncthreads();
  for (int k = slow; k < kSquare; k += kStep) {
    if (row0 + k < rows && column0 + fast < columns) {
      store(out + (row0 + k) * row_stride + column0 + fast, convert(square[fast][k]));
    }
  }
  __syncthreads();  // the next tile overwrites the square
}

template <class In, class Out, class Function>
__device__ inline void pack_tile(const PackTable& table, int at, int64_t tile, void* shared) {
  const PackEntry& entry = table.entries[at];
  const Function convert(table.scale);
  if (entry.layout == Layout::transposed) {
    pack_transposed<In, Out>(table, entry, tile, shared, convert);
    return;
  }
  const int64_t stop = at + 1 < table.count ? table.entries[at + 1].start : table.stop;
  const Part part = part_of(Tiles<kPackTile<Out>>{table.origin}, tile, entry.start, stop);
  if (entry.layout == Layout::contiguous) {
    pack_contiguous<In, Out>(table, entry, part, convert);
  } else {
    pack_strided<In, Out>(table, entry, part, convert);
  }
}

// kCasts: whether sources of other dtypes, or to be scaled, are among them.
template <class Out, bool kCasts>
__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ PackTable table) {
  struct alignas(kAccess) Shared {
    unsigned char bytes[kSquare * (kSquare + 1) * (kCasts ? sizeof(double) : sizeof(Out))];
  };
  __shared__ Shared shared;
  int at = 0;
  for (int64_t tile = blockIdx.x; tile < table.tiles; tile += gridDim.x) {
    while (at + 1 < table.count && tile >= table.entries[at + 1].first_tile) {
      ++at;
    }
    const int64_t own = tile - table.entries[at].first_tile;
    if constexpr (kCasts) {
      switch (table.entries[at].source) {
        case SourceType::f32:
          pack_tile<float, Out, Convert<float, Out>>(table, at, own, shared.bytes);
          continue;
        case SourceType::bf16:
          pack_tile<BFloat16, Out, Convert<BFloat16, Out>>(table, at, own, shared.bytes);
          continue;
        case SourceType::f16:
          pack_tile<Half, Out, Convert<Half, Out>>(table, at, own, shared.bytes);
          continue;
        case SourceType::f64:
          pack_tile<double, Out, Convert<double, Out>>(table, at, own, shared.bytes);
          continue;
        default:
          break;
      }
    }
    pack_tile<Out, Out, Copy<Out>>(table, at, own, shared.bytes);
  }
}

namespace {

template <class Out, bool kCasts>
void launch(const PackTable& table, const Queue& queue) {
  const unsigned blocks = blocks_for(table.tiles, queue);
  pack_kernel<Out, kCasts><<<blocks, kThreads, 0, queue.stream>>>(table);
}

template <class Out, bool kCasts>
void pack_as(void* out, int64_t out_numel, const PackSource* sources, int64_t count,
             PackTypes types, const Queue& queue) {
  PackPlan<Out> plan(static_cast<Out*>(out), out_numel, types);
  const auto run = [&](const PackTable& table) { launch<Out, kCasts>(table, queue); };
  for (int64_t i = 0; i < count; ++i) {
    plan.add(sources[i], run);
  }
  plan.finish(run);
}

bool all_copies(const PackSource* sources, int64_t count, PackTypes types) {
  return std::all_of(sources, sources + count,
                     [&](const PackSource& s) { return types.of(s.dtype) == SourceType::copy; });
}

}  // namespace

void pack(void* out, DType out_dtype, int64_t out_numel, const PackSource* sources, int64_t count,
          double scale, const Queue& queue) {
  const PackTypes types{out_dtype, scale, true};
  if (all_copies(sources, count, types)) {
    return pack_bytes(out, element_size(out_dtype), out_numel, sources, count, queue);
  }
  switch (out_dtype) {
    case DType::f32:
      return pack_as<float, true>(out, out_numel, sources, count, types, queue);
    case DType::bf16:
      return pack_as<BFloat16, true>(out, out_numel, sources, count, types, queue);
    case DType::f16:
      return pack_as<Half, true>(out, out_numel, sources, count, types, queue);
    default:
      return pack_as<double, true>(out, out_numel, sources, count, types, queue);
  }
}

void pack_bytes(void* out, int64_t element_size, int64_t out_numel, const PackSource* sources,
                int64_t count, const Queue& queue) {
  const PackTypes types{DType::f32, 1.0, false};
  switch (element_size) {
    case 1:
      return pack_as<uint8_t, false>(out, out_numel, sources, count, types, queue);
    case 2:
      return pack_as<uint16_t, false>(out, out_numel, sources, count, types, queue);
    case 4:
      return pack_as<uint32_t, false>(out, out_numel, sources, count, types, queue);
    case 8:
      return pack_as<uint64_t, false>(out, out_numel, sources, count, types, queue);
    default:
      return pack_as<Element16, false>(out, out_numel, sources, count, types, queue);
  }
}

}  // namespace zerocore::kernels::cuda
