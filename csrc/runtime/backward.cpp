// The backward half of the runtime.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "runtime/hooks.h"
#include "runtime/runtime.h"

namespace zerocore {

void Runtime::begin_backward() {
  // Nested backwards are part of the one under way, unless that one has failed.
  if (in_backward_ && !backward_task_.expired()) return;
  if (in_backward_) abandon_backward();
  in_backward_ = true;
  dropped_ = false;
  // Goes with the backward, whether that ends or fails. On a device that is a thread of its own,
  // which may let go of one that failed when the next is under way.
  std::shared_ptr<int64_t> task(new int64_t(++backward_number_),
                                [runtime = weak_from_this()](const int64_t* number) {
                                  if (auto self = runtime.lock()) self->backward_is_gone(*number);
                                  delete number;
                                });
  backward_task_ = task;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [self = shared_from_this(), task] { self->end_backward(); });
  backward_sync_ = sync_;
  phase_ = "backward";
  shards_ready();
  std::vector<bool> participates;
  for (auto& unit : units_) {
    unit->expected = 0;
    unit->ready = 0;
    unit->issued = unit->late = unit->in_backward = false;
    unit->differentiating.clear();
    unit->all_trainable = true;
    for (size_t f = 0; f < unit->flats.size(); ++f) {
      const Flat& flat = *unit->flats[f];
      unit->arrived[f].assign(flat.size(), false);
      unit->used[f].assign(flat.size(), false);
      for (int64_t i = 0; i < flat.size(); ++i) {
        const bool trainable = flat.param(i).requires_grad();
        unit->expected += trainable;
        unit->all_trainable = unit->all_trainable && trainable;
      }
      unit->gradients[f]->begin(sync_);
    }
    participates.push_back(unit->expected > 0);
  }
  reductions_->begin(std::move(participates));
  // The root's parameters may be needed by any node: a loss may come from inside the model too. So
  // may what was read through open(), and any resident parameter.
  if (scheduler_->live(0)) enter_backward_of(0);
  for (int unit = 0; unit < units(); ++unit) {
    if (units_[unit]->borrowed) enter_backward_of(unit);
    if (options_.persistent && scheduler_->live(unit)) show(unit, View::window);
  }
}

// Models in one another begin together, the outermost first: every rank then ends them in the same
// order, whichever of them it uses.
void Runtime::begin_family() {
  std::unique_lock<std::recursive_mutex> lock(mutex_);
  begin_backward();
  lock.unlock();
  for (const auto& nested : nested_) {
    if (auto model = nested.lock()) model->begin_family();
  }
}

void Runtime::before_accumulation() {
  {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (in_backward_ && !backward_task_.expired()) return;
  }
  std::shared_ptr<Runtime> outermost = shared_from_this();
  while (auto outer = outermost->outer_.lock()) outermost = outer;
  outermost->begin_family();
}

void Runtime::pre_backward(Call call, GradientEdge edge) {
  before_accumulation();
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  auto& calls = units_[call.unit]->differentiating;
  if (std::find(calls.begin(), calls.end(), call.id) == calls.end()) calls.push_back(call.id);
  // The output of one call is the input of the next: that one's backward is over, and its window
  // makes room for this one, though its own hook on the same tensor has yet to come.
  for (int unit = 1; unit < units(); ++unit) {
    if (!units_[unit]->in_backward) continue;
    for (const auto& [input, id] : units_[unit]->inputs) {
      if (input == edge && id != call.id) leave_backward_of({unit, id});
    }
  }
  enter_backward_of(call.unit);
}

// Calls of one unit may follow each other, or be nested: its window goes with the last of them.
void Runtime::leave_backward_of(Call call) {
  auto& calls = units_[call.unit]->differentiating;
  const auto found = std::find(calls.begin(), calls.end(), call.id);
  if (found == calls.end()) return;
  calls.erase(found);
  if (calls.empty()) finish_backward_of(call.unit);
}

void Runtime::enter_backward_of(int unit) {
  Unit& state = *units_[unit];
  if (state.in_backward) return;
  state.in_backward = true;
  need(unit);
  scheduler_->demand(unit);
  show(unit, View::window);
  begin("begin", "compute", unit);
}

void Runtime::gradient_ready(int unit, int flat, int64_t param) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  Unit& state = *units_[unit];
  if (state.issued) state.late = true;
  if (state.arrived[flat][param]) return;
  state.arrived[flat][param] = true;
  if (++state.ready < state.expected) return;
  if (backward_sync_ == Sync::none) {
    take_gradients_of(unit);
  } else {
    reductions_->ready(unit);
    for (int next : reductions_->take()) take_gradients_of(next);
  }
  // With a gradient for every parameter no node is left that reads one (the root stays: nested
  // backwards may compute parts of it again).
  if (state.all_trainable && unit != 0) finish_backward_of(unit);
}

