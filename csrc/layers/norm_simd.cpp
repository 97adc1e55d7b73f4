// Row kernels of rms_norm and layer_norm on the CPU. A row is read from memory once; later passes find it in
// the L1 cache. Backward also keeps the sums for the gradients of weight and bias in that cache. One pass
// over memory thus computes the gradients of x, weight and bias.

#include "layers/norm_table.h"

#include "layers/norm_rows_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

using kernels::Norm;
using kernels::Upcast;

template <class E>
SHOESTRING_INLINE Row elements(const typename E::Type* p, int64_t n) {
  return get_any<E, kWide>(p, n);
}
// Loads elements of the weight, the bias or the sums over rows, which are stored in the order in which
// get_any() loads elements of x.
SHOESTRING_INLINE Row arranged(const float* p, int64_t n) { return get_some<Float, kWide>(p, n); }

// The template arguments In, E and Out are the element types of x, of the rows that are normalised (and of
// the residual), and of y. The caller passes `upcast` and `centred` as constants where many rows are written.
template <class In, class E, class Out, int kRows>
SHOESTRING_INLINE void write_rows(Upcast upcast, bool centred, const Norm& norm, const typename E::Type* x,
                                  const float* weight, const float* bias, const Statistics* of,
                                  const typename In::Type* source, const typename E::Type* residual,
                                  typename Out::Type* y) {
  F32 mean[kRows], scale[kRows];
  for (int r = 0; r < kRows; ++r) {
    mean[r] = splat(of[r].mean);
    scale[r] = upcast == Upcast::kNone ? rounded(E{}, splat(of[r].rstd)) : splat(of[r].rstd);
  }
  sweep<kStep>(0, norm.features, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    const Row w = arranged(weight + i, n), b = centred ? arranged(bias + i, n) : Row{};
#pragma GCC unroll 2
    for (int r = 0; r < kRows; ++r) {
      const int64_t at = r * norm.features + i;
      if (centred) {  // the pass that computed the mean has already prefetched the next rows of x
        ask_for<true>(y + at, kRows * norm.features, n);
      } else {
        ask_for(source + at, kRows * norm.features, n);
      }
      if (residual != nullptr) ask_for(residual + at, kRows * norm.features, n);
      Row v = elements<E>(x + at, n);
#pragma GCC unroll 4
      for (int k = 0; k < kWide; ++k) {
        F32 h = (centred ? v.value[k] - mean[r] : v.value[k]) * scale[r];
        if (upcast != Upcast::kGemma) h = rounded_of_elements(E{}, h);
        v.value[k] = centred ? fma(h, w.value[k], b.value[k]) : h * w.value[k];
      }
      put_any<Out>(y + at, v, n);
    }
  });
}

// The rows that a norm normalises. Without a residual, `source` and `x` are the same rows. With a residual,
// load() adds it to the elements of `source`, and writes the rounded sums to the rows `x`.
template <class In, class E>
struct Input {
  const typename In::Type* source;
  const typename E::Type* residual;
  typename E::Type* sum;
  const typename E::Type* x;

  SHOESTRING_METHOD Row load(int64_t at, int64_t n) const {
    Row v = elements<In>(source + at, n);
    if (residual == nullptr) return v;
    const Row more = elements<E>(residual + at, n);
#pragma GCC unroll 4
    for (int k = 0; k < kWide; ++k) v.value[k] = rounded_of_elements(E{}, v.value[k] + more.value[k]);
    put_any<E>(sum + at, v, n);
    return v;
  }
};

// Computes the mean of each row and the sum of squared differences from the mean.
template <class In, class E, int kRows>
SHOESTRING_INLINE void centred_squares(int64_t features, const Input<In, E>& input, Statistics* of,
                                       double* squares) {
  const auto count = static_cast<double>(features);
  double sums[2 * kRows];
  row_sums<kRows>(features, sums, [&](int64_t i, int64_t n, auto& sums) __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (int r = 0; r < kRows; ++r) {
      const Row v = input.load(r * features + i, n);
#pragma GCC unroll 4
      for (int k = 0; k < kWide; ++k) sums[r][k % kChains] += v.value[k];
    }
  });
  F32 mean[kRows];
  for (int r = 0; r < kRows; ++r)
    of[r].mean = static_cast<float>(sums[r] / count), mean[r] = splat(of[r].mean);
  // The mean of the differences x - mean is the rounding error of the computed mean, and is used to correct
  // it. Missing elements at the end of a row must count as 0; otherwise each would add a difference of -mean.
  row_sums<2 * kRows>(features, sums, [&](int64_t i, int64_t n, auto& sums) __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (int r = 0; r < kRows; ++r) {
      ask_for(input.source + r * features + i, kRows * features, n);
      const Row v = elements<E>(input.x + r * features + i, n);
#pragma GCC unroll 4
      for (int k = 0; k < kWide; ++k) {
        F32 d = v.value[k] - mean[r];
        for (int64_t lane = n - k * kLanes; n < kStep && lane < kLanes; ++lane) d[lane < 0 ? 0 : lane] = 0;
        sums[r][k % kChains] = fma(d, d, sums[r][k % kChains]);
        sums[kRows + r][k % kChains] += d;
      }
    }
  });
  for (int r = 0; r < kRows; ++r) {
    const double shift = sums[kRows + r] / count, apart = sums[r] - shift * shift * count;
    of[r].mean = static_cast<float>(static_cast<double>(of[r].mean) + shift);
    // If all elements of a row are equal, rounding may make the sum of squares negative.
    squares[r] = apart < 0 ? 0 : apart;
  }
}

