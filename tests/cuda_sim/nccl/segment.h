// The memory that the ranks of one communicator share: a file mapped by all of them.
//
// Collectives move data through one slot per rank, in chunks; point-to-point messages through a
// small ring per ordered pair of ranks. A rank that needs something another rank has not done yet
// sleeps on the bell, a futex that every change rings.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace fake_nccl {

constexpr int kMaxRanks = 64;
constexpr size_t kSlotBytes = 1 << 20;
constexpr size_t kRingSlots =
    8;  // with kRingSlotBytes: 2 MiB buffered per pair; real NCCL buffers a few MiB too
constexpr size_t kRingSlotBytes = 256 << 10;

enum class Kind : uint32_t {
  all_reduce,
  broadcast,
  reduce,
  all_gather,
  reduce_scatter,
  all_to_all,
  gather,
  scatter
};

// What all ranks must agree on, per collective.
struct Description {
  Kind kind;
  uint32_t dtype;
  uint32_t op;
  int32_t root;
  uint64_t count;
  bool operator==(const Description&) const = default;
};

struct alignas(64) RankState {
  std::atomic<uint64_t> phase;  // barriers entered by collectives
  std::atomic<uint64_t>
      started;              // collectives whose execution has begun: a demand on the other ranks
  Description description;  // of the collective being executed
  std::atomic<uint64_t> control_phase;
  int32_t control[2];  // value of the control exchange in progress
  int32_t pid;
};

struct alignas(64) Channel {            // from one rank to another
  std::atomic<uint64_t> written, read;  // ring slots
  std::atomic<uint64_t> recvs_waiting;  // the receiver waits for messages up to this number
  std::atomic<uint64_t> sends_waiting;  // the sender's ring is full at this message number
  uint64_t message_bytes[kRingSlots];   // total size of the message a slot belongs to
};

class Segment {
 public:
  // Returns when all ranks are attached.
  Segment(const std::string& name, int rank, int nranks);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  RankState& rank_state(int rank) const;
  char* slot(int rank) const;
  Channel& channel(int from, int to) const;
  char* ring_slot(int from, int to, uint64_t index) const;

  uint32_t bell() const;
  void ring() const;
  void sleep(uint32_t seen_bell,
             int milliseconds) const;  // returns early when the bell moved past seen_bell

  // Sleeps until done() holds; false when the communicator was aborted instead. Dies, saying
  // what(), when that takes longer than CUDA_SIM_NCCL_TIMEOUT seconds (300) or when a rank's
  // process is gone.
  bool wait(const std::function<bool()>& done, const std::function<std::string()>& what) const;

  void abort();
  bool aborted() const { return aborted_; }
  const std::string& name() const { return name_; }

 private:
  struct Header;
  Header* header() const { return reinterpret_cast<Header*>(base_); }
  size_t slots_offset() const;
  size_t rings_offset() const;
  size_t total_bytes() const;
  void die_if_a_rank_is_gone(const std::string& what) const;

  std::string name_;
  int rank_, nranks_;
  char* base_ = nullptr;
  std::atomic<bool> aborted_{false};
};

[[noreturn]] void die(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace fake_nccl
