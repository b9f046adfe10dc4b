#include "runtime/runtime.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "runtime/hooks.h"

namespace zerocore {
namespace {

constexpr int kRoot = 0;

// A forward inside of a backward is one that is done again.
const char* forward_kind() { return inside_backward() ? "recompute" : "compute"; }

std::shared_ptr<Transport> make_transport(const RuntimeOptions& options,
                                          const std::shared_ptr<DevicePool>& buffers,
                                          const std::shared_ptr<Log>& log) {
  return options.pairwise ? make_pairwise_transport(options.groups, buffers, log)
                          : make_native_transport(options.groups, buffers, log);
}

bool needs_grad(const std::vector<at::Tensor>& tensors) {
  return c10::GradMode::is_enabled() &&
         std::any_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& tensor) { return tensor.requires_grad(); });
}

std::shared_ptr<DevicePool> make_windows(const RuntimeOptions& options, Streams& streams,
                                         const std::shared_ptr<Transport>& transport) {
  DevicePool::Allocate allocate;
  if (options.register_windows) {
    allocate = [transport](int64_t bytes) { return transport->allocate(bytes); };
  }
  // For the stream that computes: it uses them last, so they need no wait on their way back.
  return std::make_shared<DevicePool>(streams, std::nullopt, options.max_window_bytes,
                                      std::move(allocate));
}

}  // namespace

Runtime::Runtime(RuntimeOptions options)
    : options_(std::move(options)),
      streams_(Streams::of(options_.device)),
      log_(options_.log),
      buffers_(std::make_shared<DevicePool>(streams_, streams_.reduce(), /*budget=*/0)),
      transport_(make_transport(options_, buffers_, log_)),
      windows_(make_windows(options_, streams_, transport_)),
      control_(options_.control),
      fault_(options_.fault) {}

Runtime::~Runtime() = default;

int Runtime::add_unit(std::string name, std::vector<FlatParams> flats) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  auto unit = std::make_unique<Unit>();
  unit->name = std::move(name);
  const double scale = 1.0 / (static_cast<double>(transport_->shards()) * transport_->replicas());
  for (FlatParams& group : flats) {
    FlatOptions flat_options{options_.compute_dtype, options_.master_dtype, options_.persistent};
    std::unique_ptr<Flat> flat;
    waiting("broadcast of the initial parameters", -1, [&] {
      flat =
          std::make_unique<Flat>(unit->name, std::move(group.names), std::move(group.params),
                                 group.values, flat_options, *transport_, windows_, next_channel_);
    });
    transport_->set_unit(next_channel_, units());
    next_channel_ += 2;
    unit->gradients.push_back(
        std::make_unique<Gradients>(*flat, gradient_dtypes(*flat), scale, buffers_));
    unit->accumulators.emplace_back(flat->size());
    unit->arrived.emplace_back(flat->size(), false);
    unit->used.emplace_back(flat->size(), false);
    unit->flats.push_back(std::move(flat));
  }
  units_.push_back(std::move(unit));
  return static_cast<int>(units_.size()) - 1;
}

GradientDtypes Runtime::gradient_dtypes(const Flat& flat) const {
  const c10::ScalarType own = flat.shard().scalar_type();
  if (!c10::isFloatingType(own)) return {own, own};
  return {options_.reduce_dtype.value_or(flat.compute_dtype()),
          options_.accumulate_dtype.value_or(own)};
}

void Runtime::set_sync(Sync sync) {
  sync_ = sync == Sync::shard && transport_->replicas() == 1 ? Sync::all : sync;
}

void Runtime::seal() {
  scheduler_ = std::make_unique<Scheduler>(*this, units(), options_.prefetch, options_.persistent,
                                           options_.launch_bytes);
  reductions_ = std::make_unique<ReduceOrder>(units());
}

void Runtime::add_nested(const std::shared_ptr<Runtime>& nested) {
  nested_.push_back(nested);
  nested->outer_ = weak_from_this();
}

int64_t Runtime::bytes(int unit) const {
  int64_t bytes = 0;
  for (const auto& flat : units_[unit]->flats) bytes += flat->window_bytes();
  return bytes;
}

void Runtime::show(int unit, View view) {
  for (auto& flat : units_[unit]->flats) flat->show(view);
}

void Runtime::show_all(View view) {
  for (int unit = 0; unit < units(); ++unit) show(unit, view);
}

// ---- windows, for the scheduler --------------------------------------------------------------

void Runtime::begin_launch() {
  windows_->begin_moment();
  transport_->begin_launch();
}

