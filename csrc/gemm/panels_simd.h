#pragma once

// Packs rows or columns of a matrix ("lines") into panels. Lines that are adjacent in memory (line stride 1)
// are copied. Other lines are transposed, one block of registers at a time.

#include "core/element_simd.h"
#include "gemm/gemm_table.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

#if defined(__AVX512F__)
// A tile of kRows rows keeps its sums in 28 of the 32 registers. kLeastRows rows have 16 registers of sums,
// which are enough to hide latency.
constexpr int kRows = 14, kLeastRows = 8;
#elif defined(__AVX2__)
constexpr int kRows = 6, kLeastRows = 6;  // 12 of the 16 registers hold sums of a tile
#else
constexpr int kRows = 4, kLeastRows = 4;
#endif
constexpr int kWide = 2;  // number of registers that hold one row of a result tile
constexpr int kColumns = kWide * kLanes;

// Packing writes whole registers for each depth step. If a panel is narrower than a register, the next depth
// step overwrites the excess elements.
static_assert(kRows <= kLanes && kLanes <= kernels::kGemmSlack);

// One and Two are the formats of an element in a packed panel. One is an fp32 number. Two holds two depth
// steps of a line as bf16, with the earlier step in the lower half.
struct One {
  static constexpr int kSteps = 1;
  // Loads one packed element for each of `n` adjacent lines. p points to the first depth step in the element.
  // The matrix has `count` depth steps from there on.
  template <class Element>
  static SHOESTRING_METHOD F32 across(const typename Element::Type* p, int64_t n, int64_t, int64_t) {
    return load_some<Element>(p, n);
  }
  // Loads kLanes consecutive elements of one line, a row or a column of the operand. `n` elements of the line
  // are left from p on.
  template <class Element>
  static SHOESTRING_METHOD F32 along(const typename Element::Type* p, int64_t n) {
    return load_some<Element>(p, n);
  }
};
struct Two {
  static constexpr int kSteps = 2;
  template <class Element>
  static SHOESTRING_METHOD F32 across(const typename Element::Type* p, int64_t n, int64_t count,
                                      int64_t stride) {
    const auto bits = [](F32 x) { return __is_same(Element, BFloat16) ? as_bits(x) : rounded_bf16(x); };
    const U32 low = bits(load_some<Element>(p, n)),
              high = count > 1 ? bits(load_some<Element>(p + stride, n)) : U32{};
    return as_float((low >> 16) | (high & 0xffff0000u));
  }
  template <class Element>
  static SHOESTRING_METHOD F32 along(const typename Element::Type* p, int64_t n) {
    if (__is_same(Element, BFloat16) && n >= 2 * kLanes)
      return load_as<F32>(p);  // two adjacent bf16 elements already have the packed format
    uint16_t both[2 * kLanes];
    store_upper_halves(both, rounded_bf16(load_some<Element>(p, n)),
                       rounded_bf16(load_some<Element>(p + kLanes, n - kLanes)));
    return load_as<F32>(both);
  }
};

// Returns the numbers of the lanes: 0, 1, 2 and so on.
SHOESTRING_INLINE I32 lanes() {
  I32 v;
  for (int i = 0; i < kLanes; ++i) v[i] = i;
  return v;
}

// Not inlined, because inlining slows down the calling loop.
template <class Packed, class Element>
__attribute__((noinline)) F32 across_some(const typename Element::Type* p, int64_t n, int64_t count,
                                          int64_t stride) {
  return Packed::template across<Element>(p, n, count, stride);
}

// Packs adjacent lines (line stride 1) into a panel that is at most kParts registers wide. `readable`
// elements from `source` on may be read.
template <class Packed, class Element, int kParts>
void copy(const typename Element::Type* source, int64_t lines, int64_t readable, int64_t depth,
          int64_t depth_stride, int64_t width, float* out) {
  I32 there[kParts];
  for (int k = 0; k < kParts; ++k) {
    const int64_t n = lines - k * kLanes;
    there[k] = lanes() < static_cast<int32_t>(n < kLanes ? n : kLanes);
  }
  for (int64_t d = 0; d < depth; d += Packed::kSteps, source += Packed::kSteps * depth_stride, out += width) {
    const int64_t count = depth - d < Packed::kSteps ? depth - d : Packed::kSteps;
    const bool whole = (d + count - 1) * depth_stride + kParts * kLanes <= readable;
    for (int k = 0; k < kParts; ++k) {
      const auto* from = source + k * kLanes;
      const F32 x = whole ? Packed::template across<Element>(from, kLanes, count, depth_stride)
                          : across_some<Packed, Element>(from, lines - k * kLanes, count, depth_stride);
      store(out + k * kLanes, as_float(as_bits(x) & (U32)there[k]));
    }
  }
}

// Exchanges groups of kHalf lanes between registers that are kHalf apart, a step in transposing a square of
// registers.
template <int kHalf>
SHOESTRING_INLINE void exchange(F32 (&rows)[kLanes]) {
  I32 low, high;
  for (int l = 0; l < kLanes; ++l) {
    low[l] = l + (l / kHalf % 2) * (kLanes - kHalf);
    high[l] = low[l] + kHalf;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i / kHalf % 2 == 0) {
      const F32 a = rows[i], b = rows[i + kHalf];
      rows[i] = __builtin_shuffle(a, b, low);
      rows[i + kHalf] = __builtin_shuffle(a, b, high);
    }
  }
}

