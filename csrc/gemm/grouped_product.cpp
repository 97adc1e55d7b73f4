// Products of groups on the CPU. A part of one group's result is a task, which one thread computes as a
// product of its own. Tasks are taken from a queue, the largest first. A task divides the result, never the
// depth, so that bits do not depend on the division.

#include "gemm/grouped_product.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <numeric>
#include <optional>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/SmallVector.h>

#include "core/huge_pages.h"
#include "core/threads.h"
#include "gemm/add_row_table.h"
#include "gemm/gemm.h"

namespace shoestring::gemm {
namespace {

using at::Tensor;

// A task has at least so many rows or columns, unless its group has fewer: with fewer, packing takes too
// large a share of the time.
constexpr int64_t kLeastRows = 128, kLeastColumns = 256;
constexpr int64_t kTasksPerThread = 8;
// A result is written in the time of so many multiplications of each of its elements.
constexpr double kWritingAsMultiplications = 8;
// The rows of a group that are multiplied before their results are added, so that these stay in the cache.
constexpr int64_t kRowsToAdd = 256;

// Calls body(i, then) for i in [0, count) from several threads, in this order as threads become free. `then`
// is the number that the thread probably gets next, if that is below count.
template <class Body>
void for_each_task(int64_t count, double multiplications, const Body& body) {
  const int64_t threads = std::min(count, threads_for(multiplications));
  std::atomic<int64_t> next = 0;
  at::parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
    const at::AutoDispatchBelowADInplaceOrView below;  // threads do not inherit that of the operator
    for (int64_t thread = first; thread < last; ++thread) {
      for (int64_t i = next++; i < count; i = next++) body(i, next.load() + threads - 1);
    }
  });
}

// A part of the result of a group.
struct Task {
  int64_t group, row, rows, column, columns;
  double cost;
};

// The tasks of all groups, the largest first.
struct Tasks {
  // sizes, cost: the rows of the result of each group, and its multiplications.
  Tasks(const std::vector<int64_t>& sizes, int64_t columns, const std::vector<double>& cost)
      : total(std::accumulate(cost.begin(), cost.end(), 0.0)) {
    const double most = std::max(1.0, total / static_cast<double>(kTasksPerThread * at::get_num_threads()));
    for (size_t g = 0; g < sizes.size(); ++g) {
      const int64_t rows = sizes[g];
      if (rows == 0 || columns == 0) continue;
      // The longer side is divided, which repeats the packing of the shorter side alone.
      const bool by_row = rows >= columns;
      const int64_t side = by_row ? rows : columns, least = by_row ? kLeastRows : kLeastColumns;
      const int64_t parts = std::clamp<int64_t>(side / least, 1, static_cast<int64_t>(cost[g] / most) + 1);
      for (int64_t at = 0, step = parts_of(side, parts); at < side; at += step) {
        const int64_t some = std::min(step, side - at);
        const double share = cost[g] * static_cast<double>(some) / static_cast<double>(side);
        const auto group = static_cast<int64_t>(g);
        all.push_back(by_row ? Task{group, at, some, 0, columns, share}
                             : Task{group, 0, rows, at, some, share});
      }
    }
    std::ranges::stable_sort(all, std::greater<>(), &Task::cost);
  }

  // Calls body(task, then), where `then` points to the task that the thread probably gets next, or is null.
  template <class Body>
  void run(const Body& body) const {
    for_each_task(std::ssize(all), total, [&](int64_t i, int64_t then) {
      body(all[i], then < std::ssize(all) ? &all[then] : nullptr);
    });
  }

  double total;
  std::vector<Task> all{};
};

std::vector<int64_t> sizes_of(c10::ArrayRef<int64_t> offsets) {
  std::vector<int64_t> sizes;
  for (size_t e = 0; e + 1 < offsets.size(); ++e) sizes.push_back(offsets[e + 1] - offsets[e]);
  return sizes;
}

// Returns the multiplications of the result of each group, where a slot takes m n of them.
std::vector<double> costs_of(const std::vector<int64_t>& sizes, int64_t m, int64_t n) {
  std::vector<double> costs;
  for (const int64_t size : sizes) costs.push_back(static_cast<double>(size * m) * static_cast<double>(n));
  return costs;
}

