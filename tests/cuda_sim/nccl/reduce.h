// Arithmetic of the collectives on raw buffers.
#pragma once
#include <nccl.h>

#include <cstddef>
#include <vector>

namespace fake_nccl {

size_t element_bytes(ncclDataType_t dtype);
const char* dtype_name(ncclDataType_t dtype);

// x[i] *= factor, rounded to the type: how NCCL applies the factor of ncclAvg and of a PreMulSum
// operator.
void scale(ncclDataType_t dtype, void* x, size_t count, double factor);

// out[i] = inputs[0][i] op inputs[1][i] op ..., in rank order. 16-bit floats are accumulated in
// float and rounded once, where NCCL rounds at every hop. out may be one of the inputs.
void reduce(ncclDataType_t dtype, ncclRedOp_t op, const std::vector<const void*>& inputs, void* out,
            size_t count);

bool is_floating(ncclDataType_t dtype);

double value_of(ncclDataType_t dtype, const void* x);  // one element

}  // namespace fake_nccl
