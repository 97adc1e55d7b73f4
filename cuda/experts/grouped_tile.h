#pragma once

// The product of a block of grouped_linear. 256 threads compute a square of the result and step through the
// depth. An operand of a product is straight if its rows in memory are rows, or columns, of the result; it is
// turned if they are steps of the depth. In 16 bits, tensor cores multiply what asynchronous copies have put
// into shared memory. In fp32 and fp64, a thread multiplies for a square of its own.

#include <cstdint>
#include <type_traits>

#include "cuda/core/convert.h"
#include "cuda/core/launch.h"
#include "cuda/core/ptx.h"
#include "cuda/core/vector.h"
#include "cuda/core/warp.h"

namespace shoestring::cuda {
namespace {

constexpr int kGroupThreads = 256;

template <class T>
constexpr bool kTensorCores = sizeof(T) == 2;
/// The numbers of rows and columns of the result that a block computes.
template <class T>
constexpr int kSide = sizeof(T) == 8 ? 64 : 128;
/// The depth of a step.
template <class T>
constexpr int kStep = kTensorCores<T> ? 32 : 8;
/// The number of adjacent elements that a thread copies at once.
template <class T>
constexpr int kPiece = kTensorCores<T> ? 8 : 1;
/// The number of steps whose operands are in shared memory.
template <class T>
constexpr int kStages = kTensorCores<T> ? 3 : 2;

/// The type of sums.
template <class T>
using Total = std::conditional_t<sizeof(T) == 8, double, float>;

/// Says which row of a matrix each index refers to: row refers[i], or i if `refers` is null.
struct Rows {
  const int64_t* refers;
  int end, count;
  /// Returns -1 from `end` on, and if a row is not in [0, count).
  __device__ int operator()(int i) const {
    if (i >= end) return -1;
    if (refers == nullptr) return i;
    const int64_t row = refers[i];
    return row >= 0 && row < count ? static_cast<int>(row) : -1;
  }
};

/// Walks through the tiles of an operand, one for each step of the depth.
template <class T, bool kTurned>
class Operand {
 public:
  static constexpr int kLines = kTurned ? kStep<T> : kSide<T>, kLength = kTurned ? kSide<T> : kStep<T>;
  static constexpr int kPieces = kLength / kPiece<T>, kLinesApart = kGroupThreads / kPieces;
  static constexpr int kEach = kLines / kLinesApart;  // pieces of a thread

  /// The first tile begins at the row to which index `first` refers, and at `column`. Columns from `width` on
  /// count as 0, as do rows without a place in the matrix.
  __device__ Operand(const void* from, int64_t stride, const Rows& rows, int first, int column, int width)
      : from_(static_cast<const T*>(from)), stride_(stride), rows_(rows), first_(first), column_(column),
        width_(width) {
    look_up();
  }

  /// Calls use(i, line, column, source, count) for each piece of the tile that belongs to the thread. `count`
  /// elements of the matrix begin at `source`; the others of the piece are 0. Goes on to the next tile.
  template <class Use>
  __device__ void take(Use use) {
    const int column = static_cast<int>(threadIdx.x) % kPieces * kPiece<T>;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int count = row_[i] < 0 ? 0 : max(0, min(kPiece<T>, width_ - column_ - column));
      use(i, line(i), column, from_ + (count > 0 ? row_[i] * stride_ + column_ + column : 0), count);
    }
    if constexpr (kTurned) {
      first_ += kStep<T>;
      look_up();  // ahead of the copies of the next tile, which then need not wait for the rows
    } else {
      column_ += kStep<T>;
    }
  }

 private:
  __device__ static int line(int i) { return static_cast<int>(threadIdx.x) / kPieces + i * kLinesApart; }
  __device__ void look_up() {
#pragma unroll
    for (int i = 0; i < kEach; ++i) row_[i] = rows_(first_ + line(i));
  }

  const T* from_;
  int64_t stride_;
  Rows rows_;
  int first_, column_, width_;
  int row_[kEach];
};

/// The part of a result that a block writes.
template <class T>
struct Result {
  using Sum = Total<T>;

  void* out;
  int64_t stride;
  const Sum* bias;  // of the columns, or null
  Rows rows;        // rows from rows.end on are not written, and rows that refer to none are 0
  int columns;
  bool wide, pairs;  // pairs: the alignment allows storing two adjacent elements at once

  template <class To>
  __device__ void put(To* to, Sum x, Sum y, bool both) const {
    Vector<To, 2> pair;
    if constexpr (std::is_same_v<To, Sum>) {
      pair[0] = x;
      pair[1] = y;
    } else {
      round_pair(x, y, pair.value);
    }
    if (both && pairs) return store(to, pair);
    to[0] = pair[0];
    if (both) to[1] = pair[1];
  }

