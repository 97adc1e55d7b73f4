// A row comes from memory once: what follows its first pass finds it in the nearest cache. Backward adds a row's share of
// the weight's gradient to a row of sums there, so x and the gradient are read once for all three gradients.

#include "kernels/norm.h"

#include "cpu/row.h"
#include "cpu/some.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

using kernels::Casting;
using kernels::Norm;

constexpr int kWide = 4;  // registers of a step
constexpr int64_t kStep = kWide * kLanes;

using Row = Some<kWide>;  // a step of one
constexpr int kRowsAtOnce = 2;  // of backward: with their sums they still fit the nearest cache

SHOESTRING_INLINE F32 rounded(Float, F32 x) { return x; }
SHOESTRING_INLINE F32 rounded(BFloat16, F32 x) { return as_float(rounded_bf16(x) & 0xffff0000u); }
SHOESTRING_INLINE F32 rounded(Half, F32 x) { return from_fp16(to_fp16(x)); }

// Of what was made from elements alone: a NaN of bf16 has nothing in its lower half that rounding could carry over.
template <class E>
SHOESTRING_INLINE F32 rounded_of_elements(E, F32 x) { return rounded(E{}, x); }
SHOESTRING_INLINE F32 rounded_of_elements(BFloat16, F32 x) { return as_float(round_upper_half(x) & 0xffff0000u); }

// For sums, and what stays by itself: whole steps in whatever order they come cheapest.
template <class E>
SHOESTRING_INLINE Row get_any(const typename E::Type* p, int64_t n) {
  if (n < kStep) return get_some<E, kWide>(p, n);
  Row row;
#pragma GCC unroll 2
  for (int k = 0; k < kWide; k += 2) {
    const Pair pair = E::load_pair(p + k * kLanes);
    row.value[k] = pair.first, row.value[k + 1] = pair.second;
  }
  return row;
}

// Asks for what the next rows have where these have p: while a row's last pass works in cache, memory would idle.
template <class T>
SHOESTRING_INLINE void ask_for(const T* p, int64_t ahead, int64_t n) {
#pragma GCC unroll 4
  for (int64_t i = 0; i < n; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(p + ahead + i, 0, 2);
}

template <class E>
SHOESTRING_INLINE void put_any(typename E::Type* p, const Row& row, int64_t n) {
  if (n < kStep) return put_some<E>(p, row, n);
#pragma GCC unroll 2
  for (int k = 0; k < kWide; k += 2) E::store_pair(p + k * kLanes, Pair{row.value[k], row.value[k + 1]});
}

// A sum over a row of body(offset, count, sums), which adds to kWide registers.
template <class Body>
SHOESTRING_INLINE double row_sum(int64_t features, Body body) {
  F32 sums[kWide] = {};
  double total = 0;
  folded<kStep>(
      features, [&](int64_t i, int64_t n) __attribute__((always_inline)) { body(i, n, sums); },
      [&]() __attribute__((always_inline)) {
        total += horizontal_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
        for (int k = 0; k < kWide; ++k) sums[k] = F32{};
      });
  return total;
}

template <class E, Casting kCasting, bool kCentred>
SHOESTRING_INLINE void write_row(const Norm& norm, const typename E::Type* x, const float* weight, const float* bias,
                                 float mean, float rstd, const typename E::Type* source,
                                 const typename E::Type* residual, typename E::Type* y) {
  const F32 scale = kCasting == Casting::kNone ? rounded(E{}, splat(rstd)) : splat(rstd);
  sweep<kStep>(0, norm.features, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    ask_for(source + i, norm.features, n);
    if (residual != nullptr) ask_for(residual + i, norm.features, n);
    Row v = get_some<E, kWide>(x + i, n), w, b;
    if (weight != nullptr) w = get_some<Float, kWide>(weight + i, n);
    if (bias != nullptr) b = get_some<Float, kWide>(bias + i, n);
#pragma GCC unroll 4
    for (int k = 0; k < kWide; ++k) {
      F32 h = (kCentred ? v.value[k] - mean : v.value[k]) * scale;
      if (kCasting != Casting::kGemma) h = rounded_of_elements(E{}, h);
      if (weight != nullptr) {
        const F32 g = w.value[k] + norm.offset;
        h = h * (kCasting == Casting::kNone ? rounded(E{}, g) : g);
      }
      v.value[k] = bias != nullptr ? h + b.value[k] : h;
    }
    put_some<E>(y + i, v, n);
  });
}

