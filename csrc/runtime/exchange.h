// Messages between this rank of a process group and its peers, for the pairwise transport.
#pragma once

#include <ATen/core/Tensor.h>

#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "runtime/worker.h"

namespace zerocore {

// A process group, and which of its ranks read each other's memory.
class Peers {
 public:
  using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

  // A collective: all ranks tell how they can be read from, and then whom they can read.
  explicit Peers(GroupPtr group);

  const GroupPtr& group() const { return group_; }
  int size() const { return group_->getSize(); }
  int rank() const { return group_->getRank(); }
  // Whether `bytes` between this rank and the peer are read, in both directions. Both agree.
  bool reads(int peer, int64_t bytes) const;
  // Whether they are between this rank and any.
  bool reads_any(int64_t bytes) const;
  // Whether they are between all ranks. All agree.
  bool reads_all(int64_t bytes) const;
  int64_t process(int peer) const { return processes_[static_cast<size_t>(peer)]; }

 private:
  GroupPtr group_;
  std::vector<int64_t> processes_;  // of ranks that read and are read; else 0
  bool any_ = false;
  bool all_ = false;
};

// gloo matches messages of one tag in their order.
struct Tags {
  int data;  // what is sent, or where it can be read
  int read;  // that it has been read
};

// What a peer sends: so many bytes, and where they are put. What can be read needs no place: see
// read_part().
struct Incoming {
  int64_t bytes;
  at::Tensor target;
};

// At most one message to and one from each peer. Where ranks read each other's memory, the message
// says where the data is, and is answered by one that says that it has been read.
//
//   this rank                              peer
//   post:     its address            -->   receive: reads the data from there
//   drain:    the buffer is free     <--            has been read
//
// Thread-safe, but for read_part().
class Exchange {
 public:
  using To = std::function<at::Tensor(int peer)>;  // undefined: nothing is sent
  using From = std::function<std::optional<Incoming>(int peer)>;

  // Posts the messages on a thread of its own [Note: posting], which calls `to` and `from`.
  Exchange(std::shared_ptr<Worker> poster, std::shared_ptr<const Peers> peers, Tags tags, To to,
           From from);
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // On return all that has a place has arrived, and the rest can be read. Whoever calls this first
  // does what there is to do.
  void receive();
  // Reads a part of what has no place, from that byte on. After receive().
  void read_part(int peer, int64_t offset, const at::Tensor& to) const;
  // Nothing is read any more.
  void end_reading();
  // On return all has arrived, and the peers have what this rank sent.
  void drain();

 private:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  // Data of a peer that this rank reads.
  struct Offer {
    int peer;
    WorkPtr announced;
    at::Tensor address;  // int64, one element; it is there when announced
    Incoming data;
  };
  struct Messages {
    std::vector<WorkPtr> received;
    std::vector<Offer> offers;
    std::vector<WorkPtr> sent;
    std::vector<at::Tensor> kept;  // what is under way
  };

  static Messages post(const Peers& peers, Tags tags, const To& to, const From& from);
  void read(const Offer& offer, int64_t offset, const at::Tensor& to) const;
  void answer(int peer);

  const std::shared_ptr<Worker> poster_;
  const std::shared_ptr<const Peers> peers_;
  const Tags tags_;
  std::mutex mutex_;
  std::future<Messages> posted_;
  Messages messages_;
  std::vector<Offer> parts_;  // announced, without a place
  std::vector<std::future<WorkPtr>> answers_;
  std::exception_ptr error_;  // what receive() failed with
};

}  // namespace zerocore
