// Execution of collectives and messages, inside stream tasks.
#include <algorithm>
#include <cstring>
#include <thread>

#include "comm.h"
#include "reduce.h"

namespace fake_nccl {

std::string describe(const Description& d) {
  static const char* const kinds[] = {"all_reduce",     "broadcast",  "reduce", "all_gather",
                                      "reduce_scatter", "all_to_all", "gather", "scatter"};
  static const char* const ops[] = {"sum", "prod", "max", "min", "avg"};
  std::string text = kinds[uint32_t(d.kind)];
  text += "(count=" + std::to_string(d.count) + ", " + dtype_name(ncclDataType_t(d.dtype));
  if (d.kind == Kind::all_reduce || d.kind == Kind::reduce || d.kind == Kind::reduce_scatter) {
    text += std::string(", ") + (d.op < 5 ? ops[d.op] : "premul_sum");
  }
  if (d.root >= 0) text += ", root=" + std::to_string(d.root);
  return text + ")";
}

namespace {

bool reduces(Kind kind) {
  return kind == Kind::all_reduce || kind == Kind::reduce || kind == Kind::reduce_scatter;
}

// Kinds whose contribution has a separate part for every receiving rank.
bool is_split_by_receiver(Kind kind) {
  return kind == Kind::reduce_scatter || kind == Kind::all_to_all || kind == Kind::scatter;
}

// One chunk [offset, offset + n) of a collective's elements. First every rank puts its contribution
// into its slot, then every rank takes what it needs out of all slots.
struct Chunk {
  const Segment& segment;
  const Collective& c;
  int rank, nranks;
  size_t element, offset, n;

  const char* send_part(int part) const {
    return static_cast<const char*>(c.send) +
           (size_t(part) * c.description.count + offset) * element;
  }
  char* recv_part(int part) const {
    return static_cast<char*>(c.recv) + (size_t(part) * c.description.count + offset) * element;
  }
  bool is_root() const { return c.description.root < 0 || c.description.root == rank; }

  void contribute() const {
    Kind kind = c.description.kind;
    if ((kind == Kind::broadcast || kind == Kind::scatter) && !is_root()) return;
    int parts = is_split_by_receiver(kind) ? nranks : 1;
    for (int part = 0; part < parts; ++part) {
      std::memcpy(segment.slot(rank) + size_t(part) * n * element, send_part(part), n * element);
    }
    if (!reduces(kind)) return;
    auto dtype = ncclDataType_t(c.description.dtype);
    double factor = 1;
    if (c.description.op == ncclAvg && is_floating(dtype)) factor = 1.0 / nranks;
    if (c.description.op >= ncclNumOps) factor = c.factor;
    if (factor != 1) scale(dtype, segment.slot(rank), size_t(parts) * n, factor);
  }

  void consume() const {
    Kind kind = c.description.kind;
    size_t own = is_split_by_receiver(kind) ? size_t(rank) * n * element
                                            : 0;  // this rank's part of every slot
    switch (kind) {
      case Kind::all_reduce:
      case Kind::reduce:
      case Kind::reduce_scatter: {
        if (!is_root()) return;
        std::vector<const void*> inputs;
        for (int r = 0; r < nranks; ++r) inputs.push_back(segment.slot(r) + own);
        reduce(ncclDataType_t(c.description.dtype), ncclRedOp_t(c.description.op), inputs,
               recv_part(0), n);
        return;
      }
      case Kind::broadcast:
      case Kind::scatter:
        std::memcpy(recv_part(0), segment.slot(c.description.root) + own, n * element);
        return;
      case Kind::all_gather:
      case Kind::all_to_all:
      case Kind::gather:
        if (!is_root()) return;
        for (int r = 0; r < nranks; ++r)
          std::memcpy(recv_part(r), segment.slot(r) + own, n * element);
        return;
    }
  }
};

}  // namespace
}  // namespace fake_nccl

using namespace fake_nccl;

bool ncclComm::barrier(const Collective& c) {
  uint64_t phase = ++segment.rank_state(rank).phase;
  segment.ring();
  auto missing = [&] {
    std::string ranks;
    for (int r = 0; r < nranks; ++r) {
      if (segment.rank_state(r).phase < phase) ranks += " " + std::to_string(r);
    }
    return ranks;
  };
  return segment.wait(
      [&] {
        for (int r = 0; r < nranks; ++r) {
          if (segment.rank_state(r).phase < phase) return false;
        }
        return true;
      },
      [&] {
        return describe(c.description) + ", number " + std::to_string(c.number) +
               ", still misses rank" + missing();
      });
}

