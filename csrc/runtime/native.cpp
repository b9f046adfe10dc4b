// The process group's own collectives, on streams, for NCCL and HCCL (and for fake groups).

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "ops/ops.h"
#include "runtime/transport.h"

namespace zerocore {
namespace {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// [Note: launches] A launch is what goes to a communicator in one group call. Every launch costs
// the process group events and the device a start, so small buffers share one. What is in a launch
// is decided by sizes and by the order of calls, which are the same on all ranks.
struct Launch {
  bool out = false;
  Mark end;
};

// The launches that may not be over.
class Sent {
 public:
  void add(int64_t launch, Mark begin, Mark end) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (sent_.size() >= kMany) forget();
    sent_.push_back({launch, std::move(begin), std::move(end)});
  }
  std::optional<std::pair<int64_t, double>> under_way() {
    std::lock_guard<std::mutex> lock(mutex_);
    forget();
    const auto at = std::find_if(sent_.begin(), sent_.end(), [](const Interval& interval) {
      return Streams::reached(interval.begin) && !Streams::reached(interval.end);
    });
    if (at == sent_.end()) {
      seen_ = -1;
      return std::nullopt;
    }
    const auto now = std::chrono::steady_clock::now();
    if (std::exchange(seen_, at->launch) != at->launch) since_ = now;
    return std::pair(seen_, std::chrono::duration<double>(now - since_).count());
  }

 private:
  static constexpr size_t kMany = 64;  // looking costs more than a few that are over
  struct Interval {
    int64_t launch;
    Mark begin;
    Mark end;
  };

  void forget() {
    while (!sent_.empty() && Streams::reached(sent_.front().end)) sent_.pop_front();
  }

  std::mutex mutex_;
  std::deque<Interval> sent_;
  int64_t seen_ = -1;
  std::chrono::steady_clock::time_point since_;
};

class LaunchPending : public Pending {
 public:
  LaunchPending(Streams& streams, std::shared_ptr<Launch> launch, Wait why)
      : streams_(streams), launch_(std::move(launch)), why_(why) {}
  void wait() override { wait(why_); }
  // A rank's own part of a collective ends when others have what it sent.
  void drain() override { wait(Wait::shards_read); }

 private:
  void wait(Wait why) {
    TORCH_INTERNAL_ASSERT(launch_->out, "a collective is waited for before its launch");
    streams_.wait(streams_.current(), launch_->end, why);
  }

  Streams& streams_;
  const std::shared_ptr<Launch> launch_;
  const Wait why_;
};

// For the current stream. Groups that cannot enqueue on it return something to wait for.
void enqueued(const c10::intrusive_ptr<c10d::Work>& work) {
  if (work) work->wait();
}

at::Tensor slot(const at::Tensor& buffer, int slots, int index) {
  const int64_t size = buffer.numel() / slots;
  return buffer.narrow(0, index * size, size);
}

at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor).view(-1) : tensor;
}

struct Reduction {
  at::Tensor packed;
  at::Tensor partial;
  at::Tensor out;
  bool accumulate;
  bool over_replicas;
  at::Tensor sum;  // this rank's slot
};

GroupPtr resolve(const std::string& name) {
  return name.empty() ? GroupPtr() : c10d::resolve_process_group(name);
}

class NativeTransport : public Transport {
 public:
  NativeTransport(const GroupNames& names, std::shared_ptr<DevicePool> buffers,
                  std::shared_ptr<Log> log)
      : gather_group_(resolve(names.shard)),
        replicate_group_(resolve(names.replicate)),
        scatter_group_(resolve(names.reduce_shard)),
        reduce_group_(resolve(names.reduce_replicate)),
        buffers_(std::move(buffers)),
        streams_(buffers_->streams()),
        log_(std::move(log)) {
    if (gather_group_) {
      shards_ = gather_group_->getSize();
      shard_rank_ = gather_group_->getRank();
    }
    if (replicate_group_) replicas_ = replicate_group_->getSize();
  }

  void begin_launch() override {
    if (depth_++ == 0) launch_ = std::make_shared<Launch>();
  }

