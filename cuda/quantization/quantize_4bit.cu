// Quantises to 4 bits on the GPU. A warp holds 1024 elements in registers: each lane has four vectors of
// eight neighbours. So x is read once, and the largest magnitude of a block needs only shuffles. Blocks of
// 2048 and 4096 elements are read twice. A code is found without a search: each of 32 equal buckets of [-1,
// 1] holds at most one midpoint of the code book (except next to FP4's two zeros).

#include <cmath>

#include "core/cuda_tables.h"
#include "cuda/core/convert.h"
#include "cuda/core/launch.h"
#include "cuda/core/vector.h"
#include "cuda/core/warp.h"
#include "quantization/quantize_4bit_table.h"

namespace shoestring::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kWidth = 8;  // neighbouring elements per vector, whose codes are one word
constexpr int kVectors = 4;
constexpr int kStep = kWarp * kWidth;     // elements from one vector of a lane to its next
constexpr int kChunk = kVectors * kStep;  // elements that a warp holds
constexpr int kBuckets = 32;
constexpr float kSmallestScale = 1e-38f;  // as on the CPU: a smaller scale's reciprocal would overflow

// The look-up table of a code book: for each bucket its midpoint, the code up to the midpoint (lowest byte)
// and the code above (next byte). two_zeros marks FP4, in which positive numbers below the midpoint next to 0
// have code 8, and 0 has code 0.
struct Table {
  float midpoint[kBuckets];
  unsigned codes[kBuckets];
  bool two_zeros;
};

/// Returns the bucket of u in [-1, 1] multiplied by 4, which is an offset in bytes. Zero is a bucket
/// boundary, because FP4 has midpoints on both sides of it.
__host__ __device__ inline unsigned bucket(float u) {
  const float n = fmaf(u, 62.f, 63.5f) + 8388608.f;  // the last bits are the rounded integer
  unsigned bits;
  __builtin_memcpy(&bits, &n, sizeof bits);
  return bits & (4 * (kBuckets - 1));
}

Table make_table(const kernels::Codebook& book) {
  Table table{};
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
  const float left =
      *reinterpret_cast<const float*>(reinterpret_cast<const char*>(table.midpoint) + offset) - u;
  // The sign bit selects the byte. A comparison would need a predicate register, and those are few.
  return reinterpret_cast<const uint8_t*>(table.codes)[offset + (__float_as_uint(left) >> 31)];
}

__device__ unsigned largest(unsigned a, unsigned b) { return a > b ? a : b; }

// If kEdge, x may end inside a unit and need not be aligned.
// Budget: 80 registers, 260 bytes shared, no spills.
template <class T, bool kEdge>
__global__ void __launch_bounds__(kThreads)
    quantize(const T* x, int64_t count, int log_block, Table given, uint8_t* packed, float* absmax) {
  __shared__ Table table;
  const int block_size = 1 << log_block, unit = block_size > kChunk ? block_size : kChunk;
  // Each warp handles whole quantisation blocks from here on, so 32-bit indices suffice after this offset.
  const int64_t begin = (int64_t{blockIdx.x} * kWarps + warp()) * unit;
  x += begin;
  packed += begin / 2;
  absmax += begin >> log_block;
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

  unsigned top[kVectors] = {};  // magnitudes as integers; NaN is the largest
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
      // A short last block divides by the scale, which is never below kSmallestScale, as bitsandbytes does.
      const bool cut = kEdge && ((i >> log_block) + 1) << log_block > end;
      if ((i & (block_size - 1)) == 0) absmax[i >> log_block] = cut ? divisor : scale;
      float u[kWidth];
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        // The product below is rounded separately, so it must not fuse into an fma.
        const float value = to_float(part[v][k]);
        u[k] = !cut ? __fmul_rn(value, inverse) : i + k < end ? value / divisor : 0;
      }
      // In a block with an infinity or a NaN, NaN gets the code of the largest value, as on the CPU.
      if (top[v] >= 0x7f800000) {
#pragma unroll
        for (int k = 0; k < kWidth; ++k) u[k] = u[k] != u[k] ? 1 : u[k];
      }
      // The word of codes is assembled from its top four bits down. The even element of a pair is in the
      // upper half of its byte.
      unsigned word = 0;
#pragma unroll
      for (int k = kWidth - 1; k >= 0; --k) word = word * 16 + encode(table, u[k ^ 1]);
      if (given.two_zeros) {
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          if (u[k ^ 1] > 0 && (word >> 4 * k & 15) == 0) word |= 8u << 4 * k;
        }
      }
      if (!kEdge || i + kWidth <= end) {
        *reinterpret_cast<unsigned*>(packed + i / 2) = word;
      } else {
        for (int k = 0; i + 2 * k < end; ++k) packed[i / 2 + k] = word >> 8 * k & 0xff;
      }
    }
  }
}

template <class T>
const char* run(const void* data, int64_t count, int64_t block_size, const kernels::Codebook& book,
                uint8_t* packed, float* absmax, void* stream) {
  const T* x = static_cast<const T*>(data);
  const Table table = make_table(book);
  int log_block = 0;
  while ((int64_t{1} << log_block) < block_size) ++log_block;
  const int64_t per_block = kWarps * (block_size > kChunk ? block_size : kChunk);
  const int64_t inner = aligned(x) ? count / per_block : 0, done = inner * per_block;
  const char* error =
      launch(quantize<T, false>, inner, kThreads, 0, stream, x, done, log_block, table, packed, absmax);
  if (error != nullptr) return error;
  return launch(quantize<T, true>, (count - done + per_block - 1) / per_block, kThreads, 0, stream, x + done,
                count - done, log_block, table, packed + done / 2, absmax + (done >> log_block));
}

const kernels::Quantize4bitCuda kTable{run<float>, run<__nv_bfloat16>, run<__half>};
const bool kProvided = (provide("quantize_4bit", &kTable), true);

}  // namespace
}  // namespace shoestring::cuda
