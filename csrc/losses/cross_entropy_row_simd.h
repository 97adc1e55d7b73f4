#pragma once

// CPU kernels for the cross-entropy of a row of logits and its gradient (losses/cross_entropy_table.h). Each
// makes several passes over a row in cache.

#include <math.h>

#include "core/element_simd.h"
#include "core/row_simd.h"
#include "losses/cross_entropy_table.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

using kernels::CrossEntropyResult;
using kernels::CrossEntropyRule;
using kernels::CrossEntropyUpstream;

// Loads the first n elements as fp32, and fills the other lanes with `fill`.
template <class Element>
SHOESTRING_INLINE F32 get_as(const typename Element::Type* p, int64_t n, float fill) {
  if (n == kLanes) return Element::load(p);
  typename Element::Type padded[kLanes] = {};
  __builtin_memcpy(padded, p, n * sizeof(padded[0]));
  float lanes[kLanes];
  store(lanes, Element::load(padded));
  return load(lanes, n, fill);
}

// Computes the final logits (scale, bias, softcap) into z, and returns the largest. z may be the same memory
// as `raw`. With `lazy`, only the scale applies, and z is not written.
template <class Element>
SHOESTRING_INLINE float finish(const typename Element::Type* raw, float* z,
                               const CrossEntropyRule<float>& rule, bool lazy) {
  const float cap = static_cast<float>(rule.softcap), scale = static_cast<float>(rule.logit_scale);
  const bool same = static_cast<const void*>(raw) == z;
  F32 best = splat(kLow);
  if (lazy) {
    sweep(0, rule.vocab, [&](int64_t i, int64_t n) {
      F32 v = get_as<Element>(raw + i, n, kLow) * scale;
      if (n < kLanes) {  // -inf times a negative scale would be +inf in the padding lanes
        float lanes[kLanes];
        store(lanes, v);
        v = load(lanes, n, kLow);
      }
      best = max(v, best);
    });
  } else if (!same || rule.bias != nullptr || cap != 0 || scale != 1) {
    sweep(0, rule.vocab, [&](int64_t i, int64_t n) {
      F32 v = get_as<Element>(raw + i, n, kLow) * scale;
      if (rule.bias != nullptr) v += get(rule.bias + i, n, 0);
      if (cap != 0) v = cap * tanh(v / cap);
      put(z + i, v, n);
      if (n < kLanes) v = load(z + i, n, kLow);  // the padding lanes may have become finite
      best = max(v, best);
    });
  } else {
    sweep(0, rule.vocab, [&](int64_t i, int64_t n) { best = max(get(z + i, n, kLow), best); });
  }
  return horizontal_max(best);
}

// Returns sum(w z); without class weights w is 1.
inline double weighted_total(const float* z, const CrossEntropyRule<float>& rule) {
  double total = 0;
  F32 partial{};
  folded(
      rule.vocab,
      [&](int64_t i, int64_t n) {
        F32 v = get(z + i, n, 0);
        partial += rule.class_weights != nullptr ? v * get(rule.class_weights + i, n, 0) : v;
      },
      [&] {
        total += horizontal_sum(partial);
        partial = F32{};
      });
  return total;
}

struct Yes {
  constexpr operator bool() const { return true; }
};
struct No {
  constexpr operator bool() const { return false; }
};

struct Sums {
  double exp, moment;  // the sums of e = exp(z - largest), and of e * (z - largest)
};

// Computes the sums of exponentials of scale * from. With kKeep it stores the exponentials in z, which may be
// the same memory as `from`. This pass never waits for memory, so it also prefetches `next`, the following
// row, unless that is null.
template <class Element, bool kKeep, bool kMoment>
Sums exponentials(const typename Element::Type* from, float scale, float* z, int64_t vocab, float largest,
                  const char* next) {
  constexpr int64_t kStep = kLanes * sizeof(typename Element::Type), kLine = 64;
  Sums sums{};
  F32 partial{}, moment{};
  folded(
      vocab,
      [&](int64_t i, int64_t n) {
        if (next != nullptr && (kStep >= kLine || i * sizeof(typename Element::Type) % kLine == 0)) {
          __builtin_prefetch(next + i * sizeof(typename Element::Type), 0, 2);
        }
        F32 x = get_as<Element>(from + i, n, 0) * scale - largest, e = exp_of_negative(x);
        if (n < kLanes) {  // the padding lanes must not count
          float lanes[kLanes];
          store(lanes, e);
          e = load(lanes, n, 0);
        }
        if (kKeep) put(z + i, e, n);
        partial += e;
        if (kMoment) moment += e > 0 ? e * x : F32{};  // if e is zero, x may be -inf
      },
      [&] {
        sums.exp += horizontal_sum(partial);
        if (kMoment) sums.moment += horizontal_sum(moment);
        partial = moment = F32{};
      });
  return sums;
}

