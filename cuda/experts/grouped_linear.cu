// Matrix products of the rows of experts on CUDA, and their gradients. A block finds the expert of its rows
// from the offsets on the GPU: no result leaves it. All sums are in a fixed order.

#include <climits>

#include "core/cuda_tables.h"
#include "cuda/core/gpu.h"
#include "cuda/experts/grouped_tile.h"
#include "experts/grouped_linear_table.h"

namespace shoestring::cuda {
namespace {

using kernels::GroupedMatrix;
using kernels::GroupedProduct;
using kernels::GroupedSlots;
using kernels::GroupedSums;

enum class Form { kForward, kInput, kWeight };

template <Form form>
constexpr bool kTurnedA = form == Form::kWeight;
template <Form form>
constexpr bool kTurnedB = form != Form::kForward;

// Blocks of adjacent indices compute so many rows of squares, so that both operands stay in the L2 cache.
constexpr int kBand = 8;

// The alignment of operands allows loads of 16 bytes, and that of the result stores of two elements.
struct GroupedAccess {
  bool a, b, pairs;
};

struct Cell {
  int row, column;
};

// Returns the row and column of a block in a grid of squares.
__device__ inline Cell cell_of(int index, int rows, int columns) {
  const int of_band = kBand * columns, band = index / of_band * kBand, within = index % of_band;
  const int height = min(kBand, rows - band);
  return {band + within % height, within / height};
}

// Returns the first slot of expert i - 1. The slots before the first expert count as those of i = 0, and the
// slots after the last one as those of i = groups + 1.
__device__ inline int first_slot(const GroupedSlots& s, int i) {
  if (i == 0) return 0;
  if (i > s.groups + 1) return static_cast<int>(s.slots);
  return static_cast<int>(max(int64_t{0}, min(s.offsets[i - 1], s.slots)));
}

__device__ inline int64_t element_of(const GroupedSlots& s, int64_t slot) {
  return s.order == nullptr ? slot : s.order[slot];
}

// The slots [first, end) of a tile, and i of their expert, as in first_slot.
struct SlotTile {
  int i, first, end;
};

// Finds a tile of `side` slots of one expert. The tiles of expert i have the numbers from
// first_slot(i) / side + i on. These are at least as many as it has, so tiles may be empty. All threads call
// the function; `found` is in shared memory.
template <int side>
__device__ SlotTile find_tile(const GroupedSlots& s, int tile, unsigned* found) {
  const auto first_tile = [&](int i) { return first_slot(s, i) / side + i; };
  if (threadIdx.x == 0) *found = 0;
  __syncthreads();
  unsigned last = 0;
  for (int i = threadIdx.x; i < s.groups + 2; i += kGroupThreads) {
    if (first_tile(i) <= tile) last = i;
  }
  last = warp_max(last);
  if (lane() == 0) atomicMax(found, last);
  __syncthreads();
  const int i = static_cast<int>(*found), end = first_slot(s, i + 1);
  const int64_t first = first_slot(s, i) + int64_t{side} * (tile - first_tile(i));
  return {i, static_cast<int>(min(first, int64_t{end})), end};
}

template <class T>
int64_t slot_tiles(const GroupedSlots& s) {
  return s.slots == 0 ? 0 : s.slots / kSide<T> + s.groups + 2;
}

template <class T>
__device__ __host__ int64_t squares(int64_t length) {
  return (length + kSide<T> - 1) / kSide<T>;
}

template <class T>
__device__ const T* of_group(const void* stack, int64_t apart, int group) {
  return static_cast<const T*>(stack) + apart * group;
}

// Computes the square of a block that has slots of one expert as rows.
template <class T, Form form>
__device__ void multiply_slots(const GroupedProduct& p, const GroupedAccess& access) {
  constexpr int side = kSide<T>;
  const int columns = static_cast<int>(p.columns), depth = static_cast<int>(p.depth);
  const int wide = static_cast<int>(squares<T>(columns));
  const Cell cell = cell_of(blockIdx.x, static_cast<int>(gridDim.x) / wide, wide);
  constexpr int shared = Square<T>::template kSharedBytes<kTurnedA<form>, kTurnedB<form>>;
  const SlotTile tile =
      find_tile<side>(p.slots, cell.row, reinterpret_cast<unsigned*>(dynamic_shared() + shared));
  if (tile.first >= tile.end) return;
  const int first_column = cell.column * side, group = tile.i - 1;
  const bool belongs = group >= 0 && group < p.slots.groups;
  if (!belongs && p.keep) return;
  const Rows rows{p.slots.rows, tile.end, static_cast<int>(p.slots.count)};
  const Result<T> to{p.out,
                     p.out_row,
                     belongs && p.bias != nullptr ? of_group<Total<T>>(p.bias, p.bias_group, group) : nullptr,
                     rows,
                     columns,
                     p.wide,
                     access.pairs};
  Square<T> square;
  if (belongs) {
    const Rows of_b{nullptr, form == Form::kForward ? columns : depth, 0};
    const int steps = (depth + kStep<T> - 1) / kStep<T>;
    square.add(Operand<T, false>(p.a.data, p.a.row, rows, tile.first, 0, depth),
               Operand<T, kTurnedB<form>>(of_group<T>(p.b.data, p.b.group, group), p.b.row, of_b,
                                          form == Form::kForward ? first_column : 0,
                                          form == Form::kForward ? 0 : first_column,
                                          form == Form::kForward ? depth : columns),
               steps, access.a, access.b);
  }
  square.write(to, tile.first, first_column);
}

// Computes the square of a block that adds the products of an expert's slots.
template <class T>
__device__ void add_slots(const GroupedProduct& p, const GroupedAccess& access) {
  const int height = static_cast<int>(p.height), columns = static_cast<int>(p.columns);
  const int high = static_cast<int>(squares<T>(height)), wide = static_cast<int>(squares<T>(columns));
  const int group = static_cast<int>(blockIdx.x) / (high * wide);
  const Cell cell = cell_of(static_cast<int>(blockIdx.x) % (high * wide), high, wide);
  const int first_row = cell.row * kSide<T>, first_column = cell.column * kSide<T>;
  const int first = first_slot(p.slots, group + 1), end = max(first, first_slot(p.slots, group + 2));
  const int64_t size = p.wide ? sizeof(Total<T>) : sizeof(T);
  const Result<T> to{static_cast<unsigned char*>(p.out) + size * p.out_group * group,
                     p.out_row,
                     nullptr,
                     {nullptr, height, 0},
                     columns,
                     p.wide,
                     access.pairs};
  Square<T> square;
  const Rows plain{nullptr, end, 0}, referring{p.slots.rows, end, static_cast<int>(p.slots.count)};
  square.add(Operand<T, true>(p.a.data, p.a.row, p.turned ? referring : plain, first, first_row, height),
             Operand<T, true>(p.b.data, p.b.row, p.turned ? plain : referring, first, first_column, columns),
             (end - first + kStep<T> - 1) / kStep<T>, access.a, access.b);
  square.write(to, first_row, first_column);
}

// Dynamic shared memory takes 60 KiB in 16 bits, and 17 KiB in fp32 and fp64. On sm_120, 96 bytes of two
// kernels of fp32 spill.
// Budget: 128 registers, 0 bytes shared, no spills; in fp32 24 bytes stack.
template <class T, Form form>
__global__ void __launch_bounds__(kGroupThreads, 2) multiply(GroupedProduct p, GroupedAccess access) {
  if constexpr (kHasMma || !kTensorCores<T>) {
    if constexpr (form == Form::kWeight) {
      add_slots<T>(p, access);
    } else {
      multiply_slots<T, form>(p, access);
    }
  }
}

template <class T>
__device__ Total<T> widened(T x) {
  if constexpr (sizeof(T) == 8) {
    return x;
  } else {
    return to_float(x);
  }
}

// A block adds 32 columns of an expert's slots. A warp adds every eighth slot.
// Budget: 48 registers, 0 bytes shared, no spills.
template <class T>
__global__ void __launch_bounds__(kGroupThreads) sum_slots(GroupedSlots s, GroupedMatrix a, int64_t columns,
                                                           bool refer, const Total<T>* scale, Total<T>* out) {
  constexpr int warps = kGroupThreads / kWarp;
  const int wide = static_cast<int>((columns + kWarp - 1) / kWarp),
            group = static_cast<int>(blockIdx.x) / wide;
  const int64_t column = static_cast<int64_t>(blockIdx.x) % wide * kWarp + lane();
  const Rows rows{s.rows, first_slot(s, group + 2), static_cast<int>(s.count)};
  auto* sums = reinterpret_cast<Total<T>*>(dynamic_shared());
  Total<T> sum = 0;
  if (column < columns) {
    const T* from = static_cast<const T*>(a.data) + column;
#pragma unroll 4
    for (int slot = first_slot(s, group + 1) + warp(); slot < rows.end; slot += warps) {
      const int row = rows(slot);
      if (row < 0) continue;
      const Total<T> value = widened(from[(refer ? row : slot) * a.row]);
      sum += scale == nullptr ? value : scale[element_of(s, slot)] * value;
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (warp() != 0 || column >= columns) return;
  for (int i = 1; i < warps; ++i) sum += sums[i * kWarp + lane()];
  out[group * columns + column] = sum;
}

// A thread adds four columns of the rows of one sum.
// Budget: 72 registers, 0 bytes shared, no spills.
template <class Sum, class T>
__global__ void __launch_bounds__(kGroupThreads)
    collect_rows(GroupedMatrix a, GroupedSums s, int64_t count, int64_t columns, T* out, int64_t out_row) {
  const int64_t wide = (columns + 3) / 4, index = int64_t{blockIdx.x} * kGroupThreads + threadIdx.x;
  const int64_t row = index / wide, column = index % wide * 4;
  if (row >= count) return;
  const Sum* from = static_cast<const Sum*>(a.data) + column;
  const auto* factors = static_cast<const Sum*>(s.factors);
  const int64_t last = s.end == nullptr ? LLONG_MAX : *s.end;
  const int64_t first = s.starts == nullptr ? row * s.each : s.starts[row],
                end = s.starts == nullptr ? first + s.each : s.starts[row + 1];
  Sum sums[4] = {};
  for (int64_t i = first; i < end; ++i) {
    const int64_t place = s.order[i];
    if (place >= last) continue;
    const Sum factor = factors == nullptr ? 1 : factors[i];
    const auto values = load<4>(from + place * a.row);
#pragma unroll
    for (int k = 0; k < 4; ++k) sums[k] += factor * values[k];
  }
  T* to = out + row * out_row + column;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (column + k >= columns) continue;
    if constexpr (std::is_same_v<Sum, T>) {
      to[k] = sums[k];
    } else {
      to[k] = rounded<T>(sums[k]);
    }
  }
}

// A warp multiplies the row of a slot by that of its group.
// Budget: 64 registers, 0 bytes shared, no spills.
template <class T>
__global__ void __launch_bounds__(kGroupThreads)
    dot_rows(GroupedSlots s, GroupedMatrix a, const Total<T>* b, int64_t columns, Total<T>* out) {
  const int64_t slot = int64_t{blockIdx.x} * (kGroupThreads / kWarp) + warp();
  if (slot >= first_slot(s, static_cast<int>(s.groups) + 1)) return;
  const Rows rows{s.rows, static_cast<int>(s.slots), static_cast<int>(s.count)};
  unsigned last = 0;  // one more than the group
  for (int i = lane() + 1; i <= s.groups; i += kWarp) {
    if (first_slot(s, i) <= slot) last = i;
  }
  last = warp_max(last);
  const int row = rows(static_cast<int>(slot));
  if (last == 0 || row < 0) return;
  const T* from = static_cast<const T*>(a.data) + row * a.row;
  const Total<T>* of_group = b + (last - 1) * columns;
  Total<T> sum = 0;
  for (int64_t i = lane(); i < columns; i += kWarp) sum += widened(from[i]) * of_group[i];
  sum = warp_reduce(sum, [](Total<T> x, Total<T> y) { return x + y; });
  if (lane() == 0) out[element_of(s, slot)] += sum;
}

bool fits(const GroupedMatrix& m, int64_t element, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(m.data) % bytes == 0 && m.row * element % bytes == 0 &&
         m.group * element % bytes == 0;
}

template <class T, Form form>
const char* run_multiply(const GroupedProduct& p, void* stream) {
  for (const int64_t size : {p.slots.slots, p.slots.count, p.slots.groups, p.height, p.columns, p.depth}) {
    if (size > INT_MAX - 256) return "expected fewer than 2^31 - 256 rows and columns";
  }
  const auto element = static_cast<int64_t>(sizeof(T));
  const auto of_out = p.wide ? static_cast<int64_t>(sizeof(Total<T>)) : element;
  const GroupedAccess access{fits(p.a, element, 16), fits(p.b, element, 16),
                             fits({p.out, p.out_row, p.out_group}, of_out, 2 * of_out)};
  const int64_t blocks =
      squares<T>(p.columns) *
      (form == Form::kWeight ? p.slots.groups * squares<T>(p.height) : slot_tiles<T>(p.slots));
  constexpr int shared = Square<T>::template kSharedBytes<kTurnedA<form>, kTurnedB<form>>;
  return launch(multiply<T, form>, blocks, kGroupThreads, shared + 16, stream, p, access);
}

template <class T>
const char* run_sum(const GroupedSlots& s, const GroupedMatrix& a, int64_t columns, bool refer,
                    const void* scale, void* out, void* stream) {
  return launch(sum_slots<T>, s.groups * ((columns + kWarp - 1) / kWarp), kGroupThreads,
                kGroupThreads * static_cast<int>(sizeof(Total<T>)), stream, s, a, columns, refer,
                static_cast<const Total<T>*>(scale), static_cast<Total<T>*>(out));
}

template <class T>
const char* run_collect(const GroupedMatrix& a, const GroupedSums& sums, int64_t count, int64_t columns,
                        void* out, int64_t out_row, void* stream) {
  const int64_t threads = count * ((columns + 3) / 4);
  return launch(collect_rows<Total<T>, T>, (threads + kGroupThreads - 1) / kGroupThreads, kGroupThreads, 0,
                stream, a, sums, count, columns, static_cast<T*>(out), out_row);
}

template <class T>
const char* run_dot(const GroupedSlots& s, const GroupedMatrix& a, const void* b, int64_t columns, void* out,
                    void* stream) {
  constexpr int warps = kGroupThreads / kWarp;
  return launch(dot_rows<T>, (s.slots + warps - 1) / warps, kGroupThreads, 0, stream, s, a,
                static_cast<const Total<T>*>(b), columns, static_cast<Total<T>*>(out));
}

const char* has_tensor_cores(bool& result) {
  int capability = 0;
  const char* error = compute_capability(capability);
  result = capability >= 80;
  return error;
}

template <class T>
constexpr kernels::GroupedLinearCuda::Kernels of_type() {
  return {run_multiply<T, Form::kForward>,
          run_multiply<T, Form::kInput>,
          run_multiply<T, Form::kWeight>,
          run_sum<T>,
          run_collect<T>,
          run_dot<T>};
}

const kernels::GroupedLinearCuda kTable{of_type<float>(), of_type<double>(), of_type<__nv_bfloat16>(),
                                        of_type<__half>(), has_tensor_cores};
const bool kProvided = (provide("grouped_linear", &kTable), true);

}  // namespace
}  // namespace shoestring::cuda
