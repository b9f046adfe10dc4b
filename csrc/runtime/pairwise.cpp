// Collectives as exchanges between pairs of ranks, for CPU ranks and gloo.

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <future>
#include <limits>
#include <optional>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <utility>

#include "ops/ops.h"
#include "runtime/exchange.h"
#include "runtime/transport.h"
#include "runtime/worker.h"

namespace zerocore {
namespace {

using PeersPtr = std::shared_ptr<const Peers>;
using ExchangePtr = std::shared_ptr<Exchange>;

class ExchangePending : public Pending {
 public:
  ExchangePending(ExchangePtr exchange, at::Tensor buffer)
      : exchange_(std::move(exchange)), buffer_(std::move(buffer)) {}
  void wait() override { exchange_->receive(); }
  void drain() override {
    exchange_->drain();
    buffer_ = at::Tensor();
  }

 private:
  ExchangePtr exchange_;
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
  explicit FuturePending(std::shared_future<void> future) : future_(std::move(future)) {}
  void wait() override { future_.get(); }
  void drain() override { future_.get(); }

 private:
  std::shared_future<void> future_;
};

// The purposes that may be under way at once on one channel get tags of their own.
enum class Purpose { gather, scatter, replica_scatter, replica_gather, broadcast, count };

// gloo matches messages of one tag in their order. Generations come back after a while, when
// nothing of the old one is left.
constexpr int kGenerations = 16;

struct Channel {
  int number;
  int generation;