template <class E>
void forward(const Norm& norm, const kernels::NormForward& io, int64_t begin, int64_t end) {
  using T = typename E::Type;
  const int64_t features = norm.features;
  const auto *weight = static_cast<const float*>(io.weight), *bias = static_cast<const float*>(io.bias);
  const auto write = norm.centred                      ? write_row<E, Casting::kGemma, true>
                     : norm.casting == Casting::kGemma ? write_row<E, Casting::kGemma, false>
                     : norm.casting == Casting::kLlama ? write_row<E, Casting::kLlama, false>
                                                       : write_row<E, Casting::kNone, false>;
  for (int64_t row = begin; row < end; ++row) {
    const T *x = static_cast<const T*>(io.x) + row * features, *source = x;
    const T* residual = io.residual == nullptr ? nullptr : static_cast<const T*>(io.residual) + row * features;
    T* y = static_cast<T*>(io.y) + row * features;
    float mean = 0;
    double squares;
    if (residual != nullptr) {
      T* sum = static_cast<T*>(io.sum) + row * features;
      squares = row_sum(features, [&](int64_t i, int64_t n, F32* sums) __attribute__((always_inline)) {
        Row a = get_any<E>(source + i, n);
        const Row b = get_any<E>(residual + i, n);
#pragma GCC unroll 4
        for (int k = 0; k < kWide; ++k) {
          a.value[k] = rounded_of_elements(E{}, a.value[k] + b.value[k]);
          sums[k] = fma(a.value[k], a.value[k], sums[k]);
        }
        put_any<E>(sum + i, a, n);
      });
      x = sum;
    } else if (norm.centred) {
      mean = static_cast<float>(row_sum(features, [&](int64_t i, int64_t n, F32* sums) __attribute__((always_inline)) {
        const Row v = get_any<E>(x + i, n);
#pragma GCC unroll 4
        for (int k = 0; k < kWide; ++k) sums[k] += v.value[k];
      }) / static_cast<double>(features));
      // What rounding has left over, the mean of differences, is added to the mean. Elements that are missing at a row's
      // end have none: they would count as the mean's square.
      F32 rest[kWide] = {};
      squares = row_sum(features, [&](int64_t i, int64_t n, F32* sums) __attribute__((always_inline)) {
        const Row v = get_any<E>(x + i, n);
#pragma GCC unroll 4
        for (int k = 0; k < kWide; ++k) {
          F32 d = v.value[k] - mean;
          for (int64_t lane = n - k * kLanes; n < kStep && lane < kLanes; ++lane) d[lane < 0 ? 0 : lane] = 0;
          sums[k] = fma(d, d, sums[k]);
          rest[k] += d;
        }
      });
      const double shift = horizontal_sum((rest[0] + rest[1]) + (rest[2] + rest[3])) / static_cast<double>(features);
      mean = static_cast<float>(static_cast<double>(mean) + shift);
      squares -= shift * shift * static_cast<double>(features);
      squares = squares < 0 ? 0 : squares;  // of a row of one number, but for rounding
    } else {
      squares = row_sum(features, [&](int64_t i, int64_t n, F32* sums) __attribute__((always_inline)) {
        const Row v = get_any<E>(x + i, n);
#pragma GCC unroll 4
        for (int k = 0; k < kWide; ++k) sums[k] = fma(v.value[k], v.value[k], sums[k]);
      });
    }
    const auto rstd = static_cast<float>(1 / ::sqrt(squares / static_cast<double>(features) + static_cast<double>(norm.eps)));
    if (norm.centred) io.mean[row] = mean;
    io.rstd[row] = rstd;
    write(norm, x, weight, bias, mean, rstd, source, residual, y);
  }
}

// What a row's gradient is made of besides its elements: with h the normalised row and g = grad * weight,
// rstd (g - mean(g) - h mean(g h)), the first mean only if centred.
struct RowStatistics {
  float mean, rstd, level, slope;  // level: -rstd mean(g); slope: -rstd mean(g h)
};

template <class E, bool kCentred>
SHOESTRING_INLINE RowStatistics statistics_of(const Norm& norm, const kernels::NormBackward& io, int64_t row) {
  using T = typename E::Type;
  const int64_t features = norm.features;
  const T *x = static_cast<const T*>(io.x) + row * features, *grad = static_cast<const T*>(io.grad) + row * features;
  const auto* weight = static_cast<const float*>(io.weight);
  const float mean = kCentred ? io.mean[row] : 0.f, rstd = io.rstd[row];
  F32 levels[kWide] = {};
  double level_sum = 0;
  const double along = row_sum(features, [&](int64_t i, int64_t n, F32* sums) __attribute__((always_inline)) {
    const Row v = get_some<E, kWide>(x + i, n);
    Row g = get_some<E, kWide>(grad + i, n), w;
    if (weight != nullptr) w = get_some<Float, kWide>(weight + i, n);
#pragma GCC unroll 4
    for (int k = 0; k < kWide; ++k) {
      if (weight != nullptr) g.value[k] *= w.value[k] + norm.offset;
      sums[k] = fma(g.value[k], v.value[k] - mean, sums[k]);
      if (kCentred) levels[k] += g.value[k];
    }
    if (kCentred && (i + kStep) % kFold == 0) {  // as row_sum folds its own
      level_sum += horizontal_sum((levels[0] + levels[1]) + (levels[2] + levels[3]));
      for (int k = 0; k < kWide; ++k) levels[k] = F32{};
    }
  });
  level_sum += horizontal_sum((levels[0] + levels[1]) + (levels[2] + levels[3]));
  const double scale = -static_cast<double>(rstd) / static_cast<double>(features);
  return {mean, rstd, static_cast<float>(level_sum * scale), static_cast<float>(along * static_cast<double>(rstd) * scale)};
}

