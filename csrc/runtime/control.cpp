// Agreements on the host, over gloo.

#include <ATen/ops/empty_like.h>

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
  Worker worker;  // see [Note: posting]

  // Returns when the collective is done.
  void run(std::function<void()> collective) {
    auto task = std::make_shared<std::packaged_task<void()>>(std::move(collective));
    std::future<void> done = task->get_future();
    worker.post([task] { (*task)(); });
    done.get();
  }
};

Control::Control(const std::string& group, std::shared_ptr<Log> log)
    : group_(std::make_unique<Group>()), log_(std::move(log)) {
  if (group.empty()) return;
  group_->group = c10d::resolve_process_group(group);
  ranks_ = group_->group->getSize();
}

Control::~Control() = default;

void Control::max(const at::Tensor& bytes) {
  if (ranks_ == 1) return;
  log_->count("control", bytes.numel(), bytes.numel());
  group_->run([&] {
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::MAX;
    std::vector<at::Tensor> tensors{bytes};
    group_->group->allreduce(tensors, options)->wait();
  });
}

std::vector<at::Tensor> Control::gather(const at::Tensor& values) {
  if (ranks_ == 1) return {values};
  log_->count("control", values.numel(), static_cast<int64_t>(values.nbytes()));
  std::vector<std::vector<at::Tensor>> results(1);
  for (int rank = 0; rank < ranks_; ++rank) results[0].push_back(at::empty_like(values));
  std::vector<at::Tensor> inputs{values};
  group_->run([&] { group_->group->allgather(results, inputs)->wait(); });
  return results[0];
}

}  // namespace zerocore
