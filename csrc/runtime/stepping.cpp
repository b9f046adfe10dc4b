// What an optimizer does to a model.
#include <ATen/ops/view_as_real.h>

#include "ops/ops.h"
#include "runtime/runtime.h"

namespace zerocore {
namespace {

at::Tensor as_real(const at::Tensor& flat) {
  return flat.is_complex() ? at::view_as_real(flat).view(-1) : flat;
}

}  // namespace

void Runtime::before_write() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  settle();
  note("wait", "drain", -1, 0);
  for (int unit = 0; unit < units(); ++unit) {
    for (const auto& flat : units_[unit]->flats) {
      waiting("all-gather", unit, [&] { flat->drain(); });
    }
  }
  note("done", "drain", -1, 0);
}

void Runtime::before_step() {
  fault_->check();
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  before_write();
  for (const auto& unit : units_) {
    TORCH_CHECK(unit->opened == 0, "zerocore: expected optimizer.step() outside of ",
                "zerocore.gathered(), got unit '", unit->name, "' opened by it");
    for (const auto& gradients : unit->gradients) gradients->require_reduced();
  }
}

std::string Runtime::settle_gradients(int unit, int flat, const std::string& own) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const Flat& source = this->flat(unit, flat);
  std::string found = own;
  bool any = false;
  for (int64_t i = 0; i < source.size(); ++i) {
    found.at(i) = found[i] && source.grad(i).defined();
    any = any || found[i];
  }
  if (any) gradients(unit, flat).settle();
  return found;
}

void Runtime::adamw(int unit, int flat, const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq,
                    const at::Tensor& ranges, const at::Tensor& hyper,
                    const std::vector<at::Tensor>& counters,
                    const std::optional<at::Tensor>& grad_scale,
                    const std::optional<at::Tensor>& found_inf, const std::string& stepped) {
  Flat& target = this->flat(unit, flat);
  const at::Tensor slot = target.slot();
  const bool cast = slot.defined() && at::isReducedFloatingType(slot.scalar_type());
  ops::fused_adamw_(as_real(target.shard()), as_real(gradients(unit, flat).main()), exp_avg,
                    exp_avg_sq, cast ? std::optional(slot) : std::nullopt, ranges, hyper, counters,
                    grad_scale, found_inf);
  target.tell_written(stepped);
  if (cast) target.slot_written();
}

void Runtime::after_step(int unit, int flat) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  scheduler_->invalidate(unit);
  this->flat(unit, flat).stepped();
}

}  // namespace zerocore
