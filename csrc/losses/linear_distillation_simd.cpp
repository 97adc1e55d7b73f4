// CPU kernels for the rows of linear_distillation. The student's and the teacher's row of logits stay in the
// second-level cache. Four passes over them (maxima, sums, divergence, gradient) are therefore cheap compared
// to the matrix products. The exponentials are computed again instead of being stored. To keep precision, the
// kernels subtract logits that are reduced by their row's maximum, never log-sum-exps.

#include "losses/linear_distillation_table.h"

#include <math.h>

#include "core/row_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {
namespace {

using kernels::DistillationRule;
using kernels::Divergence;

// Adds the bias to the raw logits z, and returns the largest sum.
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

// One class's term of the divergence, where p is the student's and q the teacher's probability. `surprise` is
// log(p / q) for reverse_kl and log(p / m) for jsd, with the mixture m. For forward_kl it is 0, because the
// gradient does not need it.
template <class V>
struct Share {
  V loss, surprise;
};

template <Divergence kDivergence, class T>
struct Pair {
  using V = RegisterOf<T>;

  // Computes the term of one class from p, q and r = log(q / p), where p is the student's and q the teacher's
  // probability.
  SHOESTRING_METHOD Share<V> share(V p, V q, V r) const {
    if constexpr (kDivergence == Divergence::kForwardKl) {
      return {q == 0 ? V{} : q * r, V{}};
    } else if constexpr (kDivergence == Divergence::kReverseKl) {
      return {p == 0 ? V{} : -p * r, p == 0 ? V{} : -r};
    } else {
      // of_larger is log(m / max(p, q)), where m is the mixture of p and q. m / max(p, q) is at least
      // min(beta, 1 - beta). Each term of the loss is of first order in q - p, while the sum of the terms is
      // of second order. The formulas therefore never add 1 to a small number, which would lose precision.
      V of_larger = log_of_rest((r > 0 ? V{} + other : V{} + beta) * one_less_exp(abs(r)));
      V of_student = -(r > 0 ? of_larger + r : of_larger), of_teacher = -(r > 0 ? of_larger : of_larger - r);
      V surprise = p == 0 ? V{} : of_student;
      return {beta * (q == 0 ? V{} : q * of_teacher) + other * (p * surprise), surprise};
    }
  }

  // Calls body(offset, count, p, q, r) for each vector of the row. p are the student's probabilities, q the
  // teacher's, and r = log(q / p).
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
  // student_share is 1 / (sum of the student's exponentials), and teacher_share is 1 / (sum of the teacher's
  // exponentials)
  T student_max, teacher_max, student_share, teacher_share;
  T offset;       // log(sum of the student's exponentials / sum of the teacher's)
  T beta, other;  // other is 1 - beta, the student's weight in the mixture m
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

  double loss = 0, mean = 0;  // mean is the sum of p * surprise over all classes
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
  // `offset`, the difference of the log-sum-exps of student and teacher, was rounded to T. The returned loss
  // is corrected for this rounding. The correction of jsd would be of second order, so jsd has none.
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
