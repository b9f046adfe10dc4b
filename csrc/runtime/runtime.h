// One sharded model: its units, and what happens to them in forward and backward.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/fault.h"
#include "runtime/flat.h"
#include "runtime/gradients.h"
#include "runtime/hooks.h"
#include "runtime/scheduler.h"
#include "runtime/transport.h"

namespace zerocore {

struct RuntimeOptions {
  GroupNames groups;
  std::shared_ptr<Control> control;  // agreements on the host over all ranks
  std::shared_ptr<Log> log;
  std::shared_ptr<Fault> fault;
  c10::Device device = c10::kCPU;
  bool pairwise = true;               // the transport for gloo
  bool persistent = false;            // full parameters resident (stages 0 to 2)
  bool reshard_after_forward = true;  // else the windows of a forward stay for its backward
  int prefetch = 1;                   // units gathered ahead
  int64_t max_window_bytes = 0;       // 0: no limit; at least the root and the largest unit
  bool register_windows = false;      // window memory comes from the process group
  int64_t launch_bytes = 0;           // collectives share launches up to this size; 0: they do not
  // Of floating tensors; nothing: the parameters' own.
  std::optional<c10::ScalarType> compute_dtype;
  std::optional<c10::ScalarType> reduce_dtype;
  std::optional<c10::ScalarType> accumulate_dtype;
  std::optional<c10::ScalarType> master_dtype;
};

// Parameters of one dtype that share a flat buffer, and their values.
struct FlatParams {
  std::vector<std::string> names;
  std::vector<at::Tensor> params;
  Flat::Values values;
};

// [Note: a step]
//   begin_forward           all parameters show their window, or a guard where it is not gathered
//     pre_forward(unit)     the window is live
//     post_forward(unit)    it is kept until the next unit needs one; outputs get a hook
//   end_forward             all parameters show their shard
//   (first gradient)        begin_backward: gradients are put aside
//     pre_backward(unit)    hook on the unit's outputs: the window is live again
//     gradient ready        hook on each accumulator; the last one packs and launches the reduction
//                           and gives the window back
//     post_backward(unit)   hook on the unit's latest input: gives the window back in any case
//   end_backward            callback of the engine: ranks agree on what was used, the rest is
//                           reduced, gradients and shards are shown
// Everything between forward and end_backward runs in C++ on the threads of autograd, without the
// GIL. Unit 0 is the root: its window stays for the whole pass.
class Runtime : public Windows, public std::enable_shared_from_this<Runtime> {
 public:
  explicit Runtime(RuntimeOptions options);
  ~Runtime() override;

  // Takes over the parameters (collective: rank 0's values are broadcast). Returns the index.
  int add_unit(std::string name, std::vector<FlatParams> flats);
  // Ends the construction.
  void seal();
  // A model that was sharded before this one and is part of it. Ranks may use it differently in a
  // pass of this one: what is collective in it happens on all of them.
  void add_nested(const std::shared_ptr<Runtime>& nested);

  void begin_forward(bool gradients);
  // failed: an exception is on its way.
  void end_forward(const std::vector<at::Tensor>& outputs, bool failed);
  // inputs: when the gradient of the latest of them is there, the backward of this call is over.
  void pre_forward(int unit, const std::vector<at::Tensor>& inputs);
  void post_forward(int unit, const std::vector<at::Tensor>& outputs, bool failed);

  // Shows full parameters, until close(): in their own dtype; inside a forward the windows, which
  // are gathered again for the backward. write: rank 0's content becomes the parameters'. Throws if
  // the parameters were written to otherwise.
  void open(const std::vector<int>& units);
  void close(const std::vector<int>& units, bool write);
  // What was allocated for them, outside of a forward.
  int64_t opened_bytes();
  bool is_open(int unit) const { return units_.at(unit)->opened > 0; }
  // Copies of the full parameters of a flat buffer, in its order.
  std::vector<at::Tensor> full_tensors(int unit, int flat);
  // The same of other values of the parameters, of which `part` (1-D, of the shard's size, any
  // dtype) holds this rank's.
  std::vector<at::Tensor> gather_tensors(int unit, int flat, const at::Tensor& part);

  // How far backwards take their gradients. Without replicas there is no Sync::shard: it is all.
  void set_sync(Sync sync);
  Sync sync() const { return sync_; }

