// Compresses gradients with error feedback, and decompresses the mean of several, on the GPU. A warp handles
// 256 elements: a block of 8 or 1 bits, or two blocks of 4 bits. A lane holds four consecutive elements of
// each half of a block, so that its codes are whole words.

#include <cmath>

#include "core/cuda_tables.h"
#include "cuda/core/convert.h"
#include "cuda/core/launch.h"
#include "cuda/core/vector.h"
#include "cuda/core/warp.h"
#include "quantization/compress_gradient_table.h"

namespace shoestring::cuda {
namespace {

using kernels::GradientCodec;
using kernels::GradientType;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kVector = 4, kVectors = 2;

// The part of a block that belongs to this lane.
template <class Codec>
struct Part {
  static constexpr int kLanes = Codec::kBlock / (kVector * kVectors);  // lanes of a block
  int64_t block;                                                       // number of the block
  int64_t begin;                                                       // first element of the block
  int64_t count;  // elements of the block; 0 or less beyond the last one
  int first;      // first element of the lane's first vector, from the beginning of the block

  __device__ explicit Part(int64_t n) {
    block = (int64_t{blockIdx.x} * kWarps + warp()) * (kWarp / kLanes) + lane() / kLanes;
    begin = block * Codec::kBlock;
    count = n - begin < Codec::kBlock ? n - begin : Codec::kBlock;
    first = lane() % kLanes * kVector;
  }
  __device__ int offset(int v) const { return first + v * (Codec::kBlock / 2); }
  __device__ bool whole() const { return count == Codec::kBlock; }
};

template <class Codec, class T>
__device__ void read(const Part<Codec>& part, const T* from, bool vectors, float (&x)[kVectors][kVector]) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int at = part.offset(v);
    if (vectors && part.whole()) {
      const auto some = load<kVector>(from + part.begin + at);
#pragma unroll
      for (int k = 0; k < kVector; ++k) x[v][k] = to_float(some[k]);
    } else {
#pragma unroll
      for (int k = 0; k < kVector; ++k)
        x[v][k] = at + k < part.count ? to_float(from[part.begin + at + k]) : 0.f;
    }
  }
}

template <class Codec, class T>
__device__ void write(const Part<Codec>& part, T* to, bool vectors, const float (&x)[kVectors][kVector]) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int at = part.offset(v);
    if (vectors && part.whole()) {
      Vector<T, kVector> some;
#pragma unroll
      for (int k = 0; k < kVector; ++k) some[k] = rounded<T>(x[v][k]);
      store(to + part.begin + at, some);
    } else {
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        if (at + k < part.count) to[part.begin + at + k] = rounded<T>(x[v][k]);
      }
    }
  }
}

// Reduces over the lanes of a block. Every lane of the warp takes part.
template <int kLanes, class T, class Combine>
__device__ T block_reduce(T x, Combine combine) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2)
    x = combine(x, __shfl_xor_sync(kAllLanes, x, offset));
  return x;
}

// Adds magnitudes as a tree of halves, in the order of the CPU kernels.
__device__ float sum_of_magnitudes(const float (&x)[kVectors][kVector]) {
  float sum[kVector];
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    sum[k] = block_reduce<kWarp>(fabsf(x[0][k]) + fabsf(x[1][k]), [](float a, float b) { return a + b; });
  }
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

__device__ float scale_of(float top, float inverse_levels) {
  return __uint_as_float((__float_as_uint(__fmul_rn(top, inverse_levels)) + 0xffu) & ~0xffu);
}

// Budget: 48 registers, 0 bytes shared, no spills.
template <class Codec, class T>
__global__ void __launch_bounds__(kThreads)
    compress(float* error, const T* gradient, int64_t n, bool vectors, uint8_t* records) {
  const Part<Codec> part(n);
  float x[kVectors][kVector], more[kVectors][kVector];
  read(part, error, vectors, x);
  read(part, gradient, vectors, more);
  unsigned most = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      x[v][k] = __fadd_rn(x[v][k], more[v][k]);
      const unsigned magnitude = __float_as_uint(x[v][k]) & 0x7fffffffu;
      most = magnitude > most ? magnitude : most;
    }
  }
  float scale, inverse = 0;
  bool usable;
  if constexpr (Codec::kRecord == GradientCodec<1>::kRecord) {
    const float total = sum_of_magnitudes(x);
    usable = total < kernels::kHugeGradient;
    scale = __fdiv_rn(total, static_cast<float>(part.count));
  } else {
    most = block_reduce<Part<Codec>::kLanes>(most, [](unsigned a, unsigned b) { return a > b ? a : b; });
    const float top = __uint_as_float(most);
    usable = top < kernels::kHugeGradient;
    scale = top < kernels::kTinyGradient ? 0.f : scale_of(top, Codec::kInverse);
    inverse = scale > 0 ? __fdiv_rn(1.f, scale) : 0.f;
  }
  if (!usable) scale = __uint_as_float(0x7fc00000u);

  int code[kVectors][kVector];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      if constexpr (Codec::kRecord == GradientCodec<1>::kRecord) {
        code[v][k] = __float_as_uint(x[v][k]) >> 31;
        x[v][k] = x[v][k] - (code[v][k] != 0 ? -scale : scale);
      } else {
        code[v][k] = usable ? __float2int_rn(__fmul_rn(x[v][k], inverse)) : 0;
        x[v][k] = __fsub_rn(x[v][k], __fmul_rn(static_cast<float>(code[v][k]), scale));
      }
      if (!usable) x[v][k] = 0;
    }
  }
  write(part, error, vectors, x);

  uint8_t* record = records + part.block * Codec::kRecord;
  auto* words = reinterpret_cast<unsigned*>(record + 4);
  const int number = lane() % Part<Codec>::kLanes;
  if (number == 0 && part.count > 0) *reinterpret_cast<float*>(record) = scale;
  if constexpr (Codec::kRecord == GradientCodec<8>::kRecord) {
    if (part.count <= 0) return;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      unsigned word = 0;
#pragma unroll
      for (int k = 0; k < kVector; ++k) word |= static_cast<unsigned>(code[v][k] + 128) << 8 * k;
      words[v * kWarp + number] = usable ? word : 0;
    }
  } else if constexpr (Codec::kRecord == GradientCodec<4>::kRecord) {
    if (part.count <= 0) return;
    unsigned word = 0;
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      word |= static_cast<unsigned>(code[0][k] + 8) << 8 * k;
      word |= static_cast<unsigned>(code[1][k] + 8) << (8 * k + 4);
    }
    words[number] = usable ? word : 0;
  } else {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      unsigned word = 0;  // eight lanes have the bits of a word
#pragma unroll
      for (int k = 0; k < kVector; ++k)
        word |= static_cast<unsigned>(code[v][k]) << (lane() % 8 * kVector + k);
      word = block_reduce<8>(word, [](unsigned a, unsigned b) { return a | b; });
      if (part.count > 0 && lane() % 8 == 0) words[v * 4 + lane() / 8] = usable ? word : 0;
    }
  }
}