// kRows rows, which share the way of the weight and of the sums to and from the cache.
template <class E, bool kCentred, int kRows>
SHOESTRING_INLINE void backward_rows(const Norm& norm, const kernels::NormBackward& io, int64_t row) {
  using T = typename E::Type;
  const int64_t features = norm.features, first = row * features;
  const T *x = static_cast<const T*>(io.x) + first, *grad = static_cast<const T*>(io.grad) + first;
  const T* grad_sum = io.grad_sum == nullptr ? nullptr : static_cast<const T*>(io.grad_sum) + first;
  T* grad_x = static_cast<T*>(io.grad_x) + first;
  const auto* weight = static_cast<const float*>(io.weight);
  RowStatistics of[kRows];
  for (int r = 0; r < kRows; ++r) of[r] = statistics_of<E, kCentred>(norm, io, row + r);
  sweep<kStep>(0, features, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    Row w, to_weight, to_bias;
    if (weight != nullptr) {
      w = get_some<Float, kWide>(weight + i, n);
#pragma GCC unroll 4
      for (int k = 0; k < kWide; ++k) w.value[k] += norm.offset;
    }
    if (io.grad_weight != nullptr) to_weight = get_some<Float, kWide>(io.grad_weight + i, n);
    if (io.grad_bias != nullptr) to_bias = get_some<Float, kWide>(io.grad_bias + i, n);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const int64_t at = r * features + i;
      ask_for(x + at, kRows * features, n);
      ask_for(grad + at, kRows * features, n);
      const Row v = get_some<E, kWide>(x + at, n), d = get_some<E, kWide>(grad + at, n);
      Row result, more;
      if (grad_sum != nullptr) {
        ask_for(grad_sum + at, kRows * features, n);
        more = get_some<E, kWide>(grad_sum + at, n);
      }
#pragma GCC unroll 4
      for (int k = 0; k < kWide; ++k) {
        const F32 h = (kCentred ? v.value[k] - of[r].mean : v.value[k]) * of[r].rstd;
        const F32 g = weight != nullptr ? d.value[k] * w.value[k] : d.value[k];
        const F32 others = kCentred ? fma(h, splat(of[r].slope), splat(of[r].level)) : h * of[r].slope;
        result.value[k] = fma(g, splat(of[r].rstd), others);
        if (grad_sum != nullptr) result.value[k] += more.value[k];
        if (io.grad_weight != nullptr) to_weight.value[k] = fma(d.value[k], h, to_weight.value[k]);
        if (io.grad_bias != nullptr) to_bias.value[k] += d.value[k];
      }
      put_some<E>(grad_x + at, result, n);
    }
    if (io.grad_weight != nullptr) put_some<Float>(io.grad_weight + i, to_weight, n);
    if (io.grad_bias != nullptr) put_some<Float>(io.grad_bias + i, to_bias, n);
  });
}

template <class E, bool kCentred>
void backward_all(const Norm& norm, const kernels::NormBackward& io, int64_t begin, int64_t end) {
  int64_t row = begin;
  for (; row + kRowsAtOnce <= end; row += kRowsAtOnce) backward_rows<E, kCentred, kRowsAtOnce>(norm, io, row);
  for (; row < end; ++row) backward_rows<E, kCentred, 1>(norm, io, row);
}

template <class E>
void backward(const Norm& norm, const kernels::NormBackward& io, int64_t begin, int64_t end) {
  (norm.centred ? backward_all<E, true> : backward_all<E, false>)(norm, io, begin, end);
}

void sum_rows(const float* parts, int64_t rows, int64_t stride, int64_t begin, int64_t end, float* out) {
  sweep<kStep>(begin, end, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    Row sum = get_some<Float, kWide>(parts + i, n);
    for (int64_t row = 1; row < rows; ++row) {
      const Row part = get_some<Float, kWide>(parts + row * stride + i, n);
#pragma GCC unroll 4
      for (int k = 0; k < kWide; ++k) sum.value[k] += part.value[k];
    }
    put_some<Float>(out + i, sum, n);
  });
}

}  // namespace

extern const kernels::NormTable norm;
const kernels::NormTable norm{forward<Float>,  forward<BFloat16>,  forward<Half>,
                              backward<Float>, backward<BFloat16>, backward<Half>, sum_rows};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
