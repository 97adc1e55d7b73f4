// Dequantises 4-bit weights on the GPU. Memory bandwidth limits the kernel: it reads half a byte per element
// and writes two or four. A lane decodes a vector, the elements of one 16-byte store, so a warp stores 512
// contiguous bytes. Each lane has the loads of four vectors in flight. The table of 16 values lies in 16
// banks of shared memory, so the look-ups of a warp have no bank conflicts.

#include <type_traits>

#include "core/cuda_tables.h"
#include "cuda/core/convert.h"
#include "cuda/core/launch.h"
#include "cuda/core/vector.h"
#include "quantization/quantize_4bit_table.h"

namespace shoestring::cuda {
namespace {

constexpr int kThreads = 256;
// number of vectors per thread; all of them are loaded before the first one is decoded
constexpr int kVectors = 4;

// The quantised tensor as kernels::Packed describes it, in the form that the kernel uses. The block size is a
// power of two, given by its logarithm, so that a shift replaces a division. `value` holds the values of the
// 16 codes.
struct Source {
  const uint8_t* packed;
  const float* absmax;
  const uint8_t* codes;
  const float* nested;
  const uint32_t* offset;
  int log_block;
  float value[16];
};

enum class Scales { kPlain, kNested, kOffset };

// The scale of a block. For int4, the 32 bits of `scale` hold a bf16 scale and a bf16 offset.
template <Scales kScales>
struct Scale {
  float scale;

  __device__ static Scale of(const Source& s, int64_t block) {
    if (kScales == Scales::kOffset) return {__uint_as_float(s.offset[block])};
    if (kScales == Scales::kPlain) return {s.absmax[block]};
    // The product and the sum are rounded separately, as on the CPU; an fma would round once.
    return {__fadd_rn(__fmul_rn(s.nested[1 + s.codes[block]], s.nested[257 + (block >> 8)]), s.nested[0])};
  }
  __device__ float operator()(float value) const {
    if (kScales != Scales::kOffset) return value * scale;
    const unsigned bits = __float_as_uint(scale);
    return __fmaf_rn(value, __uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
  }
};

// Returns the value of the 4-bit code in bits [shift, shift + 4) of a word. The code times 4 is the byte
// offset into the table.
__device__ float value_at(const float* table, unsigned word, int shift) {
  const unsigned offset = (shift < 2 ? word << 2 : word >> (shift - 2)) & 60;
  return *reinterpret_cast<const float*>(reinterpret_cast<const char*>(table) + offset);
}

// The N vectors that a thread decodes; they are kThreads vectors apart. The codes of a vector are one word
// (32 bits, or 16 bits for fp32 output) and share one scale.
template <class T, Scales kScales, int N>
struct Vectors {
  static constexpr int kWidth = 16 / sizeof(T);
  unsigned word[N];
  Scale<kScales> scale[N];

  __device__ void load(const Source& s, int64_t from) {
    using Word = std::conditional_t<kWidth == 8, uint32_t, uint16_t>;
    const int64_t block = from >> s.log_block;
    const int inside = static_cast<int>(from - (block << s.log_block));
    const auto* words = reinterpret_cast<const Word*>(s.packed + from / 2);
#pragma unroll
    for (int v = 0; v < N; ++v) word[v] = words[v * kThreads];
#pragma unroll
    for (int v = 0; v < N; ++v) {
      scale[v] = Scale<kScales>::of(s, block + ((inside + v * kThreads * kWidth) >> s.log_block));
    }
  }
  __device__ void decode(const float* table, T* out) const {
#pragma unroll
    for (int v = 0; v < N; ++v) {
      Vector<T, kWidth> values;
#pragma unroll
      // the code of an element with even index is in the upper half of a byte
      for (int k = 0; k < kWidth; ++k) {
        values[k] = rounded<T>(scale[v](value_at(table, word[v], 4 * (k ^ 1))));
      }
      store(out + v * kThreads * kWidth, values);
    }
  }
};

// Dequantises elements [begin, begin + count) into `out`. The first `whole` of them are handled in vectors.
// begin is a multiple of the vector width.
// Budget: 48 registers, 64 bytes shared, no spills.
template <class T, Scales kScales>
__global__ void __launch_bounds__(kThreads)
    dequantize(Source s, int64_t begin, int64_t whole, int64_t count, T* out) {
  constexpr int kWidth = 16 / sizeof(T), kTile = kThreads * kVectors * kWidth;
  __shared__ float table[16];
  const int64_t tile = int64_t{blockIdx.x} * kTile, first = tile + threadIdx.x * kWidth;
  const bool full = tile + kTile <= whole;
  Vectors<T, kScales, kVectors> vectors;
  // The loads of codes and scales start before the table is filled, because they take longest.
  if (full) vectors.load(s, begin + first);
  if (threadIdx.x == 0) {
#pragma unroll
    for (int k = 0; k < 16; ++k) table[k] = s.value[k];
  }
  __syncthreads();
  if (full) return vectors.decode(table, out + first);

  int64_t i = first;
  for (; i < tile + kTile && i < whole; i += kThreads * kWidth) {
    Vectors<T, kScales, 1> one;
    one.load(s, begin + i);
    one.decode(table, out + i);
  }
  for (i = (whole > tile ? whole : tile) + threadIdx.x; i < tile + kTile && i < count; i += kThreads) {
    const int64_t from = begin + i;
    const float value = value_at(table, s.packed[from / 2], i % 2 == 0 ? 4 : 0);
    out[i] = rounded<T>(Scale<kScales>::of(s, from >> s.log_block)(value));
  }
}

template <class T>
const char* run(const kernels::Packed& p, int64_t begin, int64_t count, void* out, void* stream) {
  constexpr int kWidth = 16 / sizeof(T), kTile = kThreads * kVectors * kWidth;
  Source s{p.packed, p.absmax, p.codes, p.nested, p.offset, 0, {}};
  while ((int64_t{1} << s.log_block) < p.block_size) ++s.log_block;
  for (int i = 0; i < 16; ++i) s.value[i] = p.codebook->value[i];
  const bool vectors = aligned(p.packed, kWidth / 2) && aligned(out);
  const int64_t whole = vectors ? count - count % kWidth : 0;
  const auto kernel = p.offset != nullptr  ? dequantize<T, Scales::kOffset>
                      : p.codes != nullptr ? dequantize<T, Scales::kNested>
                                           : dequantize<T, Scales::kPlain>;
  return launch(kernel, (count + kTile - 1) / kTile, kThreads, 0, stream, s, begin, whole, count,
                static_cast<T*>(out));
}

const kernels::Dequantize4bitCuda kTable{run<float>, run<__nv_bfloat16>, run<__half>};
const bool kProvided = (provide("dequantize_4bit", &kTable), true);

}  // namespace
}  // namespace shoestring::cuda