// Returns the index of the first element that equals the largest.
template <class T>
int64_t first_of(const T* z, int64_t vocab, T largest) {
  int64_t i = 0;
  while (i + 1 < vocab && z[i] != largest) ++i;
  return i;
}

// Computes z_j = multiply * e_j - each * w_j, and subtracts `at_target` from the target's element. z holds e
// on entry.
inline void subtract(float* z, int64_t target, const CrossEntropyRule<float>& rule, double multiply,
                     double each, double at_target) {
  const float factor = static_cast<float>(multiply), less = static_cast<float>(each);
  if (factor != 1 || less != 0) {
    sweep(0, rule.vocab, [&](int64_t i, int64_t n) {
      F32 weight = rule.class_weights != nullptr ? get(rule.class_weights + i, n, 0) : splat(1.f);
      put(z + i, get(z + i, n, 0) * factor - less * weight, n);
    });
  }
  z[target] = static_cast<float>(z[target] - at_target);
}

// Computes to = factor * z. `to` may begin at the same address as z, because elements are written only after
// they have been read.
template <class Element>
void scale_row(const float* z, float factor, int64_t vocab, typename Element::Type* to) {
  sweep<2 * kLanes>(0, vocab, [&](int64_t i, int64_t n) {
    if (n == 2 * kLanes) return Element::store(to + i, load(z + i) * factor, load(z + i + kLanes) * factor);
    float padded[2 * kLanes] = {};
    typename Element::Type narrow[2 * kLanes];
    __builtin_memcpy(padded, z + i, n * sizeof(float));
    Element::store(narrow, load(padded) * factor, load(padded + kLanes) * factor);
    __builtin_memcpy(to + i, narrow, n * sizeof(narrow[0]));
  });
}

// Returns the results of a row. With `upstream`, z becomes the gradient with respect to the logits
// before softcap, without the factor result.scale.
template <class Element>
CrossEntropyResult reduce_row(const typename Element::Type* raw, float* z, int64_t target,
                              const CrossEntropyRule<float>& rule, const CrossEntropyUpstream* upstream,
                              const void* next = nullptr) {
  const int64_t vocab = rule.vocab;
  const float cap = static_cast<float>(rule.softcap);
  const double smooth = rule.label_smoothing;
  const bool keep = upstream != nullptr && cap == 0 && upstream->entropy == 0;
  const bool lazy =
      rule.bias == nullptr && cap == 0 && smooth == 0 && !rule.stats && (upstream == nullptr || keep);
  const float scale = static_cast<float>(rule.logit_scale), largest = finish<Element>(raw, z, rule, lazy);
  const double at_target = lazy ? get_as<Element>(raw + target, 1, 0)[0] * scale : z[target];
  const double total = smooth != 0 ? weighted_total(z, rule) : 0;

  CrossEntropyResult result{};
  if (rule.stats) result.argmax = first_of(z, vocab, largest);
  const bool moment = rule.stats || (upstream != nullptr && upstream->entropy != 0);
  const auto make = [&](auto keeps, auto moments) {
    if (lazy)
      return exponentials<Element, keeps, moments>(raw, scale, z, vocab, largest,
                                                   static_cast<const char*>(next));
    return exponentials<Float, keeps, moments>(z, 1, z, vocab, largest, nullptr);
  };
  const Sums sums = keep ? (moment ? make(Yes{}, Yes{}) : make(Yes{}, No{}))
                         : (moment ? make(No{}, Yes{}) : make(No{}, No{}));
  const double lse = largest + ::log(sums.exp), share = smooth / vocab;
  const double sure = (rule.class_weights != nullptr ? rule.class_weights[target] : 1) * (1 - smooth);
  const double spread = smooth != 0 ? share * rule.total_weight : 0;
  result.lse = lse;
  result.loss =
      sure * (lse - at_target) + (smooth != 0 ? spread * lse - share * total : 0) + rule.z_loss * lse * lse;
  result.entropy = moment ? ::log(sums.exp) - sums.moment / sums.exp : 0;
  if (upstream == nullptr) return result;

  const double u = upstream->loss, h = upstream->entropy;
  const double a = u * (sure + spread + 2 * rule.z_loss * lse) + upstream->lse;
  result.scale = 1;
  if (keep) {
    // Usually the common factor a / sum stays in result.scale, and the exponentials need no multiplication.
    // If |a| is small, the subtracted terms divided by it would be large, and adding the exponentials to them
    // would lose precision. The factor is then applied to z.
    const double size = __builtin_fabs(u) * (sure + spread);
    if (__builtin_fabs(a) >= 0.25 * size) {
      const double each = a != 0 ? sums.exp * u / a : 0;
      result.scale = a / sums.exp;
      subtract(z, target, rule, 1, each * share, each * sure);
    } else {
      subtract(z, target, rule, a / sums.exp, u * share, u * sure);
    }
    return result;
  }
  // With z = cap * tanh(raw / cap), d z / d raw = 1 - (z / cap)^2.
  const float inverse = static_cast<float>(1 / sums.exp), less = static_cast<float>(u * share);
  const float constant = static_cast<float>(a + h * (lse - largest - result.entropy)),
              slope = static_cast<float>(h);
  const float ratio_at = cap != 0 ? z[target] / cap : 0;
  sweep(0, vocab, [&](int64_t i, int64_t n) {
    F32 v = get(z + i, n, 0), x = v - largest, p = exp(x) * inverse;
    F32 ratio = cap != 0 ? v / cap : F32{};
    F32 weight = rule.class_weights != nullptr ? get(rule.class_weights + i, n, 0) : splat(1.f);
    F32 grad = slope != 0 ? (p > 0 ? p * (constant - slope * x) : p * constant) : p * constant;
    put(z + i, (grad - less * weight) * (1.f - ratio * ratio), n);
  });
  z[target] -= static_cast<float>(u * sure) * (1 - ratio_at * ratio_at);
  return result;
}

