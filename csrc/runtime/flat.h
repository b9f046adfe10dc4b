// A flat buffer of parameters: this rank's shard, the window, and what the parameters show of them.
#pragma once

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/layout.h"
#include "runtime/memory.h"
#include "runtime/transport.h"

namespace zerocore {

// What the parameters are views of. They are the same objects in every state.
enum class View {
  shard,     // this rank's part, shape (local elements, 1, ..., 1); where optimizers work
  window,    // the full parameters in compute dtype; where modules work
  original,  // the full parameters in their own dtype, outside of a pass
  guard,     // the full shape over no memory: reading it raises an error that says what to do
};

struct FlatOptions {
  // Dtype that modules compute in, for floating parameters; nothing: the parameters' own.
  std::optional<c10::ScalarType> compute_dtype;
  // Dtype of the shard, for trainable floating parameters that have no wider one; nothing: the
  // dtype that modules compute in.
  std::optional<c10::ScalarType> master_dtype;
  // The window is resident: the full parameters live always (stages 0 to 2).
  bool persistent = false;
};

// [Note: windows]
// The window is one StorageImpl for life. Unsharding puts leased memory under it, resharding takes
// the memory away: views of it that autograd saved in forward are valid again once the window is
// gathered before backward, at whatever address. While the memory is gone, reading any such view
// raises an error instead of touching freed memory. The parameters' own full views share the
// storage; which tensor a parameter shows is switched by copying metadata into it, which keeps the
// object, its hooks, its version counter and its gradient accumulator.
//
// With a persistent window in the shard's dtype the shard IS this rank's slot of the window; else
// it is memory of its own, cast into the slot before each gather. An optimizer that casts it while
// it steps spares that: slot() and slot_written().
class Flat {
 public:
  // The full values of the parameters: one each, of its shape and dtype, on any device, on the
  // ranks that broadcast them; none on the others, which take rank 0's. Nothing: no rank has any
  // yet, and they are NaN (zero, where there is none) until somebody writes them.
  using Values = std::optional<std::vector<at::Tensor>>;

  // The parameters become views of the shard; whatever they showed is let go. names: as in error
  // messages. channel: unique among the transport's users, and the next number is used too.
  Flat(std::string unit, std::vector<std::string> names, std::vector<at::Tensor> params,
       const Values& values, const FlatOptions& options, Transport& transport,
       std::shared_ptr<DevicePool> windows, int channel);
  ~Flat();
  Flat(const Flat&) = delete;

  const Layout& layout() const { return layout_; }
  const std::string& unit() const { return unit_; }
  int64_t size() const { return static_cast<int64_t>(params_.size()); }
  const at::Tensor& param(int64_t i) const { return params_.at(i); }
  // As param(i).grad(), which also looks whether it is a leaf.
  const at::Tensor& grad(int64_t i) const { return params_.at(i).unsafeGetTensorImpl()->grad(); }
  const std::string& name(int64_t i) const { return names_.at(i); }
  const at::Tensor& shard() const { return shard_; }
  Transport& transport() const { return transport_; }
  int channel() const { return channel_; }
  c10::ScalarType compute_dtype() const { return compute_dtype_; }
  bool persistent() const { return options_.persistent; }
  bool shard_is_slot() const { return shard_is_slot_; }
  int64_t window_bytes() const;

  void show(View view);
  View view() const { return view_; }

  // Moves what the user assigned to `p.data` into the shard; whether there was anything. Throws if
  // it does not fit.
  bool adopt_replaced();
  // Whether, since the last call, an operator wrote to a parameter while it showed a window that
  // will be thrown away.
  bool take_written();

  // Whether the window must be gathered (again) before it is read.
  bool stale() const;
  void invalidate();
  // An optimizer has changed the shard.
  void stepped();
  // A kernel has written to the shard of these parameters, one byte for each: tells autograd, for
  // graphs that need the old values.
  void tell_written(const std::string& params);
  // Sum of the parameters' version counters: changes when an operator writes to one of them.
  int64_t versions() const;