// Budget: 56 registers, 0 bytes shared, no spills.
template <class Codec, class T>
__global__ void __launch_bounds__(kThreads)
    decompress_mean(const uint8_t* records, int64_t stride, int64_t ranks, int64_t n, float factor,
                    bool vectors, T* out) {
  const Part<Codec> part(n);
  if (part.count <= 0) return;
  const int number = lane() % Part<Codec>::kLanes;
  const uint8_t* record = records + part.block * Codec::kRecord;
  float sum[kVectors][kVector] = {};
  for (int64_t rank = 0; rank < ranks; ++rank, record += stride) {
    const float scale = *reinterpret_cast<const float*>(record);
    const auto* words = reinterpret_cast<const unsigned*>(record + 4);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const unsigned word = Codec::kRecord == GradientCodec<8>::kRecord   ? words[v * kWarp + number]
                            : Codec::kRecord == GradientCodec<4>::kRecord ? words[number] >> 4 * v
                                                                          : words[v * 4 + number / 8];
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        float value;
        if constexpr (Codec::kRecord == GradientCodec<8>::kRecord) {
          value = __fmul_rn(static_cast<float>(static_cast<int>(word >> 8 * k & 0xff) - 128), scale);
        } else if constexpr (Codec::kRecord == GradientCodec<4>::kRecord) {
          value = __fmul_rn(static_cast<float>(static_cast<int>(word >> 8 * k & 0xf) - 8), scale);
        } else {
          value = (word >> (number % 8 * kVector + k) & 1) != 0 ? -scale : scale;
        }
        sum[v][k] = __fadd_rn(sum[v][k], value);
      }
    }
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) sum[v][k] = __fmul_rn(sum[v][k], factor);
  }
  write(part, out, vectors, sum);
}

// Calls body(codec, null pointer to the element type).
template <class Body>
const char* select(int bits, GradientType type, Body body) {
  return kernels::with_gradient_codec(bits, [&](auto codec) -> const char* {
    switch (type) {
      case GradientType::kFloat:
        return body(codec, static_cast<float*>(nullptr));
      case GradientType::kBFloat16:
        return body(codec, static_cast<__nv_bfloat16*>(nullptr));
      default:
        return body(codec, static_cast<__half*>(nullptr));
    }
  });
}

int64_t thread_blocks(int64_t n) {
  constexpr int64_t kElements = int64_t{kWarps} * kWarp * kVector * kVectors;
  return (n + kElements - 1) / kElements;
}

template <class T>
bool vectors_at(const T* p) {
  return aligned(p, static_cast<int>(sizeof(T)) * kVector);
}

const char* run_compress(int bits, GradientType type, float* error, const void* gradient, int64_t n,
                         uint8_t* records, void* stream) {
  return select(bits, type, [&](auto codec, auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    const T* from = static_cast<const T*>(gradient);
    return launch(compress<decltype(codec), T>, thread_blocks(n), kThreads, 0, stream, error, from, n,
                  vectors_at(error) && vectors_at(from), records);
  });
}

const char* run_decompress_mean(int bits, GradientType type, const uint8_t* records, int64_t stride,
                                int64_t ranks, int64_t n, void* out, void* stream) {
  return select(bits, type, [&](auto codec, auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    T* to = static_cast<T*>(out);
    return launch(decompress_mean<decltype(codec), T>, thread_blocks(n), kThreads, 0, stream, records, stride,
                  ranks, n, 1.f / static_cast<float>(ranks), vectors_at(to), to);
  });
}

const kernels::CompressGradientCuda kTable{run_compress, run_decompress_mean};
const bool kProvided = (provide("compress_gradient", &kTable), true);

}  // namespace
}  // namespace shoestring::cuda