void Runtime::end_launch() {
  transport_->end_launch();
  windows_->end_moment();
}

void Runtime::cancel_launch() {
  transport_->cancel_launch();
  windows_->end_moment();
}

bool Runtime::start(int unit) {
  auto& flats = units_[unit]->flats;
  int64_t elements = 0;
  for (size_t i = 0; i < flats.size(); ++i) {
    if (!flats[i]->stale()) continue;
    waiting("all-gather", unit, [&] { flats[i]->drain(); });
    if (!flats[i]->start_gather()) {
      for (size_t j = 0; j < i; ++j) flats[j]->release_window();
      return false;
    }
    elements += flats[i]->layout().total();
  }
  if (elements > 0) note("launch", "all_gather", unit, elements);
  return true;
}

void Runtime::finish(int unit) {
  begin("wait", "all_gather", unit);
  waiting("all-gather", unit, [&] {
    for (auto& flat : units_[unit]->flats) flat->finish_gather();
  });
  end("done", "all_gather", unit);
}

void Runtime::release(int unit) {
  const Flat* written = nullptr;
  for (auto& flat : units_[unit]->flats) {
    waiting("all-gather", unit, [&] { flat->drain(); });
    flat->release_window();
    flat->show(depth_ > 0 ? View::guard : View::shard);
    if (flat->take_written()) written = flat.get();
  }
  note("release", "window", unit, elements(unit));
  TORCH_CHECK(
      written == nullptr, "zerocore: a parameter of unit '", unit_name(unit),
      "' was written to while it was gathered, and the change would be lost; expected ",
      "parameters to be changed between steps, or in zerocore.gathered(module, write=True)");
}

void Runtime::no_room(int unit) {
  TORCH_CHECK(false, "max_window_bytes: unit '", unit_name(unit), "' needs a window of ",
              bytes(unit), " bytes, but ", windows_->pool().leased(), " of ",
              options_.max_window_bytes, " are in use; expected a larger budget, smaller units, ",
              "or fewer modules opened at once");
}

// ---- forward ---------------------------------------------------------------------------------

// With resident windows all gathers start at once, called for or not: a rank that leaves a unit out
// still sends its part. So do those of nested models.
void Runtime::gather_ahead(const std::weak_ptr<Runtime>& outer) {
  std::unique_lock<std::recursive_mutex> lock(mutex_);
  outer_ = outer;
  if (options_.persistent && !computing() && !in_backward_) {
    notice_changes();
    shards_ready();
    invalidate_stale();
    scheduler_->start_all();
  }
  lock.unlock();
  for (const auto& nested : nested_) {
    if (auto model = nested.lock()) model->gather_ahead(weak_from_this());
  }
}

void Runtime::invalidate_stale() {
  for (int unit = 0; unit < units(); ++unit) {
    const auto& flats = units_[unit]->flats;
    const bool stale =
        std::any_of(flats.begin(), flats.end(), [](const auto& flat) { return flat->stale(); });
    if (stale) scheduler_->invalidate(unit);
  }
}

void Runtime::begin_forward(bool gradients) {
  fault_->check();
  if (!inside_backward()) {
    for (const auto& nested : nested_) {
      if (auto model = nested.lock()) model->gather_ahead(weak_from_this());
    }
  }
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (depth_ > 0) {
    ++depth_;
    return;
  }
  for (const auto& unit : units_) {
    TORCH_CHECK(unit->opened == 0, "zerocore: expected the forward outside of ",
                "zerocore.gathered(), got unit '", unit->name, "' opened by it");
  }
  if (!inside_backward()) {
    settle();
    phase_ = "forward";
    log_->begin_forward();
    raised_ = false;
    scheduler_->begin_pass(gradients);
    for (const auto& unit : units_) {
      unit->borrowed = false;
      unit->inputs.clear();
    }
  }
  depth_ = 1;
  if (!inside_backward()) shards_ready();
  invalidate_stale();
  if (options_.persistent) scheduler_->start_all();
  // Nobody reads a unit before its module is called: whether its window is there yet would depend
  // on what happened before. Replicated parameters are always there.
  const bool replicated = options_.persistent && transport_->shards() == 1;
  for (int unit = 0; unit < units(); ++unit) {
    if (replicated) scheduler_->demand(unit);
    show(unit, replicated ? View::window : View::guard);
    hold_accumulators(unit);
  }
  pre_forward(kRoot, {});
}

// Gathers see what the current stream was given until now, the last step above all.
void Runtime::shards_ready() {
  streams_.wait(streams_.gather(), streams_.here(streams_.current()), Wait::shards_written);
}