// The fp64 version serves gradient checks. It is written for clarity, not for speed.
inline CrossEntropyResult reduce_row(double* z, int64_t target, const CrossEntropyRule<double>& rule,
                                     const CrossEntropyUpstream* upstream) {
  const int64_t vocab = rule.vocab;
  const double cap = rule.softcap, smooth = rule.label_smoothing, share = smooth / vocab;
  const auto weight = [&](int64_t i) { return rule.class_weights != nullptr ? rule.class_weights[i] : 1.0; };
  double largest = -__builtin_inf(), total = 0, sum = 0, moment = 0;
  for (int64_t i = 0; i < vocab; ++i) {
    z[i] *= rule.logit_scale;
    if (rule.bias != nullptr) z[i] += rule.bias[i];
    if (cap != 0) z[i] = cap * ::tanh(z[i] / cap);
    largest = z[i] > largest ? z[i] : largest;
    if (smooth != 0) total += weight(i) * z[i];
  }
  for (int64_t i = 0; i < vocab; ++i) {
    const double x = z[i] - largest, e = ::exp(x);
    sum += e;
    if (e > 0) moment += e * x;
  }
  CrossEntropyResult result{};
  const double lse = largest + ::log(sum);
  const double sure = weight(target) * (1 - smooth), spread = smooth != 0 ? share * rule.total_weight : 0;
  result.lse = lse;
  result.loss =
      sure * (lse - z[target]) + (smooth != 0 ? spread * lse - share * total : 0) + rule.z_loss * lse * lse;
  result.entropy = ::log(sum) - moment / sum;
  result.argmax = rule.stats ? first_of(z, vocab, largest) : 0;
  result.scale = 1;
  if (upstream == nullptr) return result;
  const double u = upstream->loss, h = upstream->entropy;
  const double a = u * (sure + spread + 2 * rule.z_loss * lse) + upstream->lse;
  for (int64_t i = 0; i < vocab; ++i) {
    const double ratio = cap != 0 ? z[i] / cap : 0, p = ::exp(z[i] - lse);
    const double surprise = p > 0 && h != 0 ? h * (lse - result.entropy - z[i]) : 0;
    z[i] = (p * (a + surprise) - u * (share * weight(i) + (i == target ? sure : 0))) * (1 - ratio * ratio);
  }
  return result;
}

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
