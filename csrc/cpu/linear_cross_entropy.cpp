// A row of logits is read from memory once: it fits the second-level cache, where the maximum, the exponentials and
// the gradient are then taken. The exponentials are left in place unnormalised; 1/sum goes into the (tokens, hidden)
// sized operands of the matrix products, so no pass over the vocabulary is spent on it.

#include "kernels/linear_cross_entropy.h"

#include <math.h>

#include "cpu/row.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

using kernels::CrossEntropyResult;
using kernels::CrossEntropyRule;
using kernels::CrossEntropyUpstream;

F32 tanh(F32 x) {
  F32 square = x * x;
  F32 p = splat(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  F32 near_zero = x + x * square * p;
  F32 elsewhere = 1.f - 2.f / (exp(2.f * x) + 1.f);
  return abs(x) < 0.625f ? near_zero : elsewhere;
}

// Makes raw logits final, and finds the largest.
SHOESTRING_INLINE float finish(float* z, const CrossEntropyRule<float>& rule) {
  const float cap = static_cast<float>(rule.softcap);
  F32 best = splat(kLow);
  if (rule.bias != nullptr || cap != 0) {
    sweep(0, rule.vocab, [&](int64_t i, int64_t n) {
      F32 v = get(z + i, n, kLow);
      if (rule.bias != nullptr) v += get(rule.bias + i, n, 0);
      if (cap != 0) v = cap * tanh(v / cap);
      put(z + i, v, n);
      if (n < kLanes) v = load(z + i, n, kLow);  // the padding may have become finite
      best = max(v, best);
    });
  } else {
    sweep(0, rule.vocab, [&](int64_t i, int64_t n) { best = max(get(z + i, n, kLow), best); });
  }
  return horizontal_max(best);
}

// The sum of w z, and w is 1 where there are none.
double weighted_total(const float* z, const CrossEntropyRule<float>& rule) {
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

struct Sums {
  double exp, moment;  // of e = exp(z - largest), and of e (z - largest)
};

template <bool kKeep, bool kMoment>
Sums exponentials(float* z, int64_t vocab, float largest) {
  Sums sums{};
  F32 partial{}, moment{};
  folded(
      vocab,
      [&](int64_t i, int64_t n) {
        F32 x = get(z + i, n, kLow) - largest, e = exp(x);
        if (n < kLanes) {  // low - low is NaN where every logit is -inf: count the row's own lanes only
          float lanes[kLanes];
          store(lanes, e);
          e = load(lanes, n, 0);
        }
        if (kKeep) put(z + i, e, n);
        partial += e;
        if (kMoment) moment += e > 0 ? e * x : F32{};  // where e is zero, x may be -inf
      },
      [&] {
        sums.exp += horizontal_sum(partial);
        if (kMoment) sums.moment += horizontal_sum(moment);
        partial = moment = F32{};
      });
  return sums;
}

template <class T>
int64_t first_of(const T* z, int64_t vocab, T largest) {
  int64_t i = 0;
  while (i + 1 < vocab && z[i] != largest) ++i;
  return i;
}

// z_j = multiply e_j - each w_j, and the target's less `at_target` besides; e is in z.
void subtract(float* z, int64_t target, const CrossEntropyRule<float>& rule, double multiply, double each,
              double at_target) {
  const float factor = static_cast<float>(multiply), less = static_cast<float>(each);
  if (factor != 1 || less != 0) {
    sweep(0, rule.vocab, [&](int64_t i, int64_t n) {
      F32 weight = rule.class_weights != nullptr ? get(rule.class_weights + i, n, 0) : splat(1.f);
      put(z + i, get(z + i, n, 0) * factor - less * weight, n);
    });
  }
  z[target] = static_cast<float>(z[target] - at_target);
}

CrossEntropyResult row_float(float* z, int64_t target, const CrossEntropyRule<float>& rule,
                             const CrossEntropyUpstream* upstream) {
  const int64_t vocab = rule.vocab;
  const float cap = static_cast<float>(rule.softcap);
  const float largest = finish(z, rule);
  const double at_target = z[target], smooth = rule.label_smoothing;
  const double total = smooth != 0 ? weighted_total(z, rule) : 0;

  CrossEntropyResult result{};
  if (rule.stats) result.argmax = first_of(z, vocab, largest);
  const bool keep = upstream != nullptr && cap == 0 && upstream->entropy == 0;
  const bool moment = rule.stats || (upstream != nullptr && upstream->entropy != 0);
  const Sums sums = keep ? (moment ? exponentials<true, true>(z, vocab, largest) : exponentials<true, false>(z, vocab, largest))
                         : (moment ? exponentials<false, true>(z, vocab, largest) : exponentials<false, false>(z, vocab, largest));
  const double lse = largest + ::log(sums.exp), share = smooth / vocab;
  const double sure = (rule.class_weights != nullptr ? rule.class_weights[target] : 1) * (1 - smooth);
  const double spread = smooth != 0 ? share * rule.total_weight : 0;
  result.lse = lse;
  result.loss = sure * (lse - at_target) + (smooth != 0 ? spread * lse - share * total : 0) + rule.z_loss * lse * lse;
  result.entropy = moment ? ::log(sums.exp) - sums.moment / sums.exp : 0;
  if (upstream == nullptr) return result;

  const double u = upstream->loss, h = upstream->entropy;
  const double a = u * (sure + spread + 2 * rule.z_loss * lse) + upstream->lse;
  result.scale = 1;
  if (keep) {
    // The exponentials stay as they are, unless what they are divided by could be lost in what is subtracted.
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
  const float constant = static_cast<float>(a + h * (lse - largest - result.entropy)), slope = static_cast<float>(h);
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

// fp64 serves gradient checks; it is written to be read.
CrossEntropyResult row_double(double* z, int64_t target, const CrossEntropyRule<double>& rule,
                              const CrossEntropyUpstream* upstream) {
  const int64_t vocab = rule.vocab;
  const double cap = rule.softcap, smooth = rule.label_smoothing, share = smooth / vocab;
  const auto weight = [&](int64_t i) { return rule.class_weights != nullptr ? rule.class_weights[i] : 1.0; };
  double largest = -__builtin_inf(), total = 0, sum = 0, moment = 0;
  for (int64_t i = 0; i < vocab; ++i) {
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
  result.loss = sure * (lse - z[target]) + (smooth != 0 ? spread * lse - share * total : 0) + rule.z_loss * lse * lse;
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

template <class T>
void mark(const T* __restrict z, int64_t vocab, T least, uint8_t* __restrict live) {
  for (int64_t i = 0; i < vocab; ++i) live[i] |= !((z[i] < 0 ? -z[i] : z[i]) < least);
}

}  // namespace

extern const kernels::LinearCrossEntropyTable linear_cross_entropy;
const kernels::LinearCrossEntropyTable linear_cross_entropy{row_float, row_double, mark<float>, mark<double>};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
