#include "runtime/fault.h"

namespace zerocore {

void Fault::set(const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (broken_) return;
  text_ = text;
  broken_.store(true, std::memory_order_release);
}

std::string Fault::text() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return text_;
}

void Fault::check() const {
  if (broken()) throw_text("");
}

void Fault::raise(const std::string& what, const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  const std::string reason = torch_error ? torch_error->what_without_backtrace() : error.what();
  const std::string failure = "zerocore: the " + what + " failed: " + reason;
  if (!broken()) set(explain_ ? explain_(failure) : failure);
  throw_text("\n(On this rank: " + failure + ")");
}

void Fault::throw_text(const std::string& detail) const {
  told_.store(true, std::memory_order_relaxed);
  throw Diverged({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text() + detail);
}

}  // namespace zerocore
