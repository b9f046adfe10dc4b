#include "isa.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "loops.h"

namespace zerocore::kernels {
namespace {

constexpr Isa kAll[] = {Isa::portable, Isa::avx2, Isa::avx512};

std::string supported_names() {
  std::string names;
  for (const Isa isa : kAll) {
    if (isa_supported(isa)) {
      names += (names.empty() ? "" : ", ") + std::string(isa_name(isa));
    }
  }
  return names;
}

void check_supported(const std::string& what, Isa isa) {
  if (!isa_supported(isa)) {
    throw std::invalid_argument(what + ": expected an instruction set of this machine (" +
                                supported_names() + "), got " + isa_name(isa));
  }
}

Isa choose() {
  const char* name = std::getenv("ZEROCORE_ISA");
  if (name != nullptr && name[0] != '\0') {
    const Isa isa = isa_from_name(name);
    check_supported("ZEROCORE_ISA", isa);
    return isa;
  }
  for (const Isa isa : {Isa::avx512, Isa::avx2}) {
    if (isa_supported(isa)) {
      return isa;
    }
  }
  return Isa::portable;
}

std::atomic<Isa>& active() {
  static std::atomic<Isa> isa{choose()};
  return isa;
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
    default:
      return "portable";
  }
}

Isa isa_from_name(const std::string& name) {
  for (const Isa isa : kAll) {
    if (name == isa_name(isa)) {
      return isa;
    }
  }
  throw std::invalid_argument("instruction set: expected portable, avx2 or avx512, got '" + name +
                              "'");
}

bool isa_supported(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::avx2) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
  }
  if (isa == Isa::avx512) {
    return isa_supported(Isa::avx2) && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
  }
#endif
  return isa == Isa::portable;
}

Isa active_isa() { return active().load(std::memory_order_relaxed); }

void set_isa(Isa isa) {
  check_supported("instruction set", isa);
  active().store(isa, std::memory_order_relaxed);
}

const Loops& loops() {
#if defined(__x86_64__)
  switch (active_isa()) {
    case Isa::avx512:
      return avx512::kLoops;
    case Isa::avx2:
      return avx2::kLoops;
    default:
      break;
  }
#endif
  return portable::kLoops;
}

}  // namespace zerocore::kernels
