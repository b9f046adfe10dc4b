// Agreements on the host, as messages between pairs of ranks.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/max.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <functional>
#include <future>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "runtime/transport.h"
#include "runtime/worker.h"

namespace zerocore {

struct Control::Group {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  int number = 0;
  bool fake = false;
  Worker worker;  // see [Note: posting] in exchange.cpp

  // Returns when it is done.
  void run(std::function<void()> exchange) {
    auto task = std::make_shared<std::packaged_task<void()>>([exchange = std::move(exchange)] {
      c10::InferenceMode normal(false);
      at::NoGradGuard no_grad;
      exchange();
    });
    std::future<void> done = task->get_future();
    worker.post([task] { (*task)(); });
    done.get();
  }

  // Rounds of one agreement are between different pairs, with different sizes.
  int tag(Topic topic, int round) const {
    constexpr int kRounds = 32;
    return (number * static_cast<int>(Topic::count) + static_cast<int>(topic)) * kRounds + round;
  }

  void swap(Topic topic, int round, const at::Tensor& sent, int to, const at::Tensor& received,
            int from) {
    std::vector<at::Tensor> in{received}, out{sent};
    auto receiving = group->recv(in, from, tag(topic, round));
    auto sending = group->send(out, to, tag(topic, round));
    receiving->wait();
    sending->wait();
  }
};

Control::Control(const std::string& group, int number, bool fake)
    : group_(std::make_unique<Group>()) {
  if (group.empty()) return;
  group_->group = c10d::resolve_process_group(group);
  group_->number = number;
  ranks_ = group_->group->getSize();
  group_->fake = fake;
}

Control::~Control() = default;

// After each round a rank has the maximum over twice as many ranks in front of it, some of them
// perhaps twice, which a maximum does not mind.
void Control::max(Topic topic, const at::Tensor& bytes) {
  if (ranks_ == 1 || group_->fake) return;
  group_->run([&] {
    const int rank = group_->group->getRank();
    const at::Tensor other = at::empty_like(bytes);
    at::Tensor own = bytes;
    for (int round = 0, step = 1; step < ranks_; ++round, step *= 2) {
      group_->swap(topic, round, own, (rank + step) % ranks_, other,
                   (rank + ranks_ - step) % ranks_);
      at::max_out(own, own, other);
    }
  });
}

// Block i is of the rank i places behind this one; after each round there are twice as many.
std::vector<at::Tensor> Control::gather(Topic topic, const at::Tensor& values) {
  if (ranks_ == 1 || group_->fake) return std::vector<at::Tensor>(ranks_, values);
  const int64_t size = values.numel();
  const at::Tensor blocks = at::empty({ranks_ * size}, values.options());
  blocks.narrow(0, 0, size).copy_(values);
  const int rank = group_->group->getRank();
  group_->run([&] {
    for (int round = 0, step = 1; step < ranks_; ++round, step *= 2) {
      const int64_t count = std::min(step, ranks_ - step) * size;
      group_->swap(topic, round, blocks.narrow(0, 0, count), (rank + ranks_ - step) % ranks_,
                   blocks.narrow(0, step * size, count), (rank + step) % ranks_);
    }
  });
  std::vector<at::Tensor> ordered;
  for (int peer = 0; peer < ranks_; ++peer) {
    ordered.push_back(blocks.narrow(0, (peer + ranks_ - rank) % ranks_ * size, size));
  }
  return ordered;
}

}  // namespace zerocore
