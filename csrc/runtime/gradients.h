// The gradients of a flat buffer's parameters, from autograd's to the reduced shard.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <vector>

#include "runtime/flat.h"

namespace zerocore {

// [Note: gradients]
// Between backwards `p.grad` is all there is, so that zero_grad() clears everything:
//   - the main gradient, a view of this rank's shard of the reduced gradient; or
//   - after a backward without reduction, this rank's part of the full local gradient that is kept
//     (what the other parts hold is cleared with it, if it is cleared).
// A backward starts by putting these aside: autograd then accumulates full local gradients into a
// clean `p.grad` (or into the kept one). The reduction packs and takes them away; the end of the
// backward puts the main gradient back. A parameter that no rank used keeps `p.grad is None`.
class Gradients {
 public:
  // transport_dtype: of the reduction's messages. scale: factor on every local gradient.
  Gradients(Flat& flat, c10::ScalarType transport_dtype, double scale,
            std::shared_ptr<DevicePool> buffers);

  // Puts the gradients aside. Throws if what is in `p.grad` cannot be accumulated to.
  void begin();
  // Whether this backward, or one before it, left a full local gradient for parameter i.
  bool has_local(int64_t i) const { return flat_.param(i).grad().defined(); }
  // Packs the local gradients, frees them, and launches the reduction. May be called again in the
  // same backward: the results add up.
  void reduce();
  // Waits for the reductions, and shows the main gradient where `used` (by any rank) says so.
  void finish(const std::vector<bool>& used);
  // Ends a backward without reduction: keeps the full local gradients.
  void keep_local();
  // Ends a backward that failed: its gradients are dropped, as far as they were not added to
  // others.
  void abandon();
  // Whether gradients that finish() showed were cleared since; true once for each finish().
  bool cleared();
  // Whether gradients were shown, and not seen to be cleared.
  bool shown() const { return finished_; }

  // Whether a gradient was kept that was never reduced (nor cleared).
  bool unreduced() const;
  // The reduced shard, 1-D; undefined before the first reduction.
  const at::Tensor& main() const { return main_; }
  // Moves what is in `p.grad` into the main gradient, as zeros where it is None.
  void settle();
  // Bytes held now.
  int64_t bytes() const;

 private:
  struct Slot {
    bool main_counts = false;  // the main gradient is to be added to
    at::Tensor local;          // N-D, full: kept without reduction
    bool had_local = false;    // this backward adds to such a one
    bool shows_main = false;   // finish() put the main gradient into p.grad
    // What finish() or keep_local() put into p.grad. Weak: whoever else holds it keeps its memory.
    c10::weak_intrusive_ptr<c10::TensorImpl> shown{c10::intrusive_ptr<c10::TensorImpl>()};
    uint32_t shown_version = 0;
  };

  void take_aside(int64_t i);
  void take_local(int64_t i, const at::Tensor& grad);
  void adopt(int64_t i, const at::Tensor& grad);
  void show(int64_t i, at::Tensor grad);
  void make_main();
  void clear_unless_counted();

  Flat& flat_;
  const c10::ScalarType transport_dtype_;
  const double scale_;
  const std::shared_ptr<DevicePool> buffers_;
  at::Tensor main_;  // 1-D, of the shard's size and the parameters' dtype
  std::vector<Slot> slots_;
  bool reduced_ = false;   // in this backward
  bool finished_ = false;  // shown()
  std::vector<std::unique_ptr<Pending>> pending_;
};

}  // namespace zerocore
