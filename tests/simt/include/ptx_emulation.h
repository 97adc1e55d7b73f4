#pragma once

// The functions of cuda/core/ptx.h, implemented by the emulator. Their comments are in that header.

#include <cmath>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace simt {

// An instruction that all lanes of a warp have to execute on the same source line. When all have arrived,
// compute(lanes, lane, out) is called for each lane. It reads the stacks of other lanes, which only functions
// marked SIMT_UNCHECKED may do.
template <class In>
struct AlignedLane {
  In in;
  const char* name;
  unsigned line;
};

template <class In, class Out, class Compute>
SIMT_UNCHECKED void aligned_collective(const char* name, const In& in, Out* out, Compute, Where where) {
  using Lane = AlignedLane<In>;
  const Lane own{in, name, where.line()};
  warp_collective(
      name, 0xffffffff, &own, out,
      [](const void* const in[32], unsigned, int lane, void* out) SIMT_UNCHECKED {
        const auto* const* lanes = reinterpret_cast<const Lane* const*>(in);
        const Lane &mine = *lanes[lane], &first = *lanes[0];
        if (mine.line != first.line) {
          failf("%s: lane %d is at line %u, lane 0 at line %u; expected one instruction for the whole warp",
                first.name, lane, mine.line, first.line);
        }
        Compute{}(lanes, lane, static_cast<Out*>(out));
      },
      false, where);
}

// Checks that all lanes of a warp come to the same named barrier, because the hardware counts whole warps.
inline void whole_warp(const char* name, int id, Where where) {
  if (id < 1 || id > 15) failf("%s: expected a barrier from 1 to 15, received %d", name, id);
  aligned_collective(
      name, id, static_cast<int*>(nullptr),
      [](const auto* const* lanes, int lane, int*) SIMT_UNCHECKED {
        const int mine = lanes[lane]->in, first = lanes[0]->in;
        if (mine != first)
          failf("%s: lane 0 is at barrier %d, lane %d at %d", lanes[0]->name, first, lane, mine);
      },
      where);
}

// Loads matrices as ldmatrix does. Each row of a matrix is checked twice: as an access of the lane that gives
// the address, and as accesses of the lanes that receive values of the row.
template <int count, bool trans>
SIMT_UNCHECKED void ldmatrix(const char* name, uint32_t (&out)[count], const void* row, Where where) {
  static_assert(count == 1 || count == 2 || count == 4, "ldmatrix loads 1, 2 or 4 matrices");
  if (own_lane() < 8 * count) check_matrix_row(row, where);
  struct Received {
    uint16_t value[count][2];
    const unsigned char* from[count][2];
  } received;
  aligned_collective(
      name, static_cast<const unsigned char*>(row), &received,
      [](const auto* const* lanes, int lane, Received* out) SIMT_UNCHECKED {
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < count; ++i) {
          for (int half = 0; half < 2; ++half) {
            const int matrix_row = trans ? 2 * t + half : g, column = trans ? g : 2 * t + half;
            out->from[i][half] = lanes[8 * i + matrix_row]->in + 2 * column;
            std::memcpy(&out->value[i][half], out->from[i][half], 2);
          }
        }
      },
      where);
  for (int i = 0; i < count; ++i) {
    for (int half = 0; half < 2; ++half) check_read(received.from[i][half], 2, where);
    out[i] = received.value[i][0] | uint32_t{received.value[i][1]} << 16;
  }
}

// Rounds the sum of a tensor core to fp32. Tensor cores cut off the bits below the last one. The errors of a
// long chain of sums then have one direction, as on an H200. The result for a sum beyond the largest number
// is infinite.
inline SIMT_UNCHECKED float cut_off(double sum) {
  const float nearest = static_cast<float>(sum);
  const bool beyond = std::fabs(static_cast<double>(nearest)) > std::fabs(sum) && !std::isinf(nearest);
  return beyond ? std::nextafterf(nearest, 0.f) : nearest;
}

struct Fragments {
  const uint32_t *a, *b;
  const float* c;
};

