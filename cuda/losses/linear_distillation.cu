// The CUDA kernel of linear_distillation, which memory bandwidth limits. For each token it reads two rows of
// logits, the student's and the teacher's, three times: for maxima and sums, for the divergence, and for the
// gradient. The second pass runs backwards, so that each pass begins with the data that the previous pass has
// left in the L2 cache.

#include "core/cuda_tables.h"
#include "cuda/core/launch.h"
#include "cuda/core/vector.h"
#include "cuda/core/warp.h"
#include "cuda/losses/logits.h"
#include "losses/linear_distillation_table.h"

namespace shoestring::cuda {
namespace {

template <class T>
constexpr int kMaxThreads = sizeof(T) == 4 ? 1024 : 256;

using kernels::Divergence;

template <class T>
// Number of logits that are loaded together. For fp64 it is 1, because the functions of fp64 compile to long
// code.
constexpr int kVector = sizeof(T) == 4 ? 4 : 1;

// Computes log(1 - weight * (1 - e^-x)), accurately also if the result is close to 0.
__device__ inline float log_of_mixture(float weight, float x) { return log1pf(weight * expm1f(-x)); }
__device__ inline double log_of_mixture(double weight, double x) { return log1p(weight * expm1(-x)); }

// The maximum and sum of a part of a row's logits. If a logit is NaN, then `sum` is NaN, but `max` ignores
// it.
template <class T>
// alignment with which one access to shared memory reads both `max` and `sum`
struct alignas(2 * sizeof(T)) Summary {
  T max = low<T>();
  T sum = 0;  // sum of exp(logit - max)

  // Adds logits to the statistics. If all logits so far are -inf, base is 0. The exponentials are then 0;
  // with base = max they would be exp(-inf + inf), which is NaN.
  __device__ void add(const Vector<T, kVector<T>>& z) {
    T most = max;
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) most = larger(z[i], most);
    const T base = most > low<T>() ? most : 0;
    sum *= exponential(max - base);
    max = most;
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) sum += exponential(z[i] - base);
  }
};

// Merges the statistics that the lanes of a warp hold. All lanes get the same bits, because every lane scales
// the same one of two sums: the one with the smaller maximum.
template <class T>
__device__ Summary<T> warp_merge(Summary<T> a) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const Summary<T> b{__shfl_xor_sync(kAllLanes, a.max, offset), __shfl_xor_sync(kAllLanes, a.sum, offset)};
    const bool first = a.max > b.max;
    const T max = first ? a.max : b.max, less = first ? b.max : a.max;
    const T scale = less > low<T>() ? exponential(less - max) : 0;
    a = {max, (first ? a.sum : b.sum) + (first ? b.sum : a.sum) * scale};
  }
  return a;
}

// Loads vector v of a row of logits and adds the bias. Elements past the vocabulary become -inf.
template <class T>
__device__ Vector<T, kVector<T>> logits(const T* row, const T* bias, int v, int vocab) {
  auto z = load<kVector<T>>(row + v * kVector<T>);
  if (bias != nullptr) {
    const auto b = load<kVector<T>>(bias + v * kVector<T>);
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) z[i] += b[i];
  }
  if (vocab < (v + 1) * kVector<T>) {
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) {
      if (v * kVector<T> + i >= vocab) z[i] = low<T>();
    }
  }
  return z;
}

// The term of one class in the divergence of the student's probability p and the teacher's probability q.
// `surprise` is needed for the gradient: log(p / q) for the reverse KL divergence, and log(p / m) for JSD,
// where m is the mixture of p and q.
template <class T>
struct alignas(2 * sizeof(T)) Share {
  T loss, surprise;
};

template <class T>
struct Pair {
  // student_share and teacher_share are 1 / (the sum of exp(logit - max) over all classes).
  T student_max, teacher_max, student_share, teacher_share;
  T offset;  // log(the student's sum of exponentials / the teacher's)
  T beta;
  Divergence divergence;

  __device__ T p(T z) const { return exponential(z - student_max) * student_share; }
  __device__ T q(T z) const { return exponential(z - teacher_max) * teacher_share; }

  // Computes the term of one class from the student's probability p, the teacher's probability q and r =
  // log(q / p). A product with a zero probability counts as 0, also if the logarithm is infinite.
  __device__ Share<T> share(T p, T q, T r) const {
    if (divergence == Divergence::kForwardKl) return {q == 0 ? 0 : q * r, 0};
    if (divergence == Divergence::kReverseKl) return {p == 0 ? 0 : -p * r, p == 0 ? 0 : -r};
    // of_larger is log(m / max(p, q)), where m is the mixture of p and q. The terms of JSD are of first order
    // in p - q, but their sum is of second order. The formulas therefore never add 1 to a small number, which
    // would lose precision.
    const T of_larger = log_of_mixture(r > 0 ? 1 - beta : beta, r > 0 ? r : -r);
    const T of_student = -(r > 0 ? of_larger + r : of_larger),
            of_teacher = -(r > 0 ? of_larger : of_larger - r);
    const T surprise = p == 0 ? 0 : of_student;
    return {beta * (q == 0 ? 0 : q * of_teacher) + (1 - beta) * (p * surprise), surprise};
  }
  __device__ T log_ratio(T student_logit, T teacher_logit) const {
    return ((teacher_logit - teacher_max) - (student_logit - student_max)) + offset;
  }
};

