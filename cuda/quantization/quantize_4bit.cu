// Quantises weights to 4 bits on the GPU. A warp holds 1024 elements in registers: each lane has four vectors
// of eight consecutive elements. So x is read once, and the largest magnitude of a quantisation block needs
// only shuffles. Blocks of 2048 and 4096 elements are read twice. A code is found without a search. The
// interval [-1, 1] is divided into 32 equal buckets, each with at most one midpoint between neighbouring
// values of the code book. The only exception is FP4, which has codes for 0 and for -0: next to zero, one
// bucket contains two midpoints, of which one is zero. Fake quantisation is the same kernel, which decodes
// its codes and stores values instead: it reads x once and writes the result.

#include <cmath>

#include "core/cuda_tables.h"
#include "cuda/core/convert.h"
#include "cuda/core/launch.h"
#include "cuda/core/vector.h"
#include "cuda/core/warp.h"
#include "quantization/fake_quantize_table.h"
#include "quantization/quantize_4bit_table.h"

namespace shoestring::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kWidth = 8;  // consecutive elements per vector; their codes are one 32-bit word
constexpr int kVectors = 4;
constexpr int kStep = kWarp * kWidth;     // elements from one vector of a lane to the lane's next vector
constexpr int kChunk = kVectors * kStep;  // elements that a warp holds in registers
constexpr int kBuckets = 32;
// the smallest scale, the same as on the CPU: the reciprocal of a smaller number would overflow
constexpr float kSmallestScale = 1e-38f;

// The look-up table of a code book. For each bucket it holds the midpoint, and in `codes` the code for
// numbers up to the midpoint (lowest byte) and above (next byte). two_zeros marks FP4, which has two codes
// for zero. Positive numbers below the smallest positive midpoint have code 8, and 0 has code 0. `value`
// holds the values of the 16 codes.
struct Table {
  float midpoint[kBuckets];
  unsigned codes[kBuckets];
  bool two_zeros;
  float value[16];
};

/// Returns 4 times the index of the bucket that contains u, which is in [-1, 1]. This is the byte offset into
/// the table. Zero is a boundary between buckets, because FP4 has midpoints on both sides of it.
__host__ __device__ inline unsigned bucket(float u) {
  // adding 2^23 rounds to an integer, which is then in the last bits of n
  const float n = fmaf(u, 62.f, 63.5f) + 8388608.f;
  unsigned bits;
  __builtin_memcpy(&bits, &n, sizeof bits);
  return bits & (4 * (kBuckets - 1));
}

Table make_table(const kernels::Codebook& book) {
  Table table{};
  for (int code = 0; code < 16; ++code) table.value[code] = book.value[code];
  for (int b = 0, below = 0; b < kBuckets; ++b) {
    table.midpoint[b] = INFINITY;
    table.codes[b] = book.order[below];
    for (; below < 15 && bucket(book.midpoint[below]) == 4u * b; ++below) {
      table.two_zeros |= book.midpoint[below] == 0;
      if (book.midpoint[below] != 0) table.midpoint[b] = book.midpoint[below];
    }
    table.codes[b] |= unsigned{book.order[below]} << 8;
  }
  return table;
}

__device__ unsigned encode(const Table& table, float u) {
  const unsigned offset = bucket(u);
  const float midpoint_distance =
      *reinterpret_cast<const float*>(reinterpret_cast<const char*>(table.midpoint) + offset) - u;
  // The sign bit of the difference selects the byte. A comparison would need a predicate register, and these
  // are few.
  return reinterpret_cast<const uint8_t*>(table.codes)[offset + (__float_as_uint(midpoint_distance) >> 31)];
}

__device__ unsigned largest(unsigned a, unsigned b) { return a > b ? a : b; }