  // Leases memory (unless persistent) and launches the gather; false if there is no room. What was
  // written to the shard before has to be ready for Streams::gather().
  bool start_gather();
  void finish_gather();
  void release_window();
  // This rank's slot of a persistent window in another dtype than the shard, as far as it is the
  // shard, cast; else undefined. Who changes the shard may write the same change here, and then
  // tells (after telling autograd, by the parameters' versions).
  at::Tensor slot() const;
  void slot_written();
  // Waits until the peers have read this rank's shard, which may then change.
  void drain();

  // The full parameters in their own dtype, 1-D and padded; a collective unless resident.
  at::Tensor gather_original();
  // Such a buffer of what every rank's `part` (1-D, of the shard's size, any dtype) holds; a
  // collective. In a group of one it is the part itself.
  at::Tensor gather(const at::Tensor& part);
  // View::original over such a buffer, and its end. write: rank 0's content becomes the
  // parameters'.
  void open_original(const at::Tensor& full);
  void close_original(const at::Tensor& full, bool write);
  // Parameter i as a view of such a buffer (of any dtype).
  at::Tensor full_view(const at::Tensor& full, int64_t i) const;
  // Copies of all parameters in it.
  std::vector<at::Tensor> clones(const at::Tensor& full) const;

  // A view of parameter i's part in `buffer` (1-D, of the shard's size).
  at::Tensor shard_view(const at::Tensor& buffer, int64_t i) const;
  // `full`, of parameter i's shape, with the parameter's strides: a copy if it has others.
  at::Tensor in_memory_order(const at::Tensor& full, int64_t i) const;
  // A view of this rank's part of such a tensor.
  at::Tensor slice(const at::Tensor& full, int64_t i) const;
  // Parameter i's shape and strides when full; dims in the order of memory, slowest first.
  at::IntArrayRef sizes(int64_t i) const { return sizes_[i]; }
  at::IntArrayRef strides(int64_t i) const { return strides_[i]; }
  at::IntArrayRef memory_order(int64_t i) const { return memory_order_[i]; }

 private:
  void describe(int64_t i);
  void make_views();
  void make_window();
  void take(const std::vector<at::Tensor>& values);
  void pack(const std::vector<at::Tensor>& values, int64_t begin, const at::Tensor& piece) const;
  void fill_with_nothing();
  at::Tensor own_slot(const at::Tensor& buffer) const;
  // Gathers start after what the current stream was given until now.
  void shards_ready() const;

  const std::string unit_;
  const std::vector<std::string> names_;
  const std::vector<at::Tensor> params_;
  const FlatOptions options_;
  Transport& transport_;
  const std::shared_ptr<DevicePool> windows_;
  const int channel_;
  std::vector<std::vector<int64_t>> sizes_;
  std::vector<std::vector<int64_t>> strides_;
  std::vector<std::vector<int64_t>> memory_order_;
  const Layout layout_;
  const c10::ScalarType compute_dtype_;
  const c10::ScalarType shard_dtype_;
  const bool shard_is_slot_;
  const std::string released_message_;

  at::Tensor shard_;                      // 1-D
  at::Tensor window_;                     // 1-D, shards() slots
  at::Tensor slot_;                       // 1-D, this rank's slot of it
  std::vector<at::Tensor> shard_views_;   // N-D, of shard_
  std::vector<at::Tensor> window_views_;  // N-D, of window_
  std::vector<at::Tensor> guards_;        // N-D, of nothing
  // Geometry of shard_views_, side by side: looking at the views would cost a cache miss for each.
  struct Place {
    int64_t offset;
    at::DimVector sizes;
  };
  std::vector<Place> places_;
  View view_ = View::original;
  Lease lease_;
  std::optional<c10::Stream> reader_;  // the stream that uses the window
  std::unique_ptr<Pending> gather_;
  bool fresh_ = false;
  bool written_ = false;
  int64_t shown_versions_ = 0;     // versions() when the window was shown
  int64_t gathered_versions_ = 0;  // versions() when the window was gathered
  int64_t slot_versions_ = -1;     // versions() when the slot was the shard, cast
  bool slot_stepped_ = false;      // slot_written() in the step under way
  bool slot_kept_ = false;         // the last step wrote it, and nothing was gathered since
};

}  // namespace zerocore