void Runtime::post_backward(Call call) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (call.unit != 0) leave_backward_of(call);
}

void Runtime::finish_backward_of(int unit) {
  Unit& state = *units_[unit];
  if (!state.in_backward) return;
  state.in_backward = false;
  state.differentiating.clear();
  end("end", "compute", unit);
  scheduler_->release(unit);
  show(unit, View::shard);
}

void Runtime::take_gradients_of(int unit) {
  Unit& state = *units_[unit];
  if (backward_sync_ != Sync::none) state.issued = true;
  for (size_t f = 0; f < state.flats.size(); ++f) {
    Gradients& gradients = *state.gradients[f];
    bool trainable = false;
    for (int64_t i = 0; i < state.flats[f]->size(); ++i) {
      trainable = trainable || state.flats[f]->param(i).requires_grad();
      if (gradients.has_local(i)) state.used[f][i] = true;
    }
    if (trainable) gradients.take();
  }
  if (backward_sync_ == Sync::none) return;
  taken_.push_back(unit);
  taken_bytes_ += bytes(unit);
  // Less than gathers share: full gradients wait for it.
  if (taken_bytes_ >= options_.launch_bytes / 4) launch_reductions();
}

// [Note: reductions behind] Where work is enqueued the host is ahead of the device, and the memory
// of a gradient may not be used again before it was packed. So it is held here until the
// computation has waited for that, which it does before the next launch: the packing is over by
// then, unless the network does not keep up (a packing starts when the reduction before it has
// ended), and then the wait is what bounds the memory.
void Runtime::launch_reductions() {
  if (taken_.empty()) return;
  fault_->check();
  streams_.wait(streams_.reduce(), streams_.here(streams_.current()), Wait::gradients_ready);
  if (packing_) {
    begin("wait", "packing", -1);
    streams_.wait(streams_.current(), packing_->first, Wait::gradients_packed);
    end("done", "packing", -1);
  }
  packing_.reset();
  transport_->make_room();
  std::vector<at::Tensor> held;
  transport_->begin_launch();
  try {
    for (int unit : std::exchange(taken_, {})) {
      for (auto& gradients : units_[unit]->gradients) {
        for (at::Tensor& tensor : gradients->reduce()) held.push_back(std::move(tensor));
      }
      note("launch", "reduce", unit, elements(unit));
    }
  } catch (...) {
    transport_->cancel_launch();
    throw;
  }
  if (streams_.asynchronous()) packing_.emplace(streams_.mark(streams_.reduce()), std::move(held));
  transport_->end_launch();
  taken_bytes_ = 0;
}

void Runtime::end_backward() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (!in_backward_) return;
  at::NoGradGuard no_grad;
  if (backward_sync_ != Sync::none) {
    const Agreement agreement = agree();
    reduce_rest(agreement);
    launch_reductions();
    for (int unit = 0; unit < units(); ++unit) {
      Unit& state = *units_[unit];
      if (state.issued) begin("wait", "reduce", unit);
      waiting("reduction", unit, [&] {
        for (size_t f = 0; f < state.flats.size(); ++f) {
          state.gradients[f]->finish(agreement.used[unit][f]);
        }
      });
      if (state.issued) end("done", "reduce", unit);
    }
    packing_.reset();
    if (!order_agreed_) adopt_observed_order();
  } else {
    for (auto& unit : units_) {
      for (auto& gradients : unit->gradients) gradients->finish({});
    }
  }
  for (int unit = 0; unit < units(); ++unit) finish_backward_of(unit);
  scheduler_->end_pass();
  scheduler_->release_all();
  show_all(View::shard);
  in_backward_ = false;
  phase_ = "idle";
}

