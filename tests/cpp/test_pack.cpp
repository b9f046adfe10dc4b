// pack and pack_bytes against a loop over elements.

#include "pack_cases.h"

namespace zerocore::test {
namespace {

void check_pack(const std::vector<Tensor>& tensors, DType to, double scale, int64_t shift,
                std::mt19937& random) {
  const Packing packing(tensors, random);
  const Buffer expected = packing.expected(tensors, to, scale, shift);
  const std::vector<PackSource>& sources = packing.sources;
  const int64_t end = packing.numel;
  for (const kernels::Parallel& parallel : ways(end)) {
    Buffer out(to, end, shift);
    kernels::pack(out.data(), to, end, sources.data(), static_cast<int64_t>(sources.size()), scale,
                  parallel);
    check_same_bits(out, expected, "pack");
  }
}

void test_sizes_and_alignments() {
  std::mt19937 random(1);
  for (const DType from : kDTypes) {
    for (const DType to : kDTypes) {
      for (const int64_t n : sizes()) {
        for (const int64_t shift : {0, 1, 7}) {
          check_pack({make(from, {n}, {1}, (shift * 5) % 16, random)}, to, 0.3, shift, random);
        }
        check_pack({make(from, {n}, {1}, 1, random)}, to, 1.0, 0, random);
      }
    }
  }
}

void test_strides() {
  std::mt19937 random(2);
  for (int round = 0; round < 120; ++round) {
    const DType to = kDTypes[random() % 4];
    std::vector<Tensor> tensors;
    for (int i = 0; i < 6; ++i) {
      tensors.push_back(random_tensor(kDTypes[random() % 4], random));
    }
    check_pack(tensors, to, round % 2 == 0 ? 1.0 : 0.7, static_cast<int64_t>(random() % 17),
               random);
  }
  for (const DType from : kDTypes) {  // transposed matrices of many columns, whole and in part
    check_pack({make(from, {130, 300}, {1, 130}, 3, random)}, DType::f32, 1.0, 1, random);
    check_pack({make(from, {3, 67, 260}, {67 * 300, 1, 70}, 0, random)}, from, 1.0, 0, random);
    check_pack({make(from, {67, 3, 260}, {1, 67 * 260, 67}, 0, random)}, from, 0.7, 0, random);
  }
}

void test_bytes() {
  std::mt19937 random(3);
  for (const int64_t size : {1, 2, 4, 8, 16}) {
    const std::vector<std::vector<int64_t>> shapes = {{700}, {300, 40}, {5, 300, 11}};
    for (const std::vector<int64_t>& shape : shapes) {
      std::vector<int64_t> strides(shape.size());
      int64_t numel = 1;
      for (size_t d = 0; d < shape.size(); ++d) {  // the first dimension innermost
        strides[d] = numel;
        numel *= shape[d];
      }
      std::vector<char> in(static_cast<size_t>(numel * size)), out(in.size() + 2 * size, 1);
      for (char& c : in) c = static_cast<char>(random());
      const PackSource source{
          in.data(),    DType::f32,    1, numel, static_cast<int64_t>(shape.size()),
          shape.data(), strides.data()};
      kernels::pack_bytes(out.data(), size, numel + 2, &source, 1, kernels::serial());
      for (int64_t i = 0; i < numel; ++i) {
        int64_t place = 0, index = i;
        for (size_t d = shape.size(); d-- > 0;) {
          place += index % shape[d] * strides[d];
          index /= shape[d];
        }
        CHECK(std::memcmp(&out[static_cast<size_t>((i + 1) * size)],
                          &in[static_cast<size_t>(place * size)], static_cast<size_t>(size)) == 0);
      }
      for (int64_t k = 0; k < size; ++k) {
        CHECK_EQ(static_cast<int>(out[static_cast<size_t>(k)]), 0);
        CHECK_EQ(static_cast<int>(out[out.size() - 1 - static_cast<size_t>(k)]), 0);
      }
    }
  }
}

}  // namespace
}  // namespace zerocore::test

int main() {
  zerocore::test::on_every_isa([] {
    zerocore::test::test_sizes_and_alignments();
    zerocore::test::test_strides();
  });
  zerocore::test::test_bytes();
}