// Quantises blocks of 2^log_block elements; a warp handles a unit of at least 1024 elements. If kEdge, x may
// end inside a unit and need not be aligned. If kFake, writes the dequantised values to `fake` instead of
// codes and scales.
// Budget: 80 registers, 324 bytes shared, no spills.
template <class T, bool kEdge, bool kFake>
__global__ void __launch_bounds__(kThreads)
    quantize(const T* x, int64_t count, int log_block, Table given, uint8_t* packed, float* absmax, T* fake) {
  __shared__ Table table;
  const int block_size = 1 << log_block, unit = block_size > kChunk ? block_size : kChunk;
  // Offset of the first element of this warp, at which a quantisation block starts. Relative to it, 32-bit
  // indices suffice.
  const int64_t begin = (int64_t{blockIdx.x} * kWarps + warp()) * unit;
  x += begin;
  if constexpr (kFake) {
    fake += begin;
  } else {
    packed += begin / 2;
    absmax += begin >> log_block;
  }
  const int end = kEdge && count - begin < unit ? static_cast<int>(count > begin ? count - begin : 0) : unit;
  Vector<T, kWidth> part[kVectors];
  const auto read = [&](int from) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int i = from + v * kStep;
      if (!kEdge) part[v] = load<kWidth>(x + i);
#pragma unroll
      for (int k = 0; kEdge && k < kWidth; ++k) part[v][k] = i + k < end ? x[i + k] : rounded<T>(0.f);
    }
  };

  unsigned top[kVectors] = {};  // largest magnitudes as integers, in which NaN is above infinity
  for (int from = lane() * kWidth; from < unit; from += kChunk) {
    read(from);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        top[v] = largest(top[v], __float_as_uint(to_float(part[v][k])) & 0x7fffffff);
      }
    }
  }
  for (int offset = 1; offset < kWarp && offset * kWidth < block_size; offset *= 2) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) top[v] = largest(top[v], __shfl_xor_sync(kAllLanes, top[v], offset));
  }
  if (block_size >= 2 * kStep) {
    top[0] = top[1] = largest(top[0], top[1]);
    top[2] = top[3] = largest(top[2], top[3]);
  }
  if (block_size >= 4 * kStep) top[0] = top[1] = top[2] = top[3] = largest(top[0], top[2]);

  if (threadIdx.x == 0) {
#pragma unroll
    for (int b = 0; b < kBuckets; ++b) {
      table.midpoint[b] = given.midpoint[b];
      table.codes[b] = given.codes[b];
    }
    if constexpr (kFake) {
#pragma unroll
      for (int code = 0; code < 16; ++code) table.value[code] = given.value[code];
    }
  }
  __syncthreads();

  for (int from = lane() * kWidth; from < unit; from += kChunk) {
    if (unit > kChunk) read(from);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int i = from + v * kStep;
      if (kEdge && i >= end) continue;
      const float scale = __uint_as_float(top[v]), divisor = scale < kSmallestScale ? kSmallestScale : scale;
      const float inverse = 1 / divisor;
      // In an incomplete last block, elements are divided by the scale instead of being multiplied by its
      // reciprocal, and the scale is at least kSmallestScale. bitsandbytes does the same.
      const bool cut = kEdge && ((i >> log_block) + 1) << log_block > end;
      if (!kFake && (i & (block_size - 1)) == 0) absmax[i >> log_block] = cut ? divisor : scale;
      float u[kWidth];
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        // The product must be rounded by itself, so the compiler must not fuse it with the arithmetic in
        // bucket() into an fma.
        const float value = to_float(part[v][k]);
        u[k] = !cut ? __fmul_rn(value, inverse) : i + k < end ? value / divisor : 0;
      }
      // In a block with infinity or NaN, NaN elements get the code of the largest value, as on the CPU.
      if (top[v] >= 0x7f800000) {
#pragma unroll
        for (int k = 0; k < kWidth; ++k) u[k] = u[k] != u[k] ? 1 : u[k];
      }
      // The word of eight codes is assembled from its top four bits down. In each byte, the element with even
      // index is in the upper half.
      unsigned word = 0;
#pragma unroll
      for (int k = kWidth - 1; k >= 0; --k) word = word * 16 + encode(table, u[k ^ 1]);
      if (given.two_zeros) {
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          if (u[k ^ 1] > 0 && (word >> 4 * k & 15) == 0) word |= 8u << 4 * k;
        }
      }
      if constexpr (kFake) {
        Vector<T, kWidth> values;
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          values[k] = rounded<T>(__fmul_rn(table.value[word >> 4 * (k ^ 1) & 15], cut ? divisor : scale));
        }
        if constexpr (kEdge) {
#pragma unroll
          for (int k = 0; k < kWidth; ++k) {
            if (i + k < end) fake[i + k] = values[k];
          }
        } else {
          store(fake + i, values);
        }
      } else if (!kEdge || i + kWidth <= end) {
        *reinterpret_cast<unsigned*>(packed + i / 2) = word;
      } else {
        for (int k = 0; i + 2 * k < end; ++k) packed[i / 2 + k] = word >> 8 * k & 0xff;
      }
    }
  }
}

template <class T, bool kFake>
const char* start(const T* x, int64_t count, int64_t block_size, const kernels::Codebook& book,
                  uint8_t* packed, float* absmax, T* fake, void* stream) {
  const Table table = make_table(book);
  int log_block = 0;
  while ((int64_t{1} << log_block) < block_size) ++log_block;
  const int64_t per_block = kWarps * (block_size > kChunk ? block_size : kChunk);
  const bool vectors = aligned(x) && (!kFake || aligned(fake));
  const int64_t inner = vectors ? count / per_block : 0, done = inner * per_block;
  const char* error = launch(quantize<T, false, kFake>, inner, kThreads, 0, stream, x, done, log_block, table,
                             packed, absmax, fake);
  if (error != nullptr) return error;
  const auto from = [&](auto* p, int64_t offset) { return p == nullptr ? p : p + offset; };
  return launch(quantize<T, true, kFake>, (count - done + per_block - 1) / per_block, kThreads, 0, stream,
                x + done, count - done, log_block, table, from(packed, done / 2),
                from(absmax, done >> log_block), from(fake, done));
}

template <class T>
const char* run(const void* x, int64_t count, int64_t block_size, const kernels::Codebook& book,
                uint8_t* packed, float* absmax, void* stream) {
  return start<T, false>(static_cast<const T*>(x), count, block_size, book, packed, absmax, nullptr, stream);
}

template <class T>
const char* run_fake(const void* x, int64_t count, int64_t block_size, const kernels::Codebook* book,
                     void* out, void* stream) {
  return start<T, true>(static_cast<const T*>(x), count, block_size, *book, nullptr, nullptr,
                        static_cast<T*>(out), stream);
}

const kernels::Quantize4bitCuda kTable{run<float>, run<__nv_bfloat16>, run<__half>};
const kernels::FakeQuantizeCuda kFakeTable{run_fake<float>, run_fake<__nv_bfloat16>, run_fake<__half>};
const bool kProvided = (provide("quantize_4bit", &kTable), provide("fake_quantize_4bit", &kFakeTable), true);

}  // namespace
}  // namespace shoestring::cuda
