// CPU kernels for the cross-entropy of a row of logits and its gradient. losses/cross_entropy_table.h has the
// formulas. Each kernel makes several passes over a row that stays in cache.
//
// Memory bandwidth limits cross_entropy. Each row of logits is read from memory once, and its gradient is
// written once. The steps in between run in cache, in fp32. If the gradient is fp32, its own memory holds the
// intermediate values; otherwise each thread has a buffer of one row for them.
//
// In linear_cross_entropy a row of logits is read from memory once. It fits into the second-level cache,
// where the kernel computes the maximum, the exponentials and the gradient. The exponentials replace the
// logits and are not normalised. The missing factor 1 / sum is applied to the (tokens, features) operands of
// the matrix products. This saves a pass over the (tokens, vocab) logits.

#include <math.h>

#include "core/element_simd.h"
#include "core/row_simd.h"
#include "losses/cross_entropy_table.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

using kernels::CrossEntropyResult;
using kernels::CrossEntropyRule;
using kernels::CrossEntropyTargets;
using kernels::CrossEntropyUpstream;

// Loads the first n elements of p as fp32, and fills the other lanes of the vector with `fill`.
template <class Element>
SHOESTRING_INLINE F32 get_as(const typename Element::Type* p, int64_t n, float fill) {
  if (n == kLanes) return Element::load(p);
  typename Element::Type padded[kLanes] = {};
  __builtin_memcpy(padded, p, n * sizeof(padded[0]));
  float lanes[kLanes];
  store(lanes, Element::load(padded));
  return load(lanes, n, fill);
}

// Computes the final logits from the raw ones (scale, bias, softcap), stores them in z, and returns the
// largest. z may be the same memory as `raw`. If `lazy` is set there is neither bias nor softcap, and z is
// not written.
template <class Element>
SHOESTRING_INLINE float finish(const typename Element::Type* raw, float* z,
                               const CrossEntropyRule<float>& rule, bool lazy) {
  const float cap = static_cast<float>(rule.softcap), scale = static_cast<float>(rule.logit_scale);
  const bool same = static_cast<const void*>(raw) == z;
  F32 best = splat(kLow);
  if (lazy) {
    sweep(0, rule.vocab, [&](int64_t i, int64_t n) {
      F32 v = get_as<Element>(raw + i, n, kLow) * scale;
      // lanes that hold no element of the row are -inf, which a negative scale would turn into +inf
      if (n < kLanes) {
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
      // after bias and softcap, lanes that hold no element of the row must be -inf again
      if (n < kLanes) v = load(z + i, n, kLow);
      best = max(v, best);
    });
  } else {
    sweep(0, rule.vocab, [&](int64_t i, int64_t n) { best = max(get(z + i, n, kLow), best); });
  }
  return horizontal_max(best);
}

// Returns the sum of w_j * (largest - z_j) over all classes j, where w are the class weights. Without class
// weights w_j is 1. The sum of w_j * z_j would lose the differences of large logits to rounding.
inline double weighted_distance(const float* z, float largest, const CrossEntropyRule<float>& rule) {
  double total = 0;
  F32 partial{};
  folded(
      rule.vocab,
      [&](int64_t i, int64_t n) {
        F32 v = largest - get(z + i, n, largest);
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
  double exp, moment;  // the sum of e = exp(z - largest), and the sum of e * (z - largest)
};

// Let x = scale * from - largest for each element of the row `from`. Computes the sum of exp(x) and, with
// kMoment, the sum of exp(x) * x. With kKeep, stores the exponentials in z, which may be the same memory as
// `from`. This pass is bound by computation, so it also prefetches the next row, unless `next` is null.
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
        if (n < kLanes) {  // lanes that hold no element of the row must not add to the sum
          float lanes[kLanes];
          store(lanes, e);
          e = load(lanes, n, 0);
        }
        if (kKeep) put(z + i, e, n);
        partial += e;
        // if e = exp(x) is 0, x may be -inf, and e * x would be NaN
        if (kMoment) moment += e > 0 ? e * x : F32{};
      },
      [&] {
        sums.exp += horizontal_sum(partial);
        if (kMoment) sums.moment += horizontal_sum(moment);
        partial = moment = F32{};
      });
  return sums;
}

