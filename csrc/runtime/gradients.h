// The gradients of a flat buffer's parameters, from autograd's to the reduced shard.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <optional>
#include <vector>

#include "ops/ops.h"
#include "runtime/flat.h"

namespace zerocore {

// How far a backward takes its gradients.
enum class Sync {
  all,    // reduced over all ranks, into the main gradient
  shard,  // over the shard group; the sum over replicas waits for a backward with Sync::all
  none,   // kept as full local gradients until a backward with another value
};

struct GradientDtypes {
  c10::ScalarType transport;   // of the reduction's messages
  c10::ScalarType accumulate;  // of everything that is added up over backwards
};

// [Note: gradients]
// Between backwards `p.grad` is all there is, so that zero_grad() clears everything. It shows
//   - the main gradient: this rank's shard of the reduced gradient; or
//   - what waits for its reduction, in part: after Sync::none this rank's part of the full local
//     gradient, after Sync::shard its shard of the sum over the shard group. The parts that are not
//     shown are cleared with it.
// Each is a flat buffer. A backward starts by putting them aside: autograd then accumulates into a
// clean `p.grad`. When a unit's gradients are there they are taken away: added to the full local
// gradient, or packed and reduced together with what waits. The end of the backward shows them
// again. A parameter that no rank used keeps `p.grad is None`.
class Gradients {
 public:
  // scale: factor on every local gradient in the reduction.
  Gradients(Flat& flat, GradientDtypes dtypes, double scale, std::shared_ptr<DevicePool> buffers);

  // Puts the gradients aside. Throws if what is in `p.grad` cannot be accumulated to.
  void begin(Sync sync);
  // Whether there is anything to reduce for parameter i: of this backward, or kept by earlier ones.
  bool has_local(int64_t i) const;
  // Takes the gradients out of `p.grad`: adds them up locally, or keeps them for reduce().
  void take();
  // Packs what take() kept and hands it to the transport. Returns the tensors that are packed;
  // where work is enqueued they have to live until that is done. Both may be called again in the
  // same backward: the results add up.
  std::vector<at::Tensor> reduce();
  // Ends a backward: waits for the reductions, and shows gradients. used: by any rank; not asked
  // for with Sync::none.
  void finish(const std::vector<bool>& used);
  // Ends a backward that failed: its gradients are dropped, as far as they were not added to
  // others. `p.grad` shows what it showed before, so that clearing it clears that. Not so where
  // backwards have a thread of their own, which may come to this after the user has cleared them:
  // there all gradients are gone.
  void drop();
  // Waits for what a dropped backward has left under way, before anything else is begun.
  void abandon();
  // Whether gradients that finish() showed were cleared since; true once for each finish().
  bool cleared();
  // Lets go of the memory of gradients that were cleared (set to None); who holds one keeps it.
  void free_cleared();
  // Whether gradients were shown, and not seen to be cleared.
  bool shown() const { return finished_; }

  // Throws if a gradient waits for a reduction (and was not cleared).
  void require_reduced() const;
  // The reduced shard, 1-D; undefined before the first reduction.
  const at::Tensor& main() const { return main_; }
  // Moves what is in `p.grad` into the main gradient, which has anything where it is None.
  void settle();
  // Bytes held now, and the dtype of all of them.
  int64_t bytes() const;
  c10::ScalarType dtype() const { return dtypes_.accumulate; }

 private:
  // What a parameter's gradients before this backward are part of.
  enum class Kept { nothing, main, local, partial };
  struct Slot {
    bool main_counts = false;     // the main gradient is to be added to
    bool local_counts = false;    // so is the local one
    bool partial_counts = false;  // so is the partial sum
    Kept shows = Kept::nothing;   // what `p.grad` shows between backwards
    // The tensor that does. Weak: whoever else holds it keeps its memory.
    c10::weak_intrusive_ptr<c10::TensorImpl> shown{c10::intrusive_ptr<c10::TensorImpl>()};
    uint32_t shown_version = 0;
  };

  void leave_to_holders(at::Tensor& buffer, Kept kept) const;
  static bool& counts(Slot& slot, Kept kept);
  bool any_counts(Kept kept);
  bool is_shown(const Slot& slot, const at::Tensor& grad) const;
  bool is_untouched(const Slot& slot, const at::Tensor& grad) const;
  void put_aside(int64_t i);
  void put_aside_unreduced(int64_t i, const at::Tensor& grad);
  void copy_replaced(int64_t i, at::Tensor own, const at::Tensor& grad) const;
  bool is_main(int64_t i, const at::Tensor& grad) const;
  void adopt(int64_t i, const at::Tensor& grad);
  void make(at::Tensor& sum) const;
  at::TensorOptions sum_options() const;
  ops::OptionalTensors take_fresh();
  at::Tensor empty_local() const;
  void add_locally();
  void take_for_reduction();
  bool prepare(at::Tensor& sum, Kept kept);
  at::Tensor shown_part(Kept kept, int64_t i) const;
  void show(int64_t i);

  Flat& flat_;
  const GradientDtypes dtypes_;
  const double scale_;
  const std::shared_ptr<DevicePool> buffers_;
  at::Tensor main_;     // 1-D, of the shard's size
  at::Tensor partial_;  // 1-D, of the shard's size: summed over the shard group
  at::Tensor local_;    // 1-D, of the flat buffer's size: this rank's
  // What goes into the next reduction, and where it lies in the flat buffer.
  struct Taken {
    ops::OptionalTensors tensors;
    std::vector<int64_t> offsets;
    at::Tensor partial;
    bool accumulate = false;
  };
  std::optional<Taken> taken_;
  std::vector<Slot> slots_;
  Sync sync_ = Sync::all;  // of this backward
  bool reduced_ = false;   // in this backward
  bool finished_ = false;  // shown()
  std::vector<std::unique_ptr<Pending>> pending_;
};

}  // namespace zerocore
