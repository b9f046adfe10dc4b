// pack and pack_bytes of the CUDA kernels against a loop over elements and the CPU's.

#include <cmath>

#include "cuda_cases.h"
#include "pack_cases.h"

namespace zerocore::test {
namespace {

namespace cuda = kernels::cuda;

void check_pack(const std::vector<Tensor>& tensors, DType to, double scale, int64_t shift,
                std::mt19937& random) {
  const TestQueue queue;
  const Packing packing(tensors, random);
  const Buffer expected = packing.expected(tensors, to, scale, shift);
  Buffer out(to, packing.numel, shift);
  take_bytes();
  cuda::pack(out.data(), to, packing.numel, packing.sources.data(), packing.count(), scale, queue);
  const Bytes bytes = take_bytes();
  check_same_bits(out, expected, "pack");
  int64_t source_bytes = 0;
  for (const PackSource& source : packing.sources) {
    source_bytes += source.data == nullptr ? 0 : source.numel * kernels::element_size(source.dtype);
  }
  CHECK_EQ(bytes.loaded, source_bytes);
  CHECK_EQ(bytes.stored, packing.numel * kernels::element_size(to));
}

void test_sizes_and_alignments() {
  std::mt19937 random(1);
  for (const DType from : kDTypes) {
    for (const DType to : kDTypes) {
      for (const int64_t n : cuda_sizes(from == to)) {
        const int64_t shift = random() % 2 == 0 ? 0 : static_cast<int64_t>(random() % 17);
        check_pack({make(from, {n}, {1}, static_cast<int64_t>(random() % 9), random)}, to,
                   random() % 2 == 0 ? 1.0 : 0.3, shift, random);
      }
      // In step with out: both are at multiples of 16 bytes.
      check_pack({make(from, {9000}, {1}, 0, random)}, to, 0.3, 0, random);
    }
  }
}

void test_strides() {
  std::mt19937 random(2);
  for (int round = 0; round < 60; ++round) {
    const DType to = kDTypes[random() % 4];
    std::vector<Tensor> tensors;
    for (int i = 0; i < 6; ++i) {
      tensors.push_back(random_tensor(kDTypes[random() % 4], random));
    }
    check_pack(tensors, to, round % 2 == 0 ? 1.0 : 0.7, static_cast<int64_t>(random() % 17),
               random);
  }
}

void test_transposed() {
  std::mt19937 random(3);
  for (const DType from : kDTypes) {
    check_pack({make(from, {40, 33}, {1, 40}, 3, random)}, DType::f32, 1.0, 1, random);
    if (kThreadsEngine) {
      continue;
    }
    check_pack({make(from, {130, 300}, {1, 130}, 3, random)}, DType::bf16, 1.0, 1, random);
    check_pack({make(from, {3, 67, 260}, {67 * 300, 1, 70}, 0, random)}, from, 1.0, 0, random);
    check_pack({make(from, {67, 3, 260}, {1, 67 * 260, 67}, 0, random)}, from, 0.7, 0, random);
    check_pack({make(from, {2, 3, 33, 2, 40}, {9000, 2640 + 1, 1, 33 * 40, 33}, 0, random)},
               DType::f64, 0.7, 0, random);
    check_pack({make(from, {8, 8}, {1, 8}, 0, random), make(from, {7, 9}, {1, 7}, 0, random),
                make(from, {5000}, {1}, 0, random), make(from, {64, 64}, {1, 64}, 0, random)},
               DType::f16, 1.0, 0, random);
  }
}

// More than one launch holds, with and without strides, and the same address after each other.
void test_many_sources() {
  std::mt19937 random(4);
  for (const bool strided : {false, true}) {
    std::vector<Tensor> tensors;
    for (int i = 0; i < 1000; ++i) {
      const int64_t n = static_cast<int64_t>(random() % (i % 100 == 5 ? 6000 : 30));
      tensors.push_back(strided && i % 2 == 0 ? make(DType::bf16, {n, 3, 2}, {13, 4, 2}, 1, random)
                                              : make(DType::bf16, {n}, {1}, 2, random));
    }
    check_pack(tensors, DType::f32, 0.5, 0, random);
    check_pack(tensors, DType::bf16, 1.0, 3, random);
  }
}

void test_nothing_to_pack() {
  std::mt19937 random(5);
  check_pack({}, DType::f32, 1.0, 0, random);
  const TestQueue queue;
  for (const int64_t n : {0, 1, 4099}) {
    Buffer out(DType::bf16, n, 1), zeros(DType::bf16, n, 1);
    for (int64_t i = 0; i < n; ++i) {
      zeros.set(i, 0.0);
    }
    const PackSource none{nullptr, DType::f32, 0, n, 1, &n, &n};
    cuda::pack(out.data(), DType::bf16, n, &none, 1, 2.0, queue);
    check_same_bits(out, zeros, "nothing");
  }
}

// Bits of a copy, NaNs included; all 65,536 values of 16 bits in casts.
void test_special_values() {
  const TestQueue queue;
  const int64_t n = 65536;
  for (const DType from : {DType::bf16, DType::f16}) {
    for (const DType to : kDTypes) {
      std::vector<uint16_t> values(static_cast<size_t>(n));
      for (int64_t i = 0; i < n; ++i) {
        values[static_cast<size_t>(i)] = static_cast<uint16_t>(i);
      }
      const int64_t one = 1;
      const PackSource source{values.data(), from, 0, n, 1, &n, &one};
      Buffer out(to, n), expected(to, n);
      kernels::pack(expected.data(), to, n, &source, 1, 1.0, kernels::serial());
      cuda::pack(out.data(), to, n, &source, 1, 1.0, queue);
      for (int64_t i = 0; i < n; ++i) {
        if (from == to || !std::isnan(expected.get(i))) {
          CHECK_EQ(out.bits(i), expected.bits(i));
        } else {
          CHECK(std::isnan(out.get(i)));
        }
      }
    }
  }
}

void test_bytes() {
  std::mt19937 random(3);
  const TestQueue queue;
  for (const int64_t size : {1, 2, 4, 8, 16}) {
    for (const std::vector<int64_t>& shape :
         std::vector<std::vector<int64_t>>{{700}, {300, 40}, {5, 300, 11}}) {
      for (const bool transposed : {false, true}) {
        std::vector<int64_t> strides(shape.size());
        int64_t numel = 1;
        for (size_t d = 0; d < shape.size(); ++d) {
          const size_t dim = transposed ? d : shape.size() - 1 - d;
          strides[dim] = numel;
          numel *= shape[dim];
        }
        const size_t bytes = static_cast<size_t>((numel + 2) * size);
        std::vector<char> in(bytes), out(bytes, 1), expected(bytes, 2);
        for (char& c : in) c = static_cast<char>(random());
        const PackSource source{
            in.data(),    DType::f32,    1, numel, static_cast<int64_t>(shape.size()),
            shape.data(), strides.data()};
        kernels::pack_bytes(expected.data(), size, numel + 2, &source, 1, kernels::serial());
        take_bytes();
        cuda::pack_bytes(out.data(), size, numel + 2, &source, 1, queue);
        const Bytes moved = take_bytes();
        CHECK(out == expected);
        CHECK_EQ(moved.loaded, numel * size);
        CHECK_EQ(moved.stored, (numel + 2) * size);
      }
    }
  }
}

}  // namespace
}  // namespace zerocore::test

int main() {
  using namespace zerocore::test;
  if (kThreadsEngine) {  // only squares have barriers
    test_transposed();
    return 0;
  }
  in_every_order([] {
    test_sizes_and_alignments();
    test_strides();
    test_transposed();
    test_many_sources();
    test_nothing_to_pack();
    test_special_values();
    test_bytes();
  });
}
