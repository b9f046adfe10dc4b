// What the log says of a model, and what ranks say of each other where they part.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "runtime/runtime.h"

namespace zerocore {

int64_t Runtime::elements(int unit) const {
  int64_t total = 0;
  for (const auto& flat : units_[unit]->flats) total += flat->layout().total();
  return total;
}

void Runtime::note(const char* event, const char* kind, int unit, int64_t elements) {
  const char* dtype = elements > 0 && unit >= 0 ? this->dtype(unit, kind) : "";
  const int64_t launch = std::string_view(event) == "launch" ? transport_->launch() : -1;
  log_->add({event, kind, phase_, unit, elements, launch, dtype});
}

// Where work is enqueued and timed, an event on the stream that computes begins an interval.
void Runtime::begin(const char* event, const char* kind, int unit) {
  int64_t number = -1;
  if (times_.on()) {
    number = next_interval_++;
    times_.begin(number, streams_.current());
    intervals_.push_back({kind, unit, number});
  }
  const int64_t elements =
      std::string_view(event) == "wait" && unit >= 0 ? this->elements(unit) : 0;
  const char* dtype = elements > 0 ? this->dtype(unit, kind) : "";
  log_->add({event, kind, phase_, unit, elements, number, dtype});
}

void Runtime::end(const char* event, const char* kind, int unit) {
  const auto begun = std::find_if(intervals_.rbegin(), intervals_.rend(), [&](const Interval& i) {
    return i.kind == std::string_view(kind) && i.unit == unit;
  });
  if (begun != intervals_.rend()) {
    times_.end(begun->number, streams_.current());
    intervals_.erase(std::next(begun).base());
  }
  note(event, kind, unit, std::string_view(event) == "done" && unit >= 0 ? elements(unit) : 0);
}

int64_t Runtime::opened_bytes() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  int64_t bytes = 0;
  for (const auto& unit : units_) {
    for (size_t f = 0; f < unit->originals.size(); ++f) {
      // A resident window, or the only shard, is no other memory.
      const bool resident = unit->flats[f]->shard_is_slot() ||
                            unit->originals[f].data_ptr() == unit->flats[f]->shard().data_ptr();
      if (!resident) bytes += static_cast<int64_t>(unit->originals[f].nbytes());
    }
  }
  return bytes;
}

void Runtime::begin_span(const std::string& kind, int unit) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  begin("begin", interned(kind), unit);
}

void Runtime::end_span(const std::string& kind, int unit) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  end("end", interned(kind), unit);
}

void Runtime::time_device(bool on) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  std::shared_ptr<const TimesStart> start;
  if (on && streams_.asynchronous()) start = std::make_shared<TimesStart>(streams_.current());
  intervals_.clear();
  times_.start(start);
  transport_->time_launches(std::move(start));
}

std::optional<std::pair<double, double>> Runtime::device_times(const std::string& event,
                                                               int64_t number) const {
  if (event == "launch") return transport_->times(number);
  return event == "begin" || event == "wait" ? times_.of(number) : std::nullopt;
}

const char* Runtime::dtype(int unit, const char* kind) const {
  const bool reduce = std::string_view(kind) == "reduce";
  std::optional<c10::ScalarType> common;
  for (const auto& flat : units_[unit]->flats) {
    const c10::ScalarType dtype = reduce ? gradient_dtypes(*flat).transport : flat->compute_dtype();
    if (common.value_or(dtype) != dtype) return "";
    common = dtype;
  }
  return common ? c10::toString(*common) : "";
}

// Before the wait for it, so that the log tells what this rank wants.
void Runtime::need(int unit) {
  if (!options_.persistent) note("need", "window", unit, elements(unit));
}

// Of the user's: where a collective has failed, the log ends with the wait for it.
void Runtime::note_exception(int unit) {
  if (!fault_->broken() && !std::exchange(raised_, true)) note("raise", "compute", unit, 0);
}

// Ranks that saw the exception at different points may have sent different messages ahead.
void Runtime::recover() {
  if (fault_->broken()) return;
  log_->recover();
  transport_->set_generation(log_->recoveries());
  raised_ = false;
}

at::Tensor Runtime::gather_full(int unit, const std::function<at::Tensor()>& gather) {
  if (transport_->shards() == 1) return gather();
  note("enter", "full_parameters", unit, elements(unit));
  at::Tensor full;
  waiting("all-gather of full parameters", unit, [&] { full = gather(); });
  note("leave", "full_parameters", unit, elements(unit));
  return full;
}

void Runtime::collective_failed(const char* what, int unit, const std::exception& error) {
  std::string where = what;
  if (unit >= 0) where += " of unit '" + unit_name(unit) + "'";
  fault_->raise(where + " in " + phase_, error);
}

void Runtime::report_divergence() {
  at::Tensor recoveries = at::full({1}, log_->recoveries(), at::kLong);
  std::vector<at::Tensor> everyones;
  const auto gather = [&](const at::Tensor& own) {
    agreeing("divergence", [&] { everyones = control_->gather(Topic::steps, own); });
  };
  gather(recoveries);
  for (size_t rank = 1; rank < everyones.size(); ++rank) {
    const auto first = everyones[0].item<int64_t>(), other = everyones[rank].item<int64_t>();
    if (first == other) continue;
    collective_failed("agreement", -1,
                      std::runtime_error(c10::str("rank 0 of the model has gone on after ", first,
                                                  " exceptions, rank ", rank, " after ", other)));
  }
  const std::vector<int> visited = scheduler_->visited();
  at::Tensor length = at::full({1}, static_cast<int64_t>(visited.size()), at::kLong);
  int64_t longest = 0;
  gather(length);
  for (const at::Tensor& other : everyones) {
    longest = std::max(longest, other.item<int64_t>());
  }
  at::Tensor own = at::full({longest}, -1, at::kLong);
  std::copy(visited.begin(), visited.end(), own.data_ptr<int64_t>());
  gather(own);
  const std::vector<at::Tensor>& orders = everyones;
  const auto name = [&](int64_t unit) {
    return unit < 0 ? std::string("nothing") : "unit '" + unit_name(static_cast<int>(unit)) + "'";
  };
  for (int64_t step = 0; step < longest; ++step) {
    const int64_t expected = orders[0].data_ptr<int64_t>()[step];
    for (size_t rank = 1; rank < orders.size(); ++rank) {
      const int64_t got = orders[rank].data_ptr<int64_t>()[step];
      TORCH_CHECK(got == expected, "zerocore: expected all ranks to use the units in the same ",
                  "order, got a difference at step ", step, ": rank 0 used ", name(expected),
                  ", rank ", rank, " ", name(got));
    }
  }
  TORCH_CHECK(false, "zerocore: the ranks' orders of units differ in their fingerprints only");
}

}  // namespace zerocore