// Returns the index of the first element of z that equals `largest`.
template <class T>
int64_t first_of(const T* z, int64_t vocab, T largest) {
  int64_t i = 0;
  while (i + 1 < vocab && z[i] != largest) ++i;
  return i;
}

// Computes z_j = multiply * z_j - each * w_j for all classes j, where w are the class weights. Then subtracts
// `at_target` and at_target2 from the targets' elements of z.
inline void subtract(float* z, const CrossEntropyTargets<double>& targets,
                     const CrossEntropyRule<float>& rule, double multiply, double each, double at_target,
                     double at_target2) {
  const float factor = static_cast<float>(multiply), less = static_cast<float>(each);
  if (factor != 1 || less != 0) {
    sweep(0, rule.vocab, [&](int64_t i, int64_t n) {
      F32 weight = rule.class_weights != nullptr ? get(rule.class_weights + i, n, 0) : splat(1.f);
      put(z + i, get(z + i, n, 0) * factor - less * weight, n);
    });
  }
  z[targets.target] = static_cast<float>(z[targets.target] - at_target);
  if (at_target2 != 0) z[targets.target2] = static_cast<float>(z[targets.target2] - at_target2);
}

// Writes factor * z to `to`, converted to Element. `to` may begin at the same address as z, because elements
// are written only after they have been read.
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

// Returns the loss and the statistics of a row. If `upstream` is given, z becomes the gradient with respect
// to the logits before softcap, divided by the returned result.scale.
template <class Element>
CrossEntropyResult reduce_row(const typename Element::Type* raw, float* z,
                              const CrossEntropyTargets<double>& targets, const CrossEntropyRule<float>& rule,
                              const CrossEntropyUpstream* upstream, const void* next = nullptr) {
  const int64_t vocab = rule.vocab;
  const float cap = static_cast<float>(rule.softcap);
  const double smooth = rule.label_smoothing;
  const bool keep = upstream != nullptr && cap == 0 && upstream->entropy == 0;
  const bool lazy =
      rule.bias == nullptr && cap == 0 && smooth == 0 && !rule.stats && (upstream == nullptr || keep);
  const float scale = static_cast<float>(rule.logit_scale), largest = finish<Element>(raw, z, rule, lazy);
  const auto logit_of = [&](int64_t target) -> double {
    return lazy ? get_as<Element>(raw + target, 1, 0)[0] * scale : z[target];
  };
  const double at_target = logit_of(targets.target), at_target2 = logit_of(targets.target2);
  const double distance = smooth != 0 ? weighted_distance(z, largest, rule) : 0;

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
  const double log_sum = ::log(sums.exp), lse = largest + log_sum, parts = targets.part + targets.part2;
  const auto sure_of = [&](int64_t target, double part) {
    return part * (rule.class_weights != nullptr ? rule.class_weights[target] : 1) * (1 - smooth);
  };
  const double sure = sure_of(targets.target, targets.part), sure2 = sure_of(targets.target2, targets.part2);
  const double share = parts * smooth / vocab, z_loss = parts * rule.z_loss;
  const double spread = smooth != 0 ? share * rule.total_weight : 0;
  result.lse = lse;
  // Differences to the largest logit are taken first, since the loss may be small compared with the logits.
  result.loss = sure * (log_sum + (largest - at_target)) +
                (smooth != 0 ? spread * log_sum + share * distance : 0) + z_loss * lse * lse;
  if (sure2 != 0) result.loss += sure2 * (log_sum + (largest - at_target2));
  result.entropy = moment ? log_sum - sums.moment / sums.exp : 0;
  if (upstream == nullptr) return result;

  const double u = upstream->loss, h = upstream->entropy;
  const double a = u * (sure + sure2 + spread + 2 * z_loss * lse) + upstream->lse;
  result.scale = 1;
  if (keep) {
    // Here z holds exponentials e_j. The gradient is a e_j / sum minus terms of the target and of label
    // smoothing, with `a` as in cross_entropy_table.h. Usually the factor a / sum is returned in
    // result.scale, and only these terms, divided by the factor, are subtracted. If |a| is small, the divided
    // terms would be large, and the subtraction would lose precision. In this case z is multiplied by the
    // factor first, and result.scale is 1.
    const double size = __builtin_fabs(u) * (sure + sure2 + spread);
    if (__builtin_fabs(a) >= 0.25 * size) {
      const double each = a != 0 ? sums.exp * u / a : 0;
      result.scale = a / sums.exp;
      subtract(z, targets, rule, 1, each * share, each * sure, each * sure2);
    } else {
      subtract(z, targets, rule, a / sums.exp, u * share, u * sure, u * sure2);
    }
    return result;
  }
  // The softcapped logit z = cap * tanh(raw / cap) has the derivative dz / draw = 1 - (z / cap)^2.
  const float inverse = static_cast<float>(1 / sums.exp), less = static_cast<float>(u * share);
  const float constant = static_cast<float>(a + h * (log_sum - result.entropy)),
              slope = static_cast<float>(h);
  const auto slope_of = [&](int64_t target) {
    const float ratio = cap != 0 ? z[target] / cap : 0;
    return 1 - ratio * ratio;
  };
  const float slope_at = slope_of(targets.target), slope_at2 = slope_of(targets.target2);
  sweep(0, vocab, [&](int64_t i, int64_t n) {
    F32 v = get(z + i, n, 0), x = v - largest, p = exp(x) * inverse;
    F32 ratio = cap != 0 ? v / cap : F32{};
    F32 weight = rule.class_weights != nullptr ? get(rule.class_weights + i, n, 0) : splat(1.f);
    F32 grad = slope != 0 ? (p > 0 ? p * (constant - slope * x) : p * constant) : p * constant;
    put(z + i, (grad - less * weight) * (1.f - ratio * ratio), n);
  });
  z[targets.target] -= static_cast<float>(u * sure) * slope_at;
  if (sure2 != 0) z[targets.target2] -= static_cast<float>(u * sure2) * slope_at2;
  return result;
}

