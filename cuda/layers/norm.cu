// rms_norm and layer_norm on CUDA. A row is read once, stays in registers (16 elements per thread) and is
// written once. A short row is computed by a warp, without barriers, and a longer row by a block. In
// backward, a warp or block computes many rows. It keeps its sums for the weight's gradient in registers
// until its last row. A second kernel adds the sums of all warps or blocks in a fixed order.

#include "core/cuda_tables.h"
#include "cuda/core/launch.h"
#include "cuda/layers/norm.h"
#include "layers/norm_table.h"

namespace shoestring::cuda {
namespace {

using kernels::Norm;
using kernels::NormBackward;
using kernels::NormForward;
using kernels::Upcast;

// Budget: 64 registers, 256 bytes shared, no spills.
template <class T, int N, Group kGroup>
__global__ void __launch_bounds__(kMostWarps* kWarp) forward(Norm norm, NormForward io, int64_t rows) {
  using Threads = Member<kGroup>;
  constexpr int kHeld = Threads::kHeld ? kEach / N : 1;
  __shared__ float2 slots[2][kMostWarps];
  const int64_t row = Threads::group(), first = row * norm.features;
  if (row >= rows) return;  // `row` is the same in all lanes of a warp, so either all lanes return or none
  const T* x = static_cast<const T*>(io.x) + first;
  const T* residual = io.residual == nullptr ? nullptr : static_cast<const T*>(io.residual) + first;
  T *y = static_cast<T*>(io.y) + first, *sum = static_cast<T*>(io.sum) + first;
  Vector<T, N> held[kHeld];
  // sums.x is the sum of x, and sums.y is the sum of its squares.
  float2 sums = {0, 0};
  Threads::template sweep<N>(norm.features, [&](int j, int64_t i) {
    held[j] = load<N>(x + i);
    if (residual != nullptr) {
      const auto other = load<N>(residual + i);
#pragma unroll
      for (int k = 0; k < N; ++k) held[j][k] = rounded<T>(to_float(held[j][k]) + to_float(other[k]));
      store(sum + i, held[j]);
    }
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float v = to_float(held[j][k]);
      sums = {sums.x + v, sums.y + v * v};
    }
  });
  if (residual != nullptr) x = sum;
  sums = group_sum<kGroup>(sums, slots[0]);
  const float count = static_cast<float>(norm.features);
  float mean = norm.centred ? sums.x / count : 0;
  // Second pass of layer_norm, with the differences to the mean. The formula mean(x^2) - mean(x)^2 for the
  // variance would suffer from cancellation if the mean is large. The pass also corrects the mean's rounding
  // error.
  if (norm.centred) {
    float2 apart = {0, 0};
    Threads::template sweep<N>(norm.features, [&](int j, int64_t i) {
      const auto v = Threads::kHeld ? held[j] : load<N>(x + i);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float d = to_float(v[k]) - mean;
        apart = {apart.x + d, apart.y + d * d};
      }
    });
    sums = group_sum<kGroup>(apart, slots[1]);
    const float shift = sums.x / count;
    mean += shift;
    sums.y -= shift * shift * count;
    // If all elements of a row are equal, rounding may make the sum of squared differences from the mean
    // negative.
    sums.y = sums.y < 0 ? 0 : sums.y;
  }
  const float rstd = 1 / sqrtf(sums.y / count + norm.eps);
  if (Threads::index() == 0) {
    io.rstd[row] = rstd;
    if (norm.centred) io.mean[row] = mean;
  }
  const bool narrow = norm.upcast == Upcast::kNone, cast = norm.upcast != Upcast::kGemma;
  const float scale = narrow ? to_float(rounded<T>(rstd)) : rstd;
  Threads::template sweep<N>(norm.features, [&](int j, int64_t i) {
    const auto v = Threads::kHeld ? held[j] : load<N>(x + i);
    Vector<float, N> h;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      h[k] = (to_float(v[k]) - mean) * scale;
      if (cast) h[k] = to_float(rounded<T>(h[k]));
    }
    if (io.weight != nullptr) {
      const auto w = parameters<N, T>(io.weight, norm.wide_weight, i);
#pragma unroll
      for (int k = 0; k < N; ++k)
        h[k] *= narrow ? to_float(rounded<T>(w[k] + norm.offset)) : w[k] + norm.offset;
    }
    if (io.bias != nullptr) {
      const auto b = parameters<N, T>(io.bias, norm.wide_weight, i);
#pragma unroll
      for (int k = 0; k < N; ++k) h[k] += b[k];
    }
    Vector<T, N> result;
#pragma unroll
    for (int k = 0; k < N; ++k) result[k] = rounded<T>(h[k]);
    store(y + i, result);
  });
}

