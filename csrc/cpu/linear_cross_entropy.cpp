// A row of logits is read from memory once: it fits the second-level cache, where the maximum, the exponentials and
// the gradient are then taken. The exponentials are left in place unnormalised; 1/sum goes into the (tokens, hidden)
// sized operands of the matrix products, so no pass over the vocabulary is spent on it.

#include "kernels/linear_cross_entropy.h"

#include <math.h>

#include "cpu/vec.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

using kernels::CrossEntropyResult;
using kernels::CrossEntropyRow;

// fp32 partial sums are folded into a double every so many elements: the error stays that of short sums.
constexpr int64_t kFold = 4096;

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

// Calls body(offset, count) for whole registers, then once for what is left.
template <class Body>
SHOESTRING_INLINE void sweep(int64_t begin, int64_t end, Body body) {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) body(i, int64_t{kLanes});
  if (i < end) body(i, end - i);
}

SHOESTRING_INLINE F32 get(const float* p, int64_t n, float fill) {
  return n == kLanes ? load(p) : load(p, n, fill);
}
SHOESTRING_INLINE void put(float* p, F32 v, int64_t n) {
  if (n == kLanes) {
    store(p, v);
  } else {
    store(p, v, n);
  }
}

CrossEntropyResult row_float(float* z, const float* bias, const CrossEntropyRow& row) {
  const int64_t vocab = row.vocab;
  const float cap = static_cast<float>(row.softcap);
  const float low = -__builtin_inff();

  F32 best = splat(low);
  if (bias != nullptr || cap != 0) {
    sweep(0, vocab, [&](int64_t i, int64_t n) {
      F32 v = get(z + i, n, low);
      if (bias != nullptr) v += get(bias + i, n, 0);
      if (cap != 0) v = cap * tanh(v / cap);
      put(z + i, v, n);
      if (n < kLanes) v = load(z + i, n, low);  // the padding may have become finite
      best = max(v, best);
    });
  } else {
    sweep(0, vocab, [&](int64_t i, int64_t n) { best = max(get(z + i, n, low), best); });
  }
  const float largest = horizontal_max(best);
  const double target = z[row.target];

  double total_logit = 0;
  if (row.label_smoothing != 0) {
    for (int64_t begin = 0; begin < vocab; begin += kFold) {
      F32 partial{};
      sweep(begin, begin + kFold < vocab ? begin + kFold : vocab,
            [&](int64_t i, int64_t n) { partial += get(z + i, n, 0); });
      total_logit += horizontal_sum(partial);
    }
  }

  const bool keep_exp = row.gradient && cap == 0;
  double sum = 0;
  for (int64_t begin = 0; begin < vocab; begin += kFold) {
    F32 partial{};
    sweep(begin, begin + kFold < vocab ? begin + kFold : vocab, [&](int64_t i, int64_t n) {
      F32 e = exp(get(z + i, n, low) - largest);
      if (n < kLanes) {  // low - low is NaN where every logit is -inf: count the row's own lanes only
        float lanes[kLanes];
        store(lanes, e);
        e = load(lanes, n, 0);
      }
      if (keep_exp) put(z + i, e, n);
      partial += e;
    });
    sum += horizontal_sum(partial);
  }

  const double smooth = row.label_smoothing;
  const double lse = largest + ::log(sum);
  CrossEntropyResult result{lse - (1 - smooth) * target - smooth * total_logit / vocab, 1 / sum};
  if (!row.gradient) return result;

  if (cap == 0) {
    if (smooth != 0) {
      const float floor = static_cast<float>(sum * smooth / vocab);
      sweep(0, vocab, [&](int64_t i, int64_t n) { put(z + i, get(z + i, n, 0) - floor, n); });
    }
    z[row.target] = static_cast<float>(z[row.target] - sum * (1 - smooth));
    return result;
  }
  // With z = cap * tanh(raw / cap), d z / d raw = 1 - (z / cap)^2.
  const float floor = static_cast<float>(smooth / vocab), inverse = static_cast<float>(1 / sum);
  const float capped = z[row.target], slope = 1 - (capped / cap) * (capped / cap);
  sweep(0, vocab, [&](int64_t i, int64_t n) {
    F32 v = get(z + i, n, 0), ratio = v / cap;
    put(z + i, (exp(v - largest) * inverse - floor) * (1.f - ratio * ratio), n);
  });
  z[row.target] -= static_cast<float>(1 - smooth) * slope;
  result.scale = 1;
  return result;
}

// fp64 serves gradient checks; it is written to be read.
CrossEntropyResult row_double(double* z, const double* bias, const CrossEntropyRow& row) {
  const int64_t vocab = row.vocab;
  const double cap = row.softcap, smooth = row.label_smoothing;
  double largest = -__builtin_inf(), total_logit = 0, sum = 0;
  for (int64_t i = 0; i < vocab; ++i) {
    if (bias != nullptr) z[i] += bias[i];
    if (cap != 0) z[i] = cap * ::tanh(z[i] / cap);
    largest = z[i] > largest ? z[i] : largest;
    total_logit += z[i];
  }
  for (int64_t i = 0; i < vocab; ++i) sum += ::exp(z[i] - largest);
  const double lse = largest + ::log(sum);
  CrossEntropyResult result{lse - (1 - smooth) * z[row.target] - (smooth != 0 ? smooth * total_logit / vocab : 0), 1};
  if (!row.gradient) return result;
  for (int64_t i = 0; i < vocab; ++i) {
    const double ratio = cap != 0 ? z[i] / cap : 0;
    const double onehot = i == row.target ? 1 - smooth : 0;
    z[i] = (::exp(z[i] - lse) - smooth / vocab - onehot) * (1 - ratio * ratio);
  }
  return result;
}

}  // namespace

extern const kernels::LinearCrossEntropyTable linear_cross_entropy;
const kernels::LinearCrossEntropyTable linear_cross_entropy{row_float, row_double};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
