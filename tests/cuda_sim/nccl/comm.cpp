// Communicators: creation, the host-side exchange, and serving the demands of peers.
//
// With the lazy schedule an enqueued collective runs only when something demands it. On a real GPU
// it would run by itself, so a peer that waits in it is such a demand: every communicator has a
// thread that watches what the other ranks wait for and runs this rank's streams up to there.
// Without it, a rank that has enqueued a collective and then waits for its peer by other means (a
// barrier on the host, say) would deadlock here and nowhere else.
#include "comm.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "cuda_sim_api.h"

using namespace fake_nccl;

ncclComm::ncclComm(const std::string& name, int rank_, int nranks_, int device_)
    : segment(name, rank_, nranks_), rank(rank_), nranks(nranks_), device(device_) {
  if (cuda_sim_is_lazy()) server = new std::thread([this] { serve_peers(); });
}

ncclComm::~ncclComm() {
  stop = true;
  segment.ring();
  if (server) server->join();
  delete server;
  // Helper threads use this object until their event is done.
  while (helpers > 0) segment.sleep(segment.bell(), 1);
}

std::vector<std::pair<int, int>> ncclComm::exchange(int a, int b) {
  auto control_barrier = [&] {
    uint64_t phase = ++segment.rank_state(rank).control_phase;
    segment.ring();
    return segment.wait(
        [&] {
          for (int r = 0; r < nranks; ++r) {
            if (segment.rank_state(r).control_phase < phase) return false;
          }
          return true;
        },
        [] { return std::string("not all ranks have called ncclCommSplit"); });
  };
  segment.rank_state(rank).control[0] = a;
  segment.rank_state(rank).control[1] = b;
  std::vector<std::pair<int, int>> all;
  if (!control_barrier()) return all;
  for (int r = 0; r < nranks; ++r)
    all.emplace_back(segment.rank_state(r).control[0], segment.rank_state(r).control[1]);
  if (!control_barrier()) all.clear();  // nobody may overwrite a value before everyone has read it
  return all;
}

void ncclComm::note_finished(Backlog& backlog, uint64_t number) {
  std::lock_guard<std::mutex> lock(mutex);
  backlog.finished = std::max(backlog.finished, number);
  backlog.events.erase(backlog.events.begin(), backlog.events.upper_bound(number));
}

// The events to wait for so that everything runs that peers wait for and that is enqueued here.
// With `take`, they are noted as taken care of.
std::vector<EventPtr> ncclComm::demanded_events(bool take) {
  std::vector<EventPtr> events;
  auto add = [&](Backlog& backlog, uint64_t wanted) {
    // A peer may be further ahead than this rank has enqueued; then the latest enqueued operation
    // comes first.
    wanted = std::min(wanted, backlog.enqueued);
    if (wanted <= backlog.finished || wanted <= backlog.driven) return;
    auto it = backlog.events.find(wanted);
    if (it == backlog.events.end()) return;  // being enqueued right now; the bell rings when it is
    if (take) backlog.driven = wanted;
    events.push_back(it->second);
  };
  uint64_t started = 0;
  for (int r = 0; r < nranks; ++r) {
    if (r != rank) started = std::max(started, segment.rank_state(r).started.load());
  }
  add(collectives, started);
  for (auto& [peer, backlog] : sends) add(backlog, segment.channel(rank, peer).recvs_waiting);
  for (auto& [peer, backlog] : recvs) add(backlog, segment.channel(peer, rank).sends_waiting);
  return events;
}

// Serving a demand at once would make it a matter of timing whether work of a program that forgot
// to wait has run by the time the program reads the result. So a rank that is still busy enqueuing
// gets the time to reach the point where it demands the work itself; only a rank that has been
// quiet for a few milliseconds is taken to be waiting.
void ncclComm::wait_until_host_is_quiet() {
  const int quiet_ms = 3, limit_ms = 1000;
  unsigned long seen = cuda_sim_activity();
  for (int quiet = 0, total = 0; quiet < quiet_ms && total < limit_ms && !stop; ++total) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    unsigned long now = cuda_sim_activity();
    quiet = now == seen ? quiet + 1 : 0;
    seen = now;
  }
}

bool ncclComm::peers_demand_something() {
  std::lock_guard<std::mutex> lock(mutex);
  return !demanded_events(/*take=*/false).empty();
}

void ncclComm::serve_peers() {
  while (!stop) {
    uint32_t seen = segment.bell();
    if (peers_demand_something()) wait_until_host_is_quiet();
    std::vector<EventPtr> events;
    {
      std::lock_guard<std::mutex> lock(mutex);
      events = demanded_events(/*take=*/true);
    }
    for (EventPtr& event : events) {
      // In its own thread: this operation may have to wait for a third rank, which may wait for
      // another one of ours.
      ++helpers;
      std::thread([this, event] {
        cudaSetDevice(device);
        cudaEventSynchronize(event.get());
        --helpers;
      }).detach();
    }
    if (!stop) segment.sleep(seen, 100);
  }
}
