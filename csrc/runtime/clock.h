// Which stream has waited for which, so that nothing is waited for twice.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace zerocore {

// All that was enqueued on a stream up to some moment.
struct Point {
  int stream = -1;  // -1: nothing
  int64_t time = 0;
};

// A vector clock over streams ("Virtual Time and Global States of Distributed Systems", Mattern,
// 1988): row s holds, for every stream, up to which of its times stream s is known to come later. A
// wait hands the row of the stream that was waited for on to the waiter.
class Clock {
 public:
  using Row = std::vector<int64_t>;

  // All that was enqueued on the stream until now.
  Point now(int stream) {
    grow(stream);
    return {stream, ++rows_[stream][stream]};
  }
  // What `stream` comes after, itself included.
  const Row& row(int stream) {
    grow(stream);
    return rows_[stream];
  }
  // Whether what `waiter` is given next starts after the point.
  bool knows(int waiter, const Point& point) {
    if (point.stream < 0 || point.stream == waiter) return true;
    grow(std::max(waiter, point.stream));
    return rows_[waiter][point.stream] >= point.time;
  }
  // `waiter` has waited for a stream when its row was `seen`.
  void learn(int waiter, const Row& seen) {
    grow(std::max(waiter, static_cast<int>(seen.size()) - 1));
    Row& own = rows_[waiter];
    for (size_t stream = 0; stream < seen.size(); ++stream) {
      if (static_cast<int>(stream) != waiter) own[stream] = std::max(own[stream], seen[stream]);
    }
  }

 private:
  void grow(int stream) {
    const size_t size = std::max(rows_.size(), static_cast<size_t>(stream) + 1);
    rows_.resize(size);
    for (Row& row : rows_) row.resize(size);
  }

  std::vector<Row> rows_;
};

}  // namespace zerocore