template <class In, class E, class Out, Upcast kUpcast, bool kCentred>
void write_pair(const Norm& norm, const typename E::Type* x, const float* weight, const float* bias,
                const Statistics* of, const typename In::Type* source, const typename E::Type* residual,
                typename Out::Type* y) {
  write_rows<In, E, Out, kRowsAtOnce>(kUpcast, kCentred, norm, x, weight, bias, of, source, residual, y);
}
template <class In, class E, class Out>
void write_last(const Norm& norm, const typename E::Type* x, const float* weight, const float* bias,
                const Statistics* of, const typename In::Type* source, const typename E::Type* residual,
                typename Out::Type* y) {
  const Upcast upcast = norm.centred ? Upcast::kGemma : norm.upcast;
  write_rows<In, E, Out, 1>(upcast, norm.centred, norm, x, weight, bias, of, source, residual, y);
}

// Returns the function that writes kRows rows with the options of a norm. Rounding to fp32 changes nothing,
// so all upcasts of fp32 rows share one function. A last row without a second one is written by a function
// for all options, because each function takes a second to compile.
template <class In, class E, class Out, int kRows>
SHOESTRING_INLINE auto writer_of(const Norm& norm) {
  auto* write = write_pair<In, E, Out, Upcast::kGemma, false>;
  if (kRows == 1) return write_last<In, E, Out>;
  if (norm.centred) return write_pair<In, E, Out, Upcast::kGemma, true>;
  if constexpr (!kSame<E, Float>) {
    if (norm.upcast == Upcast::kLlama) write = write_pair<In, E, Out, Upcast::kLlama, false>;
    if (norm.upcast == Upcast::kNone) write = write_pair<In, E, Out, Upcast::kNone, false>;
  }
  return write;
}

// Computes the statistics of kRows rows. A function of its own, because all types of y share it.
template <class In, class E, int kRows>
__attribute__((noinline)) void statistics(const Norm& norm, const Input<In, E>& input, Statistics* of) {
  const int64_t features = norm.features;
  double squares[kRows];
  if (norm.centred) {
    centred_squares<In, E, kRows>(features, input, of, squares);
  } else {
    row_sums<kRows>(features, squares, [&](int64_t i, int64_t n, auto& sums) __attribute__((always_inline)) {
#pragma GCC unroll 2
      for (int r = 0; r < kRows; ++r) {
        const Row v = input.load(r * features + i, n);
#pragma GCC unroll 4
        for (int k = 0; k < kWide; ++k)
          sums[r][k % kChains] = fma(v.value[k], v.value[k], sums[r][k % kChains]);
      }
    });
  }
  for (int r = 0; r < kRows; ++r) {
    const double variance = squares[r] / static_cast<double>(features) + static_cast<double>(norm.eps);
    of[r].rstd = static_cast<float>(1 / ::sqrt(variance));
  }
}

template <class In, class E, class Out, int kRows>
SHOESTRING_INLINE void forward_rows(const Norm& norm, const kernels::NormForward& io, int64_t row) {
  using T = typename E::Type;
  const int64_t first = row * norm.features;
  const auto *weight = static_cast<const float*>(io.weight), *bias = static_cast<const float*>(io.bias);
  Input<In, E> input{static_cast<const typename In::Type*>(io.x) + first, nullptr, nullptr,
                     static_cast<const T*>(io.x) + first};
  if (io.residual != nullptr) {
    input.residual = static_cast<const T*>(io.residual) + first;
    input.x = input.sum = static_cast<T*>(io.sum) + first;
  }
  Statistics of[kRows] = {};
  statistics<In, E, kRows>(norm, input, of);
  for (int r = 0; r < kRows; ++r) {
    if (norm.centred) io.mean[row + r] = of[r].mean;
    io.rstd[row + r] = of[r].rstd;
  }
  writer_of<In, E, Out, kRows>(norm)(norm, input.x, weight, bias, of, input.source, input.residual,
                                     static_cast<typename Out::Type*>(io.y) + first);
}

