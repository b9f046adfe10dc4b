// The orders in which collectives are issued, the same on every rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace zerocore {

// The order in which a pass over the model needs its windows: forward, then backward. A pass
// records it; the next one looks ahead in it. A unit that comes unexpectedly costs the look-ahead,
// nothing else.
class GatherOrder {
 public:
  // A pass starts at the front. One that never finished (an exception, a second forward before the
  // first backward) is forgotten.
  void begin();
  void visit(int unit);
  // The pass has ended; what it did is what the next one expects.
  void finish();

  // The next `count` distinct units after the current one.
  std::vector<int> upcoming(int count) const;
  // Units in the order visited since begin().
  const std::vector<int>& visited() const { return visited_; }
  // FNV-1a of visited(), to compare ranks.
  uint64_t fingerprint() const;

 private:
  std::vector<int> expected_;
  std::vector<int> previous_;  // where in it each of them was last, -1: nowhere
  std::vector<int> visited_;
  int position_ = -1;  // of the current unit in expected_
  bool passing_ = false;
};

// The order of reductions. Gradients become ready in an order of their own on each rank (a rank may
// leave a unit unused), so reductions are issued in one agreed order: at first the units backwards
// with unit 0 last, later the order that was observed on rank 0.
class ReduceOrder {
 public:
  explicit ReduceOrder(int units);

  // A backward starts. participates[unit]: whether the unit has trainable parameters.
  void begin(std::vector<bool> participates);
  void ready(int unit);
  // The units that may be issued now: ready, and everything before them issued.
  std::vector<int> take();
  // At the end of backward: all that were not issued, of those wanted.
  std::vector<int> flush(const std::vector<bool>& wanted);

  // Units in the order in which they became ready in this backward, the rest behind them.
  std::vector<int> observed() const;
  const std::vector<int>& agreed() const { return agreed_; }
  void adopt(std::vector<int> order);

 private:
  std::vector<int> agreed_;
  std::vector<int> observed_;
  std::vector<bool> participates_;
  std::vector<bool> ready_;
  size_t next_ = 0;  // in agreed_
};

}  // namespace zerocore