  void end_launch() override {
    if (--depth_ > 0) return;
    // Even if one of the calls throws, nothing stays for the next launch.
    const std::vector<at::Tensor> windows = std::exchange(windows_, {});
    std::vector<Reduction> reductions = std::exchange(reductions_, {});
    const std::shared_ptr<Launch> launch = std::move(launch_);
    launch->out = true;
    if (!windows.empty()) send(*launch, streams_.gather(), [&] { gather_all(windows); });
    if (!reductions.empty()) send(*launch, streams_.reduce(), [&] { reduce_all(reductions); });
  }

  void time_launches(std::shared_ptr<const TimesStart> start) override {
    times_.start(std::move(start));
  }
  int64_t launch() const override { return launches_; }
  std::optional<std::pair<double, double>> times(int64_t launch) const override {
    return times_.of(launch);
  }

  std::optional<std::pair<int64_t, double>> under_way() override { return sent_.under_way(); }

  at::Tensor allocate(int64_t bytes) override {
    const c10::Device device = streams_.device();
    const auto options = at::TensorOptions().dtype(at::kByte).device(device);
    if (!gather_group_) return at::empty({bytes}, options);
    const auto backend = gather_group_->getBackend(device.type());
    TORCH_CHECK_VALUE(backend->supportsTensorAlloc(device.index()), "register_windows: expected a ",
                      "process group that has memory of its own on ", device, ", got ",
                      backend->getBackendName(), " without; leave it out");
    return backend->allocateTensor(bytes, options);
  }

  void cancel_launch() override {
    depth_ = 0;
    windows_.clear();
    reductions_.clear();
    if (launch_) launch_->out = true;  // there will be nothing to wait for
    launch_.reset();
  }

  std::unique_ptr<Pending> all_gather(const at::Tensor& window, int) override {
    begin_launch();
    windows_.push_back(window);
    auto pending = std::make_unique<LaunchPending>(streams_, launch_, Wait::window_ready);
    end_launch();
    return pending;
  }

  std::unique_ptr<Pending> reduce(const at::Tensor& packed, const at::Tensor& partial,
                                  const at::Tensor& out, bool accumulate, int) override {
    return add({packed, partial, out, accumulate, /*over_replicas=*/true, {}});
  }

  std::unique_ptr<Pending> reduce_scatter(const at::Tensor& packed, const at::Tensor& out,
                                          bool accumulate, int) override {
    return add({packed, {}, out, accumulate, /*over_replicas=*/false, {}});
  }

  void broadcast(const at::Tensor& buffer, Range) override {
    std::vector<at::Tensor> bytes{buffer.view(at::kByte)};  // any dtype travels, exactly
    c10d::BroadcastOptions options;
    options.asyncOp = false;
    for (const GroupPtr& group : {replicate_group_, gather_group_}) {
      if (!group || buffer.numel() == 0) continue;
      count("broadcast", buffer, buffer.numel());
      enqueued(group->broadcast(bytes, options));
    }
  }

  void retire(std::unique_ptr<Pending> pending, std::function<void()> then) override {
    if (pending) pending->drain();
    then();
  }

 private:
  template <class Collectives>
  void send(Launch& launch, const c10::Stream& stream, const Collectives& collectives) {
    const c10::InferenceMode normal(false);
    // Views of flat buffers, and writes to them, are no business of autograd's.
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const c10::StreamGuard on(stream);
    const int64_t number = launches_++;
    if (times_.on()) times_.begin(number, stream);
    Mark begin = streams_.mark(stream);
    collectives();
    if (times_.on()) times_.end(number, stream);
    launch.end = streams_.mark(stream);
    sent_.add(number, std::move(begin), launch.end);
  }

  std::unique_ptr<Pending> add(Reduction reduction) {
    begin_launch();
    reductions_.push_back(std::move(reduction));
    auto pending = std::make_unique<LaunchPending>(streams_, launch_, Wait::gradients_reduced);
    end_launch();
    return pending;
  }

  void count(const char* kind, const at::Tensor& buffer, int64_t elements) {
    log_->count(kind, elements, elements * static_cast<int64_t>(buffer.element_size()));
  }

