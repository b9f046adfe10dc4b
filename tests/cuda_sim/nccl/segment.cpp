#include "segment.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace fake_nccl {

using Clock = std::chrono::steady_clock;

struct Segment::Header {
  std::atomic<uint32_t> bell;
  std::atomic<uint32_t> attached;
  RankState ranks[kMaxRanks];
  Channel channels[];  // nranks * nranks
};

namespace {

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

int timeout_seconds() {
  static const int seconds = [] {
    const char* text = std::getenv("CUDA_SIM_NCCL_TIMEOUT");
    return text && *text ? std::atoi(text) : 300;
  }();
  return seconds;
}

std::string directory() {
  const char* text = std::getenv("CUDA_SIM_SHM_DIR");
  return text && *text ? text : "/dev/shm";
}

}  // namespace

void die(const char* format, ...) {
  char text[2048];  // one write, so that messages of several ranks do not mix
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof text, format, args);
  va_end(args);
  std::fprintf(stderr, "cuda_sim nccl: %s\n", text);
  std::abort();
}

Segment::Segment(const std::string& name, int rank, int nranks)
    : name_(name), rank_(rank), nranks_(nranks) {
  if (nranks > kMaxRanks) die("%d ranks; at most %d are supported", nranks, kMaxRanks);
  std::string path = directory() + "/cuda_sim_nccl_" + name;
  int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  // A new file is all zeros, which is the initial state of everything in it, so it does not matter
  // who creates it.
  if (fd < 0 || ftruncate(fd, off_t(total_bytes())) != 0)
    die("cannot create %s: %s", path.c_str(), std::strerror(errno));
  void* mapped = mmap(nullptr, total_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (mapped == MAP_FAILED) die("cannot map %s: %s", path.c_str(), std::strerror(errno));
  base_ = static_cast<char*>(mapped);
  rank_state(rank).pid = getpid();
  ++header()->attached;
  ring();
  wait([&] { return header()->attached == uint32_t(nranks_); },
       [&] {
         return std::to_string(header()->attached) + " of " + std::to_string(nranks_) +
                " ranks joined communicator " + name_;
       });
  // Everyone has it mapped: the name is no longer needed, and a crash leaves nothing behind.
  if (rank == 0) unlink(path.c_str());
}

Segment::~Segment() { munmap(base_, total_bytes()); }

size_t Segment::slots_offset() const {
  return round_up(sizeof(Header) + sizeof(Channel) * size_t(nranks_) * size_t(nranks_), 4096);
}
size_t Segment::rings_offset() const { return slots_offset() + size_t(nranks_) * kSlotBytes; }
size_t Segment::total_bytes() const {
  return rings_offset() + size_t(nranks_) * size_t(nranks_) * kRingSlots * kRingSlotBytes;
}

RankState& Segment::rank_state(int rank) const { return header()->ranks[rank]; }
char* Segment::slot(int rank) const { return base_ + slots_offset() + size_t(rank) * kSlotBytes; }
Channel& Segment::channel(int from, int to) const {
  return header()->channels[from * nranks_ + to];
}
char* Segment::ring_slot(int from, int to, uint64_t index) const {
  size_t ring = size_t(from) * size_t(nranks_) + size_t(to);
  return base_ + rings_offset() + (ring * kRingSlots + index % kRingSlots) * kRingSlotBytes;
}

uint32_t Segment::bell() const { return header()->bell; }

void Segment::ring() const {
  ++header()->bell;
  syscall(SYS_futex, &header()->bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Segment::sleep(uint32_t seen_bell, int milliseconds) const {
  timespec timeout{milliseconds / 1000, milliseconds % 1000 * 1000000L};
  syscall(SYS_futex, &header()->bell, FUTEX_WAIT, seen_bell, &timeout, nullptr, 0);
}

void Segment::die_if_a_rank_is_gone(const std::string& what) const {
  for (int r = 0; r < nranks_; ++r) {
    int pid = rank_state(r).pid;
    if (pid && kill(pid, 0) != 0 && errno == ESRCH)
      die("rank %d: the process of rank %d is gone; %s", rank_, r, what.c_str());
  }
}

bool Segment::wait(const std::function<bool()>& done,
                   const std::function<std::string()>& what) const {
  auto start = Clock::now();
  auto next_check = start + std::chrono::seconds(2);
  while (true) {
    uint32_t seen = bell();
    if (done()) return true;
    if (aborted_) return false;
    sleep(seen, 100);
    if (Clock::now() < next_check || done()) continue;
    die_if_a_rank_is_gone(what());
    next_check += std::chrono::seconds(2);
    if (Clock::now() - start > std::chrono::seconds(timeout_seconds())) {
      die("rank %d waits for more than %d s; %s", rank_, timeout_seconds(), what().c_str());
    }
  }
}

void Segment::abort() {
  aborted_ = true;
  ring();
}

}  // namespace fake_nccl