// With h the normalised row and g = grad * weight, grad_x is rstd * (g - mean(g) - h * mean(g * h)).
// rms_norm, which does not subtract the mean (norm.centred is false), has no term mean(g).
// Budget: 128 registers, 256 bytes shared, no spills.
template <class T, int N, Group kGroup>
__global__ void __launch_bounds__(kMostWarps* kWarp)
    backward(Norm norm, NormBackward io, int64_t rows, int64_t parts) {
  using Threads = Member<kGroup>;
  constexpr int kHeld = Threads::kHeld ? kEach / N : 1;
  __shared__ float2 slots[2][kMostWarps];
  const int64_t part = Threads::group();
  if (part >= parts) return;  // `part` is the same in all lanes of a warp, so either all lanes return or none
  float* grad_weight = io.grad_weight == nullptr ? nullptr : io.grad_weight + part * norm.features;
  float* grad_bias = io.grad_bias == nullptr ? nullptr : io.grad_bias + part * norm.features;
  Vector<float, N> to_weight[kHeld], to_bias[kHeld];
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
#pragma unroll
    for (int k = 0; k < N; ++k) to_weight[j][k] = to_bias[j][k] = 0;
  }
  bool odd = false;
  for (int64_t row = part; row < rows; row += parts, odd = !odd) {
    const int64_t first = row * norm.features;
    const T *x = static_cast<const T*>(io.x) + first, *grad = static_cast<const T*>(io.grad) + first;
    const T* grad_sum = io.grad_sum == nullptr ? nullptr : static_cast<const T*>(io.grad_sum) + first;
    T* grad_x = static_cast<T*>(io.grad_x) + first;
    const float mean = norm.centred ? io.mean[row] : 0, rstd = io.rstd[row];
    const auto weighted = [&](const Vector<T, N>& d, int64_t i) {
      Vector<float, N> g;
#pragma unroll
      for (int k = 0; k < N; ++k) g[k] = to_float(d[k]);
      if (io.weight == nullptr) return g;
      const auto w = parameters<N, T>(io.weight, norm.wide_weight, i);
#pragma unroll
      for (int k = 0; k < N; ++k) g[k] *= w[k] + norm.offset;
      return g;
    };
    Vector<T, N> held[kHeld], held_grad[kHeld];
    float2 sums = {0, 0};
    Threads::template sweep<N>(norm.features, [&](int j, int64_t i) {
      held[j] = load<N>(x + i);
      held_grad[j] = load<N>(grad + i);
      const auto g = weighted(held_grad[j], i);
#pragma unroll
      for (int k = 0; k < N; ++k) sums = {sums.x + g[k], sums.y + g[k] * (to_float(held[j][k]) - mean)};
    });
    sums = group_sum<kGroup>(sums, slots[odd]);
    const float count = static_cast<float>(norm.features), level = norm.centred ? sums.x / count : 0;
    const float slope = sums.y * rstd / count;
    Threads::template sweep<N>(norm.features, [&](int j, int64_t i) {
      const auto v = Threads::kHeld ? held[j] : load<N>(x + i),
                 d = Threads::kHeld ? held_grad[j] : load<N>(grad + i);
      const auto g = weighted(d, i);
      Vector<T, N> more, result;
      if (grad_sum != nullptr) more = load<N>(grad_sum + i);
      if (!Threads::kHeld && row != part) {
        if (grad_weight != nullptr) to_weight[0] = load<N>(grad_weight + i);
        if (grad_bias != nullptr) to_bias[0] = load<N>(grad_bias + i);
      } else if (!Threads::kHeld) {
#pragma unroll
        for (int k = 0; k < N; ++k) to_weight[0][k] = to_bias[0][k] = 0;
      }
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float h = (to_float(v[k]) - mean) * rstd;
        float to_x = rstd * (g[k] - level - h * slope);
        if (grad_sum != nullptr) to_x += to_float(more[k]);
        result[k] = rounded<T>(to_x);
        to_weight[j][k] += to_float(d[k]) * h;
        to_bias[j][k] += to_float(d[k]);
      }
      store(grad_x + i, result);
      if (!Threads::kHeld && grad_weight != nullptr) store(grad_weight + i, to_weight[0]);
      if (!Threads::kHeld && grad_bias != nullptr) store(grad_bias + i, to_bias[0]);
    });
  }
  if (!Threads::kHeld) return;
  Threads::template sweep<N>(norm.features, [&](int j, int64_t i) {
    if (grad_weight != nullptr) store(grad_weight + i, to_weight[j]);
    if (grad_bias != nullptr) store(grad_bias + i, to_bias[j]);
  });
}