  // Without others the slot is all there is; what filled it is waited for as a gather is.
  void gather_all(const std::vector<at::Tensor>& windows) {
    if (shards_ == 1) return;
    std::vector<at::Tensor> whole, slots;
    for (const at::Tensor& window : windows) {
      count("all_gather", window, window.numel() / shards_ * (shards_ - 1));
      whole.push_back(window.view(at::kByte));
      slots.push_back(slot(whole.back(), shards_, shard_rank_));
    }
    c10d::AllgatherOptions options;
    options.asyncOp = false;  // on the current stream
    enqueued(gather_group_->all_gather_single_coalesced(whole, slots, options));
  }

  // Straight into `out` where it is the sum and nothing else.
  bool direct(const Reduction& r) const {
    return !r.accumulate && !r.partial.defined() && r.out.scalar_type() == r.packed.scalar_type();
  }

  // Group calls want tensors of one dtype.
  void reduce_all(std::vector<Reduction>& reductions) {
    std::vector<c10::ScalarType> dtypes;
    for (const Reduction& r : reductions) {
      const c10::ScalarType dtype = r.packed.scalar_type();
      if (std::find(dtypes.begin(), dtypes.end(), dtype) == dtypes.end()) dtypes.push_back(dtype);
    }
    for (c10::ScalarType dtype : dtypes) {
      std::vector<Reduction*> same;
      for (Reduction& r : reductions) {
        if (r.packed.scalar_type() == dtype) same.push_back(&r);
      }
      scatter_all(same);
      replicate_all(same);
    }
    for (const Reduction& r : reductions) {
      if (!r.sum.is_same(r.out)) ops::sum_shards_(r.out, {r.sum}, r.accumulate);
    }
  }

  void scatter_all(const std::vector<Reduction*>& reductions) {
    std::vector<at::Tensor> sums, packed;
    for (Reduction* r : reductions) {
      r->sum = r->packed;
      if (shards_ == 1) continue;
      count("reduce_scatter", r->packed, r->packed.numel() / shards_ * (shards_ - 1));
      r->sum = direct(*r) ? r->out : place_for_sum(r->packed);
      packed.push_back(as_real(r->packed));
      sums.push_back(as_real(r->sum));
    }
    if (packed.empty()) return;
    c10d::ReduceScatterOptions options;
    options.asyncOp = false;
    enqueued(scatter_group_->reduce_scatter_single_coalesced(sums, packed, options));
  }

  // NCCL reduces in place, into the own slot; HCCL is not known to.
  at::Tensor place_for_sum(const at::Tensor& packed) const {
    if (packed.is_cuda()) return slot(packed, shards_, shard_rank_);
    return DevicePool::empty(buffers_, packed.numel() / shards_, packed.scalar_type(),
                             streams_.reduce());
  }

  void replicate_all(const std::vector<Reduction*>& reductions) {
    std::vector<at::Tensor> sums;
    for (Reduction* r : reductions) {
      if (replicas_ == 1 || !r->over_replicas) continue;
      if (r->partial.defined()) {
        ops::sum_shards_(r->partial, {r->sum}, /*accumulate=*/true);
        r->sum.copy_(r->partial);
      }
      count("all_reduce", r->sum, 2 * (r->sum.numel() / replicas_) * (replicas_ - 1));
      sums.push_back(as_real(r->sum));
    }
    if (sums.empty()) return;
    c10d::AllreduceCoalescedOptions options;
    options.asyncOp = false;
    enqueued(reduce_group_->allreduce_coalesced(sums, options));
  }

  const GroupPtr gather_group_;
  const GroupPtr replicate_group_;
  const GroupPtr scatter_group_;
  const GroupPtr reduce_group_;
  const std::shared_ptr<DevicePool> buffers_;
  Streams& streams_;
  const std::shared_ptr<Log> log_;
  Times times_;
  Sent sent_;
  int64_t launches_ = 0;
  int depth_ = 0;
  std::shared_ptr<Launch> launch_;
  std::vector<at::Tensor> windows_;
  std::vector<Reduction> reductions_;
};

}  // namespace

std::unique_ptr<Transport> make_native_transport(const GroupNames& groups,
                                                 std::shared_ptr<DevicePool> buffers,
                                                 std::shared_ptr<Log> log) {
  return std::make_unique<NativeTransport>(groups, std::move(buffers), std::move(log));
}

}  // namespace zerocore