template <class In, class E, class Out>
void forward(const Norm& norm, const kernels::NormForward& io, int64_t begin, int64_t end) {
  int64_t row = begin;
  for (; row + kRowsAtOnce <= end; row += kRowsAtOnce) forward_rows<In, E, Out, kRowsAtOnce>(norm, io, row);
  for (; row < end; ++row) forward_rows<In, E, Out, 1>(norm, io, row);
}

// Coefficients of a row's gradient. With h the normalised row and g = grad * weight, the gradient of x is
// rstd (g - mean(g) - h mean(g h)). For rms_norm, the term mean(g) is absent.
struct Slopes {
  float level, slope;  // level = -rstd mean(g), slope = -rstd mean(g h)
};

template <class E, class Out, int kRows>
SHOESTRING_INLINE void slopes_of(bool centred, int64_t features, const typename E::Type* x,
                                 const typename Out::Type* grad, const float* weight, const Statistics* of,
                                 Slopes* slopes) {
  // The first kRows elements of `sums` are the sums of g * (x - mean). The kRows elements after them are the
  // sums of g = grad * weight, which only layer_norm needs.
  double sums[2 * kRows];
  F32 mean[kRows];
  for (int r = 0; r < kRows; ++r) mean[r] = splat(of[r].mean);
  row_sums<2 * kRows>(features, sums, [&](int64_t i, int64_t n, auto& sums) __attribute__((always_inline)) {
    const Row w = arranged(weight + i, n);
#pragma GCC unroll 2
    for (int r = 0; r < kRows; ++r) {
      ask_for(x + r * features + i, kRows * features, n);
      ask_for(grad + r * features + i, kRows * features, n);
      const Row v = elements<E>(x + r * features + i, n);
      Row g = elements<Out>(grad + r * features + i, n);
#pragma GCC unroll 4
      for (int k = 0; k < kWide; ++k) {
        F32& along = sums[r][k % kChains];
        g.value[k] *= w.value[k];
        if (centred) sums[kRows + r][k % kChains] += g.value[k];
        along = fma(g.value[k], centred ? v.value[k] - mean[r] : v.value[k], along);
      }
    }
  });
  for (int r = 0; r < kRows; ++r) {
    const auto rstd = static_cast<double>(of[r].rstd), scale = -rstd / static_cast<double>(features);
    slopes[r] = {centred ? static_cast<float>(sums[kRows + r] * scale) : 0.f,
                 static_cast<float>(sums[r] * rstd * scale)};
  }
}

// Computes the gradients of kRows rows together, so that the weight and the sums over rows are loaded and
// stored once for all of them.
template <class E, class Out, int kRows>
SHOESTRING_INLINE void backward_rows(bool centred, bool vectors, const Norm& norm,
                                     const kernels::NormBackward& io, int64_t row) {
  using T = typename E::Type;
  using Narrow = typename Out::Type;
  const int64_t features = norm.features, first = row * features;
  const T* x = static_cast<const T*>(io.x) + first;
  const auto* grad = static_cast<const Narrow*>(io.grad) + first;
  const T* grad_sum = io.grad_sum == nullptr ? nullptr : static_cast<const T*>(io.grad_sum) + first;
  T* grad_x = static_cast<T*>(io.grad_x) + first;
  Narrow* rounded_grad_x =
      io.rounded_grad_x == nullptr ? nullptr : static_cast<Narrow*>(io.rounded_grad_x) + first;
  const auto* weight = static_cast<const float*>(io.weight);
  Statistics of[kRows];
  Slopes slopes[kRows];
  for (int r = 0; r < kRows; ++r) of[r] = {centred ? io.mean[row + r] : 0.f, io.rstd[row + r]};
  slopes_of<E, Out, kRows>(centred, features, x, grad, weight, of, slopes);
  F32 mean[kRows], rstd[kRows], level[kRows], slope[kRows];
  for (int r = 0; r < kRows; ++r) {
    mean[r] = splat(of[r].mean), rstd[r] = splat(of[r].rstd);
    level[r] = splat(slopes[r].level), slope[r] = splat(slopes[r].slope);
  }
  sweep<kStep>(0, features, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    const Row w = arranged(weight + i, n);
    Row to_weight, to_bias;
    if (vectors) to_weight = arranged(io.grad_weight + i, n);
    if (vectors && centred) to_bias = arranged(io.grad_bias + i, n);
#pragma GCC unroll 2
    for (int r = 0; r < kRows; ++r) {
      const int64_t at = r * features + i;
      ask_for<true>(grad_x + at, kRows * features, n);
      const Row v = elements<E>(x + at, n), d = elements<Out>(grad + at, n);
      Row result;
#pragma GCC unroll 4
      for (int k = 0; k < kWide; ++k) {
        const F32 h = (centred ? v.value[k] - mean[r] : v.value[k]) * rstd[r];
        result.value[k] =
            fma(d.value[k] * w.value[k], rstd[r], centred ? fma(h, slope[r], level[r]) : h * slope[r]);
        if (vectors) to_weight.value[k] = fma(d.value[k], h, to_weight.value[k]);
        if (vectors && centred) to_bias.value[k] += d.value[k];
      }
      if (grad_sum != nullptr) {
        ask_for(grad_sum + at, kRows * features, n);
        const Row more = elements<E>(grad_sum + at, n);
#pragma GCC unroll 4
        for (int k = 0; k < kWide; ++k) result.value[k] += more.value[k];
      }
      put_any<E>(grad_x + at, result, n);
      if constexpr (!kSame<E, Out>)
        if (rounded_grad_x != nullptr) put_any<Out>(rounded_grad_x + at, result, n);
    }
    if (vectors) put_some<Float>(io.grad_weight + i, to_weight, n);
    if (vectors && centred) put_some<Float>(io.grad_bias + i, to_bias, n);
  });
}

