#pragma once

// Packing into panels: lines that lie side by side are copied, others transposed, a block of registers at a
// time.

#include "core/element_simd.h"
#include "gemm/gemm_table.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

#if defined(__AVX512F__)
constexpr int kRows = 14, kLeastRows = 8;  // 28 of 32 registers hold sums; 16 hide the latency of an addition
#elif defined(__AVX2__)
constexpr int kRows = 6, kLeastRows = 6;  // 12 of 16
#else
constexpr int kRows = 4, kLeastRows = 4;
#endif
constexpr int kWide = 2;  // registers
constexpr int kColumns = kWide * kLanes;

// A step of a panel is whole registers, or less than one: what that has too much, the next step overwrites.
static_assert(kRows <= kLanes && kLanes <= kernels::kGemmSlack);

// What a packed panel's elements are: an fp32, or two steps of the depth in bf16, the first in the lower
// half.
struct One {
  static constexpr int kSteps = 1;
  // Lines that lie side by side, `n` of them, `count` steps from p on.
  template <class Element>
  static SHOESTRING_METHOD F32 across(const typename Element::Type* p, int64_t n, int64_t, int64_t) {
    return load_some<Element>(p, n);
  }
  // kLanes elements along the depth, of which n steps are there.
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
    if (__is_same(Element, BFloat16) && n >= 2 * kLanes) return load_as<F32>(p);  // as they lie
    uint16_t both[2 * kLanes];
    store_upper_halves(both, rounded_bf16(load_some<Element>(p, n)),
                       rounded_bf16(load_some<Element>(p + kLanes, n - kLanes)));
    return load_as<F32>(both);
  }
};

SHOESTRING_INLINE I32 lanes() {
  I32 v;
  for (int i = 0; i < kLanes; ++i) v[i] = i;
  return v;
}

// Kept out of the loop that it would slow down.
template <class Packed, class Element>
__attribute__((noinline)) F32 across_some(const typename Element::Type* p, int64_t n, int64_t count,
                                          int64_t stride) {
  return Packed::template across<Element>(p, n, count, stride);
}

// Lines that lie side by side, one or two registers of a panel; `readable` elements are there from `source`
// on.
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

// Halves of as many lanes change places between rows that lie as far apart: the first step of a
// transposition.
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

// Once blocks of four lanes lie where they belong, the rest stays within 128 bits, which the units do at
// once.
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

// The blocks of kLanes elements along the depth that are whole, of kLines lines; how much of the depth that
// was.
template <class Packed, class Element, int kLines>
int64_t transpose_whole(const typename Element::Type* source, int64_t depth, int64_t line_stride,
                        int64_t width, float* out) {
  constexpr int64_t kBlock = kLanes * Packed::kSteps;
  int64_t d = 0;
  for (; d + kBlock <= depth; d += kBlock, out += kLanes * width) {
    F32 block[kLanes] = {};
#pragma GCC unroll 16
    for (int i = 0; i < kLines; ++i)
      block[i] = Packed::template along<Element>(source + i * line_stride + d, kBlock);
    transpose(block);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) store(out + i * width, block[i]);
  }
  return d;
}

// The others: of `lines` lines, or at the end of the depth.
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

// Lines that each lie in one piece.
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
  // So much of the depth is read by all panels while it is in cache, where steps that are pages apart share
  // few places.
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
