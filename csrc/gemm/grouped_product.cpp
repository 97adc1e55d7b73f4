// Products of groups on the CPU. A part of one group's result is a task, which one thread computes as a
// product of its own. Tasks are taken from a queue, the largest first. A task divides the result, never the
// depth, so that bits do not depend on the division.

#include "gemm/grouped_product.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include "core/threads.h"
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

// Calls body(i) for i in [0, count) from several threads, in this order as threads become free.
template <class Body>
void for_each_task(int64_t count, double multiplications, const Body& body) {
  const int64_t threads = std::min(count, threads_for(multiplications));
  if (threads <= 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  std::atomic<int64_t> next = 0;
  at::parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
    for (int64_t thread = first; thread < last; ++thread) {
      for (int64_t i = next++; i < count; i = next++) body(i);
    }
  });
}

// A part of the result of a group.
struct Task {
  int64_t group, row, rows, column, columns;
};

// Divides the results of all groups into tasks. sizes: the rows of the result of each group.
std::vector<Task> tasks_of(const std::vector<int64_t>& sizes, int64_t columns,
                           const std::vector<double>& cost) {
  double total = 0;
  for (const double c : cost) total += c;
  const double most = std::max(1.0, total / static_cast<double>(kTasksPerThread * at::get_num_threads()));
  std::vector<Task> tasks;
  std::vector<double> weight;
  for (size_t g = 0; g < sizes.size(); ++g) {
    const int64_t rows = sizes[g];
    if (rows == 0 || columns == 0) continue;
    const auto pieces = static_cast<int64_t>(cost[g] / most) + 1;
    // The longer side is divided first: its parts are the least of all copies of panels of the other side.
    const bool by_row = rows >= columns;
    const int64_t long_side = by_row ? rows : columns, least = by_row ? kLeastRows : kLeastColumns;
    const int64_t parts = std::clamp<int64_t>(long_side / least, 1, pieces);
    const int64_t step = parts_of(long_side, parts);
    for (int64_t at = 0; at < long_side; at += step) {
      const int64_t some = std::min(step, long_side - at);
      tasks.push_back(by_row ? Task{static_cast<int64_t>(g), at, some, 0, columns}
                             : Task{static_cast<int64_t>(g), 0, rows, at, some});
      weight.push_back(cost[g] * static_cast<double>(some) / static_cast<double>(long_side));
    }
  }
  std::vector<size_t> order(tasks.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return weight[a] > weight[b]; });
  std::vector<Task> sorted;
  sorted.reserve(tasks.size());
  for (const size_t i : order) sorted.push_back(tasks[i]);
  return sorted;
}

std::vector<int64_t> sizes_of(c10::ArrayRef<int64_t> offsets) {
  std::vector<int64_t> sizes;
  for (size_t e = 0; e + 1 < offsets.size(); ++e) sizes.push_back(offsets[e + 1] - offsets[e]);
  return sizes;
}

std::vector<double> costs_of(const std::vector<int64_t>& sizes, int64_t m, int64_t n) {
  std::vector<double> costs;
  for (const int64_t size : sizes) costs.push_back(static_cast<double>(size * m) * static_cast<double>(n));
  return costs;
}

double sum_of(const std::vector<double>& costs) {
  double sum = 0;
  for (const double cost : costs) sum += cost;
  return sum;
}

void add_row(float* to, const float* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] += from[i];
}

}  // namespace

void multiply_slots(at::ScalarType compute, const Tensor& out, const Slots& a, c10::ArrayRef<int64_t> offsets,
                    GroupOperand b, const Tensor& offset) {
  const int64_t depth = a.matrix.size(1), columns = out.size(1);
  const auto sizes = sizes_of(offsets);
  const auto costs = costs_of(sizes, depth, columns);
  const auto zero = [&](int64_t first, int64_t last) {
    if (first < last) out.narrow(0, first, last - first).zero_();
  };
  zero(0, offsets.front());
  zero(offsets.back(), out.size(0));
  const auto tasks = tasks_of(sizes, columns, costs);
  for_each_task(std::ssize(tasks), sum_of(costs), [&](int64_t i) {
    const Task& task = tasks[i];
    const int64_t first = offsets[task.group] + task.row, end = task.column + task.columns;
    const Tensor part = out.narrow(0, first, task.rows).narrow(1, task.column, task.columns);
    const Tensor added =
        offset.defined() ? offset[task.group].narrow(0, task.column, task.columns) : Tensor();
    if (depth == 0) {
      added.defined() ? Tensor(part).copy_(added.expand_as(part)) : Tensor(part).zero_();
      return;
    }
    gemm_sum(compute, part, {{a.operand(first, first + task.rows, false), b(task.group, task.column, end)}},
             {}, added);
  });
}

void sum_slots(at::ScalarType compute, const Tensor& out, const Tensor& a, c10::ArrayRef<int64_t> rows,
               c10::ArrayRef<int64_t> offsets, GroupOperand b) {
  const int64_t columns = out.size(1), depth = a.size(1);
  const auto costs = costs_of(sizes_of(offsets), depth, columns);
  const bool direct = out.scalar_type() == at::kFloat && out.is_contiguous();
  const Tensor sums = direct ? out : at::empty(out.sizes(), out.options().dtype(at::kFloat));
  const int64_t parts = std::clamp<int64_t>(columns / kLeastColumns, 1, 2 * at::get_num_threads());
  const int64_t step = parts_of(columns, parts);
  for_each_task(columns == 0 ? 0 : parts_of(columns, step), sum_of(costs), [&](int64_t part) {
    const int64_t column = part * step, some = std::min(step, columns - column);
    sums.narrow(1, column, some).zero_();
    if (depth == 0) return;
    float* to = sums.mutable_data_ptr<float>() + column;
    const Tensor products = at::empty({kRowsToAdd, some}, sums.options());
    const float* from = products.const_data_ptr<float>();
    for (size_t e = 0; e + 1 < offsets.size(); ++e) {
      for (int64_t first = offsets[e]; first < offsets[e + 1]; first += kRowsToAdd) {
        const int64_t count = std::min(kRowsToAdd, offsets[e + 1] - first);
        gemm_sum(compute, products.narrow(0, 0, count),
                 {{a.narrow(0, first, count), b(static_cast<int64_t>(e), column, column + some)}});
        for (int64_t i = 0; i < count; ++i) add_row(to + rows[first + i] * columns, from + i * some, some);
      }
    }
  });
  if (!direct) Tensor(out).copy_(sums);
}

void multiply_by_group(at::ScalarType compute, const Tensor& out, const Slots& a, const Slots& b,
                       c10::ArrayRef<int64_t> offsets) {
  const int64_t m = out.size(1), n = out.size(2);
  const auto sizes = sizes_of(offsets);
  std::vector<double> costs = costs_of(sizes, m, n);
  for (double& cost : costs)
    cost += kWritingAsMultiplications * static_cast<double>(m) * static_cast<double>(n);
  const auto tasks = tasks_of(std::vector<int64_t>(sizes.size(), m), n, costs);
  for_each_task(std::ssize(tasks), sum_of(costs), [&](int64_t i) {
    const Task& task = tasks[i];
    const int64_t first = offsets[task.group], last = offsets[task.group + 1];
    const Tensor part = out[task.group].narrow(0, task.row, task.rows).narrow(1, task.column, task.columns);
    if (first == last) {
      Tensor(part).zero_();
      return;
    }
    gemm_sum(compute, part,
             {{a.columns(task.row, task.rows).operand(first, last, true),
               b.columns(task.column, task.columns).operand(first, last, false)}});
  });
}

}  // namespace shoestring::gemm
