#include "runtime/exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <system_error>
#include <type_traits>
#include <utility>

#include "runtime/cross_memory.h"

namespace zerocore {
namespace {

// Shorter messages are quicker through the socket than an address and an answer.
constexpr int64_t kReadBytes = 64 << 10;

static_assert(std::is_trivially_copyable_v<Introduction>);
constexpr int64_t kWords = sizeof(Introduction) / sizeof(int64_t);

// `own` of every rank, which are of one size.
std::vector<at::Tensor> gather(const Peers::GroupPtr& group, const at::Tensor& own) {
  std::vector<std::vector<at::Tensor>> all(1);
  for (int rank = 0; rank < group->getSize(); ++rank) {
    all[0].push_back(at::zeros(own.sizes(), own.options()));
  }
  std::vector<at::Tensor> inputs{own};
  group->allgather(all, inputs)->wait();
  return std::move(all[0]);
}

Introduction introduction_in(const at::Tensor& words) {
  const int64_t* word = words.const_data_ptr<int64_t>();
  return {word[0], word[1], word[2], word[3]};
}

// [Note: posting] Messages are posted by a thread of their own. Posting writes the first part of a
// message into the socket, which is work that the thread of autograd need not wait for. And c10d
// remembers thousands of recent messages in small blocks of memory: on the thread that computes,
// the C library would place these between the large blocks of activations, and the process would
// grow for as long as it runs (by several times the model, as measured with glibc).
template <class Start>
auto on(Worker& poster, Start start) {
  using Result = std::invoke_result_t<Start>;
  auto task = std::make_shared<std::packaged_task<Result()>>(std::move(start));
  std::future<Result> posted = task->get_future();
  poster.post([task] {
    c10::InferenceMode normal(false);
    (*task)();
  });
  return posted;
}

}  // namespace

Peers::Peers(GroupPtr group) : group_(std::move(group)), processes_(size(), 0) {
  const Introduction own = introduce();
  at::Tensor words = at::empty({kWords}, at::kLong);
  int64_t* word = words.data_ptr<int64_t>();
  word[0] = own.machine;
  word[1] = own.process;
  word[2] = own.address;
  word[3] = own.value;
  const std::vector<at::Tensor> all = gather(group_, words);
  at::Tensor readable = at::zeros({size()}, at::kByte);
  for (int peer = 0; peer < size(); ++peer) {
    readable.data_ptr<uint8_t>()[peer] = can_read(introduction_in(all[peer]));
  }
  const std::vector<at::Tensor> theirs = gather(group_, readable);
  all_ = true;
  for (int a = 0; a < size(); ++a) {
    for (int b = 0; b < size(); ++b) {
      all_ = all_ && (a == b || theirs[a].const_data_ptr<uint8_t>()[b] != 0);
    }
  }
  for (int peer = 0; peer < size(); ++peer) {
    const bool both = readable.const_data_ptr<uint8_t>()[peer] != 0 &&
                      theirs[peer].const_data_ptr<uint8_t>()[rank()] != 0;
    if (both) processes_[peer] = introduction_in(all[peer]).process;
    any_ = any_ || both;
  }
}

bool Peers::reads(int peer, int64_t bytes) const {
  return process(peer) != 0 && bytes >= kReadBytes;
}

bool Peers::reads_any(int64_t bytes) const { return any_ && bytes >= kReadBytes; }

bool Peers::reads_all(int64_t bytes) const { return all_ && bytes >= kReadBytes; }

Exchange::Exchange(std::shared_ptr<Worker> poster, std::shared_ptr<const Peers> peers, Tags tags,
                   To to, From from)
    : poster_(std::move(poster)), peers_(std::move(peers)), tags_(tags) {
  posted_ = on(*poster_, [peers = peers_, tags, to = std::move(to), from = std::move(from)] {
    return post(*peers, tags, to, from);
  });
}

// Receives first, so that no message waits for its place; peers in a different order on each rank,
// so that they do not all talk to the same one.
Exchange::Messages Exchange::post(const Peers& peers, Tags tags, const To& to, const From& from) {
  const int size = peers.size();
  const int rank = peers.rank();
  const auto receive = [&](const at::Tensor& buffer, int peer, int tag) {
    std::vector<at::Tensor> buffers{buffer};
    return peers.group()->recv(buffers, peer, tag);
  };
  Messages messages;
  for (int step = 1; step < size; ++step) {
    const int peer = (rank + size - step) % size;
    const std::optional<Incoming> data = from(peer);
    if (!data) continue;
    if (peers.reads(peer, data->bytes)) {
      const at::Tensor address = at::empty({1}, at::kLong);
      messages.offers.push_back({peer, receive(address, peer, tags.data), address, *data});
    } else {
      messages.received.push_back(receive(data->target, peer, tags.data));
    }
  }
  for (int step = 1; step < size; ++step) {
    const int peer = (rank + step) % size;
    std::vector<at::Tensor> buffer{to(peer)};
    if (!buffer[0].defined()) continue;
    if (peers.reads(peer, static_cast<int64_t>(buffer[0].nbytes()))) {
      messages.kept.push_back(buffer[0]);
      const at::Tensor answer = at::empty({1}, at::kByte);
      messages.sent.push_back(receive(answer, peer, tags.read));
      buffer[0] = at::full({1}, reinterpret_cast<int64_t>(buffer[0].const_data_ptr()), at::kLong);
    }
    messages.sent.push_back(peers.group()->send(buffer, peer, tags.data));
  }
  return messages;
}

void Exchange::receive() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (error_) std::rethrow_exception(error_);
  try {
    if (posted_.valid()) messages_ = posted_.get();
    for (const WorkPtr& work : messages_.received) work->wait();
    for (Offer& offer : messages_.offers) {
      offer.announced->wait();
      if (offer.data.target.defined()) {
        read(offer, 0, offer.data.target);
        answer(offer.peer);
      } else {
        parts_.push_back(std::move(offer));
      }
    }
  } catch (...) {
    // Nothing is read any more: the memory of the target may go.
    error_ = std::current_exception();
    throw;
  }
  messages_.received.clear();
  messages_.offers.clear();
}

