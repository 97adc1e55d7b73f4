#pragma once

// Tiles in shared memory, and the two kinds of matrix product in attention's forward and backward:
// - rows times rows: scores = q k^T, and grad_out v^T. Both operands are in shared memory.
// - scores times rows: out = p v, and the gradients of q, k and v. The left operand is in the registers that
//   hold the result of a product of the first kind.
// A warp computes 16 rows of the result. In fp32, each number is split into two TF32 numbers; three TF32
// products then give a precision of 22 bits.

#include <cstdint>

#include "cuda/core/convert.h"
#include "cuda/core/ptx.h"
#include "cuda/core/vector.h"
#include "cuda/core/warp.h"

namespace shoestring::cuda {

/// Bytes from one row of a tile in shared memory to the next. The pitch is an odd multiple of 16, so that
/// eight rows are in different banks.
template <class T, int kFeatures>
constexpr int kPitch = kFeatures * static_cast<int>(sizeof(T)) + 16;

/// Starts copies of rows [first, first + kRows) of a matrix to a tile in shared memory. Rows from `end` on
/// and features from `features` on become zero. `vectors` says that the rows begin at multiples of 16 bytes.
template <class T, int kFeatures, int kRows, int kThreads>
__device__ void copy_rows(unsigned char* tile, const T* from, int64_t stride, int first, int end,
                          int features, bool vectors) {
  constexpr int kWidth = 16 / sizeof(T), kPieces = kFeatures / kWidth;
#pragma unroll 4
  for (int i = threadIdx.x; i < kRows * kPieces; i += kThreads) {
    const int row = i / kPieces, column = i % kPieces * kWidth;
    const int count = first + row < end ? max(0, min(kWidth, features - column)) : 0;
    const T* source = from + (count > 0 ? (first + row) * stride + column : 0);
    unsigned char* to = tile + row * kPitch<T, kFeatures> + i % kPieces * 16;
    if (vectors) {
      cp_async<16>(to, source, count * static_cast<int>(sizeof(T)));
    } else {
      Vector<T, kWidth> values;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) values[k] = k < count ? source[k] : rounded<T>(0.f);
      store(reinterpret_cast<T*>(to), values);
    }
  }
}

/// An fp32 number as the sum of two TF32 numbers.
struct Tf32Pair {
  uint32_t high, low;
};

__device__ inline Tf32Pair split(float x) {
  const uint32_t high = to_tf32(x);
  return {high, to_tf32(x - __uint_as_float(high))};
}

/// Computes c += a b in fp32 precision, with three products of TF32 numbers. The products with a small part
/// are added first. A tensor core cuts off the last bits of a sum. Its sums are therefore short: they begin
/// at zero, and the addition to c rounds to nearest.
__device__ inline void mma_split(float (&c)[4], const Tf32Pair (&a)[4], float b0, float b1) {
  const Tf32Pair x = split(b0), y = split(b1);
  const uint32_t high_a[4] = {a[0].high, a[1].high, a[2].high, a[3].high};
  const uint32_t low_a[4] = {a[0].low, a[1].low, a[2].low, a[3].low};
  const uint32_t high_b[2] = {x.high, y.high}, low_b[2] = {x.low, y.low};
  float sum[4] = {};
  mma_16x8x8_tf32(sum, low_a, high_b);
  mma_16x8x8_tf32(sum, high_a, low_b);
  mma_16x8x8_tf32(sum, high_a, high_b);
#pragma unroll
  for (int i = 0; i < 4; ++i) c[i] += sum[i];
}

/// Rounds two numbers to T and packs them into a register, with x in the lower half.
template <class T>
__device__ uint32_t pack(float x, float y) {
  T pair[2];
  round_pair(x, y, pair);
  uint32_t bits;
  memcpy(&bits, pair, sizeof bits);
  return bits;
}