// Computes c += a b as one mma instruction does. Element::value(register, i) returns the i-th element in a
// register; k_per_register is 2 for 16-bit types and 1 for TF32. The products are exact, and cut_off() rounds
// their sum. The hardware's order and precision of additions are not documented.
template <class Element>
SIMT_UNCHECKED void mma(const char* name, float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                        Where where) {
  aligned_collective(
      name, Fragments{a, b, c}, &c[0],
      [](const auto* const* lanes, int lane, float* out) SIMT_UNCHECKED {
        // One register holds `per` elements of a row of a, or of a column of b. Four lanes share a row or
        // column, so one register of each of them holds half = 4 * per elements along k.
        constexpr int per = Element::k_per_register, half = 4 * per;
        for (int i = 0; i < 4; ++i) {
          // `upper` is 1 if element i of c is in row lane / 4 + 8, and 0 if it is in row lane / 4.
          const int upper = i / 2, column = lane % 4 * 2 + i % 2;
          double sum = lanes[lane]->in.c[i];
          for (int k = 0; k < 2 * half; ++k) {
            const int later = k / half, t = k % half / per;
            const uint32_t x = lanes[lane / 4 * 4 + t]->in.a[upper + 2 * later];
            const uint32_t y = lanes[column * 4 + t]->in.b[later];
            sum += static_cast<double>(Element::value(x, k % per)) * Element::value(y, k % per);
          }
          out[i] = cut_off(sum);
        }
      },
      where);
}

template <class T>
struct Element16 {
  static constexpr int k_per_register = 2;
  static SIMT_UNCHECKED float value(uint32_t bits, int place) {
    const auto half = static_cast<uint16_t>(bits >> (16 * place));
    if constexpr (std::is_same_v<T, __half>) {
      return __half2float(__ushort_as_half(half));
    } else {
      return __bfloat162float(__ushort_as_bfloat16(half));
    }
  }
};

struct ElementTf32 {
  static constexpr int k_per_register = 1;
  static SIMT_UNCHECKED float value(uint32_t bits, int) { return __uint_as_float(bits & ~0x1fffu); }
};

}  // namespace simt

namespace shoestring::cuda {

template <int bytes>
void cp_async(void* shared, const void* global, int from_bytes = bytes,
              simt::Where where = simt::Where::current()) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16, "cp.async copies 4, 8 or 16 bytes");
  if (from_bytes < 0 || from_bytes > bytes) {
    simt::failf("cp_async: expected from_bytes from 0 to %d, received %d", bytes, from_bytes);
  }
  simt::copy_async(shared, global, bytes, from_bytes, where);
}
inline void cp_async_commit(simt::Where where = simt::Where::current()) { simt::copy_async_commit(where); }
template <int pending>
void cp_async_wait(simt::Where where = simt::Where::current()) {
  simt::copy_async_wait(pending, where);
}

inline void barrier_sync(int id, int threads, simt::Where where = simt::Where::current()) {
  simt::whole_warp("barrier_sync", id, where);
  simt::barrier(id, threads, "barrier_sync", where);
}
inline void barrier_arrive(int id, int threads, simt::Where where = simt::Where::current()) {
  simt::whole_warp("barrier_arrive", id, where);
  simt::barrier_arrive(id, threads, "barrier_arrive", where);
}

template <int count>
void ldmatrix(uint32_t (&out)[count], const void* row, simt::Where where = simt::Where::current()) {
  simt::ldmatrix<count, false>("ldmatrix", out, row, where);
}
template <int count>
void ldmatrix_trans(uint32_t (&out)[count], const void* row, simt::Where where = simt::Where::current()) {
  simt::ldmatrix<count, true>("ldmatrix_trans", out, row, where);
}

template <class T>
void mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                 simt::Where where = simt::Where::current()) {
  static_assert(std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __half>,
                "T is __nv_bfloat16 or __half");
  simt::mma<simt::Element16<T>>("mma_16x8x16", c, a, b, where);
}
inline void mma_16x8x8_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                            simt::Where where = simt::Where::current()) {
  simt::mma<simt::ElementTf32>("mma_16x8x8_tf32", c, a, b, where);
}

inline uint32_t to_tf32(float x) {
  if (x != x) return 0x7fffffff;
  return (__float_as_uint(x) + 0x1000) & ~0x1fffu;
}

}  // namespace shoestring::cuda