template <class T>
__device__ T warp_sum(T x) {
  return warp_reduce(x, [](T a, T b) { return a + b; });
}

// Computes the divergence of one token, and its gradient, per block.
// Budget: 64 registers, 768 bytes shared, no spills.
template <class T, class Out>
__global__ void __launch_bounds__(kMaxThreads<T>) distillation(kernels::DistillationRows p) {
  constexpr int kWarps = kMaxThreads<T> / kWarp;
  __shared__ Summary<T> students[kWarps], teachers[kWarps];
  __shared__ Share<T> shares[kWarps];
  const int64_t r = blockIdx.x;
  const int vocab = static_cast<int>(p.vocab), vectors = (vocab + kVector<T> - 1) / kVector<T>;
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const T* student = static_cast<const T*>(p.student) + r * p.stride;
  const T* teacher = static_cast<const T*>(p.teacher) + r * p.stride;
  const T *student_bias = static_cast<const T*>(p.student_bias),
          *teacher_bias = static_cast<const T*>(p.teacher_bias);
  Out* gradient = p.gradient == nullptr ? nullptr : static_cast<Out*>(p.gradient) + r * p.stride;

  if (p.target != nullptr && p.target[r] == p.ignore_index) {
    if (threadIdx.x == 0) static_cast<T*>(p.loss)[r] = 0;
    Vector<Out, kVector<T>> zero;
    for (int i = 0; i < kVector<T>; ++i) zero[i] = narrow<Out>(T{0});
    for (int v = threadIdx.x; gradient != nullptr && v < vectors; v += blockDim.x)
      store(gradient + v * kVector<T>, zero);
    return;
  }

  Summary<T> of_student, of_teacher;
  for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
    const auto z = logits(student, student_bias, v, vocab), y = logits(teacher, teacher_bias, v, vocab);
    of_student.add(z);
    of_teacher.add(y);
  }
  of_student = warp_merge(of_student);
  of_teacher = warp_merge(of_teacher);
  if (lane() == 0) {
    students[warp()] = of_student;
    teachers[warp()] = of_teacher;
  }
  __syncthreads();
  of_student = warp_merge(lane() < warps ? students[lane()] : Summary<T>{});
  of_teacher = warp_merge(lane() < warps ? teachers[lane()] : Summary<T>{});
  const Pair<T> pair{of_student.max,
                     of_teacher.max,
                     1 / of_student.sum,
                     1 / of_teacher.sum,
                     logarithm(of_student.sum / of_teacher.sum),
                     static_cast<T>(p.beta),
                     p.divergence};

  Share<T> all{};
  for (int v = vectors - 1 - static_cast<int>(threadIdx.x); v >= 0; v -= blockDim.x) {
    const auto z = logits(student, student_bias, v, vocab), y = logits(teacher, teacher_bias, v, vocab);
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) {
      const T at_student = pair.p(z[i]);
      const Share<T> share = pair.share(at_student, pair.q(y[i]), pair.log_ratio(z[i], y[i]));
      all.loss += share.loss;
      all.surprise += at_student * share.surprise;
    }
  }
  all = {warp_sum(all.loss), warp_sum(all.surprise)};
  if (lane() == 0) shares[warp()] = all;
  __syncthreads();
  const Share<T> mine = lane() < warps ? shares[lane()] : Share<T>{};
  all = {warp_sum(mine.loss), warp_sum(mine.surprise)};
  if (threadIdx.x == 0) static_cast<T*>(p.loss)[r] = all.loss;
  if (gradient == nullptr) return;

  const T* upstream = static_cast<const T*>(p.grad_loss);
  const T share = p.divergence == Divergence::kJsd ? 1 - pair.beta : 1;
  const T factor = upstream[r * p.grad_loss_stride] * static_cast<T>(p.factor) * share;
  for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
    const auto z = logits(student, student_bias, v, vocab), y = logits(teacher, teacher_bias, v, vocab);
    Vector<Out, kVector<T>> result;
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) {
      const T at_student = pair.p(z[i]), at_teacher = pair.q(y[i]);
      T g = at_student - at_teacher;
      if (p.divergence != Divergence::kForwardKl) {
        g = at_student *
            (pair.share(at_student, at_teacher, pair.log_ratio(z[i], y[i])).surprise - all.surprise);
      }
      result[i] = narrow<Out>(g * factor);
    }
    store(gradient + v * kVector<T>, result);
  }
}

template <class T, class Out>
const char* run(const kernels::DistillationRows& rows, void* stream) {
  return launch(distillation<T, Out>, rows.tokens, threads_for(rows.vocab, kMaxThreads<T>), 0, stream, rows);
}

const kernels::LinearDistillationCuda kTable{run<float, float>, run<float, __nv_bfloat16>, run<float, __half>,
                                             run<double, double>};
const bool kProvided = (provide("linear_distillation", &kTable), true);

}  // namespace
}  // namespace shoestring::cuda
