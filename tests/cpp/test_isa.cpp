// The choice of the instruction set.

#include <cstdlib>
#include <stdexcept>

#include "check.h"
#include "kernels/isa.h"

namespace zerocore::test {
namespace {

using kernels::Isa;

void test_names() {
  for (const Isa isa : {Isa::portable, Isa::avx2, Isa::avx512}) {
    CHECK(kernels::isa_from_name(kernels::isa_name(isa)) == isa);
  }
  CHECK_THROWS(std::invalid_argument, "expected portable, avx2 or avx512, got 'sse'",
               kernels::isa_from_name("sse"));
}

// A bad value is an error at every use, not only at the first; a good one is taken.
void test_environment() {
  setenv("ZEROCORE_ISA", "AVX2", 1);
  for (int i = 0; i < 2; ++i) {
    CHECK_THROWS(std::invalid_argument, "expected portable, avx2 or avx512, got 'AVX2'",
                 kernels::active_isa());
  }
  if (!kernels::isa_supported(Isa::avx512)) {
    setenv("ZEROCORE_ISA", "avx512", 1);
    CHECK_THROWS(std::invalid_argument, "expected an instruction set of this machine (portable",
                 kernels::active_isa());
  }
  setenv("ZEROCORE_ISA", "portable", 1);
  CHECK(kernels::active_isa() == Isa::portable);
}

void test_set() {
  for (const Isa isa : {Isa::avx512, Isa::avx2, Isa::portable}) {
    if (kernels::isa_supported(isa)) {
      kernels::set_isa(isa);
      CHECK(kernels::active_isa() == isa);
    } else {
      CHECK_THROWS(std::invalid_argument, kernels::isa_name(isa), kernels::set_isa(isa));
    }
  }
  CHECK(kernels::isa_supported(Isa::portable));
}

}  // namespace
}  // namespace zerocore::test

int main() {
  zerocore::test::test_names();
  zerocore::test::test_environment();
  zerocore::test::test_set();
}