// Gradients that were cleared since they were reduced have been used: by an optimizer that tells,
// or by code of the user's that wrote to p.data, which no version counter notices.
void Runtime::notice_changes() {
  for (const auto& unit : units_) {
    for (size_t f = 0; f < unit->flats.size(); ++f) {
      unit->flats[f]->adopt_replaced();
      if (options_.persistent && unit->gradients[f]->cleared()) unit->flats[f]->invalidate();
      unit->gradients[f]->free_cleared();
    }
  }
}

void Runtime::end_forward(const std::vector<at::Tensor>& outputs, bool failed) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (depth_ == 0 || --depth_ > 0) return;
  if (failed) note_exception(kRoot);
  end("end", forward_kind(), kRoot);
  const Call call = end_call(kRoot);
  const bool gradients = !failed && needs_grad(outputs);
  if (gradients) hook_outputs(call, outputs);
  if (inside_backward()) return;
  show_all(View::shard);
  if (!gradients && !fault_->broken()) {
    scheduler_->release_all();
    if (!failed) scheduler_->end_pass();
  }
  if (failed && c10::GradMode::is_enabled()) recover();
  phase_ = "idle";
}

void Runtime::pre_forward(int unit, const std::vector<at::Tensor>& inputs) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  need(unit);
  scheduler_->demand(unit);
  show(unit, View::window);
  hold_accumulators(unit);
  const Call call{unit, next_call_++};
  units_[unit]->running.push_back(call.id);
  if (!options_.persistent) hook_inputs(call, inputs);
  begin("begin", forward_kind(), unit);
}

void Runtime::post_forward(int unit, const std::vector<at::Tensor>& outputs, bool failed) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  Unit& state = *units_[unit];
  const Call call = end_call(unit);
  if (failed) note_exception(unit);
  end("end", forward_kind(), unit);
  const bool gradients = !failed && needs_grad(outputs);
  if (gradients) hook_outputs(call, outputs);
  // Tensors that the unit gave away by other ways than its output need it from the start of
  // backward.
  if (outputs.empty() && !failed && c10::GradMode::is_enabled()) state.borrowed = true;
  if (!state.running.empty() || state.in_backward) return;
  // A recomputation inside a backward is followed by its own backward.
  const bool alone = depth_ == 0 && !inside_backward();
  if (alone && failed && c10::GradMode::is_enabled() && !computing()) recover();
  if (alone) {
    show(unit, View::shard);
  } else if (!options_.persistent) {
    // Even if the window stays: a read by somebody else would not be gathered for its backward.
    show(unit, View::guard);
  }
  if (gradients && !options_.reshard_after_forward) return;
  if (alone && !gradients) {
    scheduler_->release(unit);
  } else {
    scheduler_->keep(unit);
  }
}

// The node that adds to p.grad remembers the parameter's shape and dtype: it is made while the
// parameter shows the window or the guard, which have the shape and dtype of local gradients.
void Runtime::hold_accumulators(int unit) {
  Unit& state = *units_[unit];
  for (size_t f = 0; f < state.flats.size(); ++f) {
    const Flat& flat = *state.flats[f];
    for (int64_t i = 0; i < flat.size(); ++i) {
      auto& accumulator = state.accumulators[f][i];
      if (accumulator || !flat.param(i).requires_grad()) continue;
      accumulator = torch::autograd::impl::grad_accumulator(flat.param(i));
      hook_accumulator(*accumulator, weak_from_this(), unit, static_cast<int>(f), i);
    }
  }
}

Call Runtime::end_call(int unit) {
  std::vector<int64_t>& running = units_[unit]->running;
  Call call{unit, -1};
  if (!running.empty()) {
    call.id = running.back();
    running.pop_back();
  }
  return call;
}

void Runtime::hook_outputs(Call call, const std::vector<at::Tensor>& outputs) {
  for (const at::Tensor& output : outputs) {
    if (output.requires_grad() && !output.is_leaf()) hook_output(output, shared_from_this(), call);
  }
}

// Autograd runs what was recorded last first. When it gets to the node that made the latest input,
// all of the unit's nodes that were ready have run: the others belong to other calls.
void Runtime::hook_inputs(Call call, const std::vector<at::Tensor>& inputs) {
  if (!c10::GradMode::is_enabled()) return;
  const at::Tensor* latest = nullptr;
  for (const at::Tensor& input : inputs) {
    if (!input.requires_grad() || input.is_leaf()) continue;
    if (latest == nullptr || input.grad_fn()->sequence_nr() > latest->grad_fn()->sequence_nr()) {
      latest = &input;
    }
  }
  if (latest == nullptr) return;
  hook_input(*latest, shared_from_this(), call);
  units_[call.unit]->inputs.emplace_back(gradient_edge(*latest), call.id);
}

