#include "pack.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "loops.h"
#include "pack_dims.h"

namespace zerocore::kernels {
namespace {

constexpr int64_t kBlock =
    4096;  // elements: pieces start at multiples, so threads share no cache line
constexpr int64_t kGrain = 8;  // blocks

constexpr int64_t kBuffer =
    512;  // elements collected from a strided source before they are written
constexpr int64_t kLongRun =
    128;  // from this many neighbours on, a run is written straight from the source

// [Note: tiles] Reading a transposed matrix row by row takes one element of each cache line, and
// when the columns are many the lines are gone before the next row wants theirs. Then the elements
// of a few neighbouring lines are read together: that many rows, kTileColumns columns at a time.
constexpr int64_t kManyColumns = 256;  // their lines no longer fit into a first-level cache
constexpr int64_t kTileColumns = 64;
constexpr int64_t kTileRowBytes = 256;

struct Source {
  const char* data;
  DType dtype;
  int64_t start, stop;    // in out
  std::vector<Dim> dims;  // merged
};

std::vector<Source> merged_sources(const PackSource* sources, int64_t count) {
  std::vector<Source> out;
  out.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const PackSource& s = sources[i];
    if (s.data != nullptr && s.numel > 0) {
      out.push_back(Source{static_cast<const char*>(s.data), s.dtype, s.offset, s.offset + s.numel,
                           merged_dims(s)});
    }
  }
  return out;
}

// to[i * to_stride] = from[i * from_stride] for n elements.
template <class T>
void copy_strided(char* to, int64_t to_stride, const char* from, int64_t from_stride, int64_t n) {
  T* out = reinterpret_cast<T*>(to);
  const T* in = reinterpret_cast<const T*>(from);
  for (int64_t i = 0; i < n; ++i) {
    out[i * to_stride] = in[i * from_stride];
  }
}

void copy_strided(char* to, int64_t to_stride, const char* from, int64_t from_stride, int64_t n,
                  int64_t element_size) {
  switch (element_size) {
    case 1:
      return copy_strided<uint8_t>(to, to_stride, from, from_stride, n);
    case 2:
      return copy_strided<uint16_t>(to, to_stride, from, from_stride, n);
    case 4:
      return copy_strided<uint32_t>(to, to_stride, from, from_stride, n);
    case 8:
      return copy_strided<uint64_t>(to, to_stride, from, from_stride, n);
    default:
      return copy_strided<Element16>(to, to_stride, from, from_stride, n);
  }
}

// Walks a strided source in logical order from element `at` on. A run is what is left of its
// innermost dimension.
class Runs {
 public:
  Runs(const Source& source, int64_t at) : dims_(source.dims), index_(source.dims.size()) {
    for (size_t d = dims_.size(); d-- > 0;) {
      index_[d] = at % dims_[d].size;
      at /= dims_[d].size;
      place_ += index_[d] * dims_[d].stride;
    }
  }

  int64_t place() const { return place_; }  // in elements from the source's data
  int64_t stride() const { return dims_.back().stride; }
  int64_t left() const { return dims_.back().size - index_.back(); }
  int64_t columns() const { return dims_.back().size; }

  // How many whole rows of a transposed matrix begin here, of those in the next n elements ([Note:
  // tiles]).
  int64_t transposed_rows(int64_t n) const {
    const size_t last = dims_.size() - 1;
    if (last == 0 || dims_[last - 1].stride != 1 || index_[last] != 0 || columns() < kManyColumns) {
      return 0;
    }
    return std::min(n / columns(), dims_[last - 1].size - index_[last - 1]);
  }

  void advance(int64_t n) { advance(n, dims_.size() - 1); }
  void advance_rows(int64_t n) { advance(n, dims_.size() - 2); }

 private:
  // Goes on by n steps of dimension d, at most to its end.
  void advance(int64_t n, size_t d) {
    index_[d] += n;
    place_ += n * dims_[d].stride;
    for (; d > 0 && index_[d] == dims_[d].size; --d) {
      place_ += dims_[d - 1].stride - dims_[d].size * dims_[d].stride;
      index_[d] = 0;
      ++index_[d - 1];
    }
  }

  const std::vector<Dim>& dims_;
  std::vector<int64_t> index_;
  int64_t place_ = 0;
};

// Writes pieces of sources to out. Writer: write(out index, source dtype, address, n) for n
// neighbouring elements, and zero(out index, n).
template <class Writer>
class Packer {
 public:
  Packer(const Writer& writer, const std::vector<Source>& sources)
      : writer_(writer), sources_(sources) {}

  // Fills out[begin, end).
  void fill(int64_t begin, int64_t end) const {
    auto source = std::upper_bound(sources_.begin(), sources_.end(), begin,
                                   [](int64_t at, const Source& s) { return at < s.stop; });
    int64_t at = begin;
    for (; source != sources_.end() && source->start < end; ++source) {
      const int64_t start = std::max(at, source->start);
      const int64_t stop = std::min(end, source->stop);
      writer_.zero(at, start - at);
      copy(*source, start, stop - start);
      at = stop;
    }
    writer_.zero(at, end - at);
  }