// The fp64 version of reduce_row() serves gradient checks. It is written for clarity, not for speed.
inline CrossEntropyResult reduce_row(double* z, const CrossEntropyTargets<double>& targets,
                                     const CrossEntropyRule<double>& rule,
                                     const CrossEntropyUpstream* upstream) {
  const int64_t vocab = rule.vocab;
  const int64_t target = targets.target, target2 = targets.target2;
  const double cap = rule.softcap, smooth = rule.label_smoothing, parts = targets.part + targets.part2;
  const double share = parts * smooth / vocab, z_loss = parts * rule.z_loss;
  const auto weight = [&](int64_t i) { return rule.class_weights != nullptr ? rule.class_weights[i] : 1.0; };
  double largest = -__builtin_inf(), distance = 0, sum = 0, moment = 0;
  for (int64_t i = 0; i < vocab; ++i) {
    z[i] *= rule.logit_scale;
    if (rule.bias != nullptr) z[i] += rule.bias[i];
    if (cap != 0) z[i] = cap * ::tanh(z[i] / cap);
    largest = z[i] > largest ? z[i] : largest;
  }
  for (int64_t i = 0; i < vocab; ++i) {
    const double x = z[i] - largest, e = ::exp(x);
    sum += e;
    if (e > 0) moment += e * x;
    if (smooth != 0) distance -= weight(i) * x;
  }
  CrossEntropyResult result{};
  const double log_sum = ::log(sum), lse = largest + log_sum;
  const double sure = targets.part * weight(target) * (1 - smooth);
  const double sure2 = targets.part2 * weight(target2) * (1 - smooth);
  const double spread = smooth != 0 ? share * rule.total_weight : 0;
  result.lse = lse;
  result.loss = sure * (log_sum + (largest - z[target])) +
                (smooth != 0 ? spread * log_sum + share * distance : 0) + z_loss * lse * lse;
  if (sure2 != 0) result.loss += sure2 * (log_sum + (largest - z[target2]));
  result.entropy = log_sum - moment / sum;
  result.argmax = rule.stats ? first_of(z, vocab, largest) : 0;
  result.scale = 1;
  if (upstream == nullptr) return result;
  const double u = upstream->loss, h = upstream->entropy;
  const double a = u * (sure + sure2 + spread + 2 * z_loss * lse) + upstream->lse;
  for (int64_t i = 0; i < vocab; ++i) {
    const double ratio = cap != 0 ? z[i] / cap : 0, x = z[i] - largest, p = ::exp(x) / sum;
    const double surprise = p > 0 && h != 0 ? h * (log_sum - result.entropy - x) : 0;
    const double here = share * weight(i) + (i == target ? sure : 0) + (i == target2 ? sure2 : 0);
    z[i] = (p * (a + surprise) - u * here) * (1 - ratio * ratio);
  }
  return result;
}

