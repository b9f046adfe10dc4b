// A process-group backend for NPU tensors that behaves like ProcessGroupHCCL and moves the bytes
// with gloo.
//
// A collective is a task on the group's own stream, ordered after the caller's current stream;
// Work::wait() makes the then current stream wait for it and returns at once. So a collective runs
// only when something demands its result. A rank whose peer is already inside a collective runs its
// own part as soon as its host has been quiet for 3 ms, as a device would by itself; otherwise a
// rank that waits for a peer by other means (a store, a gloo group) would deadlock.
//
// It takes what every release of HCCL and torch_npu does with the same result: sums and maxima of
// the types below, and copies. AVG, for example, was a plain sum in some releases and an error in
// others.
#include "hccl.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <thread>

namespace npu_sim {
namespace {

using c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

std::atomic<int64_t> tensors_allocated{0};

struct HcclWork final : c10d::Work {
  HcclWork(int rank, OpType type, const Tensors& outputs, const c10::Stream& stream)
      : Work(rank, type), outputs_(outputs), device_(stream.device()), done_(kNpu) {
    c10::StreamGuard on(stream);  // the future records its events on the current stream
    done_.record(stream);
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector{device_});
    future_->markCompleted(outputs_);
  }
  bool isCompleted() override { return done_.query(); }
  bool isSuccess() const override { return true; }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  void synchronize() override { done_.block(current_stream(device_)); }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    if (opType_ == OpType::BARRIER) done_.synchronize();
    return true;
  }