// Sums an fp32 matrix (rows, features) over its rows. A block sums 32 columns. Each of its 32 warps adds
// every 32nd row.
// Budget: 56 registers, 4096 bytes shared, no spills.
template <class T>
__global__ void __launch_bounds__(kWarp* kWarp)
    sum_rows(const float* parts, int64_t rows, int64_t features, T* out) {
  __shared__ float sums[kWarp][kWarp];
  const int64_t column = int64_t{blockIdx.x} * kWarp + lane();
  float sum = 0;
  if (column < features) {
    for (int64_t row = warp(); row < rows; row += kWarp) sum += parts[row * features + column];
  }
  sums[warp()][lane()] = sum;
  __syncthreads();
  if (warp() > 0 || column >= features) return;
  for (int i = 1; i < kWarp; ++i) sum += sums[i][lane()];
  out[column] = rounded<T>(sum);
}

template <class... Pointers>
bool all_aligned(const Pointers*... pointers) {
  return (aligned(pointers) && ...);
}

// The kind of thread group that computes a row (a warp or a block), and the launch dimensions for `groups`
// such thread groups.
struct Plan {
  Group group;
  int threads;
  int64_t blocks;
};
Plan plan(int64_t features, bool vectors, int64_t groups) {
  if (!vectors || features > int64_t{kMostWarps} * kWarp * kEach) return {Group::kLong, kThreads, groups};
  if (features <= kWarp * kEach) return {Group::kWarp, kWarps * kWarp, (groups + kWarps - 1) / kWarps};
  const auto threads = static_cast<int>((features + kEach - 1) / kEach);
  return {Group::kBlock, (threads + kWarp - 1) / kWarp * kWarp, groups};
}

template <class T>
const char* run_forward(const Norm& norm, const NormForward& io, int64_t rows, void* stream) {
  constexpr int kVector = 16 / sizeof(T);
  const bool vectors =
      norm.features % kVector == 0 && all_aligned(io.x, io.residual, io.weight, io.bias, io.sum, io.y);
  const Plan p = plan(norm.features, vectors, rows);
  const auto kernel = p.group == Group::kWarp    ? forward<T, kVector, Group::kWarp>
                      : p.group == Group::kBlock ? forward<T, kVector, Group::kBlock>
                      : vectors                  ? forward<T, kVector, Group::kLong>
                                                 : forward<T, 1, Group::kLong>;
  return launch(kernel, p.blocks, p.threads, 0, stream, norm, io, rows);
}

template <class T>
const char* run_backward(const Norm& norm, const NormBackward& io, int64_t rows, int64_t parts,
                         void* stream) {
  constexpr int kVector = 16 / sizeof(T);
  const bool vectors = norm.features % kVector == 0 && all_aligned(io.x, io.grad, io.grad_sum, io.weight,
                                                                   io.grad_x, io.grad_weight, io.grad_bias);
  const Plan p = plan(norm.features, vectors, parts);
  const auto kernel = p.group == Group::kWarp    ? backward<T, kVector, Group::kWarp>
                      : p.group == Group::kBlock ? backward<T, kVector, Group::kBlock>
                      : vectors                  ? backward<T, kVector, Group::kLong>
                                                 : backward<T, 1, Group::kLong>;
  return launch(kernel, p.blocks, p.threads, 0, stream, norm, io, rows, parts);
}

template <class T>
const char* run_sum_rows(const float* parts, int64_t rows, int64_t features, void* out, void* stream) {
  return launch(sum_rows<T>, (features + kWarp - 1) / kWarp, kWarp * kWarp, 0, stream, parts, rows, features,
                static_cast<T*>(out));
}

const kernels::NormCuda kTable{run_forward<float>,  run_forward<__nv_bfloat16>,  run_forward<__half>,
                               run_backward<float>, run_backward<__nv_bfloat16>, run_backward<__half>,
                               run_sum_rows<float>, run_sum_rows<__nv_bfloat16>, run_sum_rows<__half>};
const bool kProvided = (provide("norm", &kTable), true);

}  // namespace
}  // namespace shoestring::cuda
