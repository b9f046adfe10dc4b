// Moves flat buffers between ranks. Only this and its implementations (exchange.cpp, pairwise.cpp,
// native.cpp, control.cpp) call c10d.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/layout.h"
#include "runtime/log.h"
#include "runtime/memory.h"
#include "runtime/streams.h"
#include "runtime/times.h"

namespace zerocore {

// A collective under way.
class Pending {
 public:
  virtual ~Pending() = default;
  // On return the result is there: for what the current stream is given next, where work is
  // enqueued. Throws what went wrong, on the thread that waits.
  virtual void wait() = 0;
  // The same, and the peers have read what this rank sent: its buffers may change again.
  virtual void drain() = 0;
};

// The ranks that shard a buffer, and the ranks that hold the same shard.
//
//   all_gather   over the shard group
//   reduce       reduce-scatter over the shard group, then all-reduce over the replicate group
//   reduce_scatter  the first half of it
//   broadcast    from the first rank of both
//
// Calls of each kind are made in the same order on all ranks, or, where there are channels, with
// different ones. On devices with streams gathers run on Streams::gather() and reductions on
// Streams::reduce(): what they read has to be ready there.
class Transport {
 public:
  virtual ~Transport() = default;

  // Where messages have numbers, they are matched with those of the same generation only: after an
  // exception, one that some rank had sent ahead is not taken for a later one.
  virtual void set_generation(int64_t) {}

  // The channel's reductions are of this unit, for the log.
  virtual void set_unit(int /*channel*/, int /*unit*/) {}

  // Gathers or reductions in between, not both, may go out together, with the end at the latest.
  virtual void begin_launch() {}
  virtual void end_launch() {}
  // Instead of the end, where there was an error: what did not go out is forgotten.
  virtual void cancel_launch() {}

  // From now on launches are timed by events on the device; nothing: they are not.
  virtual void time_launches(std::shared_ptr<const TimesStart>) {}
  // The number of the launch under way, or of the next one; -1 where there are none.
  virtual int64_t launch() const { return -1; }
  // When it began and ended on the device, in seconds since `start`; nothing if it was not
  // timed, is not over, or is too old.
  virtual std::optional<std::pair<double, double>> times(int64_t) const { return std::nullopt; }

  // The launch of a collective that the device is at, and the seconds since a call of this found it
  // there first; nothing if it is at none. Any thread may ask.
  virtual std::optional<std::pair<int64_t, double>> under_way() { return std::nullopt; }

  // Memory that the network may read and write itself, registered by the process group (NCCL user
  // buffers); bytes, 1-D, on the current stream. Throws if the group has none.
  virtual at::Tensor allocate(int64_t bytes);

  int shards() const { return shards_; }
  int replicas() const { return replicas_; }
  int shard_rank() const { return shard_rank_; }

  // window: 1-D, shards() equal slots, this rank's one filled. Fills the others.
  virtual std::unique_ptr<Pending> all_gather(const at::Tensor& window, int channel) = 0;
  // packed: 1-D, shards() equal slots, overwritten. Stores this rank's slot of the sum over all
  // ranks in `out` (of the slot's size), or adds it. partial: what earlier calls of reduce_scatter
  // have summed, added to this one's and overwritten; or undefined.
  virtual std::unique_ptr<Pending> reduce(const at::Tensor& packed, const at::Tensor& partial,
                                          const at::Tensor& out, bool accumulate, int channel) = 0;
  // Called before the buffer of a reduction is made. Where reductions go on beside the computation
  // without being waited for, it waits for earlier ones, a moment at most, so that their buffers
  // are used again.
  virtual void make_room() {}
  // The sum over the shard group alone.
  virtual std::unique_ptr<Pending> reduce_scatter(const at::Tensor& packed, const at::Tensor& out,
                                                  bool accumulate, int channel) = 0;
  // wanted: the elements that this rank needs; it may find others as they were.
  virtual void broadcast(const at::Tensor& buffer, Range wanted) = 0;
  void broadcast(const at::Tensor& buffer) { broadcast(buffer, {0, buffer.numel()}); }
  // Drains without waiting for it, then calls `then`. Whoever goes while peers may still read what
  // it sent leaves its collectives here: gloo never sends the rest of a message that is forgotten,
  // nor anything behind it.
  virtual void retire(std::unique_ptr<Pending> pending, std::function<void()> then) = 0;

 protected:
  int shards_ = 1;
  int replicas_ = 1;
  int shard_rank_ = 0;
};

// Names of registered process groups; empty: a group of one rank. Other users of a group have other
// channels: this one's are counted from the given ones.
struct GroupNames {
  std::string shard;
  std::string replicate;
  // The same ranks, for reductions: their order among the gathers may differ from rank to rank.
  std::string reduce_shard;
  std::string reduce_replicate;
  int shard_channel = 0;
  int replicate_channel = 0;
};

// Exchanges between pairs of ranks, for gloo: its reduce-scatter is an all-reduce underneath and
// its all-gather is slow, while point-to-point messages move the least volume and are summed here:
// in rank order, with fp32 (or wider) accumulation, rounded once to the buffer's dtype, so that the
// bits do not depend on how many of the ranks shard and how many replicate.
// buffers: memory of what is received. The log counts what is handed to the process group.
std::unique_ptr<Transport> make_pairwise_transport(const GroupNames& groups,
                                                   std::shared_ptr<DevicePool> buffers,
                                                   std::shared_ptr<Log> log);

// The process group's own collectives, for NCCL and HCCL (and for fake groups). Sums are taken in
// the order and with the accumulation that the library chooses.
std::unique_ptr<Transport> make_native_transport(const GroupNames& groups,
                                                 std::shared_ptr<DevicePool> buffers,
                                                 std::shared_ptr<Log> log);

// What the host agrees about. Each topic has messages of its own: if ranks differ in what they do
// next, they wait for each other, and nobody gets an answer to another question (nor one of another
// size, with which gloo ends the process).
enum class Topic { backward, order, steps, sizes, values, sum, maximum, count };

// Small agreements on the host, over gloo. Nothing happens in a group of one rank.
class Control {
 public:
  // number: of the user of the group; those with other numbers are not disturbed. fake: there are
  // no others, and each says what this rank says.
  Control(const std::string& group, int number, bool fake);
  ~Control();

  int ranks() const { return ranks_; }
  // Element-wise maximum over the ranks, in place. bytes: 1-D uint8 on the CPU.
  void max(Topic topic, const at::Tensor& bytes);
  // The values of every rank, in rank order, which are of one size. values: 1-D, on the CPU.
  std::vector<at::Tensor> gather(Topic topic, const at::Tensor& values);

 private:
  struct Group;
  std::unique_ptr<Group> group_;
  int ranks_ = 1;
};

}  // namespace zerocore