  /// Writes the sums of the columns `column` and `column + 1` of a row. `kept` says that the row is not 0.
  __device__ void write(int row, bool kept, int column, Sum x, Sum y) const {
    if (column >= columns) return;
    const bool both = column + 1 < columns;
    if (bias != nullptr) {
      x += bias[column];
      if (both) y += bias[column + 1];
    }
    if (!kept) x = y = 0;
    const int64_t at = row * stride + column;
    wide ? put(static_cast<Sum*>(out) + at, x, y, both) : put(static_cast<T*>(out) + at, x, y, both);
  }
};

/// A square of the result on tensor cores. A warp computes 64 rows and 32 columns.
template <class T>
class MmaSquare {
  template <bool kTurned>
  static constexpr int kPitch = 2 * Operand<T, kTurned>::kLength + 16;  // as in attention_tile.h
  template <bool kTurned>
  static constexpr int kBytes = Operand<T, kTurned>::kLines * kPitch<kTurned>;

 public:
  template <bool kTurnedA, bool kTurnedB>
  static constexpr int kStageBytes = kBytes<kTurnedA> + kBytes<kTurnedB>;
  template <bool kTurnedA, bool kTurnedB>
  static constexpr int kSharedBytes = kStages<T> * kStageBytes<kTurnedA, kTurnedB>;

  /// Adds the products of `steps` tiles of two operands. a_vectors, b_vectors: whether pieces are aligned.
  template <bool kTurnedA, bool kTurnedB>
  __device__ void add(Operand<T, kTurnedA> a, Operand<T, kTurnedB> b, int steps, bool a_vectors,
                      bool b_vectors) {
    constexpr int bytes = kStageBytes<kTurnedA, kTurnedB>;
    unsigned char* tiles = dynamic_shared();
    const auto start_copies = [&](int step) {
      unsigned char* to = tiles + step % kStages<T> * bytes;
      copy(to, a, a_vectors);
      copy(to + kBytes<kTurnedA>, b, b_vectors);
    };
    for (int step = 0; step < kStages<T> - 1; ++step) {
      if (step < steps) start_copies(step);
      cp_async_commit();
    }
    for (int step = 0; step < steps; ++step) {
      cp_async_wait<kPending>();
      // waits until the copies of this step have arrived and no warp still reads the tiles that are replaced
      __syncthreads();
      if (step + kStages<T> - 1 < steps) start_copies(step + kStages<T> - 1);
      cp_async_commit();
      const unsigned char* from = tiles + step % kStages<T> * bytes;
      multiply<kTurnedA, kTurnedB>(from, from + kBytes<kTurnedA>);
    }
  }

  __device__ void write(const Result<T>& to, int first_row, int first_column) const {
#pragma unroll
    for (int i = 0; i < kHigh; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + warp_row() + i * 16 + half * 8 + lane() / 4;
        if (row >= to.rows.end) continue;
        const bool kept = to.rows(row) >= 0;
#pragma unroll
        for (int j = 0; j < kWide; ++j) {
          to.write(row, kept, first_column + warp_column() + j * 8 + lane() % 4 * 2, c_[i][j][2 * half],
                   c_[i][j][2 * half + 1]);
        }
      }
    }
  }

 private:
  static constexpr int kHigh = 4, kWide = 4;       // of a warp, in products of 16 x 8
  static constexpr int kPending = kStages<T> - 2;  // copies of later steps that need not have arrived
  __device__ static int warp_row() { return warp() / 4 * 64; }
  __device__ static int warp_column() { return warp() % 4 * 32; }

  template <bool kTurned>
  __device__ static void copy(unsigned char* tile, Operand<T, kTurned>& from, bool vectors) {
    from.take([&](int, int line, int column, const T* source, int count) {
      unsigned char* to = tile + line * kPitch<kTurned> + column * 2;
      if (vectors) return cp_async<16>(to, source, count * 2);
      Vector<T, 8> values;
#pragma unroll
      for (int k = 0; k < 8; ++k) values[k] = k < count ? source[k] : rounded<T>(0.f);
      store(reinterpret_cast<T*>(to), values);
    });
  }