namespace {

template <class Element>
CrossEntropyResult row(const typename Element::Type* logits, typename Element::Type* gradient, float* work,
                       const CrossEntropyTargets<double>& targets, const CrossEntropyRule<float>& rule,
                       const CrossEntropyUpstream& upstream, const typename Element::Type* next) {
  float* z = work;
  if constexpr (sizeof(typename Element::Type) == sizeof(float)) {
    if (gradient != nullptr) z = gradient;
  }
  const CrossEntropyResult result =
      reduce_row<Element>(logits, z, targets, rule, gradient != nullptr ? &upstream : nullptr, next);
  if (gradient != nullptr) {
    scale_row<Element>(z, static_cast<float>(result.scale * rule.logit_scale), rule.vocab, gradient);
  }
  return result;
}

CrossEntropyResult row_double(const double* logits, double* gradient, double* work,
                              const CrossEntropyTargets<double>& targets,
                              const CrossEntropyRule<double>& rule, const CrossEntropyUpstream& upstream,
                              const double*) {
  double* z = gradient != nullptr ? gradient : work;
  for (int64_t i = 0; i < rule.vocab; ++i) z[i] = logits[i];
  const CrossEntropyResult result = reduce_row(z, targets, rule, gradient != nullptr ? &upstream : nullptr);
  for (int64_t i = 0; gradient != nullptr && i < rule.vocab; ++i)
    gradient[i] *= result.scale * rule.logit_scale;
  return result;
}

CrossEntropyResult linear_row_float(float* z, const CrossEntropyTargets<double>& targets,
                                    const CrossEntropyRule<float>& rule,
                                    const CrossEntropyUpstream* upstream) {
  return reduce_row<Float>(z, z, targets, rule, upstream);
}

CrossEntropyResult linear_row_double(double* z, const CrossEntropyTargets<double>& targets,
                                     const CrossEntropyRule<double>& rule,
                                     const CrossEntropyUpstream* upstream) {
  return reduce_row(z, targets, rule, upstream);
}

void round_row(float* z, float factor, int64_t vocab) {
  scale_row<BFloat16>(z, factor, vocab, reinterpret_cast<uint16_t*>(z));
}

template <class T>
void mark(const T* __restrict z, int64_t vocab, T least, uint8_t* __restrict live) {
  for (int64_t i = 0; i < vocab; ++i) live[i] |= !((z[i] < 0 ? -z[i] : z[i]) < least);
}

}  // namespace

extern const kernels::CrossEntropyTable cross_entropy;
const kernels::CrossEntropyTable cross_entropy{row<Float>, row<BFloat16>, row<Half>, row_double};
extern const kernels::LinearCrossEntropyTable linear_cross_entropy;
const kernels::LinearCrossEntropyTable linear_cross_entropy{linear_row_float, linear_row_double, round_row,
                                                            mark<float>, mark<double>};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