void Exchange::read_part(int peer, int64_t offset, const at::Tensor& to) const {
  const auto offer = std::find_if(parts_.begin(), parts_.end(),
                                  [&](const Offer& part) { return part.peer == peer; });
  TORCH_INTERNAL_ASSERT(
      offer != parts_.end() && offset + static_cast<int64_t>(to.nbytes()) <= offer->data.bytes,
      "expected a part of what the peer offers");
  read(*offer, offset, to);
}

void Exchange::read(const Offer& offer, int64_t offset, const at::Tensor& to) const {
  const int64_t address = offer.address.const_data_ptr<int64_t>()[0];
  try {
    read_memory(peers_->process(offer.peer), address + offset, to.mutable_data_ptr(),
                static_cast<int64_t>(to.nbytes()));
  } catch (const std::system_error& error) {
    TORCH_CHECK_WITH(DistBackendError, false, "zerocore: expected to read what process ",
                     peers_->process(offer.peer), " (rank ", offer.peer,
                     " of its process group) has offered, got an error: ", error.what());
  }
}

void Exchange::end_reading() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Offer& part : parts_) answer(part.peer);
  parts_.clear();
}

// The peer may use its buffer again.
void Exchange::answer(int peer) {
  answers_.push_back(on(*poster_, [group = peers_->group(), peer, tag = tags_.read] {
    std::vector<at::Tensor> answer{at::zeros({1}, at::kByte)};
    return group->send(answer, peer, tag);
  }));
}

void Exchange::drain() {
  receive();
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_INTERNAL_ASSERT(parts_.empty(), "expected an exchange of which all has been read");
  for (auto& answer : answers_) messages_.sent.push_back(answer.get());
  answers_.clear();
  for (const WorkPtr& work : messages_.sent) work->wait();
  messages_.sent.clear();
  messages_.kept.clear();
}

}  // namespace zerocore