// [Note: agreement] At the end of a reducing backward the ranks take the maximum over
//   [history: 8 bytes][its complement: 8][late: 1 a unit][used: 1 a parameter]
// so that all know which parameters somebody used, which units somebody has to reduce again, and (a
// maximum and the maximum of complements are complements only if all were equal) that all gathered
// in the same order, and went on after as many exceptions.
at::Tensor Runtime::agreement_bytes(const Agreement& local) const {
  int64_t count = 16 + units();
  for (const auto& unit : local.used) {
    for (const auto& flat : unit) count += static_cast<int64_t>(flat.size());
  }
  at::Tensor bytes = at::empty({count}, at::kByte);
  uint8_t* next = bytes.data_ptr<uint8_t>();
  uint64_t history = static_cast<uint64_t>(log_->recoveries()) * 0x9e3779b97f4a7c15;
  if (!options_.persistent) history ^= scheduler_->fingerprint();
  for (int shift = 0; shift < 64; shift += 8) *next++ = static_cast<uint8_t>(history >> shift);
  for (int shift = 0; shift < 64; shift += 8) *next++ = static_cast<uint8_t>(~history >> shift);
  for (bool late : local.late) *next++ = late;
  for (const auto& unit : local.used) {
    for (const auto& flat : unit) {
      for (bool used : flat) *next++ = used;
    }
  }
  return bytes;
}

Runtime::Agreement Runtime::agree() {
  Agreement result;
  for (const auto& unit : units_) {
    result.late.push_back(unit->late);
    result.used.push_back(unit->used);
    for (size_t f = 0; f < unit->flats.size(); ++f) {
      for (int64_t i = 0; i < unit->flats[f]->size(); ++i) {
        if (unit->gradients[f]->has_local(i)) result.used.back()[f][i] = true;
      }
    }
  }
  if (control_->ranks() == 1) return result;
  const at::Tensor bytes = agreement_bytes(result);
  log_->count("control", bytes.numel(), bytes.numel());
  agreeing("agreement", [&] { control_->max(Topic::backward, bytes); });
  const uint8_t* next = bytes.data_ptr<uint8_t>();
  for (int i = 0; i < 8; ++i) {
    if (next[i] + next[i + 8] != 255) report_divergence();
  }
  next += 16;
  for (size_t unit = 0; unit < result.late.size(); ++unit) result.late[unit] = *next++ != 0;
  for (auto& unit : result.used) {
    for (auto& flat : unit) {
      for (size_t i = 0; i < flat.size(); ++i) flat[i] = *next++ != 0;
    }
  }
  return result;
}

// Units whose gradients never all came, as far as some rank has any; then those that got more
// gradients after their reduction (a parameter used in several nested backwards).
void Runtime::reduce_rest(const Agreement& agreement) {
  std::vector<bool> wanted;
  for (const auto& unit : agreement.used) {
    bool any = false;
    for (const auto& flat : unit)
      any = any || std::find(flat.begin(), flat.end(), true) != flat.end();
    wanted.push_back(any);
  }
  for (int unit : reductions_->flush(wanted)) take_gradients_of(unit);
  for (int unit : reductions_->agreed()) {
    if (!agreement.late[unit]) continue;
    launch_reductions();  // what was taken before
    take_gradients_of(unit);
  }
}

void Runtime::adopt_observed_order() {
  const std::vector<int> observed = reductions_->observed();
  at::Tensor own = at::empty({units()}, at::kLong);
  std::copy(observed.begin(), observed.end(), own.data_ptr<int64_t>());
  at::Tensor first = own;
  if (control_->ranks() > 1) {
    log_->count("control", own.numel(), static_cast<int64_t>(own.nbytes()));
  }
  agreeing("order", [&] { first = control_->gather(Topic::order, own)[0]; });
  reductions_->adopt({first.data_ptr<int64_t>(), first.data_ptr<int64_t>() + units()});
  order_agreed_ = true;
}

// The rest of what a failed backward leaves is put in order by whoever comes next: it may have to
// wait for other ranks, and the error is on its way to the user.
void Runtime::backward_is_gone(int64_t number) {
  // Perhaps on a thread that has the GIL, for which the one in there may wait: then the next call
  // finds that the backward is gone.
  const std::unique_lock<std::recursive_mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || !in_backward_ || number != backward_number_) return;
  drop_gradients();
  if (depth_ == 0) show_all(View::shard);
}

void Runtime::drop_gradients() {
  if (std::exchange(dropped_, true)) return;
  int unit = 0;
  for (int i = 1; i < units(); ++i) unit = units_[i]->in_backward ? i : unit;
  note_exception(unit);
  recover();
  taken_.clear();
  taken_bytes_ = 0;
  for (auto& unit : units_) {
    for (auto& gradients : unit->gradients) gradients->drop();
  }
}

void Runtime::abandon_backward() {
  drop_gradients();
  for (auto& unit : units_) {
    unit->in_backward = false;
    for (auto& gradients : unit->gradients) gradients->abandon();
  }
  packing_.reset();
  scheduler_->release_all();
  show_all(View::shard);
  in_backward_ = false;
}

}  // namespace zerocore
