#pragma once

// The CUDA kernel that computes the cross-entropy of a row of logits and its gradient. The operators
// cross_entropy and linear_cross_entropy share it; losses/cross_entropy_table.h describes its arguments.

#include "cuda/core/check.h"
#include "cuda/core/launch.h"
#include "cuda/losses/cross_entropy_row.h"
#include "losses/cross_entropy_table.h"

namespace shoestring::cuda {
namespace {

// The maximum number of threads per block for which each thread has enough registers. With both kAll and
// kRagged, a thread needs 90 registers or more.
template <class In, bool kAll, bool kRagged>
constexpr int kMaxThreads = sizeof(In) == 8   ? 256
                            : kAll && kRagged ? 512
                                              : 1024;

// Raises if a target of row r is neither a class nor ignore_index, or if `mix` is outside [0, 1].
template <bool kRagged, class T>
__device__ void check_targets(const kernels::CrossEntropyRows& p, int64_t r, T mix) {
  const auto fits = [&](int64_t target) {
    return target == p.ignore_index || (target >= 0 && target < p.vocab);
  };
  if (!fits(p.target[r])) {
    if (kRagged)
      fail("cross_entropy: target: expected classes in [0, vocab) or ignore_index, received another");
    fail("linear_cross_entropy: target: expected classes in [0, vocab) or ignore_index, received another");
  }
  if (p.target2 == nullptr) return;
  if (!fits(p.target2[r])) {
    if (kRagged)
      fail("cross_entropy: target2: expected classes in [0, vocab) or ignore_index, received another");
    fail("linear_cross_entropy: target2: expected classes in [0, vocab) or ignore_index, received another");
  }
  if (mix >= 0 && mix <= 1) return;
  if (kRagged) fail("cross_entropy: mix: expected numbers in [0, 1], received another");
  fail("linear_cross_entropy: mix: expected numbers in [0, 1], received another");
}

// Computes one row of logits per block. kAll: the call needs class weights, entropy, argmax, a gradient of
// the entropy, or live classes (those with a gradient above filter_eps). kRagged: rows may begin at any
// address.
// Budget: 104 registers, 656 bytes shared, no spills.
template <class In, class Out, bool kAll, bool kRagged>
__global__ void __launch_bounds__(kMaxThreads<In, kAll, kRagged>, 1)
    cross_entropy(kernels::CrossEntropyRows p) {
  using T = Compute<In>;
  __shared__ Summary<T> warps[kMaxThreads<In, kAll, kRagged> / kWarp];
  __shared__ Second<T> second;
  const int64_t r = blockIdx.x;
  const auto offset = [&](const kernels::CrossEntropyLayout& at) {
    if (!kRagged) return r * at.inner_stride;
    // The index is 32 bits wide, because a 64-bit division is a function call.
    const unsigned inner = static_cast<unsigned>(at.inner);
    return blockIdx.x / inner * at.outer_stride + blockIdx.x % inner * at.inner_stride;
  };
  // Returns how many elements after a multiple of 16 bytes an address is.
  const auto beyond = [](const void* at) {
    return kRagged ? static_cast<int>(reinterpret_cast<uintptr_t>(at) % 16 / sizeof(In)) : 0;
  };
  const In* logits = static_cast<const In*>(p.logits) + offset(p.logits_at);
  const int lead = beyond(logits);
  const Row<In, kRagged> row{logits - lead,
                             static_cast<const T*>(p.bias),
                             kAll ? static_cast<const T*>(p.class_weights) : nullptr,
                             static_cast<T>(p.softcap),
                             static_cast<T>(p.logit_scale),
                             lead,
                             static_cast<int>(p.vocab)};
  const bool wanted = p.gradient != nullptr;
  // a lambda computes the address of the gradient, so that the address occupies no registers before it is
  // needed
  const auto place = [&] {
    Out* gradient = static_cast<Out*>(p.gradient) + offset(p.gradient_at);
    return Place<Out, Row<In, kRagged>, kRagged>{gradient - lead, beyond(gradient) == lead};
  };
  const auto write = [&](T loss, T lse, T entropy, int64_t argmax) {
    static_cast<T*>(p.loss)[r] = loss;
    static_cast<T*>(p.lse)[r] = lse;
    if (kAll && p.entropy != nullptr) static_cast<T*>(p.entropy)[r] = entropy;
    if (kAll && p.argmax != nullptr) p.argmax[r] = argmax;
  };

  const bool mixed = p.target2 != nullptr;
  const auto mix = [&] { return mixed ? static_cast<const T*>(p.mix)[r * p.mix_stride] : T{1}; };
  const auto find_targets = [&] {
    return kernels::targets_of(p.target[r], mixed ? p.target2[r] : p.target[r], mix(), p.ignore_index);
  };
  if (threadIdx.x == 0) check_targets<kRagged>(p, r, mix());
  // before the barrier, since the gradient may overwrite the logits after it
  T at_target = 0;
  {
    const auto targets = find_targets();
    if (targets.part + targets.part2 == 0) {
      if (threadIdx.x == 0) write(0, 0, 0, -1);
      Vector<Out, kVector<In>> zero;
      for (int i = 0; i < kVector<In>; ++i) zero[i] = narrow<Out>(T{0});
      if (!wanted) return;
      const auto to = place();
      for (int v = threadIdx.x; v < row.vectors(); v += blockDim.x) to.put(row, v, zero);
      return;
    }
    if (threadIdx.x == 0) {
      at_target = row.capped(static_cast<int>(targets.target));
      second.at = targets.part2 != 0 ? static_cast<int>(targets.target2) : -1;
      if (second.at >= 0) second.value = row.capped(second.at);
    }
  }
  const T smooth = static_cast<T>(p.label_smoothing);
  const T zeroth = smooth != 0 ? row.capped(0) : 0, reference = zeroth - zeroth == 0 ? zeroth : 0;
  Summary<T> all = warp_merge<kAll>(summarise<kAll>(row, smooth != 0, reference));
  if (lane() == 0) warps[warp()] = all;
  __syncthreads();
  all = warp_merge<kAll>(lane() < static_cast<int>(blockDim.x) / kWarp ? warps[lane()] : Summary<T>{});

  // The targets are read again, since they would occupy registers during the pass over the row.
  const auto targets = find_targets();
  const int target = static_cast<int>(targets.target), target2 = static_cast<int>(targets.target2);
  const T parts = targets.part + targets.part2;
  const bool weighted = row.class_weights != nullptr;
  const T total_weight = weighted ? *static_cast<const T*>(p.total_weight) : static_cast<T>(p.vocab);
  const auto sure_of = [&](int at, T part) {
    return (weighted ? row.class_weights[at] * (1 - smooth) : 1 - smooth) * part;
  };
  const T sure = sure_of(target, targets.part), sure2 = sure_of(target2, targets.part2);
  const T share = static_cast<T>(p.label_smoothing / p.vocab) * parts,
          z_loss = static_cast<T>(p.z_loss) * parts;
  const T log_sum = logarithm(all.sum), lse = all.max + log_sum, inverse = 1 / all.sum;
  // the average of z - max under the softmax probabilities of the logits z
  const T mean = kAll ? all.moment * inverse : 0;
  if (threadIdx.x == 0) {
    // The loss of a confident row is small compared to its logits, so differences to the maximum are taken
    // first. This avoids cancellation.
    T loss = sure * (log_sum + (all.max - at_target));
    if (sure2 != 0) loss += sure2 * (log_sum + (all.max - second.value));
    if (smooth != 0) loss += share * (total_weight * (log_sum + (all.max - reference)) - all.total);
    if (z_loss != 0) loss += z_loss * lse * lse;
    write(loss, lse, log_sum - mean, all.at == INT_MAX ? 0 : all.at);
  }
  if (!wanted) return;
  const auto upstream = [&](const void* factors, int64_t stride) {
    return factors == nullptr ? 0 : static_cast<const T*>(factors)[r * stride] * static_cast<T>(p.factor);
  };
  const T u = upstream(p.grad_loss, p.grad_loss_stride), v = upstream(p.grad_lse, p.grad_lse_stride);
  const T h = kAll ? upstream(p.grad_entropy, p.grad_entropy_stride) : 0;
  T multiply = u * (sure + sure2 + share * total_weight) + v;
  if (z_loss != 0) multiply += u * 2 * z_loss * lse;
  // With mean = the average of z - max under softmax, lse - entropy - z is mean - (z - max).
  if (kAll && h != 0) multiply += h * mean;
  const T size = magnitude(u) + magnitude(v) + magnitude(h);
  const Gradient<T> g{all.max,
                      multiply * inverse,
                      h * inverse,
                      u * share,
                      u * sure,
                      u * sure2,
                      target,
                      static_cast<T>(p.filter_eps) * size,
                      !kRagged && size != 0 ? p.live : nullptr};
  write_gradient<kAll>(row, g, place(), second);
}

inline bool wants_all(const kernels::CrossEntropyRows& rows) {
  return rows.class_weights != nullptr || rows.entropy != nullptr || rows.argmax != nullptr ||
         rows.grad_entropy != nullptr || rows.live != nullptr;
}

template <class In, class Out, bool kRagged>
const char* run(const kernels::CrossEntropyRows& rows, void* stream) {
  auto* kernel = cross_entropy<In, Out, true, kRagged>;
  int most = kMaxThreads<In, true, kRagged>;
  if constexpr (sizeof(In) != 8) {
    if (!wants_all(rows)) {
      kernel = cross_entropy<In, Out, false, kRagged>;
      most = kMaxThreads<In, false, kRagged>;
    }
  }
  return launch(kernel, rows.tokens, threads_for(rows.vocab, most), 0, stream, rows);
}

}  // namespace
}  // namespace shoestring::cuda
