#include "runtime/gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <utility>

#include "ops/ops.h"

namespace zerocore {

Gradients::Gradients(Flat& flat, c10::ScalarType transport_dtype, double scale,
                     std::shared_ptr<DevicePool> buffers)
    : flat_(flat),
      transport_dtype_(transport_dtype),
      scale_(scale),
      buffers_(std::move(buffers)),
      slots_(flat.size()) {}

void Gradients::begin() {
  at::NoGradGuard no_grad;
  for (int64_t i = 0; i < flat_.size(); ++i) take_aside(i);
  // Somebody may still look at a gradient that was cleared since: then it is theirs, and the next
  // one gets memory of its own.
  bool held = false;
  for (Slot& slot : slots_) {
    if (!slot.main_counts) held = held || slot.shown.lock();
  }
  if (held && main_.defined()) main_ = main_.clone();
  reduced_ = false;
}

void Gradients::take_aside(int64_t i) {
  Slot& slot = slots_[i];
  at::Tensor grad = std::move(flat_.param(i).mutable_grad());
  flat_.param(i).mutable_grad() = at::Tensor();
  slot.had_local = slot.local.defined() && grad.defined();
  if (!grad.defined()) {
    slot.main_counts = false;
    slot.local.reset();
    return;
  }
  if (slot.local.defined()) {
    take_local(i, grad);
    return;
  }
  const auto shown = slot.shown.lock();
  if (shown && shown.get() == grad.unsafeGetTensorImpl()) {
    slot.main_counts = true;
  } else {
    adopt(i, grad);
  }
}

void Gradients::take_local(int64_t i, const at::Tensor& grad) {
  Slot& slot = slots_[i];
  if (flat_.layout().shards() > 1) {
    const auto shown = slot.shown.lock();
    TORCH_CHECK(shown && shown.get() == grad.unsafeGetTensorImpl(), "zerocore: the gradient of '",
                flat_.name(i), "' was replaced while gradients kept under no_sync were waiting ",
                "for their reduction; expected it to be left alone or cleared");
    if (static_cast<uint32_t>(grad._version()) != slot.shown_version) {
      // The only change that can be carried to the parts on other ranks is clearing.
      TORCH_CHECK(grad.numel() == 0 || !grad.any().item<bool>(), "zerocore: the gradient of '",
                  flat_.name(i), "' was changed while gradients kept under no_sync were waiting ",
                  "for their reduction; expected it to be left alone or zeroed");
      slot.main_counts = false;
      slot.local.zero_();
    }
  }
  flat_.param(i).mutable_grad() = std::move(slot.local);
  slot.local.reset();
}

void Gradients::adopt(int64_t i, const at::Tensor& grad) {
  make_main();
  at::Tensor own = flat_.shard_view(main_, i);
  TORCH_CHECK_VALUE(grad.sizes() == own.sizes(), "zerocore: the gradient of '", flat_.name(i),
                    "' was replaced: expected the shape of this rank's shard ", own.sizes(),
                    ", got ", grad.sizes());
  own.copy_(grad);
  slots_[i].main_counts = true;
}

void Gradients::make_main() {
  if (!main_.defined()) main_ = at::zeros_like(flat_.shard());
}

void Gradients::clear_unless_counted() {
  for (int64_t i = 0; i < flat_.size(); ++i) {
    if (!slots_[i].main_counts) flat_.shard_view(main_, i).zero_();
  }
}

void Gradients::reduce() {
  at::NoGradGuard no_grad;
  ops::OptionalTensors grads;
  grads.reserve(flat_.size());
  for (int64_t i = 0; i < flat_.size(); ++i) {
    at::Tensor& grad = flat_.param(i).mutable_grad();
    TORCH_CHECK(!grad.defined() || grad.layout() == at::kStrided, "zerocore: the gradient of '",
                flat_.name(i), "': expected a dense one, got ", grad.layout(),
                "; use nn.Embedding(sparse=False)");
    grads.push_back(grad.defined() ? std::optional(grad.permute(flat_.memory_order(i)))
                                   : std::nullopt);
    grad = at::Tensor();
  }
  const at::Tensor packed = DevicePool::empty(buffers_, flat_.layout().total(), transport_dtype_);
  ops::pack_(packed, grads, flat_.layout().offsets(), scale_);
  grads.clear();
  bool accumulate = reduced_;
  if (!reduced_) {
    bool all = true;
    for (const Slot& slot : slots_) {
      accumulate = accumulate || slot.main_counts;
      all = all && slot.main_counts;
    }
    make_main();
    if (accumulate && !all) clear_unless_counted();
  }
  reduced_ = true;
  pending_.push_back(flat_.transport().reduce(packed, main_, accumulate, flat_.channel()));
}

void Gradients::finish(const std::vector<bool>& used) {
  for (auto& pending : pending_) pending->wait();
  pending_.clear();
  for (int64_t i = 0; i < flat_.size(); ++i) {
    slots_[i].shows_main = used.at(i) || slots_[i].main_counts;
    if (!slots_[i].shows_main) continue;
    show(i, flat_.shard_view(main_, i));
    finished_ = true;
  }
}

bool Gradients::cleared() {
  if (!finished_) return false;
  for (int64_t i = 0; i < flat_.size(); ++i) {
    const at::Tensor& grad = flat_.param(i).grad();
    const auto shown = slots_[i].shown.lock();
    const bool untouched = shown && grad.defined() && grad.unsafeGetTensorImpl() == shown.get() &&
                           static_cast<uint32_t>(grad._version()) == slots_[i].shown_version;
    if (slots_[i].shows_main && !untouched) {
      finished_ = false;
      return true;
    }
  }
  return false;
}

void Gradients::keep_local() {
  at::NoGradGuard no_grad;
  const bool counts =
      std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.main_counts; });
  if (!counts) main_ = at::Tensor();  // the full gradient takes its place in memory
  for (int64_t i = 0; i < flat_.size(); ++i) {
    at::Tensor grad = flat_.param(i).grad();
    if (!grad.defined()) {
      if (slots_[i].main_counts) show(i, flat_.shard_view(main_, i));
      continue;
    }
    grad = flat_.in_memory_order(grad, i);
    slots_[i].local = grad;
    show(i, flat_.slice(grad, i));
  }
}