template <class E, class Out, bool kCentred>
void backward_pairs(const Norm& norm, const kernels::NormBackward& io, int64_t begin, int64_t end) {
  const bool vectors = io.grad_weight != nullptr;
  for (int64_t row = begin; row + kRowsAtOnce <= end; row += kRowsAtOnce)
    backward_rows<E, Out, kRowsAtOnce>(kCentred, vectors, norm, io, row);
}

template <class E, class Out>
void backward(const Norm& norm, const kernels::NormBackward& io, int64_t begin, int64_t end) {
  const bool vectors = io.grad_weight != nullptr;
  auto* run = norm.centred ? backward_pairs<E, Out, true> : backward_pairs<E, Out, false>;
  run(norm, io, begin, end);
  for (int64_t row = end - (end - begin) % kRowsAtOnce; row < end; ++row)
    backward_rows<E, Out, 1>(norm.centred, vectors, norm, io, row);
}

void sum_rows(const float* parts, int64_t rows, int64_t stride, int64_t begin, int64_t end, float* out) {
  sweep<kStep>(begin, end, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    Row sum = arranged(parts + i, n);
    for (int64_t row = 1; row < rows; ++row) {
      const Row part = arranged(parts + row * stride + i, n);
#pragma GCC unroll 4
      for (int k = 0; k < kWide; ++k) sum.value[k] += part.value[k];
    }
    put_some<Float>(out + i, sum, n);
  });
}

template <class E>
void arrange(const void* vector, const Norm& norm, float offset, float* out) {
  sweep<kStep>(0, norm.features, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    Row row = norm.wide_weight ? as_any<E>(arranged(static_cast<const float*>(vector) + i, n), n)
                               : elements<E>(static_cast<const typename E::Type*>(vector) + i, n);
    for (F32& v : row.value) {
      v = plain_nan(v + offset);
      if (norm.upcast == Upcast::kNone) v = rounded(E{}, v);
    }
    put_some<Float>(out + i, row, n);
  });
}

template <class E>
void restore(const float* sums, const Norm& norm, void* out) {
  sweep<kStep>(0, norm.features, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    const Row row = in_order<E>(arranged(sums + i, n), n);
    if (norm.wide_weight) {
      put_some<Float>(static_cast<float*>(out) + i, row, n);
    } else {
      put_some<E>(static_cast<typename E::Type*>(out) + i, row, n);
    }
  });
}

// Rows that are normalised in E. x is of type In, y and its gradient are of type Out.
template <class In, class E, class Out>
constexpr kernels::NormRows kRowsOf{forward<In, E, Out>, backward<E, Out>, arrange<E>, restore<E>};
template <class E>
constexpr kernels::NormRows kRows = kRowsOf<E, E, E>;
// Rows of fp32 with results of 16 bits are computed in memory order.
template <class E>
constexpr kernels::NormRows kRounded = kRowsOf<Float, Float, InOrder<E>>;
template <class E>
constexpr kernels::NormRows kAdded = kRowsOf<InOrder<E>, Float, InOrder<E>>;
template <class E>
constexpr kernels::NormRows kWidened = kRowsOf<InOrder<E>, Float, Float>;

}  // namespace

extern const kernels::NormTable norm;
const kernels::NormTable norm{kRows<Float>,   kRows<BFloat16>,  kRows<Half>,  kRounded<BFloat16>,
                              kRounded<Half>, kAdded<BFloat16>, kAdded<Half>, kWidened<BFloat16>,
                              kWidened<Half>, sum_rows};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
