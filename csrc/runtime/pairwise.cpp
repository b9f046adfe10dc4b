// Collectives as exchanges between pairs of ranks, for CPU ranks and gloo.

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <functional>
#include <future>
#include <limits>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "ops/ops.h"
#include "runtime/transport.h"
#include "runtime/worker.h"

namespace zerocore {
namespace {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

void wait_all(Works& works) {
  for (auto& work : works) work->wait();
  works.clear();
}

// Messages of one collective between this rank and each of its peers.
struct Exchange {
  Works received;
  Works sent;
};

class ExchangePending : public Pending {
 public:
  ExchangePending(std::future<Exchange> posted, at::Tensor buffer)
      : posted_(std::move(posted)), buffer_(std::move(buffer)) {}
  void wait() override {
    if (posted_.valid()) exchange_ = posted_.get();
    wait_all(exchange_.received);
  }
  void drain() override {
    wait();
    wait_all(exchange_.sent);
    buffer_ = at::Tensor();
  }

 private:
  std::future<Exchange> posted_;
  Exchange exchange_;
  at::Tensor buffer_;  // alive until the messages are through
};

// The result is there already.
class Done : public Pending {
 public:
  void wait() override {}
  void drain() override {}
};

class FuturePending : public Pending {
 public:
  explicit FuturePending(std::future<void> future) : future_(future.share()) {}
  void wait() override { future_.get(); }
  void drain() override { future_.get(); }

 private:
  std::shared_future<void> future_;
};

// The purposes that may be under way at once on one channel get tags of their own.
enum class Purpose { gather, scatter, replica_scatter, replica_gather, count };

// gloo matches messages of one tag in their order. Generations come back after a while, when
// nothing of the old one is left.
constexpr int kGenerations = 16;

struct Channel {
  int number;
  int generation;

  int tag(Purpose purpose) const {
    const int64_t tag =
        (int64_t{number} * static_cast<int>(Purpose::count) + static_cast<int>(purpose)) *
            kGenerations +
        generation;
    TORCH_CHECK(tag <= std::numeric_limits<int>::max(),
                "zerocore: expected fewer sharded models in one process group, got no number left ",
                "for messages; make a new process group");
    return static_cast<int>(tag);
  }
};

at::Tensor slot(const at::Tensor& buffer, int slots, int index) {
  const int64_t size = buffer.numel() / slots;
  return buffer.narrow(0, index * size, size);
}

// Posts one message to and one from each peer; `to(peer)` and `from(peer)` give the buffers.
// Receives first, so that no message waits for its place; peers in a different order on each rank,
// so that they do not all talk to the same one.
template <class To, class From>
Exchange exchange(const GroupPtr& group, int tag, const To& to, const From& from) {
  const int size = group->getSize();
  const int rank = group->getRank();
  Exchange messages;
  for (int step = 1; step < size; ++step) {
    const int peer = (rank + size - step) % size;
    std::vector<at::Tensor> buffer{from(peer)};
    messages.received.push_back(group->recv(buffer, peer, tag));
  }
  for (int step = 1; step < size; ++step) {
    const int peer = (rank + step) % size;
    std::vector<at::Tensor> buffer{to(peer)};
    messages.sent.push_back(group->send(buffer, peer, tag));
  }
  return messages;
}

// [Note: posting] Messages are posted by a thread of their own. Posting writes the first part of a
// message into the socket, which is work that the thread of autograd need not wait for. And c10d
// remembers thousands of recent messages in small blocks of memory: on the thread that computes,
// the C library would place these between the large blocks of activations, and the process would
// grow for as long as it runs (by several times the model, as measured with glibc).
std::future<Exchange> post(Worker& poster, std::function<Exchange()> start) {
  auto task = std::make_shared<std::packaged_task<Exchange()>>(std::move(start));
  std::future<Exchange> posted = task->get_future();
  poster.post([task] {
    c10::InferenceMode normal(false);
    (*task)();
  });
  return posted;
}

// Every rank sends each other one its slot of `buffer`, and receives the others' version of its
// own: in the order of ranks, own one included.
struct Scatter {
  std::future<Exchange> messages;
  std::vector<at::Tensor> versions;
  at::Tensor own;
};

Scatter scatter(Worker& poster, const GroupPtr& group, int tag, const at::Tensor& buffer,
                const std::shared_ptr<DevicePool>& buffers) {
  const int size = group->getSize();
  const int rank = group->getRank();
  const int64_t numel = buffer.numel() / size;
  Scatter result;
  const at::Tensor received = DevicePool::empty(buffers, numel * (size - 1), buffer.scalar_type(),
                                                buffers->streams().current());
  for (int peer = 0; peer < size; ++peer) {
    result.versions.push_back(peer == rank ? slot(buffer, size, rank)
                                           : slot(received, size - 1, peer - (peer > rank)));
  }
  result.own = result.versions[rank];
  result.messages = post(poster, [group, tag, buffer, size, versions = result.versions] {
    return exchange(
        group, tag, [&](int peer) { return slot(buffer, size, peer); },
        [&](int peer) { return versions[peer]; });
  });
  return result;
}

std::future<Exchange> gather(Worker& poster, const GroupPtr& group, int tag,
                             const at::Tensor& buffer) {
  return post(poster, [group, tag, buffer] {
    const int size = group->getSize();
    const int rank = group->getRank();
    return exchange(
        group, tag, [&](int) { return slot(buffer, size, rank); },
        [&](int peer) { return slot(buffer, size, peer); });
  });
}

class PairwiseTransport : public Transport {
 public:
  PairwiseTransport(const GroupNames& names, std::shared_ptr<DevicePool> buffers,
                    std::shared_ptr<Log> log)
      : shard_channel_(names.shard_channel),
        replicate_channel_(names.replicate_channel),
        buffers_(std::move(buffers)),
        log_(std::move(log)) {
    if (!names.shard.empty()) {
      shard_group_ = c10d::resolve_process_group(names.shard);
      shards_ = shard_group_->getSize();
      shard_rank_ = shard_group_->getRank();
    }
    if (!names.replicate.empty()) {
      replicate_group_ = c10d::resolve_process_group(names.replicate);
      replicas_ = replicate_group_->getSize();
    }
  }

