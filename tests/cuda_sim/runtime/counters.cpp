// What happened, for tests to assert on: launches, copies, memory, waits.
#include <mutex>
#include <sstream>

#include "sim.h"

namespace cuda_sim {
namespace {

const char* const kCountNames[] = {"event_records", "event_waits", "event_syncs", "stream_syncs",
                                   "device_syncs",  "host_funcs",  "mallocs",     "frees"};
static_assert(sizeof kCountNames / sizeof *kCountNames == size_t(Count::last));

struct DeviceMemory {
  size_t allocated = 0;
  size_t peak = 0;
};

struct Counters {
  std::mutex mutex;
  uint64_t counts[size_t(Count::last)] = {};
  std::map<std::string, uint64_t> launches;
  std::map<std::string, uint64_t> host_funcs;
  std::map<std::string, uint64_t> copied_bytes;
  std::map<int, DeviceMemory> devices;
};
Counters& counters() {
  static Counters* c = new Counters;
  return *c;
}

std::string quoted(const std::string& text) {
  std::string r = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') r += '\\';
    r += c;
  }
  return r + '"';
}

void write_map(std::ostream& out, const char* name, const std::map<std::string, uint64_t>& map) {
  out << quoted(name) << ": {";
  const char* separator = "";
  for (auto& [key, value] : map) {
    out << separator << quoted(key) << ": " << value;
    separator = ", ";
  }
  out << "}";
}

}  // namespace

void count(Count what) {
  std::lock_guard<std::mutex> lock(counters().mutex);
  ++counters().counts[size_t(what)];
}

void count_launch(const std::string& kernel) {
  std::lock_guard<std::mutex> lock(counters().mutex);
  ++counters().launches[kernel];
}

void count_host_func(const std::string& name) {
  std::lock_guard<std::mutex> lock(counters().mutex);
  ++counters().counts[size_t(Count::host_funcs)];
  ++counters().host_funcs[name];
}

void count_copy(const char* kind, size_t bytes) {
  std::lock_guard<std::mutex> lock(counters().mutex);
  counters().copied_bytes[kind] += bytes;
}

void count_allocation(int device, ptrdiff_t delta) {
  std::lock_guard<std::mutex> lock(counters().mutex);
  DeviceMemory& m = counters().devices[device];
  m.allocated += size_t(delta);
  m.peak = std::max(m.peak, m.allocated);
}

size_t allocated_bytes(int device) {
  std::lock_guard<std::mutex> lock(counters().mutex);
  return counters().devices[device].allocated;
}

}  // namespace cuda_sim

using namespace cuda_sim;

SIM_EXPORT const char* cuda_sim_counters() {
  static thread_local std::string text;
  std::ostringstream out;
  {
    std::lock_guard<std::mutex> lock(counters().mutex);
    out << "{";
    for (size_t i = 0; i < size_t(Count::last); ++i)
      out << quoted(kCountNames[i]) << ": " << counters().counts[i] << ", ";
    write_map(out, "launches", counters().launches);
    out << ", ";
    write_map(out, "host_funcs_by_name", counters().host_funcs);
    out << ", ";
    write_map(out, "copied_bytes", counters().copied_bytes);
    out << ", \"devices\": {";
    const char* separator = "";
    for (auto& [device, m] : counters().devices) {
      out << separator << quoted(std::to_string(device));
      out << ": {\"allocated\": " << m.allocated << ", \"peak\": " << m.peak << "}";
      separator = ", ";
    }
    out << "}}";
  }
  text = out.str();
  return text.c_str();
}

SIM_EXPORT void cuda_sim_count(const char* name) { count_host_func(name); }

// Bytes in use stay, and the peak restarts from them.
SIM_EXPORT void cuda_sim_reset_counters() {
  std::lock_guard<std::mutex> lock(counters().mutex);
  for (uint64_t& n : counters().counts) n = 0;
  counters().launches.clear();
  counters().host_funcs.clear();
  counters().copied_bytes.clear();
  for (auto& [device, m] : counters().devices) m.peak = m.allocated;
}