 private:
  void copy(const Source& source, int64_t out, int64_t n) const {
    const int64_t size = writer_.element_size(source.dtype);
    const int64_t first = out - source.start;
    if (source.dims.empty()) {
      writer_.write(out, source.dtype, source.data + first * size, n);
      return;
    }
    Runs runs(source, first);
    while (n > 0) {
      const char* from = source.data + runs.place() * size;
      int64_t done;
      if (const int64_t rows = std::min(runs.transposed_rows(n), kTileRowBytes / size); rows > 1) {
        copy_transposed(out, source.dtype, from, size, runs.stride(), rows, runs.columns());
        runs.advance_rows(rows);
        done = rows * runs.columns();
      } else if (runs.stride() == 1 && std::min(n, runs.left()) >= kLongRun) {
        done = std::min(n, runs.left());
        writer_.write(out, source.dtype, from, done);
        runs.advance(done);
      } else {
        done = copy_short_runs(out, source, size, runs, n);
      }
      out += done;
      n -= done;
    }
  }

  // Collects runs up to a full buffer, n elements or the start of transposed rows; returns how many
  // elements.
  int64_t copy_short_runs(int64_t out, const Source& source, int64_t size, Runs& runs,
                          int64_t n) const {
    alignas(64) char buffer[kBuffer * sizeof(Element16)];
    const int64_t room = std::min(n, kBuffer);
    int64_t held = 0;
    do {
      const int64_t run = std::min(room - held, runs.left());
      copy_strided(buffer + held * size, 1, source.data + runs.place() * size, runs.stride(), run,
                   size);
      runs.advance(run);
      held += run;
    } while (held < room && runs.transposed_rows(n - held) <= 1);
    writer_.write(out, source.dtype, buffer, held);
    return held;
  }

  void copy_transposed(int64_t out, DType dtype, const char* from, int64_t size, int64_t stride,
                       int64_t rows, int64_t columns) const {
    alignas(64) char tile[kTileRowBytes * kTileColumns];  // [row][column]
    for (int64_t first = 0; first < columns; first += kTileColumns) {
      const int64_t width = std::min(kTileColumns, columns - first);
      for (int64_t k = 0; k < width; ++k) {
        copy_strided(tile + k * size, kTileColumns, from + (first + k) * stride * size, 1, rows,
                     size);
      }
      for (int64_t row = 0; row < rows; ++row) {
        writer_.write(out + row * columns + first, dtype, tile + row * kTileColumns * size, width);
      }
    }
  }

  const Writer& writer_;
  const std::vector<Source>& sources_;
};

struct BytesWriter {
  char* out;
  int64_t size;

  int64_t element_size(DType) const { return size; }
  void zero(int64_t at, int64_t n) const {
    std::memset(out + at * size, 0, static_cast<size_t>(n * size));
  }
  void write(int64_t at, DType, const char* from, int64_t n) const {
    std::memcpy(out + at * size, from, static_cast<size_t>(n * size));
  }
};

struct CastWriter {
  BytesWriter bytes;
  DType out_dtype;
  double scale;
  const Loops& loops;

  int64_t element_size(DType dtype) const { return kernels::element_size(dtype); }
  void zero(int64_t at, int64_t n) const { bytes.zero(at, n); }
  void write(int64_t at, DType dtype, const char* from, int64_t n) const {
    if (dtype == out_dtype && scale == 1.0) {
      bytes.write(at, dtype, from, n);
      return;
    }
    loops.convert[static_cast<int>(dtype)][static_cast<int>(out_dtype)](bytes.out + at * bytes.size,
                                                                        from, n, scale);
  }
};

template <class Writer>
void pack_with(const Writer& writer, int64_t out_numel, const PackSource* sources, int64_t count,
               const Parallel& parallel) {
  const std::vector<Source> merged = merged_sources(sources, count);
  const Packer<Writer> packer(writer, merged);
  parallel((out_numel + kBlock - 1) / kBlock, kGrain, [&](int64_t begin, int64_t end) {
    packer.fill(begin * kBlock, std::min(end * kBlock, out_numel));
  });
}

}  // namespace

void pack(void* out, DType out_dtype, int64_t out_numel, const PackSource* sources, int64_t count,
          double scale, const Parallel& parallel) {
  const BytesWriter bytes{static_cast<char*>(out), element_size(out_dtype)};
  pack_with(CastWriter{bytes, out_dtype, scale, loops()}, out_numel, sources, count, parallel);
}

void pack_bytes(void* out, int64_t element_size, int64_t out_numel, const PackSource* sources,
                int64_t count, const Parallel& parallel) {
  pack_with(BytesWriter{static_cast<char*>(out), element_size}, out_numel, sources, count,
            parallel);
}

}  // namespace zerocore::kernels