  void set_generation(int64_t generation) override {
    generation_ = static_cast<int>(generation % kGenerations);
  }

  void set_unit(int channel, int unit) override {
    const auto place = static_cast<size_t>(channel);
    if (place >= units_.size()) units_.resize(place + 1, -1);
    units_[place] = unit;
  }

  std::unique_ptr<Pending> all_gather(const at::Tensor& window, int channel) override {
    if (shards_ == 1) return std::make_unique<Done>();
    count("all_gather", window, window.numel() / shards_ * (shards_ - 1));
    return std::make_unique<ExchangePending>(
        gather(*poster_, shard_group_, shards(channel).tag(Purpose::gather), window), window);
  }

  std::unique_ptr<Pending> reduce(const at::Tensor& packed, const at::Tensor& partial,
                                  const at::Tensor& out, bool accumulate, int channel) override {
    return start_reduce(packed, replicate_group_, partial, out, accumulate, channel);
  }

  std::unique_ptr<Pending> reduce_scatter(const at::Tensor& packed, const at::Tensor& out,
                                          bool accumulate, int channel) override {
    return start_reduce(packed, /*replicas=*/nullptr, /*partial=*/at::Tensor(), out, accumulate,
                        channel);
  }

  void retire(std::unique_ptr<Pending> pending, std::function<void()> then) override {
    finisher_.post([pending = std::shared_ptr<Pending>(std::move(pending)), then] {
      try {
        if (pending) pending->drain();
      } catch (const std::exception&) {
        // Nobody is left to be told: the peers fail by themselves.
      }
      then();
    });
  }

  void broadcast(const at::Tensor& buffer) override {
    // As bytes: any dtype travels, exactly.
    std::vector<at::Tensor> bytes{buffer.view(at::kByte)};
    for (const GroupPtr& group : {replicate_group_, shard_group_}) {
      if (!group || buffer.numel() == 0) continue;
      count("broadcast", buffer, buffer.numel());
      group->broadcast(bytes)->wait();
    }
  }

