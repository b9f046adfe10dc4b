// The instruction set that the kernels use, chosen once at run time.
#pragma once

#include <cstdint>
#include <string>

namespace zerocore::kernels {

enum class Isa : int8_t { portable, avx2, avx512 };

const char* isa_name(Isa isa);

// Throws std::invalid_argument for a name that is none of portable, avx2, avx512.
Isa isa_from_name(const std::string& name);

// Whether both this build and this processor have it.
bool isa_supported(Isa isa);

// The widest one supported, or what the environment variable ZEROCORE_ISA names. Throws
// std::invalid_argument when that is unknown or not supported here.
Isa active_isa();

// For tests: results do not depend on it (not a bit), only speed does. Throws std::invalid_argument
// when not supported.
void set_isa(Isa isa);

}  // namespace zerocore::kernels