// Transposes the square matrix in kLanes registers in place. Once the groups of four lanes are in place, all
// shuffles stay within 128 bits, where they are fast.
SHOESTRING_INLINE void transpose(F32 (&rows)[kLanes]) {
  if constexpr (kLanes >= 16) exchange<kLanes / 2>(rows);
  if constexpr (kLanes >= 8) exchange<4>(rows);
  I32 low, high;
  for (int l = 0; l < kLanes; ++l) {
    low[l] = l / 4 * 4 + l % 4 / 2 + l % 2 * kLanes;
    high[l] = low[l] + 2;
  }
#pragma GCC unroll 4
  for (int i = 0; i < kLanes; i += 4) {
    F32* four = rows + i;
    const F32 even = __builtin_shuffle(four[0], four[2], low),
              even2 = __builtin_shuffle(four[0], four[2], high);
    const F32 odd = __builtin_shuffle(four[1], four[3], low),
              odd2 = __builtin_shuffle(four[1], four[3], high);
    four[0] = __builtin_shuffle(even, odd, low), four[1] = __builtin_shuffle(even, odd, high);
    four[2] = __builtin_shuffle(even2, odd2, low), four[3] = __builtin_shuffle(even2, odd2, high);
  }
}

// Packs kLines lines, each contiguous along the depth, in whole blocks of kLanes packed elements. Returns the
// depth that these blocks cover. Does not pack the remaining depth steps.
template <class Packed, class Element, int kLines>
int64_t transpose_whole(const typename Element::Type* source, int64_t depth, int64_t line_stride,
                        int64_t width, float* out) {
  constexpr int64_t kBlock = kLanes * Packed::kSteps;
  int64_t d = 0;
  for (; d + kBlock <= depth; d += kBlock, out += kLanes * width) {
    F32 block[kLanes] = {};
#pragma GCC unroll 16
    for (int i = 0; i < kLines; ++i) {
      block[i] = Packed::template along<Element>(source + i * line_stride + d, kBlock);
      // The lines that are packed next. The processor finds no pattern in so few steps of so many lines.
      __builtin_prefetch(address(source, (i + kLines) * line_stride + d));
    }
    transpose(block);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) store(out + i * width, block[i]);
  }
  return d;
}

// Packs a block that has fewer than kLanes lines or is cut off by the end of the depth.
template <class Packed, class Element>
__attribute__((noinline)) void transpose_some(const typename Element::Type* source, int64_t lines,
                                              int64_t depth, int64_t line_stride, int64_t width, float* out) {
  F32 block[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    block[i] = i < lines ? Packed::template along<Element>(source + i * line_stride, depth) : F32{};
  }
  transpose(block);
  for (int i = 0; i < kLanes && i * Packed::kSteps < depth; ++i) store(out + i * width, block[i]);
}

// Packs lines that are contiguous along the depth, by transposing them.
template <class Packed, class Element>
void transpose(const typename Element::Type* source, int64_t lines, int64_t depth, int64_t line_stride,
               int64_t width, float* out) {
  for (int64_t l = 0; l < width; l += kLanes) {
    const auto* from = source + l * line_stride;
    const int64_t n = lines - l;
    int64_t d =
        n >= kLanes  ? transpose_whole<Packed, Element, kLanes>(from, depth, line_stride, width, out + l)
        : n == kRows ? transpose_whole<Packed, Element, kRows>(from, depth, line_stride, width, out + l)
                     : 0;
    for (; d < depth; d += kLanes * Packed::kSteps) {
      transpose_some<Packed, Element>(from + d, n, depth - d, line_stride, width,
                                      out + d / Packed::kSteps * width + l);
    }
  }
}

// Packs a matrix of `lines` x `depth` elements into panels of `width` lines. The strides are in elements.
template <class Packed, class Element>
void pack(const typename Element::Type* source, int64_t lines, int64_t depth, int64_t line_stride,
          int64_t depth_stride, int64_t width, float* out) {
  const int64_t panel = kernels::packed_size(depth, Packed::kSteps, width);
  const auto some = [&](int64_t first) { return lines - first < width ? lines - first : width; };
  if (line_stride != 1) {
    for (int64_t first = 0; first < lines; first += width, out += panel) {
      transpose<Packed, Element>(source + first * line_stride, some(first), depth, line_stride, width, out);
    }
    return;
  }
  // Number of depth steps that are packed for all panels before the next depth steps are packed. These depth
  // steps of the source thus stay in the cache. The number is lower if depth steps are 4 KiB or more apart,
  // because their addresses then compete for the same cache sets.
  const int64_t together =
      depth_stride * static_cast<int64_t>(sizeof(typename Element::Type)) < 4096 ? 32 : 16;
  for (int64_t d = 0; d < depth; d += together) {
    const int64_t count = depth - d < together ? depth - d : together;
    float* to = out + d / Packed::kSteps * width;
    for (int64_t first = 0; first < lines; first += width, to += panel) {
      const auto* from = source + first + d * depth_stride;
      const int64_t readable = (depth - 1 - d) * depth_stride + lines - first;
      if (width > kLanes) {
        copy<Packed, Element, kWide>(from, some(first), readable, count, depth_stride, width, to);
      } else {
        copy<Packed, Element, 1>(from, some(first), readable, count, depth_stride, width, to);
      }
    }
  }
}

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