  // Ends what an exception left unfinished; shards can be changed afterwards.
  void settle();
  // The same, and waits until the peers have read the shards: they can be written to afterwards.
  void before_write();
  // An optimizer is about to change shards. Throws if gradients wait for their reduction.
  void before_step();
  void after_step(int unit, int flat);
  // Which of the parameters `own` have a gradient; one byte for each parameter of the flat buffer.
  // If any has, what is in `p.grad` is moved into the main gradient: see Gradients::settle.
  std::string settle_gradients(int unit, int flat, const std::string& own);
  // ops::fused_adamw_ on the shard and the main gradient, of complex numbers as pairs of real ones,
  // and into the slot if there is one. stepped: as from settle_gradients, called before.
  void adamw(int unit, int flat, const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq,
             const at::Tensor& ranges, const at::Tensor& hyper,
             const std::vector<at::Tensor>& counters, const std::optional<at::Tensor>& grad_scale,
             const std::optional<at::Tensor>& found_inf, const std::string& stepped);

  // What is done with the whole model outside of its passes, for the log.
  void begin_span(const std::string& kind, int unit);
  void end_span(const std::string& kind, int unit);

  // From now on events on the device take the times of launches, of computations and of what the
  // computing stream waits for; nothing where work is not enqueued.
  void time_device(bool on);
  // Of the record with this event and launch number, in seconds since time_device; nothing if it
  // was not timed, is not over, or is too old. Any thread may ask.
  std::optional<std::pair<double, double>> device_times(const std::string& event,
                                                        int64_t number) const;

  int units() const { return static_cast<int>(units_.size()); }
  const std::string& unit_name(int unit) const { return units_.at(unit)->name; }
  Flat& flat(int unit, int index) { return *units_.at(unit)->flats.at(index); }
  Gradients& gradients(int unit, int index) { return *units_.at(unit)->gradients.at(index); }
  Log& log() { return *log_; }
  Pool& windows() { return windows_->pool(); }
  Pool& messages() { return buffers_->pool(); }
  Transport& transport() { return *transport_; }
  const Streams& streams() const { return streams_; }

  // Windows, for the scheduler.
  bool start(int unit) override;
  void finish(int unit) override;
  void release(int unit) override;
  void begin_launch() override;
  void end_launch() override;
  void cancel_launch() override;
  int64_t bytes(int unit) const override;
  [[noreturn]] void no_room(int unit) override;

  // For the hooks.
  void pre_backward(Call call, GradientEdge edge);
  void post_backward(Call call);
  void before_accumulation();
  void gradient_ready(int unit, int flat, int64_t param);

 private:
  struct Unit {
    std::string name;
    std::vector<std::unique_ptr<Flat>> flats;
    std::vector<std::unique_ptr<Gradients>> gradients;
    // Nodes that add to p.grad, held so that they stay the same for ever. [flat][param]
    std::vector<std::vector<c10::intrusive_ptr<torch::autograd::Node>>> accumulators;
    std::vector<std::vector<bool>> arrived;  // in this backward
    int expected = 0;                        // parameters that need a gradient
    int ready = 0;                           // of them, those that have it
    bool all_trainable = false;
    bool in_backward = false;             // the window is needed by a backward under way
    bool issued = false;                  // the reduction of this backward was launched
    bool late = false;                    // a gradient came after it
    std::vector<std::vector<bool>> used;  // gradients that went into it. [flat][param]
    std::vector<int64_t> running;         // calls whose forward is under way, innermost last
    // With the gradient of its input the backward of a call is over.
    std::vector<std::pair<GradientEdge, int64_t>> inputs;
    std::vector<int64_t> differentiating;  // calls whose backward is under way
    bool borrowed = false;                 // read by others in this pass, through open()
    int opened = 0;                        // open() without close()
    bool write = false;                    // some close() wanted to
    std::vector<at::Tensor> originals;     // full buffers while opened outside a forward. [flat]
    std::vector<int64_t> versions;         // [flat]
  };

  void begin_family();
  void gather_ahead(const std::weak_ptr<Runtime>& outer);
  void invalidate_stale();
  bool computing() const;
  void close_unit(int unit, bool write);
  void show(int unit, View view);
  void show_all(View view);
  void hold_accumulators(int unit);
  void notice_changes();
  GradientDtypes gradient_dtypes(const Flat& flat) const;
  at::Tensor gather_original(int unit, int flat);
  void shards_ready();
  void hook_outputs(Call call, const std::vector<at::Tensor>& outputs);
  void hook_inputs(Call call, const std::vector<at::Tensor>& inputs);
  Call end_call(int unit);

