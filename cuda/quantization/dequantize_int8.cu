// Dequantises int8 weights on the GPU. Memory bandwidth limits the kernel: it reads one byte per element and
// writes two or four. A thread decodes a vector, the elements of one 16-byte store, and has the loads of four
// vectors in flight. If the row length is a multiple of the vector width, all elements of a vector have the
// same scale.

#include "core/cuda_tables.h"
#include "cuda/core/convert.h"
#include "cuda/core/launch.h"
#include "cuda/core/vector.h"
#include "quantization/quantize_int8_table.h"

namespace shoestring::cuda {
namespace {

constexpr int kThreads = 256;
// number of vectors per thread; all of them are loaded before the first one is decoded
constexpr int kVectors = 4;

// Finds the scales of the rows that a tile of elements touches. A tile is small, so 32-bit offsets suffice
// within it.
struct Scales {
  const float* absmax;  // points to the scale of the row in which the tile starts
  unsigned left;        // elements from the tile's start to the end of the row in which the tile starts
  unsigned columns;     // elements per row, but at most 2^31 - 1: a tile is smaller than this
  __device__ Scales(const kernels::PackedInt8& p, int64_t begin) {
    const int64_t row = begin / p.columns, rest = (row + 1) * p.columns - begin;
    absmax = p.absmax + row;
    left = static_cast<unsigned>(rest < INT32_MAX ? rest : INT32_MAX);
    columns = static_cast<unsigned>(p.columns < INT32_MAX ? p.columns : INT32_MAX);
  }
  __device__ float at(unsigned offset) const {
    return absmax[offset < left ? 0 : 1 + (offset - left) / columns];
  }
};

template <class T>
__device__ T decode(int8_t code, float scale) {
  return rounded<T>(__fmul_rn(__fmul_rn(static_cast<float>(code), scale), kernels::kInverse127));
}

// Dequantises elements [begin, begin + count) into `out`. If kWhole, the row length is a multiple of the
// vector width.
// Budget: 56 registers, 0 bytes shared, no spills.
template <class T, bool kWhole>
__global__ void __launch_bounds__(kThreads)
    dequantize(kernels::PackedInt8 p, int64_t begin, int64_t count, T* out) {
  constexpr int kWidth = kWhole ? 16 / sizeof(T) : 1, kTile = kThreads * kVectors * kWidth;
  const int64_t tile = int64_t{blockIdx.x} * kTile;
  const unsigned first = threadIdx.x * kWidth,
                 end = static_cast<unsigned>(count - tile < kTile ? count - tile : kTile);
  const Scales scales(p, begin + tile);
  const int8_t* codes = p.codes + begin + tile;
  out += tile;
  Vector<int8_t, kWidth> part[kVectors];
  float scale[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const unsigned i = first + v * kThreads * kWidth;
    if (i < end) part[v] = load<kWidth>(codes + i);
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const unsigned i = first + v * kThreads * kWidth;
    if (i < end) scale[v] = scales.at(i);
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const unsigned i = first + v * kThreads * kWidth;
    if (i >= end) break;
    Vector<T, kWidth> values;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) values[k] = decode<T>(part[v][k], scale[v]);
    store(out + i, values);
  }
}

template <class T>
const char* run(const kernels::PackedInt8& p, int64_t begin, int64_t count, void* out, void* stream) {
  constexpr int kWidth = 16 / sizeof(T);
  const bool whole = p.columns % kWidth == 0 && aligned(p.codes, kWidth) && aligned(out);
  const int64_t tile = int64_t{kThreads} * kVectors * (whole ? kWidth : 1);
  return launch(whole ? dequantize<T, true> : dequantize<T, false>, (count + tile - 1) / tile, kThreads, 0,
                stream, p, begin, count, static_cast<T*>(out));
}

const kernels::DequantizeInt8Cuda kTable{run<float>, run<__nv_bfloat16>, run<__half>};
const bool kProvided = (provide("dequantize_int8", &kTable), true);

}  // namespace
}  // namespace shoestring::cuda
