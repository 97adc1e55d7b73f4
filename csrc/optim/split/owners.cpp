#include "optim/split/owners.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <ATen/Functions.h>

#include "optim/split/all_reduce.h"

namespace shoestring::optim::detail {

using at::Tensor;

std::vector<int64_t> owners_of(const std::vector<double>& costs, int64_t ranks) {
  std::vector<size_t> order(costs.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return costs[a] > costs[b]; });
  std::vector<double> work(static_cast<size_t>(ranks));
  std::vector<int64_t> owners(costs.size());
  for (const size_t i : order) {
    const auto least = std::min_element(work.begin(), work.end());
    *least += costs[i];
    owners[i] = least - work.begin();
  }
  return owners;
}

double matrix_cost(at::IntArrayRef sizes) {
  const auto least = static_cast<double>(std::min(sizes[0], sizes[1]));
  return least * (2.0 * static_cast<double>(sizes[0] * sizes[1]) + least * least);
}

void on_owners(std::vector<SplitMatrix>& matrices, std::optional<at::ScalarType> dtype, int64_t first,
               const std::function<Tensor(size_t, Tensor)>& compute) {
  if (matrices.empty()) return;
  const SplitParameter& any = *matrices[0].split;
  const auto ranks = any.begins.size() - 1;
  const auto this_rank = static_cast<size_t>(any.piece);
  const auto part_of = [&](size_t i, size_t rank) {
    const auto& begins = matrices[i].split->begins;
    return begins[rank + 1] - begins[rank];
  };
  std::vector<double> costs;
  for (const SplitMatrix& m : matrices) costs.push_back(m.cost);
  const std::vector<int64_t> owners = owners_of(costs, static_cast<int64_t>(ranks));
  std::vector<std::vector<size_t>> of_rank(ranks);  // the matrices of each owner
  for (size_t i = 0; i < matrices.size(); ++i)
    of_rank[static_cast<size_t>(owners[i] + first) % ranks].push_back(i);
  size_t rounds = 0;
  for (const auto& some : of_rank) rounds = std::max(rounds, some.size());

  // In each round every owner has one matrix. A rank sends its parts to the owners, whose whole matrices are
  // the parts in the order of the ranks.
  for (size_t round = 0; round < rounds; ++round) {
    std::vector<Tensor> parts;
    std::vector<int64_t> to_owners(ranks), from_ranks(ranks);
    for (size_t owner = 0; owner < ranks; ++owner) {
      if (round >= of_rank[owner].size()) continue;
      const size_t i = of_rank[owner][round];
      parts.push_back(std::exchange(matrices[i].part, Tensor()).reshape({-1}));
      to_owners[owner] = part_of(i, this_rank);
    }
    const bool has_one = round < of_rank[this_rank].size();
    const size_t mine = has_one ? of_rank[this_rank][round] : 0;
    if (has_one) {
      for (size_t rank = 0; rank < ranks; ++rank) from_ranks[rank] = part_of(mine, rank);
    }
    Tensor whole = all_to_all(at::cat(parts), from_ranks, to_owners, any.groups[0]);
    parts.clear();
    Tensor result;
    if (has_one) result = compute(mine, whole.view(matrices[mine].split->sizes));
    if (!dtype) continue;
    result = has_one ? result.reshape({-1}) : at::empty({0}, whole.options().dtype(*dtype));
    whole.reset();
    const Tensor back = all_to_all(result, to_owners, from_ranks, any.groups[0]);
    int64_t begin = 0;
    for (size_t owner = 0; owner < ranks; ++owner) {
      if (round >= of_rank[owner].size()) continue;
      matrices[of_rank[owner][round]].part = back.narrow(0, begin, to_owners[owner]);
      begin += to_owners[owner];
    }
  }
}

}  // namespace shoestring::optim::detail