void Gradients::show(int64_t i, at::Tensor grad) {
  slots_[i].shown = grad.getIntrusivePtr();
  slots_[i].shown_version = static_cast<uint32_t>(grad._version());
  flat_.param(i).mutable_grad() = std::move(grad);
}

void Gradients::abandon() {
  at::NoGradGuard no_grad;
  try {
    for (auto& pending : pending_) pending->wait();
  } catch (const std::exception&) {
    // The failure is on its way to the user already; the main gradient is lost with it.
    main_ = at::Tensor();
    for (Slot& slot : slots_) slot.main_counts = false;
  }
  pending_.clear();
  for (int64_t i = 0; i < flat_.size(); ++i) {
    const at::Tensor local = std::move(flat_.param(i).mutable_grad());
    flat_.param(i).mutable_grad() = at::Tensor();
    if (slots_[i].had_local && local.defined()) {
      slots_[i].local = local;
      show(i, flat_.slice(local, i));
    } else if (slots_[i].main_counts) {
      show(i, flat_.shard_view(main_, i));
    }
  }
}

bool Gradients::unreduced() const {
  for (int64_t i = 0; i < flat_.size(); ++i) {
    if (slots_[i].local.defined() && flat_.param(i).grad().defined()) return true;
  }
  return false;
}

void Gradients::settle() {
  at::NoGradGuard no_grad;
  make_main();
  for (int64_t i = 0; i < flat_.size(); ++i) {
    const at::Tensor& grad = flat_.param(i).grad();
    at::Tensor own = flat_.shard_view(main_, i);
    if (!grad.defined()) {
      own.zero_();
    } else if (grad.unsafeGetTensorImpl()->storage().unsafeGetStorageImpl() !=
               main_.storage().unsafeGetStorageImpl()) {
      adopt(i, grad);
    }
  }
}

int64_t Gradients::bytes() const {
  int64_t bytes = main_.defined() ? static_cast<int64_t>(main_.nbytes()) : 0;
  for (const Slot& slot : slots_) {
    if (slot.local.defined()) bytes += static_cast<int64_t>(slot.local.nbytes());
  }
  return bytes;
}

}  // namespace zerocore
