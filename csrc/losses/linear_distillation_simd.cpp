// CPU kernels for the rows of linear_distillation. Both rows are in the second-level cache, so four passes
// over them (maxima, sums, divergence, gradient) are cheap compared to the matrix products. The exponentials
// are computed again instead of being stored. All differences are then between logits minus their maxima,
// never between two logarithms of sums.

#include "losses/linear_distillation_table.h"

#include <math.h>

#include "core/row_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

using kernels::DistillationRule;
using kernels::Divergence;

// Adds the bias to raw logits, and returns the largest logit.
template <class T>
T finish(T* z, const T* bias, int64_t vocab) {
  constexpr T kLeast = kLow;
  RegisterOf<T> best = RegisterOf<T>{} + kLeast;
  sweep<kSizeOf<T>>(0, vocab, [&](int64_t i, int64_t n) {
    RegisterOf<T> v = get(z + i, n, kLeast);
    if (bias != nullptr) {
      v += get(bias + i, n, T{0});
      put(z + i, v, n);
    }
    best = max(v, best);
  });
  return horizontal_max(best);
}

template <class T>
double sum_of_exponentials(const T* z, int64_t vocab, T largest) {
  double total = 0;
  RegisterOf<T> partial{};
  folded<kSizeOf<T>>(
      vocab, [&](int64_t i, int64_t n) { partial += exp(get(z + i, n, T{kLow}) - largest); },
      [&] {
        total += horizontal_sum(partial);
        partial = RegisterOf<T>{};
      });
  return total;
}

// A class's contribution to the divergence. `surprise` is log(p / reference) with q or m as the reference, as
// far as the gradient needs it.
template <class V>
struct Share {
  V loss, surprise;
};

template <Divergence kDivergence, class T>
struct Pair {
  using V = RegisterOf<T>;

  // Computes the contribution of a class from p, q and r = log(q / p).
  SHOESTRING_METHOD Share<V> share(V p, V q, V r) const {
    if constexpr (kDivergence == Divergence::kForwardKl) {
      return {q == 0 ? V{} : q * r, V{}};
    } else if constexpr (kDivergence == Divergence::kReverseKl) {
      return {p == 0 ? V{} : -p * r, p == 0 ? V{} : -r};
    } else {
      // log(m / the larger of p and q). Its argument is at least the smaller of beta and 1 - beta. The terms
      // of the loss are of first order in the difference of p and q, while their sum is of second order. The
      // formulas therefore avoid adding 1 anywhere, which would lose precision.
      V of_larger = log_of_rest((r > 0 ? V{} + other : V{} + beta) * one_less_exp(abs(r)));
      V of_student = -(r > 0 ? of_larger + r : of_larger), of_teacher = -(r > 0 ? of_larger : of_larger - r);
      V surprise = p == 0 ? V{} : of_student;
      return {beta * (q == 0 ? V{} : q * of_teacher) + other * (p * surprise), surprise};
    }
  }

  // Calls body(offset, count, p, q, r) for the whole row.
  template <class Body, class Fold>
  SHOESTRING_METHOD void each(Body body, Fold fold) const {
    folded<kSizeOf<T>>(
        vocab,
        [&](int64_t i, int64_t n) {
          V x = get(student + i, n, T{kLow}) - student_max, y = get(teacher + i, n, T{kLow}) - teacher_max;
          body(i, n, exp(x) * student_share, exp(y) * teacher_share, (y - x) + offset);
        },
        fold);
  }

  T *student, *teacher;
  int64_t vocab;
  T student_max, teacher_max, student_share, teacher_share;  // each share is 1 / sum of exponentials
  T offset;                                                  // log of the quotient of the two sums
  T beta, other;                                             // other = 1 - beta
};

template <Divergence kDivergence, class T>
double row(T* student, T* teacher, const DistillationRule<T>& rule, const double* upstream) {
  using V = RegisterOf<T>;
  Pair<kDivergence, T> rows{student, teacher, rule.vocab, finish(student, rule.student_bias, rule.vocab),
                            finish(teacher, rule.teacher_bias, rule.vocab)};
  const double of_student = sum_of_exponentials(student, rule.vocab, rows.student_max);
  const double of_teacher = sum_of_exponentials(teacher, rule.vocab, rows.teacher_max);
  const double offset = ::log(of_student) - ::log(of_teacher);
  rows.student_share = static_cast<T>(1 / of_student);
  rows.teacher_share = static_cast<T>(1 / of_teacher);
  rows.offset = static_cast<T>(offset);
  rows.beta = static_cast<T>(rule.beta);
  rows.other = static_cast<T>(1 - rule.beta);

  double loss = 0, mean = 0;  // mean = sum p log(p / reference)
  V partial{}, surprise{};
  rows.each(
      [&](int64_t i, int64_t n, V p, V q, V r) {
        const Share<V> s = rows.share(p, q, r);
        partial += s.loss;
        if constexpr (kDivergence == Divergence::kJsd) surprise += p * s.surprise;
      },
      [&] {
        loss += horizontal_sum(partial);
        mean += horizontal_sum(surprise);
        partial = surprise = V{};
      });
  if (kDivergence == Divergence::kReverseKl) mean = loss;
  if (upstream != nullptr) {
    const T factor = static_cast<T>(*upstream * (kDivergence == Divergence::kJsd ? 1 - rule.beta : 1));
    const T level = static_cast<T>(mean);
    rows.each(
        [&](int64_t i, int64_t n, V p, V q, V r) {
          V gradient = p - q;
          if constexpr (kDivergence != Divergence::kForwardKl)
            gradient = p * (rows.share(p, q, r).surprise - level);
          put(student + i, gradient * factor, n);
        },
        [] {});
  }
  // Corrects the loss for the rounding of `offset` to T. The jsd divergence does not depend on it to first
  // order.
  const double lost = offset - static_cast<double>(rows.offset);
  if (kDivergence == Divergence::kForwardKl) return loss + lost;
  return kDivergence == Divergence::kReverseKl ? loss - lost : loss;
}

template <class T>
double any_row(T* student, T* teacher, const DistillationRule<T>& rule, const double* upstream) {
  switch (rule.divergence) {
    case Divergence::kForwardKl:
      return row<Divergence::kForwardKl>(student, teacher, rule, upstream);
    case Divergence::kReverseKl:
      return row<Divergence::kReverseKl>(student, teacher, rule, upstream);
    default:
      return row<Divergence::kJsd>(student, teacher, rule, upstream);
  }
}

}  // namespace

extern const kernels::LinearDistillationTable linear_distillation;
const kernels::LinearDistillationTable linear_distillation{any_row<float>, any_row<double>};

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
