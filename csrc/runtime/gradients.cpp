#include "runtime/gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <utility>

namespace zerocore {

Gradients::Gradients(Flat& flat, GradientDtypes dtypes, double scale,
                     std::shared_ptr<DevicePool> buffers)
    : flat_(flat),
      dtypes_(dtypes),
      scale_(scale),
      buffers_(std::move(buffers)),
      slots_(flat.size()) {}

// ---- the beginning of a backward -------------------------------------------------------------

void Gradients::begin(Sync sync) {
  at::NoGradGuard no_grad;
  for (int64_t i = 0; i < flat_.size(); ++i) {
    TORCH_CHECK(
        sync != Sync::none || slots_[i].shows != Kept::partial || !flat_.param(i).grad().defined(),
        "zerocore: the gradient of '", flat_.name(i), "' waits for its sum over replicas; ",
        "expected zerocore.no_sync(model, replicas_only=True) until then, got a backward ",
        "in zerocore.no_sync(model)");
  }
  sync_ = sync;
  reduced_ = false;
  leave_to_holders(main_, Kept::main);
  leave_to_holders(partial_, Kept::partial);
  leave_to_holders(local_, Kept::local);
  for (int64_t i = 0; i < flat_.size(); ++i) put_aside(i);
  if (!any_counts(Kept::local)) local_ = at::Tensor();
  if (!any_counts(Kept::partial)) partial_ = at::Tensor();
}

// A gradient that is not in `p.grad` any more belongs to whoever still holds it, or another tensor
// on its memory: what comes next is written elsewhere.
void Gradients::leave_to_holders(at::Tensor& buffer, Kept kept) const {
  if (!buffer.defined()) return;
  size_t users = 1;  // the buffer itself, and each gradient that is shown of it
  bool left = false;
  for (int64_t i = 0; i < flat_.size(); ++i) {
    const bool shown = is_shown(slots_[i], flat_.grad(i));
    left = left || !shown;
    users += shown && slots_[i].shows == kept;
  }
  if (left && buffer.storage().use_count() > users) buffer = buffer.clone();
}

bool& Gradients::counts(Slot& slot, Kept kept) {
  return kept == Kept::main    ? slot.main_counts
         : kept == Kept::local ? slot.local_counts
                               : slot.partial_counts;
}

bool Gradients::any_counts(Kept kept) {
  return std::any_of(slots_.begin(), slots_.end(), [&](Slot& slot) { return counts(slot, kept); });
}

bool Gradients::is_shown(const Slot& slot, const at::Tensor& grad) const {
  // As long as there is a weak reference, nothing else is made at its address.
  return grad.defined() && slot.shown._unsafe_get_target() == grad.unsafeGetTensorImpl();
}

bool Gradients::is_untouched(const Slot& slot, const at::Tensor& grad) const {
  return is_shown(slot, grad) && static_cast<uint32_t>(grad._version()) == slot.shown_version;
}

void Gradients::put_aside(int64_t i) {
  Slot& slot = slots_[i];
  const at::Tensor grad = std::move(flat_.param(i).mutable_grad());
  flat_.param(i).mutable_grad() = at::Tensor();
  slot.local_counts = slot.partial_counts = false;
  if (!grad.defined()) {
    slot.main_counts = false;
  } else if (slot.shows == Kept::local || slot.shows == Kept::partial) {
    put_aside_unreduced(i, grad);
  } else if (is_main(i, grad)) {
    slot.main_counts = true;
  } else {
    adopt(i, grad);
  }
}

void Gradients::put_aside_unreduced(int64_t i, const at::Tensor& grad) {
  Slot& slot = slots_[i];
  counts(slot, slot.shows) = true;
  if (is_untouched(slot, grad)) return;
  const bool hides = slot.main_counts || (slot.shows == Kept::local && flat_.layout().shards() > 1);
  if (hides) {
    // The only change that can be carried to what is not shown is clearing.
    TORCH_CHECK(is_shown(slot, grad), "zerocore: the gradient of '", flat_.name(i),
                "' was replaced while gradients kept under no_sync were waiting for their ",
                "reduction; expected it to be left alone or cleared");
    TORCH_CHECK(grad.numel() == 0 || !grad.any().item<bool>(), "zerocore: the gradient of '",
                flat_.name(i), "' was changed while gradients kept under no_sync were waiting for ",
                "their reduction; expected it to be left alone or zeroed");
    slot.main_counts = false;
    if (slot.shows == Kept::local) flat_.full_view(local_, i).zero_();
  } else if (!is_shown(slot, grad)) {
    copy_replaced(i, shown_part(slot.shows, i), grad);
  }
}

void Gradients::copy_replaced(int64_t i, at::Tensor own, const at::Tensor& grad) const {
  TORCH_CHECK_VALUE(grad.sizes() == own.sizes(), "zerocore: the gradient of '", flat_.name(i),
                    "' was replaced: expected the shape of this rank's shard ", own.sizes(),
                    ", got ", grad.sizes());
  own.copy_(grad);
}

// Another tensor on the same memory may have another shape of it.
bool Gradients::is_main(int64_t i, const at::Tensor& grad) const {
  return is_shown(slots_[i], grad) && main_.defined() &&
         grad.storage().unsafeGetStorageImpl() == main_.storage().unsafeGetStorageImpl();
}

void Gradients::adopt(int64_t i, const at::Tensor& grad) {
  make(main_);
  copy_replaced(i, flat_.shard_view(main_, i), grad);
  slots_[i].main_counts = true;
}

// A sum over ranks, if it is not there yet.
void Gradients::make(at::Tensor& sum) const {
  if (!sum.defined()) sum = at::zeros({flat_.layout().shard_numel()}, sum_options());
}

at::TensorOptions Gradients::sum_options() const {
  return flat_.shard().options().dtype(dtypes_.accumulate);
}

// ---- in a backward ---------------------------------------------------------------------------

bool Gradients::has_local(int64_t i) const {
  return flat_.param(i).grad().defined() || slots_[i].local_counts ||
         (sync_ == Sync::all && slots_[i].partial_counts);
}

void Gradients::take() {
  at::NoGradGuard no_grad;
  if (sync_ == Sync::none) {
    add_locally();
  } else {
    take_for_reduction();
  }
}

// What autograd has put into `p.grad`, read in the order of memory.
ops::OptionalTensors Gradients::take_fresh() {
  ops::OptionalTensors grads;
  grads.reserve(flat_.size());
  for (int64_t i = 0; i < flat_.size(); ++i) {
    at::Tensor& grad = flat_.param(i).mutable_grad();
    TORCH_CHECK(!grad.defined() || grad.layout() == at::kStrided, "zerocore: the gradient of '",
                flat_.name(i), "': expected a dense one, got ", grad.layout(),
                "; use nn.Embedding(sparse=False)");
    at::Tensor fresh = std::exchange(grad, at::Tensor());
    const at::IntArrayRef order = flat_.memory_order(i);
    if (fresh.defined() && !std::is_sorted(order.begin(), order.end()))
      fresh = fresh.permute(order);
    grads.push_back(fresh.defined() ? std::optional(std::move(fresh)) : std::nullopt);
  }
  return grads;
}

// The pool's blocks are for reductions, and spare a CPU the first touch of fresh memory.
at::Tensor Gradients::empty_local() const {
  const int64_t numel = flat_.layout().total();
  const Streams& streams = buffers_->streams();
  if (streams.asynchronous()) return at::empty({numel}, sum_options());
  return DevicePool::empty(buffers_, numel, dtypes_.accumulate, streams.current());
}

void Gradients::add_locally() {
  const ops::OptionalTensors grads = take_fresh();
  const bool first = !any_counts(Kept::local);
  if (first) {
    local_ = empty_local();
    ops::pack_(local_, grads, flat_.layout().offsets());
  }
  for (int64_t i = 0; i < flat_.size(); ++i) {
    const std::optional<at::Tensor> grad = grads.get(i);
    Slot& slot = slots_[i];
    if (!first) {
      at::Tensor sum = flat_.full_view(local_, i).permute(flat_.memory_order(i));
      if (!grad && !slot.local_counts) sum.zero_();
      if (grad && slot.local_counts) sum.add_(*grad);
      if (grad && !slot.local_counts) sum.copy_(*grad);
    }
    slot.local_counts = slot.local_counts || grad.has_value();
  }
}

// All that this rank has for the reduction.
void Gradients::take_for_reduction() {
  TORCH_INTERNAL_ASSERT(!taken_, "gradients taken twice for one reduction");
  Taken taken;
  if (any_counts(Kept::local)) {
    add_locally();
    taken.tensors.push_back(std::exchange(local_, at::Tensor()));
    taken.offsets = {0};
    for (Slot& slot : slots_) slot.local_counts = false;
  } else {
    taken.tensors = take_fresh();
    taken.offsets = flat_.layout().offsets();
  }
  if (sync_ == Sync::shard) {
    taken.accumulate = prepare(partial_, Kept::partial);
  } else {
    if (partial_.defined()) {
      for (int64_t i = 0; i < flat_.size(); ++i) {
        if (!slots_[i].partial_counts) flat_.shard_view(partial_, i).zero_();
        slots_[i].partial_counts = false;
      }
    }
    taken.accumulate = prepare(main_, Kept::main);
    taken.partial = std::exchange(partial_, at::Tensor());
  }
  taken_ = std::move(taken);
}

// Makes `sum` ready for what this backward adds; whether there is anything to add to.
bool Gradients::prepare(at::Tensor& sum, Kept kept) {
  // All of it is written by the reduction.
  if (!sum.defined()) sum = at::empty({flat_.layout().shard_numel()}, sum_options());
  if (std::exchange(reduced_, true)) return true;
  if (!any_counts(kept)) return false;
  for (int64_t i = 0; i < flat_.size(); ++i) {
    if (!counts(slots_[i], kept)) flat_.shard_view(sum, i).zero_();
  }
  return true;
}

std::vector<at::Tensor> Gradients::reduce() {
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> held;
  if (!taken_) return held;
  const Taken taken = *std::exchange(taken_, std::nullopt);
  const c10::Stream stream = buffers_->streams().reduce();
  const c10::StreamGuard on(stream);
  const at::Tensor packed =
      DevicePool::empty(buffers_, flat_.layout().total(), dtypes_.transport, stream);
  ops::pack_(packed, taken.tensors, taken.offsets, scale_);
  Transport& transport = flat_.transport();
  if (sync_ == Sync::shard) {
    pending_.push_back(
        transport.reduce_scatter(packed, partial_, taken.accumulate, flat_.channel()));
  } else {
    pending_.push_back(
        transport.reduce(packed, taken.partial, main_, taken.accumulate, flat_.channel()));
  }
  for (size_t i = 0; i < taken.tensors.size(); ++i) {
    if (taken.tensors.get(i).has_value()) held.push_back(*taken.tensors.get(i));
  }
  if (taken.partial.defined()) held.push_back(taken.partial);
  return held;
}

// ---- the end of a backward -------------------------------------------------------------------

void Gradients::finish(const std::vector<bool>& used) {
  at::NoGradGuard no_grad;
  for (auto& pending : pending_) pending->wait();
  pending_.clear();
  if (sync_ == Sync::none) take();
  // What waits takes the place of the main gradient in memory.
  if (sync_ != Sync::all && !any_counts(Kept::main)) main_ = at::Tensor();
  for (int64_t i = 0; i < flat_.size(); ++i) {
    Slot& slot = slots_[i];
    if (sync_ == Sync::all) slot.main_counts = slot.main_counts || used.at(i);
    if (sync_ == Sync::shard) slot.partial_counts = slot.partial_counts || used.at(i);
    show(i);
    finished_ = finished_ || (sync_ == Sync::all && slot.shows == Kept::main);
  }
}

at::Tensor Gradients::shown_part(Kept kept, int64_t i) const {
  if (kept == Kept::local) return flat_.slice(flat_.full_view(local_, i), i);
  return flat_.shard_view(kept == Kept::main ? main_ : partial_, i);
}

void Gradients::show(int64_t i) {
  Slot& slot = slots_[i];
  slot.shows = slot.local_counts     ? Kept::local
               : slot.partial_counts ? Kept::partial
               : slot.main_counts    ? Kept::main
                                     : Kept::nothing;
  if (slot.shows == Kept::nothing) return;
  at::Tensor grad = shown_part(slot.shows, i);
  slot.shown = grad.getIntrusivePtr();
  slot.shown_version = static_cast<uint32_t>(grad._version());
  flat_.param(i).mutable_grad() = std::move(grad);
}

void Gradients::drop() {
  at::NoGradGuard no_grad;
  taken_.reset();
  for (int64_t i = 0; i < flat_.size(); ++i) {
    flat_.param(i).mutable_grad() = at::Tensor();
    if (buffers_->streams().asynchronous()) {
      Slot& slot = slots_[i];
      slot.main_counts = slot.local_counts = slot.partial_counts = false;
      slot.shows = Kept::nothing;
    } else {
      show(i);
    }
  }
}

void Gradients::abandon() {
  at::NoGradGuard no_grad;
  if (pending_.empty()) return;
  try {
    for (auto& pending : pending_) pending->wait();
  } catch (const std::exception&) {
    // The failure is on its way to the user already; the sums are lost with it.
    main_ = partial_ = at::Tensor();
    for (Slot& slot : slots_) slot.main_counts = slot.partial_counts = false;
    drop();
  }
  pending_.clear();
  for (int64_t i = 0; i < flat_.size(); ++i) {
    // What was zeroed meanwhile has perhaps been added to since.
    at::Tensor& grad = flat_.param(i).mutable_grad();
    if (is_shown(slots_[i], grad) && !is_untouched(slots_[i], grad)) grad.zero_();
  }
}

// ---- between backwards -----------------------------------------------------------------------

bool Gradients::cleared() {
  if (!finished_) return false;
  for (int64_t i = 0; i < flat_.size(); ++i) {
    const Slot& slot = slots_[i];
    // It may be behind an unreduced one, which differs between ranks, and is cleared with that.
    const bool main = slot.shows == Kept::main || (slot.shows != Kept::nothing && slot.main_counts);
    if (main && !is_untouched(slot, flat_.param(i).grad())) {
      finished_ = false;
      return true;
    }
  }
  return false;
}

void Gradients::free_cleared() {
  if (!main_.defined()) return;
  for (int64_t i = 0; i < flat_.size(); ++i) {
    if (flat_.param(i).grad().defined()) return;
  }
  for (Slot& slot : slots_) slot.main_counts = false;
  main_ = at::Tensor();
}

void Gradients::require_reduced() const {
  for (int64_t i = 0; i < flat_.size(); ++i) {
    const Kept shows = slots_[i].shows;
    const bool waits = shows == Kept::local || shows == Kept::partial;
    TORCH_CHECK(!waits || !flat_.grad(i).defined(), "zerocore: the gradient of '", flat_.name(i),
                "' was never reduced over the ranks; expected the last backward ",
                "before a step or clipping outside of zerocore.no_sync()");
  }
}

void Gradients::settle() {
  at::NoGradGuard no_grad;
  make(main_);
  bool left = false;
  for (int64_t i = 0; i < flat_.size(); ++i) {
    const at::Tensor& grad = flat_.grad(i);
    if (!grad.defined() || is_main(i, grad)) continue;
    if (!std::exchange(left, true)) leave_to_holders(main_, Kept::main);
    adopt(i, grad);
  }
}

int64_t Gradients::bytes() const {
  int64_t bytes = 0;
  for (const at::Tensor& buffer : {main_, partial_, local_}) {
    if (buffer.defined()) bytes += static_cast<int64_t>(buffer.nbytes());
  }
  return bytes;
}

}  // namespace zerocore
