// The table of a launch of pack: which sources fill which part of out.
#pragma once

#include <cstdint>
#include <vector>

#include "access.cuh"
#include "grid.cuh"
#include "kernels/pack.h"
#include "kernels/pack_dims.h"

namespace zerocore::kernels::cuda {

// [Note: transposed] A source whose last dimension is strided while another one has stride 1, as in
// the transpose of a matrix or in channels_last: read row by row it takes one element of each
// 32-byte sector. It is packed in squares of that dimension (rows) and the last one (columns).
enum class Layout : int8_t { contiguous, strided, transposed };

constexpr int kSquare = 32;
constexpr int64_t kSmallestTransposed = 8;  // rows and columns: below, squares are mostly empty

// What a source's elements are: to be copied as they are, or values of a dtype.
enum class SourceType : int8_t { f32, bf16, f16, f64, copy };

struct PackTypes {
  DType out;
  double scale;
  bool casts;  // false: everything is copied

  SourceType of(DType source) const {
    return !casts || (source == out && scale == 1.0) ? SourceType::copy
                                                     : static_cast<SourceType>(source);
  }
};

// Fills out from `start` to the next entry's. Only a contiguous one may be shorter than that: zeros
// follow its `numel` elements.
struct PackEntry {
  const void* data;
  int64_t start;
  int64_t numel;
  int32_t first_tile;  // tiles of the entries before it
  Layout layout;
  SourceType source;
  int8_t row_dim;  // of a transposed one: its dimension of stride 1
  uint8_t ndim;
  uint16_t first_dim;  // in the table
};

constexpr int kPackEntries = 64;
constexpr int kPackDims = 80;  // at least the 64 that a tensor may have

struct PackTable {
  void* out;
  int64_t stop;  // in out: the end of the last entry
  double scale;
  int64_t tiles;
  int64_t origin;
  int32_t count;
  PackEntry entries[kPackEntries];
  Dim dims[kPackDims];
};
static_assert(sizeof(PackTable) <= kTableBytes, "the table is a kernel argument");

// Two accesses of each thread.
template <class Out>
constexpr int kPackTile = 2 * kThreads * kLanes<Out>;

// Builds tables from sources in ascending order and hands each one that is full to `run`.
template <class Out>
class PackPlan {
 public:
  PackPlan(Out* out, int64_t numel, PackTypes types)
      : numel_(numel), types_(types), tiles_(Tiles<kPackTile<Out>>::of(out)) {
    table_.out = out;
    table_.scale = types.scale;
    table_.origin = tiles_.origin;
  }

  template <class Run>
  void add(const PackSource& source, const Run& run) {
    if (source.data == nullptr || source.numel == 0) {
      return;
    }
    const std::vector<Dim> dims = merged_dims(source);
    make_room(2, static_cast<int>(dims.size()), run);
    fill_gap(source.offset);
    PackEntry entry = entry_of(source.data, source.offset, source.numel);
    entry.source = types_.of(source.dtype);
    entry.ndim = static_cast<uint8_t>(dims.size());
    entry.first_dim = static_cast<uint16_t>(dims_);
    set_layout(entry, dims);
    std::copy(dims.begin(), dims.end(), table_.dims + dims_);
    dims_ += static_cast<int>(dims.size());
    push(entry);
  }

  template <class Run>
  void finish(const Run& run) {
    make_room(1, 0, run);
    fill_gap(numel_);
    flush(run);
  }

 private:
  static PackEntry entry_of(const void* data, int64_t start, int64_t numel) {
    return PackEntry{data, start, numel, 0, Layout::contiguous, SourceType::copy, 0, 0, 0};
  }

  static void set_layout(PackEntry& entry, const std::vector<Dim>& dims) {
    entry.layout = dims.empty() ? Layout::contiguous : Layout::strided;
    if (dims.empty() || dims.back().stride == 1 || dims.back().size < kSmallestTransposed) {
      return;
    }
    for (size_t d = 0; d + 1 < dims.size(); ++d) {
      if (dims[d].stride == 1 && dims[d].size >= kSmallestTransposed) {
        entry.layout = Layout::transposed;
        entry.row_dim = static_cast<int8_t>(d);
      }
    }
  }

  // Zeros up to `stop`: the tail of a contiguous entry, or an entry without data.
  void fill_gap(int64_t stop) {
    if (end_ == stop) {
      return;
    }
    if (table_.count == 0 || last().layout != Layout::contiguous) {
      push(entry_of(nullptr, end_, 0));
    }
    end_ = stop;
  }

  void push(const PackEntry& entry) {
    close_last();
    table_.entries[table_.count] = entry;
    table_.entries[table_.count].first_tile = static_cast<int32_t>(table_.tiles);
    ++table_.count;
    end_ = entry.start + entry.numel;
  }

  // Counts the tiles of the last entry, whose end is known now.
  void close_last() {
    if (table_.count == 0) {
      return;
    }
    const PackEntry& entry = last();
    if (entry.layout == Layout::transposed) {
      const Dim* dims = table_.dims + entry.first_dim;
      const int64_t rows = dims[entry.row_dim].size, columns = dims[entry.ndim - 1].size;
      table_.tiles += entry.numel / (rows * columns) * ((rows + kSquare - 1) / kSquare) *
                      ((columns + kSquare - 1) / kSquare);
    } else {
      table_.tiles += tiles_.count(entry.start, end_);
    }
  }

  template <class Run>
  void make_room(int entries, int dims, const Run& run) {
    if (table_.count + entries > kPackEntries || dims_ + dims > kPackDims) {
      flush(run);
    }
  }

  template <class Run>
  void flush(const Run& run) {
    close_last();
    table_.stop = end_;
    if (table_.tiles > 0) {
      run(table_);
    }
    table_.count = 0;
    table_.tiles = 0;
    dims_ = 0;
  }

  const PackEntry& last() const { return table_.entries[table_.count - 1]; }

  int64_t numel_;
  PackTypes types_;
  Tiles<kPackTile<Out>> tiles_;
  PackTable table_{};
  int dims_ = 0;
  int64_t end_ = 0;  // of what the entries fill
};

}  // namespace zerocore::kernels::cuda
