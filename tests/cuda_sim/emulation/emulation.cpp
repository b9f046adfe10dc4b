// The kernel emulation without the fake runtime: engines, orders, and the errors they must detect.
// Built twice: with fibers, and with -DCUEMU_THREADS -fsanitize=thread. Argument: sum,
// missing_barrier or divergent.
#include <cstdio>
#include <cstring>
#include <vector>

#include "cuemu.h"

template <bool Correct>
__global__ void block_sum(const float* x, float* out) {
  __shared__ float values[64];
  values[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
  if (Correct) __syncthreads();
  if (threadIdx.x == 0) {
    float sum = 0;
    for (unsigned i = 0; i < blockDim.x; ++i) sum += values[i];
    atomicAdd(out, sum);
  }
}

__global__ void divergent(int* out) {
  int value = 0;
  if (threadIdx.x < 16)
    value = __shfl_down_sync(0xffffffffu, 1, 1);  // the mask names all lanes, half of them call
  out[threadIdx.x] = value;
}

template <bool Correct>
int wrong_sums() {
  const int blocks = 4;
  std::vector<float> x(64 * blocks);
  for (size_t i = 0; i < x.size(); ++i) x[i] = float(i);
  int wrong = 0;
  for (cuemu::Order order : {cuemu::FWD, cuemu::REV, cuemu::RND}) {
    cuemu::order = order;
    float sum = 0;
    CU_LAUNCH((block_sum<Correct>), blocks, 64, 0, nullptr, x.data(), &sum);
    wrong += sum != float(x.size() * (x.size() - 1) / 2);
  }
  return wrong;
}

int main(int, char** argv) {
  if (!std::strcmp(argv[1], "divergent")) {
    std::vector<int> out(32);
    CU_LAUNCH(divergent, 1, 32, 0, nullptr, out.data());
    return 0;
  }
  bool correct = !std::strcmp(argv[1], "sum");
  int wrong = correct ? wrong_sums<true>() : wrong_sums<false>();
  std::printf("%d of 3 orders give a wrong sum\n", wrong);
  return wrong != 0;
}
