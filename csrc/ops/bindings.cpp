#include "ops/bindings.h"

#include <string>
#include <vector>

#include "kernels/isa.h"

namespace zerocore::ops {

void bind_kernels(pybind11::module_& m) {
  using kernels::Isa;
  m.def(
      "isas",
      [] {
        pybind11::list names;
        for (const Isa isa : {Isa::portable, Isa::avx2, Isa::avx512}) {
          if (kernels::isa_supported(isa)) {
            names.append(kernels::isa_name(isa));
          }
        }
        return names;
      },
      "Instruction sets of the CPU kernels that this machine supports, the widest last.");
  m.def(
      "isa", [] { return std::string(kernels::isa_name(kernels::active_isa())); },
      "The instruction set in use: the widest one, or the one ZEROCORE_ISA names.");
  m.def(
      "set_isa", [](const std::string& name) { kernels::set_isa(kernels::isa_from_name(name)); },
      pybind11::arg("name"),
      "Use another instruction set from now on. Results do not depend on it.");
}

}  // namespace zerocore::ops