// ---- outside of a pass -----------------------------------------------------------------------

void Runtime::open(const std::vector<int>& units) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const bool forward = computing();
  if (!forward) settle();
  shards_ready();
  for (int index : units) {
    Unit& unit = *units_.at(index);
    if (unit.opened++ > 0) continue;
    unit.write = false;
    for (auto& flat : unit.flats) {
      if (forward) break;
      const at::Tensor full = gather_original(index, static_cast<int>(unit.originals.size()));
      flat->open_original(full);
      unit.originals.push_back(full);
      unit.versions.push_back(flat->versions());
    }
    if (!forward) continue;
    unit.borrowed = true;
    need(index);
    scheduler_->demand(index);
    show(index, View::window);
    hold_accumulators(index);
    for (auto& flat : unit.flats) unit.versions.push_back(flat->versions());
  }
}

void Runtime::close(const std::vector<int>& units, bool write) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  std::string changed;
  for (int index : units) {
    Unit& unit = *units_.at(index);
    unit.write = unit.write || write;
    if (--unit.opened > 0) continue;
    for (size_t f = 0; f < unit.flats.size(); ++f) {
      if (unit.flats[f]->versions() != unit.versions[f] && !unit.write) changed = unit.name;
    }
    close_unit(index, unit.write);
  }
  TORCH_CHECK(changed.empty(), "zerocore.gathered: expected write=True where parameters are ",
              "changed, got a change to unit '", changed, "' without it; the change is undefined");
}

void Runtime::close_unit(int index, bool write) {
  Unit& unit = *units_[index];
  unit.versions.clear();
  if (unit.originals.empty()) {
    TORCH_CHECK(!write, "zerocore.gathered: expected write=True outside of a forward, got it for ",
                "unit '", unit.name, "' in one");
    if (!unit.running.empty()) return;
    if (!options_.persistent) show(index, View::guard);
    scheduler_->keep(index);
    return;
  }
  for (size_t f = 0; f < unit.flats.size(); ++f) {
    waiting("broadcast of written parameters", index,
            [&] { unit.flats[f]->close_original(unit.originals[f], write); });
  }
  if (write) scheduler_->invalidate(index);
  unit.originals.clear();
}

at::Tensor Runtime::gather_original(int unit, int flat) {
  // What the last gradients were used for cannot be known here; a gather is safe.
  if (gradients(unit, flat).shown()) this->flat(unit, flat).invalidate();
  return gather_full(unit, [&] { return this->flat(unit, flat).gather_original(); });
}

std::vector<at::Tensor> Runtime::full_tensors(int unit, int flat) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  TORCH_CHECK(!computing(), "zerocore: expected state_dict() and full_state_dict() to be called ",
              "outside of a forward of the model, got a call in one");
  settle();
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  const Flat& source = this->flat(unit, flat);
  const at::Tensor full =
      units_[unit]->originals.empty() ? gather_original(unit, flat) : units_[unit]->originals[flat];
  return source.clones(full);
}

std::vector<at::Tensor> Runtime::gather_tensors(int unit, int flat, const at::Tensor& part) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  Flat& source = this->flat(unit, flat);
  TORCH_CHECK_VALUE(part.dim() == 1 && part.numel() == source.layout().shard_numel(),
                    "zerocore: expected a 1-D tensor of ", source.layout().shard_numel(),
                    " elements, as the shard of unit '", unit_name(unit), "' has, got the shape ",
                    part.sizes());
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  return source.clones(gather_full(unit, [&] { return source.gather(part); }));
}

bool Runtime::computing() const {
  return depth_ > 0 || std::any_of(units_.begin(), units_.end(),
                                   [](const auto& unit) { return !unit->running.empty(); });
}

void Runtime::settle() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  TORCH_CHECK(!inside_backward(), "zerocore: expected to be called outside of a backward, got a ",
              "call from inside one (an optimizer step in a hook, for example)");
  if (in_backward_) abandon_backward();
  if (depth_ > 0) {
    depth_ = 0;
    scheduler_->release_all();
    show_all(View::shard);
  }
  for (const auto& unit : units_) unit->running.clear();
  std::erase_if(intervals_, [](const Interval& interval) { return interval.unit >= 0; });
  notice_changes();
  phase_ = "idle";
}

}  // namespace zerocore