/// Computes c += a b^T, where c is (16, kColumns). a and b are the addresses of 16 and of kColumns rows in
/// shared memory.
template <class T, int kFeatures, int kColumns>
__device__ void rows_times_rows(float (&c)[kColumns / 8][4], const unsigned char* a, const unsigned char* b) {
  constexpr int pitch = kPitch<T, kFeatures>;
  const int l = lane();
  if constexpr (sizeof(T) == 2) {
    a += l % 16 * pitch + l / 16 * 16;
    b += (l / 16 * 8 + l % 8) * pitch + l / 8 % 2 * 16;
#pragma unroll
    for (int k = 0; k < kFeatures; k += 16) {
      uint32_t left[4];
      ldmatrix(left, a + k * 2);
#pragma unroll
      // one ldmatrix loads the fragments of two columns of 8 x 8 tiles
      for (int j = 0; j < kColumns / 8; j += 2) {
        uint32_t right[4];
        ldmatrix(right, b + j * 8 * pitch + k * 2);
        mma_16x8x16<T>(c[j], left, {right[0], right[1]});
        mma_16x8x16<T>(c[j + 1], left, {right[2], right[3]});
      }
    }
  } else {
    const auto at = [&](const unsigned char* tile, int row, int column) {
      return *reinterpret_cast<const float*>(tile + (l / 4 + row) * pitch + (l % 4 + column) * 4);
    };
#pragma unroll 2
    for (int k = 0; k < kFeatures; k += 8) {
      const Tf32Pair left[4] = {split(at(a, 0, k)), split(at(a, 8, k)), split(at(a, 0, k + 4)),
                                split(at(a, 8, k + 4))};
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) mma_split(c[j], left, at(b, j * 8, k), at(b, j * 8, k + 4));
    }
  }
}

/// Computes c += p b, where c is (16, kFeatures). p, (16, kRows), is in the registers in which
/// rows_times_rows computed it. b is the address of kRows rows in shared memory.
template <class T, int kRows, int kFeatures>
__device__ void scores_times_rows(float (&c)[kFeatures / 8][4], const float (&p)[kRows / 8][4],
                                  const unsigned char* b) {
  constexpr int pitch = kPitch<T, kFeatures>;
  const int l = lane();
  if constexpr (sizeof(T) == 2) {
    b += l % 16 * pitch + l / 16 * 16;
#pragma unroll
    for (int k = 0; k < kRows / 8; k += 2) {
      const uint32_t left[4] = {pack<T>(p[k][0], p[k][1]), pack<T>(p[k][2], p[k][3]),
                                pack<T>(p[k + 1][0], p[k + 1][1]), pack<T>(p[k + 1][2], p[k + 1][3])};
#pragma unroll
      for (int j = 0; j < kFeatures / 8; j += 2) {
        uint32_t right[4];
        ldmatrix_trans(right, b + k * 8 * pitch + j * 16);
        mma_16x8x16<T>(c[j], left, {right[0], right[1]});
        mma_16x8x16<T>(c[j + 1], left, {right[2], right[3]});
      }
    }
  } else {
    // With t = lane % 4, a lane holds columns 2t and 2t + 1 of p. The mma instruction expects columns t and t
    // + 4. To make up for this, the rows of b are read in the corresponding order.
    const float* from = reinterpret_cast<const float*>(b + l % 4 * 2 * pitch) + l / 4;
    constexpr int next = pitch / 4;
#pragma unroll
    for (int k = 0; k < kRows / 8; ++k) {
      const Tf32Pair left[4] = {split(p[k][0]), split(p[k][2]), split(p[k][1]), split(p[k][3])};
#pragma unroll
      for (int j = 0; j < kFeatures / 8; ++j) {
        mma_split(c[j], left, from[k * 8 * next + j * 8], from[(k * 8 + 1) * next + j * 8]);
      }
    }
  }
}

/// Multiplies a warp's 16 rows of c by factors and stores them to rows [first, end) of `to`. A lane holds
/// elements of two rows, one of the first eight rows and one of the last eight; `by` has the factors of these
/// two rows. `pairs` says that the alignment allows storing two adjacent elements at once.
template <class T, int kFeatures>
__device__ void store_rows(T* to, int64_t stride, int first, int end, int features, bool pairs,
                           const float (&c)[kFeatures / 8][4], const float (&by)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first + lane() / 4 + half * 8;
    if (row >= end) continue;
    T* out = to + row * stride;
#pragma unroll
    for (int j = 0; j < kFeatures / 8; ++j) {
      const int column = j * 8 + lane() % 4 * 2;
      Vector<T, 2> pair;
      round_pair(c[j][2 * half] * by[half], c[j][2 * half + 1] * by[half], pair.value);
      if (pairs && column + 1 < features) {
        store(out + column, pair);
      } else {
        if (column < features) out[column] = pair[0];
        if (column + 1 < features) out[column + 1] = pair[1];
      }
    }
  }
}

}  // namespace shoestring::cuda