  Tags tags(Purpose purpose) const {
    const int64_t kind =
        int64_t{number} * static_cast<int>(Purpose::count) + static_cast<int>(purpose);
    const int64_t data = 2 * kind * kGenerations + generation;
    const int64_t read = data + kGenerations;
    TORCH_CHECK(read <= std::numeric_limits<int>::max(),
                "zerocore: expected fewer sharded models in one process group, got no number left ",
                "for messages; make a new process group");
    return {static_cast<int>(data), static_cast<int>(read)};
  }
};

at::Tensor slot(const at::Tensor& buffer, int slots, int index) {
  const int64_t size = buffer.numel() / slots;
  return buffer.narrow(0, index * size, size);
}

// Every rank sends each other one its slot of `buffer`, and has the others' versions of its own.
struct Scatter {
  ExchangePtr messages;  // null: there are no others
  int rank = 0;
  std::vector<at::Tensor> versions;  // by rank, own one included; undefined: to be read in parts
};

Scatter scatter(const std::shared_ptr<Worker>& poster, const PeersPtr& peers, Tags tags,
                const at::Tensor& buffer, const std::shared_ptr<DevicePool>& buffers) {
  const int size = peers->size();
  const at::Tensor own = slot(buffer, size, peers->rank());
  const auto bytes = static_cast<int64_t>(own.nbytes());
  Scatter result{nullptr, peers->rank(), std::vector<at::Tensor>(size)};
  for (int peer = 0; peer < size; ++peer) {
    if (peer == peers->rank()) {
      result.versions[peer] = own;
    } else if (!peers->reads(peer, bytes)) {
      result.versions[peer] =
          DevicePool::empty(buffers, own.numel(), own.scalar_type(), buffers->streams().current());
    }
  }
  result.messages = std::make_shared<Exchange>(
      poster, peers, tags, [buffer, size](int peer) { return slot(buffer, size, peer); },
      [bytes, versions = result.versions](int peer) { return Incoming{bytes, versions[peer]}; });
  return result;
}

// Sums over ranks in their order. What can be read comes in parts that are still in the processor's
// cache when they are added, and need no room in memory.
constexpr int64_t kPartBytes = 256 << 10;  // of all peers

void sum(const Scatter& from, const std::shared_ptr<DevicePool>& buffers, const at::Tensor& out,
         bool accumulate) {
  if (from.messages) from.messages->receive();
  const auto readable = std::count_if(from.versions.begin(), from.versions.end(),
                                      [](const at::Tensor& version) { return !version.defined(); });
  if (readable == 0) {
    ops::sum_shards_(out, from.versions, accumulate);
    return;
  }
  const at::Tensor& own = from.versions[from.rank];
  const int64_t part = std::max<int64_t>(
      kPartBytes / readable / static_cast<int64_t>(own.element_size()) / 64 * 64, 64);
  const at::Tensor room =
      DevicePool::empty(buffers, part * readable, own.scalar_type(), buffers->streams().current());
  for (int64_t start = 0; start < own.numel(); start += part) {
    const int64_t count = std::min(part, own.numel() - start);
    const int64_t offset = start * static_cast<int64_t>(own.element_size());
    std::vector<at::Tensor> versions;
    int64_t next = 0;
    for (size_t rank = 0; rank < from.versions.size(); ++rank) {
      if (from.versions[rank].defined()) {
        versions.push_back(from.versions[rank].narrow(0, start, count));
        continue;
      }
      versions.push_back(room.narrow(0, next++ * part, count));
      from.messages->read_part(static_cast<int>(rank), offset, versions.back());
    }
    ops::sum_shards_(out.narrow(0, start, count), versions, accumulate);
  }
  from.messages->end_reading();
}

ExchangePtr gather(const std::shared_ptr<Worker>& poster, const PeersPtr& peers, Tags tags,
                   const at::Tensor& buffer) {
  const int size = peers->size();
  const int rank = peers->rank();
  return std::make_shared<Exchange>(
      poster, peers, tags, [=](int) { return slot(buffer, size, rank); },
      [=](int peer) {
        const at::Tensor target = slot(buffer, size, peer);
        return Incoming{static_cast<int64_t>(target.nbytes()), target};
      });
}

// Reductions under way, the next one included, beyond which a rank waits for its peers, and how
// long; and for how long at most it does not after it waited in vain, more each time.
constexpr size_t kUnderWay = 2;
constexpr std::chrono::milliseconds kPatience(50);
constexpr std::chrono::milliseconds kMostImpatience(10'000);

// Threads that receive gathers, so that windows arrive while the rank computes. Ranks may gather in
// different orders: one that waits for a peer holds up no other.
constexpr int kReceivers = 16;

class PairwiseTransport : public Transport {
 public:
  PairwiseTransport(const GroupNames& names, std::shared_ptr<DevicePool> buffers,
                    std::shared_ptr<Log> log)
      : shard_channel_(names.shard_channel),
        replicate_channel_(names.replicate_channel),
        buffers_(std::move(buffers)),
        log_(std::move(log)) {
    if (!names.shard.empty()) {
      shard_peers_ = std::make_shared<Peers>(c10d::resolve_process_group(names.shard));
      shards_ = shard_peers_->size();
      shard_rank_ = shard_peers_->rank();
    }
    if (!names.replicate.empty()) {
      replicate_peers_ = std::make_shared<Peers>(c10d::resolve_process_group(names.replicate));
      replicas_ = replicate_peers_->size();
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
    ExchangePtr exchange =
        gather(poster_, shard_peers_, shards(channel).tags(Purpose::gather), window);
    if (shard_peers_->reads_any(static_cast<int64_t>(window.nbytes()) / shards_)) {
      receivers_.post([exchange] {
        try {
          exchange->receive();
        } catch (const std::exception&) {
          // It is thrown again where somebody waits.
        }
      });
    }
    return std::make_unique<ExchangePending>(std::move(exchange), window);
  }

  std::unique_ptr<Pending> reduce(const at::Tensor& packed, const at::Tensor& partial,
                                  const at::Tensor& out, bool accumulate, int channel) override {
    return start_reduce(packed, replicate_peers_, partial, out, accumulate, channel);
  }

  std::unique_ptr<Pending> reduce_scatter(const at::Tensor& packed, const at::Tensor& out,
                                          bool accumulate, int channel) override {
    return start_reduce(packed, /*replicas=*/nullptr, /*partial=*/at::Tensor(), out, accumulate,
                        channel);
  }

  // [Note: patience] A rank that is ahead of its peers would have the packed gradients of its whole
  // backward waiting for them: it waits instead. But a peer that leaves a unit out reduces it at
  // the end of its backward only, for which it may need windows of this rank: so not for long, and
  // not again soon.
  void make_room() override {
    const auto now = std::chrono::steady_clock::now();
    while (!under_way_.empty()) {
      const bool wait = under_way_.size() >= kUnderWay && now >= patient_from_;
      const auto patience = wait ? kPatience : std::chrono::milliseconds(0);
      if (under_way_.front().wait_for(patience) != std::future_status::ready) {
        if (!wait) return;
        patient_from_ = std::chrono::steady_clock::now() + impatience_;
        impatience_ = std::min(2 * impatience_, kMostImpatience);
        return;
      }
      if (wait) impatience_ = kPatience;
      under_way_.pop_front();
    }
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

  void broadcast(const at::Tensor& buffer, Range wanted) override {
    // As bytes: any dtype travels, exactly.
    std::vector<at::Tensor> bytes{buffer.view(at::kByte)};
    for (const PeersPtr& peers : {replicate_peers_, shard_peers_}) {
      if (!peers || buffer.numel() == 0) continue;
      count("broadcast", buffer, buffer.numel());
      if (peers->reads_all(static_cast<int64_t>(buffer.nbytes()))) {
        // The first rank of a shard group passes all of it on, the others wait for that.
        const bool on_the_way = peers == replicate_peers_ && shards_ > 1;
        const Range all{0, shard_rank_ == 0 ? buffer.numel() : 0};
        read_from_first(peers, buffer, on_the_way ? all : wanted);
      } else {
        peers->group()->broadcast(bytes)->wait();
      }
    }
  }

 private:
  void read_from_first(const PeersPtr& peers, const at::Tensor& buffer, Range wanted) {
    const bool first = peers->rank() == 0;
    const int channel = peers == shard_peers_ ? shard_channel_ : replicate_channel_;
    const Incoming offered{static_cast<int64_t>(buffer.nbytes()), /*target=*/{}};
    Exchange exchange(
        poster_, peers, Channel{channel, generation_}.tags(Purpose::broadcast),
        [=](int) { return first ? buffer : at::Tensor(); },
        [=](int peer) { return peer == 0 ? std::optional(offered) : std::nullopt; });
    exchange.receive();
    if (!first && wanted.size() > 0) {
      exchange.read_part(0, wanted.begin * static_cast<int64_t>(buffer.element_size()),
                         buffer.narrow(0, wanted.begin, wanted.size()));
    }
    exchange.end_reading();
    exchange.drain();
  }

  std::unique_ptr<Pending> start_reduce(const at::Tensor& packed, const PeersPtr& replicas,
                                        const at::Tensor& partial, const at::Tensor& out,
                                        bool accumulate, int channel) {
    Scatter first;
    if (shards_ > 1) {
      count("reduce_scatter", packed, packed.numel() / shards_ * (shards_ - 1));
      first =
          scatter(poster_, shard_peers_, shards(channel).tags(Purpose::scatter), packed, buffers_);
    } else {
      first.versions = {packed};
    }
    // The second half of the messages depends on sums over the first: on a thread of its own, so
    // that neither waits for the other's computation. A future keeps its task: what the task holds
    // has to go when it is done.
    auto task = std::make_shared<std::packaged_task<void()>>(
        [=, first = std::move(first), partial = at::Tensor(partial), out = at::Tensor(out),
         buffers = buffers_, log = log_, poster = poster_,
         unit = units_.at(static_cast<size_t>(channel)), elements = packed.numel(),
         replicate_channel = Channel{replicate_channel_ + channel, generation_}]() mutable {
          c10::InferenceMode normal(false);
          at::NoGradGuard no_grad;
          finish_reduce(poster, replicas, buffers, *log, std::move(first), std::move(partial),
                        std::move(out), accumulate, replicate_channel);
          log->add({"finish", "reduce", "backward", unit, elements});
        });
    under_way_.push_back(task->get_future().share());
    auto pending = std::make_unique<FuturePending>(under_way_.back());
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

  static void finish_reduce(const std::shared_ptr<Worker>& poster, const PeersPtr& replicas,
                            const std::shared_ptr<DevicePool>& buffers, Log& log, Scatter first,
                            at::Tensor partial, at::Tensor out, bool accumulate, Channel channel) {
    if (!replicas) {
      TORCH_INTERNAL_ASSERT(!partial.defined(), "no sum over replicas to wait for");
      sum(first, buffers, out, accumulate);
      if (first.messages) first.messages->drain();
      return;
    }
    // The own slot of `packed` is nobody's message: the sum may take its place.
    at::Tensor total = first.versions[first.rank];
    if (partial.defined()) {
      sum(first, buffers, partial, /*accumulate=*/true);
      total.copy_(partial);
    } else if (first.messages) {
      sum(first, buffers, total, /*accumulate=*/false);
    }
    const int size = replicas->size();
    count(log, "all_reduce", total, 2 * (total.numel() / size) * (size - 1));
    const Scatter second =
        scatter(poster, replicas, channel.tags(Purpose::replica_scatter), total, buffers);
    // What is to become the gradient as it is needs no other place.
    const bool straight = !accumulate && out.scalar_type() == total.scalar_type();
    const at::Tensor& whole = straight ? out : total;
    sum(second, buffers, slot(whole, size, second.rank), /*accumulate=*/false);
    // Else what arrives next takes the place of what was sent.
    if (!straight) second.messages->drain();
    const ExchangePtr parts =
        gather(poster, replicas, channel.tags(Purpose::replica_gather), whole);
    parts->receive();
    if (!straight) ops::sum_shards_(out, {total}, accumulate);
    parts->drain();
    second.messages->drain();
    if (first.messages) first.messages->drain();
  }

  const int shard_channel_;
  const int replicate_channel_;
  int generation_ = 0;
  std::vector<int> units_;    // by channel
  PeersPtr shard_peers_;      // null: a group of one rank
  PeersPtr replicate_peers_;  // the same
  std::shared_ptr<DevicePool> buffers_;
  std::shared_ptr<Log> log_;
  const std::shared_ptr<Worker> poster_ = std::make_shared<Worker>();
  std::deque<std::shared_future<void>> under_way_;
  std::chrono::steady_clock::time_point patient_from_;
  std::chrono::milliseconds impatience_ = kPatience;
  Worker finisher_;
  Worker receivers_{kReceivers};
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
