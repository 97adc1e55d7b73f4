// Routing of mixtures of experts on the CPU. A token has few experts, so its scores stay in the first-level
// cache. csrc/experts/moe_route_table.h has the formulas.

#include "experts/moe_route_table.h"

#include <math.h>

#include "core/element_simd.h"
#include "core/exp_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

using kernels::kMostExperts;
using kernels::Route;
using kernels::RouteScore;

// Loops run over whole registers, so arrays have room for two registers after the last expert.
constexpr int64_t kRoom = kMostExperts + 2 * kLanes;
constexpr float kLow = -__builtin_inff();
constexpr float kNone[kRoom] = {};

SHOESTRING_INLINE int64_t whole(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// Returns the sum of term(i) over the registers of n numbers, where i is the index of a register's first
// lane. Sums of 16 registers are added in fp64.
template <class Term>
SHOESTRING_INLINE double sum_of(int64_t n, Term term) {
  double sum = 0;
  for (int64_t begin = 0; begin < n; begin += 16 * kLanes) {
    const int64_t end = begin + 16 * kLanes < n ? begin + 16 * kLanes : n;
    F32 part = F32{};
    for (int64_t i = begin; i < end; i += kLanes) part += term(i);
    for (int lane = 0; lane < kLanes; ++lane) sum += static_cast<double>(part[lane]);
  }
  return sum;
}

// Computes the softmax of n logits. The lanes after the n-th must be -inf. Returns their log-sum-exp.
double softmax(const float* logit, int64_t n, float* share) {
  F32 most = splat(kLow);
  for (int64_t i = 0; i < n; i += kLanes) most = max(load(logit + i), most);
  float largest = kLow;
  for (int lane = 0; lane < kLanes; ++lane) largest = most[lane] > largest ? most[lane] : largest;
  const double sum = sum_of(n, [&](int64_t i) __attribute__((always_inline)) {
    const F32 e = exp_of_negative(load(logit + i) - splat(largest));
    store(share + i, e);
    return e;
  });
  for (int64_t i = 0; i < n; i += kLanes) store(share + i, load(share + i) / splat(static_cast<float>(sum)));
  return static_cast<double>(largest) + ::log(sum);
}

// The scores of a token. The lanes after the last expert have logits of -inf, and scores of 0.
struct Scores {
  float logit[kRoom];
  float share[kRoom];  // softmax of the logits
  double lse;          // log-sum-exp of the logits
  // Only for kSigmoid: the sigmoids, 1 - sigmoid without cancellation, and the sum of the sigmoids.
  float sigmoid[kRoom], rest[kRoom];
  double sigmoids;
};

template <class E>
__attribute__((noinline)) void read(const Route& route, const typename E::Type* x, Scores& of) {
  const int64_t n = route.experts;
  for (int64_t i = 0; i < n; i += kLanes) store(of.logit + i, load_some<E>(x + i, n - i));
  for (int64_t i = n; i < whole(n); ++i) of.logit[i] = kLow;
  of.lse = softmax(of.logit, n, of.share);
  if (route.score != RouteScore::kSigmoid) return;
  of.sigmoids = sum_of(n, [&](int64_t i) __attribute__((always_inline)) {
    const F32 l = load(of.logit + i), e = exp_of_negative(-abs(l)), one = splat(1.f);
    const F32 more = one / (one + e), less = e / (one + e), s = l >= 0.f ? more : less;
    store(of.sigmoid + i, s);
    store(of.rest + i, l >= 0.f ? less : more);
    return s;
  });
}

struct Chosen {
  float key;
  int64_t at;
};

// Returns whether the key a ranks above b. NaN ranks above all numbers.
SHOESTRING_INLINE bool above(float a, float b) { return a > b || (a != a && b == b); }

// Inserts a key into the list of the `most` best, of which there are `count`. Among equal keys, the first
// stays first.
SHOESTRING_INLINE void insert(Chosen next, int64_t most, Chosen* best, int64_t& count) {
  if (count == most && !above(next.key, best[count - 1].key)) return;
  int64_t i = count < most ? count++ : count - 1;
  for (; i > 0 && above(next.key, best[i - 1].key); --i) best[i] = best[i - 1];
  best[i] = next;
}

// Finds the groups from which experts are chosen.
void choose_groups(const Route& route, const float* key, bool* kept) {
  Chosen best[kMostExperts];
  int64_t count = 0;
  const int64_t size = route.experts / route.groups;
  for (int64_t group = 0; group < route.groups; ++group) {
    Chosen two[2] = {};
    int64_t found = 0;
    for (int64_t e = 0; e < size; ++e) insert({key[group * size + e], e}, 2, two, found);
    insert({found == 2 ? two[0].key + two[1].key : two[0].key, group}, route.top_groups, best, count);
    kept[group] = false;
  }
  for (int64_t i = 0; i < count; ++i) kept[best[i].at] = true;
}

// So few experts are found one by one in passes over all keys. Unlike insertion into a list, a pass has no
// branches that depend on the keys.
constexpr int64_t kFewChosen = 16;
constexpr int32_t kLowestRank = INT32_MIN;  // below the ranks of all keys

// Returns integers in the order of the keys. NaN has the largest, and -0 has that of 0.
SHOESTRING_INLINE I32 ranks_of(F32 key) {
  const I32 bits = (I32)as_bits(key + 0.f);
  return key == key ? bits ^ (I32)((U32)(bits >> 31) >> 1) : I32{} + INT32_MAX;
}

// Finds the k largest of n keys. The array has room for whole registers.
void choose_few(const float* key, int64_t n, int64_t k, int64_t* index) {
  int32_t rank[kRoom];
  for (int64_t i = 0; i < n; i += kLanes) {
    const I32 ranks = ranks_of(load(key + i));
    __builtin_memcpy(rank + i, &ranks, sizeof ranks);
  }
  for (int64_t i = n; i < whole(n); ++i) rank[i] = kLowestRank;
  for (int64_t j = 0; j < k; ++j) {
    I32 most = load_as<I32>(rank);
    for (int64_t i = kLanes; i < n; i += kLanes) {
      const I32 next = load_as<I32>(rank + i);
      most = next > most ? next : most;
    }
    int32_t largest = most[0];
    for (int lane = 1; lane < kLanes; ++lane) largest = most[lane] > largest ? most[lane] : largest;
    int64_t at = 0;
    while (!any(load_as<I32>(rank + at) == largest)) at += kLanes;
    while (rank[at] != largest) ++at;
    index[j] = at;
    rank[at] = kLowestRank;
  }
}

__attribute__((noinline)) void choose(const Route& route, const float* bias, const Scores& of,
                                      int64_t* index) {
  const bool limited = route.top_groups < route.groups;
  const float* key = of.logit;
  float sums[kRoom];
  if (bias != nullptr || limited) {
    const float* score = route.score == RouteScore::kSoftmax   ? of.share
                         : route.score == RouteScore::kSigmoid ? of.sigmoid
                                                               : of.logit;
    for (int64_t e = 0; e < route.experts; ++e) sums[e] = bias == nullptr ? score[e] : score[e] + bias[e];
    for (int64_t e = route.experts; e < whole(route.experts); ++e) sums[e] = kLow;
    key = sums;
  }
  if (!limited && route.top_k <= kFewChosen) return choose_few(key, route.experts, route.top_k, index);
  Chosen best[kMostExperts];
  bool kept[kMostExperts];
  int64_t count = 0;
  if (limited) choose_groups(route, key, kept);
  const int64_t groups = limited ? route.groups : 1, size = route.experts / groups;
  for (int64_t group = 0; group < groups; ++group) {
    if (limited && !kept[group]) continue;
    for (int64_t e = group * size; e < (group + 1) * size; ++e) insert({key[e], e}, route.top_k, best, count);
  }
  for (int64_t i = 0; i < count; ++i) index[i] = best[i].at;
}

// Whether the weights are a softmax of the chosen logits alone.
SHOESTRING_INLINE bool is_softmax_of_chosen(const Route& route) {
  return route.score == RouteScore::kTopkSoftmax ||
         (route.score == RouteScore::kSoftmax && route.renormalize);
}

// Computes the weights of the chosen experts without the scale. Returns the sum by which sigmoids were
// divided.
double weigh(const Route& route, const Scores& of, const int64_t* index, float* weight) {
  const int64_t k = route.top_k;
  if (is_softmax_of_chosen(route)) {
    float logit[kRoom];
    for (int64_t i = 0; i < k; ++i) logit[i] = of.logit[index[i]];
    for (int64_t i = k; i < whole(k); ++i) logit[i] = kLow;
    softmax(logit, k, weight);
    return 1;
  }
  const float* score = route.score == RouteScore::kSigmoid ? of.sigmoid : of.share;
  double sum = 0;
  for (int64_t i = 0; i < k; ++i) sum += static_cast<double>(weight[i] = score[index[i]]);
  if (!route.renormalize) return 1;
  sum += static_cast<double>(kernels::kLeastSum);
  for (int64_t i = 0; i < k; ++i) weight[i] = static_cast<float>(static_cast<double>(weight[i]) / sum);
  return sum;
}

// Rounds n numbers to E. `from` has room for two registers more.
template <class E>
SHOESTRING_INLINE void write(const float* from, int64_t n, typename E::Type* to) {
  for (int64_t i = 0; i < n; i += 2 * kLanes) {
    const F32 first = load(from + i), second = load(from + i + kLanes);
    if (n - i >= 2 * kLanes) {
      E::store(to + i, first, second);
    } else {
      typename E::Type last[2 * kLanes];
      E::store(last, first, second);
      __builtin_memcpy(to + i, last, (n - i) * sizeof last[0]);
    }
  }
}

template <class E>
void forward(const Route& route, const kernels::RouteForward& io, int64_t begin, int64_t end,
             const kernels::RouteSums& sums) {
  const auto* logits = static_cast<const typename E::Type*>(io.logits);
  auto* weights = static_cast<typename E::Type*>(io.weight);
  const int64_t k = route.top_k, n = route.experts;
  Scores of;
  float weight[kRoom] = {};
  for (int64_t row = begin; row < end; ++row) {
    int64_t* index = io.index + row * k;
    if (io.mask != nullptr && !io.mask[row]) {
      for (int64_t i = 0; i < k; ++i) index[i] = -1;
      write<E>(kNone, k, weights + row * k);
      continue;
    }
    read<E>(route, logits + row * n, of);
    choose(route, io.bias, of, index);
    weigh(route, of, index, weight);
    for (int64_t i = 0; i < k; ++i) {
      weight[i] *= route.scale;
      ++sums.counts[index[i]];
    }
    write<E>(weight, k, weights + row * k);
    if (route.score == RouteScore::kSigmoid) {
      for (int64_t e = 0; e < n; ++e) sums.shares[e] += static_cast<double>(of.sigmoid[e]) / of.sigmoids;
    } else {
      for (int64_t e = 0; e < n; ++e) sums.shares[e] += static_cast<double>(of.share[e]);
    }
    *sums.squares += of.lse * of.lse;
  }
}

// Computes the gradients of the logits from the gradients `slope` of their softmax.
void softmax_backward(const Scores& of, int64_t n, const float* slope, float* grad) {
  const double dot = sum_of(
      n, [&](int64_t i) __attribute__((always_inline)) { return load(of.share + i) * load(slope + i); });
  const F32 mean = splat(static_cast<float>(dot));
  for (int64_t i = 0; i < n; i += kLanes) store(grad + i, load(of.share + i) * (load(slope + i) - mean));
}

template <class E>
void backward(const Route& route, const kernels::RouteBackward& io, const float* slopes, float z_slope,
              int64_t begin, int64_t end) {
  using T = typename E::Type;
  const int64_t k = route.top_k, n = route.experts;
  const bool sigmoid = route.score == RouteScore::kSigmoid;
  Scores of;
  float slope[kRoom] = {}, grad[kRoom] = {}, weight[kRoom] = {}, to_weight[kRoom] = {};
  for (int64_t row = begin; row < end; ++row) {
    const int64_t* index = io.index + row * k;
    T* out = static_cast<T*>(io.grad_logits) + row * n;
    if (index[0] < 0) {
      write<E>(kNone, n, out);
      continue;
    }
    read<E>(route, static_cast<const T*>(io.logits) + row * n, of);
    for (int64_t e = 0; e < whole(n); ++e) slope[e] = slopes == nullptr || e >= n ? 0 : slopes[e];
    double along = 0, divisor = 1;  // sum of gradient * weight, and the sum that divides sigmoids
    if (io.grad_weight != nullptr) {
      const T* given = static_cast<const T*>(io.grad_weight) + row * k;
      for (int64_t i = 0; i < k; i += kLanes)
        store(to_weight + i, load_some<E>(given + i, k - i) * splat(route.scale));
      divisor = weigh(route, of, index, weight);
      for (int64_t i = 0; i < k; ++i)
        along += static_cast<double>(to_weight[i]) * static_cast<double>(weight[i]);
    }
    const bool scores = io.grad_weight != nullptr && !is_softmax_of_chosen(route);
    const auto shift = static_cast<float>(route.renormalize ? along : 0);
    if (sigmoid) {
      // The gradients of the sigmoids. The shares are the sigmoids divided by their sum.
      const double dot = sum_of(n, [&](int64_t i) __attribute__((always_inline)) {
        return load(of.sigmoid + i) * load(slope + i);
      });
      const F32 mean = splat(static_cast<float>(dot / of.sigmoids)),
                total = splat(static_cast<float>(of.sigmoids));
      for (int64_t i = 0; i < n && slopes != nullptr; i += kLanes)
        store(slope + i, (load(slope + i) - mean) / total);
      for (int64_t i = 0; i < k && scores; ++i)
        slope[index[i]] += (to_weight[i] - shift) / static_cast<float>(divisor);
      for (int64_t i = 0; i < n; i += kLanes)
        store(grad + i, load(slope + i) * load(of.sigmoid + i) * load(of.rest + i));
    } else {
      for (int64_t i = 0; i < k && scores; ++i) slope[index[i]] += to_weight[i];
      softmax_backward(of, n, slope, grad);
    }
    if (io.grad_weight != nullptr && !scores) {
      for (int64_t i = 0; i < k; ++i)
        grad[index[i]] += weight[i] * (to_weight[i] - static_cast<float>(along));
    }
    if (z_slope != 0) {
      const F32 factor = splat(static_cast<float>(static_cast<double>(z_slope) * of.lse));
      for (int64_t i = 0; i < n; i += kLanes)
        store(grad + i, fma(load(of.share + i), factor, load(grad + i)));
    }
    write<E>(grad, n, out);
  }
}

template <class E>
constexpr kernels::RouteRows kRouteRows{forward<E>, backward<E>};

}  // namespace

extern const kernels::RouteTable moe_route;
const kernels::RouteTable moe_route{kRouteRows<Float>, kRouteRows<BFloat16>, kRouteRows<Half>};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
