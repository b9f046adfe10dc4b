// A communicator, and the operations that run on it.
#pragma once
#include <nccl.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "segment.h"

namespace fake_nccl {

struct Collective {
  Description description;
  const void* send;
  void* recv;
  double factor;        // of a PreMulSum operator
  uint64_t number = 0;  // per communicator, from 1
};

struct Message {
  ncclComm_t comm;
  bool is_send;
  int peer;
  char* data;
  size_t bytes;
  uint64_t number = 0;  // per communicator, direction and peer, from 1
  size_t done = 0;
  bool finished = false;
};

using EventPtr = std::shared_ptr<CUevent_st>;  // destroys the event with its last user

// Operations of one kind that are enqueued on a stream and not finished, with an event recorded
// behind each.
struct Backlog {
  uint64_t enqueued = 0;
  uint64_t finished = 0;
  std::map<uint64_t, EventPtr> events;
  uint64_t driven = 0;  // a thread already drives the stream up to here on behalf of a peer
};

std::string describe(const Description& d);

}  // namespace fake_nccl

struct ncclComm {
  ncclComm(const std::string& name, int rank, int nranks, int device);
  ~ncclComm();

  // Exchanges two numbers among all ranks, on the host, independent of any stream.
  std::vector<std::pair<int, int>> exchange(int a, int b);

  void run(const fake_nccl::Collective& collective);

  // Where a finished or enqueued operation is noted: collectives, or messages to or from one peer.
  fake_nccl::Backlog& backlog(const fake_nccl::Message& message) {
    return message.is_send ? sends[message.peer] : recvs[message.peer];
  }
  void note_finished(fake_nccl::Backlog& backlog, uint64_t number);

  fake_nccl::Segment segment;
  const int rank, nranks, device;
  int splits = 0;

  std::mutex mutex;  // guards what follows
  fake_nccl::Backlog collectives;
  std::map<int, fake_nccl::Backlog> sends, recvs;
  fake_nccl::EventPtr last;  // behind the latest operation, whatever its stream
  cudaStream_t last_stream = nullptr;

 private:
  bool barrier(const fake_nccl::Collective& collective);
  void check_agreement(const fake_nccl::Collective& collective);
  void serve_peers();
  void wait_until_host_is_quiet();
  bool peers_demand_something();
  std::vector<fake_nccl::EventPtr> demanded_events(bool take);  // with the mutex held

  std::atomic<bool> stop{false};
  std::atomic<int> helpers{0};
  std::thread* server = nullptr;
};

namespace fake_nccl {
// Runs all messages together, whatever their communicators, until each is finished.
void run_messages(std::vector<Message>& messages);
}  // namespace fake_nccl