 private:
  Tensors outputs_;
  c10::Device device_;
  c10::Event done_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// How many operations of each kind a rank has started to wait in, visible to all ranks. Kind r *
// size + r counts rank r's collectives, r * size + s its receives from rank s.
class Board {
 public:
  Board(c10d::Store& store, int rank, int size) {
    std::string path =
        "/dev/shm/npu_sim_" + std::to_string(getpid()) + "_" + std::to_string(uintptr_t(this));
    if (rank == 0) store.set("npu_sim_board", path);
    std::string shared = store.get_to_str("npu_sim_board");
    bytes_ = size_t(size) * size * sizeof(std::atomic<uint64_t>);
    int file = open(shared.c_str(), O_RDWR | O_CREAT, 0600);
    TORCH_CHECK(file >= 0 && ftruncate(file, off_t(bytes_)) == 0, "npu_sim: cannot create ",
                shared);
    counts_ = static_cast<std::atomic<uint64_t>*>(
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    close(file);
    if (store.add("npu_sim_board_users", 1) == size) unlink(shared.c_str());
  }
  ~Board() { munmap(counts_, bytes_); }
  std::atomic<uint64_t>& operator[](int kind) { return counts_[kind]; }

 private:
  size_t bytes_;
  std::atomic<uint64_t>* counts_;
};

class HcclBackend final : public c10d::Backend {
 public:
  HcclBackend(c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<c10d::Store> store,
              int rank, int size)
      : Backend(rank, size),
        gloo_(std::move(gloo)),
        board_(*store, rank, size),
        helper_([this] { help_peers(); }) {}
  ~HcclBackend() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    enqueued_some_.notify_all();
    helper_.join();
    for (auto& [key, stream] : streams_) drain(stream);  // its tasks use this object
    for (WorkPtr& send : sends_) send->wait();
  }
  const std::string getBackendName() const override { return "hccl"; }
  // As a group that can register memory.
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long bytes, at::TensorOptions options) override {
    ++tensors_allocated;
    return at::empty({bytes}, options);
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return enqueued_[own()]; }

  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    return collective(OpType::BROADCAST, t, t,
                      [this, a = aliases(t), o]() mutable { return gloo_->broadcast(a, o); });
  }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    return reduction(OpType::ALLREDUCE, t, t, o,
                     [this, a = aliases(t)](auto& o) mutable { return gloo_->allreduce(a, o); });
  }
  WorkPtr allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    return reduction(OpType::ALLREDUCE_COALESCED, t, t, o, [this, a = aliases(t)](auto& o) mutable {
      return gloo_->allreduce_coalesced(a, o);
    });
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    return reduction(OpType::REDUCE, t, t, o,
                     [this, a = aliases(t)](auto& o) mutable { return gloo_->reduce(a, o); });
  }
  WorkPtr allgather(std::vector<Tensors>& out, Tensors& in,
                    const c10d::AllgatherOptions& o) override {
    std::vector<Tensors> to;
    for (const Tensors& one : out) to.push_back(aliases(one));
    return collective(
        OpType::ALLGATHER, in, out.at(0),
        [this, to, from = aliases(in), o]() mutable { return gloo_->allgather(to, from, o); });
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in,
                          const c10d::AllgatherOptions& o) override {
    return collective(OpType::_ALLGATHER_BASE, {in}, {out},
                      [this, to = aliases({out}), from = aliases({in}), o]() mutable {
                        return gloo_->_allgather_base(to[0], from[0], o);
                      });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in,
                                          const c10d::AllgatherOptions& o) override {
    return collective(OpType::COALESCED, in, out,
                      [this, to = aliases(out), from = aliases(in), o]() mutable {
                        return gloo_->allgather_into_tensor_coalesced(to, from, o);
                      });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                               const c10d::ReduceScatterOptions& o) override {
    return reduction(OpType::_REDUCE_SCATTER_BASE, {in}, {out}, o,
                     [this, to = aliases({out}), from = aliases({in})](auto& o) mutable {
                       return gloo_->_reduce_scatter_base(to[0], from[0], o);
                     });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in,
                                          const c10d::ReduceScatterOptions& o) override {
    return reduction(OpType::COALESCED, in, out, o,
                     [this, to = aliases(out), from = aliases(in)](auto& o) mutable {
                       return gloo_->reduce_scatter_tensor_coalesced(to, from, o);
                     });
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_sizes,
                        std::vector<int64_t>& in_sizes, const c10d::AllToAllOptions& o) override {
    return collective(
        OpType::ALLTOALL_BASE, {in}, {out},
        [this, to = aliases({out}), from = aliases({in}), out_sizes, in_sizes, o]() mutable {
          return gloo_->alltoall_base(to[0], from[0], out_sizes, in_sizes, o);
        });
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override {
    return collective(OpType::BARRIER, {}, {}, [this, o] { return gloo_->barrier(o); });
  }
  // A send is buffered, so it never waits for its receiver; a receive waits for its sender.
  WorkPtr send(Tensors& t, int to, int tag) override {
    auto start = [this, a = aliases(t), to, tag]() {
      Tensors copy{a.at(0).clone()};
      WorkPtr sent = gloo_->send(copy, to, tag);
      std::lock_guard lock(mutex_);
      sends_.push_back(sent);
    };
    return submit(OpType::SEND, to * getSize() + getRank(), t, t, start);
  }
  WorkPtr recv(Tensors& t, int from, int tag) override {
    int kind = own() - getRank() + from;
    auto start = [this, a = aliases(t), from, tag, kind]() mutable {
      ++board_[kind];
      gloo_->recv(a, from, tag)->wait();
    };
    return submit(OpType::RECV, kind, t, t, start);
  }

 private:
  int own() const { return getRank() * getSize() + getRank(); }

  static Tensors aliases(const Tensors& tensors) {
    Tensors result;
    for (const at::Tensor& t : tensors) {
      TORCH_CHECK(t.device().type() == kNpu, "hccl: expected a tensor on npu, got one on ",
                  t.device());
      TORCH_CHECK(t.is_contiguous(), "hccl: expected a contiguous tensor, got strides ",
                  t.strides());
      static const std::set<at::ScalarType> types = {
          at::kFloat, at::kHalf, at::kBFloat16, at::kDouble, at::kChar,
          at::kShort, at::kInt,  at::kLong,     at::kByte,   at::kBool};
      TORCH_CHECK(types.count(t.scalar_type()), "hccl: expected a type that it can move, got ",
                  t.scalar_type());
      result.push_back(cpu_alias(t));
    }
    return result;
  }
  template <class Options, class Start>
  WorkPtr reduction(OpType type, const Tensors& in, const Tensors& out, Options o, Start start) {
    TORCH_CHECK(!in.empty(), "hccl: expected tensors to reduce, got none");
    const auto op = o.reduceOp.op_;
    TORCH_CHECK(op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::MAX,
                "hccl: expected ReduceOp SUM (0) or MAX (4), got ", int(op),
                " (1 AVG, 2 PRODUCT, 3 MIN, 8 PREMUL_SUM)");
    static const std::set<at::ScalarType> reducible = {
        at::kFloat, at::kHalf, at::kBFloat16, at::kChar, at::kShort, at::kInt, at::kLong};
    for (const at::Tensor& t : in) {
      TORCH_CHECK(t.scalar_type() == in[0].scalar_type() && t.device() == in[0].device(),
                  "hccl: expected one type and device in a coalesced reduction, got ",
                  in[0].scalar_type(), " on ", in[0].device(), " and ", t.scalar_type(), " on ",
                  t.device());
      TORCH_CHECK(reducible.count(t.scalar_type()),
                  "hccl: expected a type that it can reduce, got ", t.scalar_type());
    }
    return submit(type, own(), in, out, [this, start, o]() mutable {
      ++board_[own()];
      start(o)->wait();
    });
  }

  template <class Start>
  WorkPtr collective(OpType type, const Tensors& in, const Tensors& out, Start start) {
    return submit(type, own(), in, out, [this, start]() mutable {
      ++board_[own()];
      start()->wait();
    });
  }

  WorkPtr submit(OpType type, int kind, const Tensors& in, const Tensors& out, Task task) {
    c10::Device device = in.empty() ? current_device() : in[0].device();
    c10::DeviceGuard on(device);
    std::lock_guard lock(mutex_);
    // One stream per device for collectives, and one per peer and direction, so that neither blocks
    // the others.
    auto it = streams_.find({device.index(), kind});
    if (it == streams_.end())
      it = streams_.emplace(std::pair(device.index(), kind), new_stream(device)).first;
    const c10::Stream& stream = it->second;
    add_wait(stream, add_mark(current_stream(device)));
    enqueue(stream, "hccl " + c10d::opTypeToString(type), std::move(task));
    for (const Tensors* tensors : {&in, &out}) {
      // As torch_npu: of its allocator's own tensors, not of memory that a library has of it.
      for (const at::Tensor& t : *tensors) {
        const c10::DataPtr& data = t.storage().data_ptr();
        const bool own = data.get_deleter() == c10::GetAllocator(kNpu)->raw_deleter();
        if (own) record_stream(data.get(), stream);
      }
    }
    ++enqueued_[kind];
    if (can_be_wanted(kind)) {
      marks_[kind].emplace(enqueued_[kind], add_mark(stream));
      enqueued_some_.notify_all();
    }
    return c10::make_intrusive<HcclWork>(getRank(), type, out, stream);
  }

  // Of messages between two ranks, only a send.
  bool can_be_wanted(int kind) const { return kind == own() || kind / getSize() != getRank(); }

  // The part of kind's operations that a peer waits for.
  uint64_t wanted(int kind) {
    if (kind != own()) return board_[kind].load();
    uint64_t most = 0;
    for (int r = 0; r < getSize(); ++r) most = std::max(most, board_[r * getSize() + r].load());
    return most;
  }

  void help_peers() {
    uint64_t seen = 0;
    auto quiet_since = std::chrono::steady_clock::now();
    while (true) {
      {
        // A thread that looks about a thousand times a second costs more than the tests.
        std::unique_lock lock(mutex_);
        enqueued_some_.wait(lock, [this] { return stop_ || !marks_.empty(); });
      }
      if (stop_) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (activity() != seen) {
        seen = activity();
        quiet_since = std::chrono::steady_clock::now();
      }
      if (std::chrono::steady_clock::now() - quiet_since < std::chrono::milliseconds(3)) continue;
      std::vector<MarkPtr> demanded;
      {
        std::lock_guard lock(mutex_);
        for (auto& [kind, marks] : marks_) {
          while (!marks.empty() && marks.begin()->first <= wanted(kind)) {
            demanded.push_back(marks.begin()->second);
            marks.erase(marks.begin());
          }
        }
        std::erase_if(marks_, [](const auto& entry) { return entry.second.empty(); });
      }
      for (const MarkPtr& mark : demanded) demand(mark);
    }
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  Board board_;
  std::mutex mutex_;
  std::map<std::pair<c10::DeviceIndex, int>, c10::Stream> streams_;
  std::map<int, uint64_t> enqueued_;
  std::map<int, std::map<uint64_t, MarkPtr>> marks_;
  std::vector<WorkPtr> sends_;
  std::condition_variable enqueued_some_;
  std::atomic<bool> stop_{false};
  std::thread helper_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> create_hccl(c10::intrusive_ptr<c10d::Backend> gloo,
                                              c10::intrusive_ptr<c10d::Store> store, int rank,
                                              int size) {
  return c10::make_intrusive<HcclBackend>(std::move(gloo), std::move(store), rank, size);
}

int64_t allocated_by_groups() { return tensors_allocated; }

}  // namespace npu_sim
