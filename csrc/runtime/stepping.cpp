// What an optimizer does to a model.
#include "runtime/runtime.h"

namespace zerocore {

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

at::Tensor Runtime::main_gradient(int unit, int flat) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  gradients(unit, flat).settle();
  return gradients(unit, flat).main();
}

void Runtime::after_step(int unit, int flat) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  scheduler_->invalidate(unit);
  this->flat(unit, flat).stepped();
}

}  // namespace zerocore
