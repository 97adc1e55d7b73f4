#pragma once

// The emulated instructions, the twins of those of a GPU, as functions on arrays. Only twins.cu and twins.cpp
// include the emulator's headers. The comparing files include CUDA's and CuTe's, which define the same names.

#include <cstdint>
#include <vector>

namespace twins {

enum class Type { bf16, fp16, tf32 };

/// Runs one mma_16x8x16 (or, for TF32, mma_16x8x8_tf32) on a warp. `a`, `b` and `c` hold the registers of
/// lane 0, then those of lane 1, and so on: 4, 2 and 4 in each lane. Returns c + a b in the layout of c.
std::vector<float> run_mma(Type type, const std::vector<uint32_t>& a, const std::vector<uint32_t>& b,
                           const std::vector<float>& c);

/// Runs one ldmatrix on a warp. `image` is the content of shared memory in 16-bit elements, and `row` has for
/// each lane the index of the element that its address points to. Returns `count` registers for each lane.
std::vector<uint32_t> run_ldmatrix(int count, bool transposed, const std::vector<uint16_t>& image,
                                   const std::vector<int>& row);

/// One wgmma of a warpgroup. `image` is the content of shared memory, in 16-bit elements. The tiles of a and
/// b begin `a_at` and `b_at` bytes into the image. Panels of 64 columns are `a_panel` and `b_panel` bytes
/// apart. The product takes the 16 columns (for b with `b_is_kn`, the 16 rows) from `step` on.
struct Product {
  Type type;
  int n;
  bool a_in_registers, b_is_kn;
  std::vector<uint16_t> image = {};
  int a_at = 0, a_panel = 0, b_at = 0, b_panel = 0, step = 0;
  std::vector<uint32_t> a = {};  // four registers for each thread, if a_in_registers
  std::vector<float> c = {};     // n / 2 accumulators for each thread

  // The results of run(): the accumulators, the descriptors of the operands, and the offset of the image from
  // the beginning of shared memory.
  std::vector<float> d = {};
  uint64_t a_descriptor = 0, b_descriptor = 0, image_at = 0;
  void run();
};

/// Copies a box of a 16-bit tensor with tma_load and returns the content of shared memory, in 16-bit
/// elements.
struct Copy {
  std::vector<int64_t> sizes,
      strides;  // sizes in elements; strides in bytes, without the innermost dimension
  std::vector<int> box, at;
  std::vector<uint16_t> run(std::vector<uint16_t> tensor) const;
};

/// Encodes a tensor map with the emulator, and returns its numbers: rank, address, and for each dimension the
/// size, the stride in bytes (0 for the innermost one) and the box.
std::vector<int64_t> encode(const void* address, const std::vector<int64_t>& sizes,
                            const std::vector<int64_t>& strides, const std::vector<int>& box);

/// Encodes the map that the attention kernels use for (features, tokens, heads, batch), strides in elements.
std::vector<int64_t> encode_attention(const void* tensor, int64_t features, int64_t tokens, int64_t heads,
                                      int64_t batch, int64_t token, int64_t head, int64_t sequence, int rows);

// Conversions of the emulator's cuda_bf16.h, cuda_fp16.h and ptx_emulation.h, on bits.
uint16_t to_bf16(float x);
uint16_t to_fp16(float x);
void to_bf16_pair(float x, float y, uint16_t (&pair)[2]);
void to_fp16_pair(float x, float y, uint16_t (&pair)[2]);
uint32_t from_bf16(uint16_t bits);
uint32_t from_fp16(uint16_t bits);
uint32_t to_tf32(float x);

/// Philox of csrc/core/philox.h: `rounds` rounds on a counter and a key, and the library's own numbers.
void philox(const uint32_t (&counter)[4], const uint32_t (&key)[2], int rounds, uint32_t (&bits)[4]);
void philox_at(uint64_t seed, uint64_t step, uint64_t index, uint32_t (&bits)[4]);
int philox_rounds();

}  // namespace twins