void zero_rows(const Tensor& out, int64_t first, int64_t last) {
  if (first < last) out.narrow(0, first, last - first).zero_();
}

// ---- fp64, for gradient checks: a loop over the groups

Tensor tensor_of(const Factor& factor) {
  if (const ComputedMatrix* computed = factor.computed) {
    const Tensor all = at::empty({computed->rows(), computed->columns()}, at::kFloat);
    computed->read(0, computed->rows(), 0, computed->columns(), all.mutable_data_ptr<float>());
    return (factor.transposed ? all.t() : all).to(at::kDouble);
  }
  if (!factor.gathered) return factor.matrix;
  const Tensor index = at::tensor(factor.index, at::kLong);
  const Tensor rows = factor.matrix.index_select(0, index);
  return factor.transposed ? rows.t() : rows;
}

Tensor product_in_double(const Factor& a, const Factor& b, const Tensor& offset) {
  const Tensor product = at::mm(tensor_of(a), tensor_of(b));
  return offset.defined() ? product + offset : product;
}

// Adds the product of `more` for the slots [first, last) of a group.
Tensor added_in_double(Tensor product, const SlotTerm& more, int64_t group, int64_t first, int64_t last) {
  if (more.low.defined())
    product.addmm_(more.low.narrow(0, first, last - first), tensor_of(more.b(group, 0, product.size(1))));
  return product;
}

// Returns the next group with slots, or -1.
int64_t next_group(c10::ArrayRef<int64_t> offsets, int64_t group) {
  const auto last = std::ssize(offsets) - 1;
  while (++group < last && offsets[group] == offsets[group + 1]) {
  }
  return group < last ? group : -1;
}

// Calls body(group, first, last) for the slots of each group.
template <class Body>
void for_each_group(c10::ArrayRef<int64_t> offsets, const Body& body) {
  for (size_t e = 0; e + 1 < offsets.size(); ++e) body(static_cast<int64_t>(e), offsets[e], offsets[e + 1]);
}

}  // namespace

void multiply_slots(at::ScalarType compute, const Tensor& out, const Slots& a, c10::ArrayRef<int64_t> offsets,
                    GroupOperand b, const Tensor& offset, const SlotTerm& more) {
  const int64_t depth = a.matrix.size(1), columns = out.size(1);
  zero_rows(out, 0, offsets.front());
  zero_rows(out, offsets.back(), out.size(0));
  const auto added = [&](int64_t group, int64_t first, int64_t last) {
    return offset.defined() ? offset[group].narrow(0, first, last - first) : Tensor();
  };
  if (compute == at::kDouble) {
    return for_each_group(offsets, [&](int64_t e, int64_t first, int64_t last) {
      const Tensor product =
          product_in_double(a.operand(first, last, false), b(e, 0, columns), added(e, 0, columns));
      out.narrow(0, first, last - first).copy_(added_in_double(product, more, e, first, last));
    });
  }
  const auto sizes = sizes_of(offsets);
  Tasks(sizes, columns, costs_of(sizes, depth, columns)).run([&](const Task& task, const Task* then) {
    const int64_t first = offsets[task.group] + task.row, end = task.column + task.columns;
    const Tensor part = out.narrow(0, first, task.rows).narrow(1, task.column, task.columns);
    const Tensor bias = added(task.group, task.column, end);
    if (depth == 0) {
      part.copy_(bias.defined() ? bias.expand_as(part) : at::zeros({}, part.options()));
    } else {
      std::optional<Factor> next;
      if (then != nullptr) next = b(then->group, then->column, then->column + then->columns);
      c10::SmallVector<Term, 2> terms{
          {a.operand(first, first + task.rows, false), b(task.group, task.column, end)}};
      if (more.low.defined())
        terms.push_back({more.low.narrow(0, first, task.rows), more.b(task.group, task.column, end)});
      gemm_sum(compute, part, terms, {}, bias, next.has_value() ? &*next : nullptr);
    }
  });
}