  template <bool kTurnedA, bool kTurnedB>
  __device__ void multiply(const unsigned char* a, const unsigned char* b) {
    constexpr int a_pitch = kPitch<kTurnedA>, b_pitch = kPitch<kTurnedB>;
    const int l = lane();
    // the addresses of the rows that the lane gives to ldmatrix
    a += kTurnedA ? (l / 16 * 8 + l % 8) * a_pitch + (warp_row() + l / 8 % 2 * 8) * 2
                  : (warp_row() + l % 16) * a_pitch + l / 16 * 16;
    b += kTurnedB ? l % 16 * b_pitch + (warp_column() + l / 16 * 8) * 2
                  : (warp_column() + l / 16 * 8 + l % 8) * b_pitch + l / 8 % 2 * 16;
#pragma unroll
    for (int k = 0; k < kStep<T>; k += 16) {
      uint32_t left[kHigh][4], right[kWide / 2][4];
#pragma unroll
      for (int i = 0; i < kHigh; ++i) {
        if constexpr (kTurnedA) {
          ldmatrix_trans(left[i], a + k * a_pitch + i * 32);
        } else {
          ldmatrix(left[i], a + i * 16 * a_pitch + k * 2);
        }
      }
#pragma unroll
      for (int j = 0; j < kWide / 2; ++j) {
        if constexpr (kTurnedB) {
          ldmatrix_trans(right[j], b + k * b_pitch + j * 32);
        } else {
          ldmatrix(right[j], b + j * 16 * b_pitch + k * 2);
        }
      }
#pragma unroll
      for (int i = 0; i < kHigh; ++i) {
#pragma unroll
        for (int j = 0; j < kWide; ++j) {
          mma_16x8x16<T>(c_[i][j], left[i], {right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1]});
        }
      }
    }
  }

  float c_[kHigh][kWide][4] = {};
};

/// A square of the result in fp32 or fp64. A thread computes groups of four rows and of four columns.
template <class T>
class PlainSquare {
  static constexpr int kPitch = kSide<T> + 4;  // tiles (kStep, kSide), in elements
  static constexpr int kTile = kStep<T> * kPitch;
  static constexpr int kOwn = kSide<T> / 16;  // rows, and columns, of a thread

 public:
  template <bool kTurnedA, bool kTurnedB>
  static constexpr int kSharedBytes = 2 * kTile * static_cast<int>(sizeof(T)) * kStages<T>;

  template <bool kTurnedA, bool kTurnedB>
  __device__ void add(Operand<T, kTurnedA> a, Operand<T, kTurnedB> b, int steps, bool, bool) {
    T* tiles = reinterpret_cast<T*>(dynamic_shared());
    T next_a[Operand<T, kTurnedA>::kEach], next_b[Operand<T, kTurnedB>::kEach];
    if (steps > 0) {
      read(a, next_a);
      read(b, next_b);
      keep<kTurnedA>(tiles, next_a);
      keep<kTurnedB>(tiles + kTile, next_b);
    }
    for (int step = 0; step < steps; ++step) {
      __syncthreads();  // the tiles are complete, and no warp still reads those that the next step replaces
      if (step + 1 < steps) {
        read(a, next_a);
        read(b, next_b);
      }
      const T* from = tiles + step % 2 * 2 * kTile;
      multiply(from, from + kTile);
      if (step + 1 < steps) {
        T* to = tiles + (step + 1) % 2 * 2 * kTile;
        keep<kTurnedA>(to, next_a);
        keep<kTurnedB>(to + kTile, next_b);
      }
    }
  }

  __device__ void write(const Result<T>& to, int first_row, int first_column) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int row = first_row + place(static_cast<int>(threadIdx.x) / 16, i);
      if (row >= to.rows.end) continue;
      const bool kept = to.rows(row) >= 0;
#pragma unroll
      for (int j = 0; j < kOwn; j += 2) {
        to.write(row, kept, first_column + place(threadIdx.x % 16, j), c_[i][j], c_[i][j + 1]);
      }
    }
  }

 private:
  // Returns the row, or column, of the i-th one of a thread.
  __device__ static int place(int thread, int i) { return i / 4 * 64 + thread * 4 + i % 4; }

  template <bool kTurned, int kEach>
  __device__ static void read(Operand<T, kTurned>& from, T (&values)[kEach]) {
    from.take([&](int i, int, int, const T* source, int count) { values[i] = count > 0 ? *source : T(0); });
  }

  template <bool kTurned, int kEach>
  __device__ static void keep(T* tile, const T (&values)[kEach]) {
    using From = Operand<T, kTurned>;
    const int column = static_cast<int>(threadIdx.x) % From::kPieces;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int line = static_cast<int>(threadIdx.x) / From::kPieces + i * From::kLinesApart;
      tile[kTurned ? line * kPitch + column : column * kPitch + line] = values[i];
    }
  }

  __device__ void multiply(const T* a, const T* b) {
    a += threadIdx.x / 16 * 4;
    b += threadIdx.x % 16 * 4;
#pragma unroll
    for (int k = 0; k < kStep<T>; ++k) {
      Vector<T, 4> left[kOwn / 4], right[kOwn / 4];
#pragma unroll
      for (int i = 0; i < kOwn / 4; ++i) {
        left[i] = load<4>(a + k * kPitch + i * 64);
        right[i] = load<4>(b + k * kPitch + i * 64);
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
#pragma unroll
        for (int j = 0; j < kOwn; ++j) c_[i][j] += left[i / 4][i % 4] * right[j / 4][j % 4];
      }
    }
  }

  T c_[kOwn][kOwn] = {};
};

template <class T>
using Square = std::conditional_t<kTensorCores<T>, MmaSquare<T>, PlainSquare<T>>;

}  // namespace
}  // namespace shoestring::cuda