void ncclComm::check_agreement(const Collective& c) {
  for (int r = 0; r < nranks; ++r) {
    Description other = segment.rank_state(r).description;
    if (other == c.description) continue;
    die("ranks disagree about collective number %lu of communicator %s: rank %d calls %s, rank %d "
        "calls %s",
        (unsigned long)c.number, segment.name().c_str(), rank, describe(c.description).c_str(), r,
        describe(other).c_str());
  }
}

void ncclComm::run(const Collective& c) {
  const Description& d = c.description;
  RankState& self = segment.rank_state(rank);
  self.description = d;
  self.started = c.number;
  size_t element = element_bytes(ncclDataType_t(d.dtype));
  size_t per_chunk = kSlotBytes / element / (is_split_by_receiver(d.kind) ? size_t(nranks) : 1);
  size_t offset = 0;
  do {  // at least once, so that empty collectives are compared and synchronise too
    Chunk chunk{
        segment, c, rank, nranks, element, offset, std::min(per_chunk, size_t(d.count) - offset)};
    chunk.contribute();
    if (!barrier(c)) return;
    if (offset == 0) check_agreement(c);
    chunk.consume();
    if (!barrier(c)) return;  // nobody may refill a slot before everyone has read it
    offset += chunk.n;
  } while (offset < d.count);
  note_finished(collectives, c.number);
}

namespace {

// Moves as much of the message as is possible now; true when something moved.
bool advance(Message& m) {
  Segment& segment = m.comm->segment;
  Channel& channel =
      m.is_send ? segment.channel(m.comm->rank, m.peer) : segment.channel(m.peer, m.comm->rank);
  int from = m.is_send ? m.comm->rank : m.peer, to = m.is_send ? m.peer : m.comm->rank;
  bool moved = false;
  while (!m.finished) {
    uint64_t written = channel.written, read = channel.read;
    size_t n = std::min(kRingSlotBytes, m.bytes - m.done);
    if (m.is_send) {
      if (written - read == kRingSlots) {
        channel.sends_waiting = m.number;
        break;
      }
      channel.message_bytes[written % kRingSlots] = m.bytes;
      std::memcpy(segment.ring_slot(from, to, written), m.data + m.done, n);
      channel.written = written + 1;
    } else {
      if (written == read) {
        channel.recvs_waiting = m.number;
        break;
      }
      uint64_t sent = channel.message_bytes[read % kRingSlots];
      if (sent != m.bytes) {
        die("message number %lu from rank %d to rank %d of communicator %s: %lu bytes sent, %zu "
            "bytes to receive",
            (unsigned long)m.number, from, to, segment.name().c_str(), (unsigned long)sent,
            m.bytes);
      }
      std::memcpy(m.data + m.done, segment.ring_slot(from, to, read), n);
      channel.read = read + 1;
    }
    m.done += n;
    m.finished = m.done == m.bytes;
    moved = true;
  }
  return moved;
}

std::string describe_message(const Message& m) {
  return std::string(m.is_send ? "send to rank " : "receive from rank ") + std::to_string(m.peer) +
         ", " + std::to_string(m.bytes) + " bytes, message number " + std::to_string(m.number);
}

}  // namespace

void fake_nccl::run_messages(std::vector<Message>& messages) {
  // Messages of one channel must not overtake each other, so only the first unfinished one of a
  // channel may move.
  auto pass = [&] {
    bool moved = false;
    std::vector<std::tuple<ncclComm_t, bool, int>> blocked;
    for (Message& m : messages) {
      std::tuple<ncclComm_t, bool, int> channel{m.comm, m.is_send, m.peer};
      if (m.finished || std::find(blocked.begin(), blocked.end(), channel) != blocked.end())
        continue;
      if (advance(m)) {
        moved = true;
        m.comm->segment.ring();
      }
      if (m.finished) {
        m.comm->note_finished(m.comm->backlog(m), m.number);
      } else {
        blocked.push_back(channel);
      }
    }
    return moved;
  };
  while (true) {
    while (pass()) {
    }
    auto unfinished = std::find_if(messages.begin(), messages.end(),
                                   [](const Message& m) { return !m.finished; });
    if (unfinished == messages.end()) return;
    // Tell the peers that this rank waits, then sleep. (With messages of several communicators, a
    // change in another one than the first is noticed a little later: a sleep ends after 100 ms at
    // most.)
    for (Message& m : messages) {
      if (!m.finished) m.comm->segment.ring();
    }
    bool moved = unfinished->comm->segment.wait([&] { return pass(); },
                                                [&] { return describe_message(*unfinished); });
    if (!moved) return;  // aborted
  }
}