 private:
  std::unique_ptr<Pending> start_reduce(const at::Tensor& packed, const GroupPtr& replicas,
                                        const at::Tensor& partial, const at::Tensor& out,
                                        bool accumulate, int channel) {
    Scatter first;
    if (shards_ > 1) {
      count("reduce_scatter", packed, packed.numel() / shards_ * (shards_ - 1));
      first =
          scatter(*poster_, shard_group_, shards(channel).tag(Purpose::scatter), packed, buffers_);
    } else {
      first.versions = {packed};
      first.own = packed;
    }
    // The second half of the messages depends on sums over the first: on a thread of its own, so
    // that neither waits for the other's computation.
    auto task = std::make_shared<std::packaged_task<void()>>(
        [=, first = std::move(first), buffers = buffers_, log = log_, poster = poster_,
         unit = units_.at(static_cast<size_t>(channel)),
         replicate_channel = Channel{replicate_channel_ + channel, generation_}]() mutable {
          c10::InferenceMode normal(false);
          at::NoGradGuard no_grad;
          finish_reduce(*poster, replicas, buffers, *log, std::move(first), partial, out,
                        accumulate, replicate_channel);
          log->add({"finish", "reduce", "backward", unit, packed.numel()});
        });
    auto pending = std::make_unique<FuturePending>(task->get_future());
    finisher_.post([task] { (*task)(); });
    return pending;
  }

  Channel shards(int channel) const { return {shard_channel_ + channel, generation_}; }

  static void count(Log& log, const char* kind, const at::Tensor& buffer, int64_t elements) {
    log.count(kind, elements, elements * static_cast<int64_t>(buffer.element_size()));
  }
  void count(const char* kind, const at::Tensor& buffer, int64_t elements) {
    count(*log_, kind, buffer, elements);
  }

  static void finish_reduce(Worker& poster, const GroupPtr& replicas,
                            const std::shared_ptr<DevicePool>& buffers, Log& log, Scatter first,
                            at::Tensor partial, at::Tensor out, bool accumulate, Channel channel) {
    Exchange messages = first.messages.valid() ? first.messages.get() : Exchange{};
    wait_all(messages.received);
    if (!replicas) {
      TORCH_INTERNAL_ASSERT(!partial.defined(), "no sum over replicas to wait for");
      ops::sum_shards_(out, first.versions, accumulate);
      wait_all(messages.sent);
      return;
    }
    // The own slot of `packed` is nobody's message: the sum may take its place.
    at::Tensor sum = first.own;
    if (partial.defined()) {
      ops::sum_shards_(partial, first.versions, /*accumulate=*/true);
      sum.copy_(partial);
    } else if (first.versions.size() > 1) {
      ops::sum_shards_(sum, first.versions, /*accumulate=*/false);
    }
    const int size = replicas->getSize();
    count(log, "all_reduce", sum, 2 * (sum.numel() / size) * (size - 1));
    Scatter second = scatter(poster, replicas, channel.tag(Purpose::replica_scatter), sum, buffers);
    Exchange versions = second.messages.get();
    wait_all(versions.received);
    at::Tensor part = slot(sum, size, replicas->getRank());
    ops::sum_shards_(part, second.versions, false);
    // What arrives next takes the place of what was sent.
    wait_all(versions.sent);
    Exchange parts = gather(poster, replicas, channel.tag(Purpose::replica_gather), sum).get();
    wait_all(parts.received);
    ops::sum_shards_(out, {sum}, accumulate);
    wait_all(parts.sent);
    wait_all(messages.sent);
  }

  const int shard_channel_;
  const int replicate_channel_;
  int generation_ = 0;
  std::vector<int> units_;  // by channel
  GroupPtr shard_group_;
  GroupPtr replicate_group_;
  std::shared_ptr<DevicePool> buffers_;
  std::shared_ptr<Log> log_;
  const std::shared_ptr<Worker> poster_ = std::make_shared<Worker>();
  Worker finisher_;
};

}  // namespace

at::Tensor Transport::allocate(int64_t) {
  TORCH_INTERNAL_ASSERT(false, "gloo has no memory of its own");
}

std::unique_ptr<Transport> make_pairwise_transport(const GroupNames& groups,
                                                   std::shared_ptr<DevicePool> buffers,
                                                   std::shared_ptr<Log> log) {
  return std::make_unique<PairwiseTransport>(groups, std::move(buffers), std::move(log));
}

}  // namespace zerocore