  void begin_backward();
  void enter_backward_of(int unit);
  void leave_backward_of(Call call);
  void end_backward();
  void take_gradients_of(int unit);
  void launch_reductions();
  void finish_backward_of(int unit);
  // What ranks tell each other at the end of a backward: see [Note: agreement].
  struct Agreement {
    std::vector<std::vector<std::vector<bool>>> used;  // by any rank: [unit][flat][param]
    std::vector<bool> late;
  };
  Agreement agree();
  at::Tensor agreement_bytes(const Agreement& local) const;
  void reduce_rest(const Agreement& agreement);
  [[noreturn]] void report_divergence();
  [[noreturn]] void collective_failed(const char* what, int unit, const std::exception& error);
  // Does what waits for other ranks; if that fails, the error says where the ranks part.
  template <class Wait>
  void waiting(const char* what, int unit, const Wait& wait);
  // The same, for an agreement on the host, which is logged as one.
  template <class Wait>
  void agreeing(const char* what, const Wait& wait);
  at::Tensor gather_full(int unit, const std::function<at::Tensor()>& gather);
  const char* dtype(int unit, const char* kind) const;
  void need(int unit);
  void note_exception(int unit);
  void recover();
  void adopt_observed_order();
  void backward_is_gone(int64_t number);
  void drop_gradients();
  void abandon_backward();
  void note(const char* event, const char* kind, int unit, int64_t elements);
  // Notes of the two ends of something that the computing stream does, or waits for.
  void begin(const char* event, const char* kind, int unit);
  void end(const char* event, const char* kind, int unit);
  int64_t elements(int unit) const;

  const RuntimeOptions options_;
  Streams& streams_;
  std::shared_ptr<Log> log_;
  std::shared_ptr<DevicePool> buffers_;
  std::shared_ptr<Transport> transport_;
  std::shared_ptr<DevicePool> windows_;
  const std::shared_ptr<Control> control_;
  const std::shared_ptr<Fault> fault_;
  std::vector<std::unique_ptr<Unit>> units_;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<ReduceOrder> reductions_;
  // Hooks come from the threads of autograd, calls from the user's.
  std::recursive_mutex mutex_;
  // Models in this one, and the last one to run of those that this is part of. Nobody waits for
  // another's mutex while holding its own.
  std::vector<std::weak_ptr<Runtime>> nested_;
  std::weak_ptr<Runtime> outer_;
  int next_channel_ = 0;
  int64_t next_call_ = 0;
  bool raised_ = false;  // an exception of this pass is in the log
  int depth_ = 0;        // of nested forwards of the root
  Sync sync_ = Sync::all;
  bool in_backward_ = false;
  // Alive as long as the engine's task of the backward under way: one that failed is gone.
  std::weak_ptr<int64_t> backward_task_;
  int64_t backward_number_ = 0;  // of the newest
  bool dropped_ = false;         // the gradients of the backward under way
  Sync backward_sync_ = Sync::all;
  // Units whose gradients were taken and wait for the next launch; bytes of their flat buffers.
  std::vector<int> taken_;
  int64_t taken_bytes_ = 0;
  // The gradients of the newest launch, and the end of their packing.
  std::optional<std::pair<Mark, std::vector<at::Tensor>>> packing_;
  bool order_agreed_ = false;
  // Intervals of the computing stream; those that have begun.
  struct Interval {
    const char* kind;
    int unit;
    int64_t number;
  };
  Times times_;
  std::vector<Interval> intervals_;
  int64_t next_interval_ = 0;
  const char* phase_ = "idle";
};

template <class Wait>
void Runtime::waiting(const char* what, int unit, const Wait& wait) {
  fault_->check();
  try {
    wait();
  } catch (const Diverged&) {
    throw;
  } catch (const std::exception& error) {
    collective_failed(what, unit, error);
  }
}

template <class Wait>
void Runtime::agreeing(const char* what, const Wait& wait) {
  if (control_->ranks() == 1) return;
  note("enter", what, -1, 0);
  waiting(what, -1, wait);
  note("leave", what, -1, 0);
}

}  // namespace zerocore