void sum_slots(at::ScalarType compute, const Tensor& out, const Tensor& a, c10::ArrayRef<int64_t> rows,
               c10::ArrayRef<int64_t> offsets, GroupOperand b, const Tensor& offset, const Tensor& scale,
               const SlotTerm& more) {
  const int64_t columns = out.size(1), depth = a.size(1);
  if (compute == at::kDouble) {
    out.zero_();
    return for_each_group(offsets, [&](int64_t e, int64_t first, int64_t last) {
      Tensor product = product_in_double(a.narrow(0, first, last - first), b(e, 0, columns),
                                         offset.defined() ? offset[e] : Tensor());
      product = added_in_double(product, more, e, first, last);
      if (scale.defined()) product.mul_(scale.narrow(0, first, last - first).unsqueeze(1));
      out.index_add_(0, at::tensor(rows.slice(first, last - first), at::kLong), product);
    });
  }
  const bool direct = out.scalar_type() == at::kFloat && out.is_contiguous();
  const Tensor sums = direct ? out : in_huge_pages(at::empty(out.sizes(), out.options().dtype(at::kFloat)));
  const int64_t parts = std::clamp<int64_t>(columns / kLeastColumns, 1, 2 * at::get_num_threads());
  const int64_t step = parts_of(columns, parts);
  const double multiplications =
      static_cast<double>(offsets.back() - offsets.front()) * static_cast<double>(depth * columns);
  const auto add = cpu::add_row().add;
  const float* factors = scale.defined() ? scale.const_data_ptr<float>() : nullptr;
  for_each_task(columns == 0 ? 0 : parts_of(columns, step), multiplications, [&](int64_t part, int64_t) {
    const int64_t column = part * step, some = std::min(step, columns - column);
    sums.narrow(1, column, some).zero_();
    float* to = sums.mutable_data_ptr<float>() + column;
    const Tensor products = depth == 0 ? at::zeros({kRowsToAdd, some}, sums.options())
                                       : at::empty({kRowsToAdd, some}, sums.options());
    const float* from = products.const_data_ptr<float>();
    for_each_group(offsets, [&](int64_t e, int64_t begin, int64_t end) {
      if (begin == end) return;
      const float* bias = offset.defined() ? offset[e].const_data_ptr<float>() + column : nullptr;
      const Factor factor = b(e, column, column + some);
      const int64_t after = next_group(offsets, e);
      std::optional<Factor> next;
      if (after >= 0) next = b(after, column, column + some);
      for (int64_t first = begin; first < end; first += kRowsToAdd) {
        const int64_t count = std::min(kRowsToAdd, end - first);
        if (depth > 0) {
          c10::SmallVector<Term, 2> terms{{a.narrow(0, first, count), factor}};
          if (more.low.defined())
            terms.push_back({more.low.narrow(0, first, count), more.b(e, column, column + some)});
          gemm_sum(compute, products.narrow(0, 0, count), terms, {}, {}, next.has_value() ? &*next : nullptr);
        }
        for (int64_t i = 0; i < count; ++i) {
          add(to + rows[first + i] * columns, from + i * some, bias,
              factors == nullptr ? 1 : factors[first + i], some);
        }
      }
    });
  });
  if (!direct) out.copy_(sums);
}

void multiply_by_group(at::ScalarType compute, const Tensor& out, const Slots& a, const Slots& b,
                       c10::ArrayRef<int64_t> offsets) {
  const int64_t m = out.size(1), n = out.size(2);
  if (compute == at::kDouble) {
    return for_each_group(offsets, [&](int64_t e, int64_t first, int64_t last) {
      out[e].copy_(product_in_double(a.operand(first, last, true), b.operand(first, last, false), {}));
    });
  }
  const auto sizes = sizes_of(offsets);
  std::vector<double> costs = costs_of(sizes, m, n);
  for (double& cost : costs)
    cost += kWritingAsMultiplications * static_cast<double>(m) * static_cast<double>(n);
  Tasks(std::vector<int64_t>(sizes.size(), m), n, costs).run([&](const Task& task, const Task*) {
    const int64_t first = offsets[task.group], last = offsets[task.group + 1];
    const Tensor part = out[task.group].narrow(0, task.row, task.rows).narrow(1, task.column, task.columns);
    if (first == last) {
      part.zero_();
    } else {
      gemm_sum(compute, part,
               {{a.columns(task.row, task.rows).operand(first, last, true),
                 b.columns(task.column, task.columns).operand(first, last, false)}});
    }
  });
}

}  // namespace shoestring::gemm
