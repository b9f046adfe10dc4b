// What ended the communication of some ranks, for good.
#pragma once

#include <c10/util/Exception.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <utility>

namespace zerocore {

// An error that says already where the ranks part.
class Diverged : public c10::DistBackendError {
 public:
  using c10::DistBackendError::DistBackendError;
};

// Shared by the models over the same ranks: when a collective of one has failed, messages may be
// missing or left over, so none of them communicates again. Thread-safe.
class Fault {
 public:
  // From what failed on this rank to where the ranks part; waits for the other ranks' answers.
  using Explain = std::function<std::string(const std::string& failure)>;

  explicit Fault(Explain explain = nullptr) : explain_(std::move(explain)) {}

  // The first text stays.
  void set(const std::string& text);
  std::string text() const;
  // Whether somebody was thrown the text.
  bool told() const { return told_.load(std::memory_order_relaxed); }
  bool broken() const { return broken_.load(std::memory_order_acquire); }
  // Throws if something has failed before.
  void check() const;
  // what: the collective, its unit and phase. Throws Diverged.
  [[noreturn]] void raise(const std::string& what, const std::exception& error);

 private:
  [[noreturn]] void throw_text(const std::string& detail) const;

  const Explain explain_;
  std::atomic<bool> broken_ = false;
  mutable std::atomic<bool> told_ = false;
  mutable std::mutex mutex_;
  std::string text_;
};

}  // namespace zerocore
