#include "catch.h"

#include <algorithm>
#include <vector>

#include "optim/split/owners.h"

using shoestring::optim::detail::matrix_cost;
using shoestring::optim::detail::owners_of;

TEST_CASE("owners of the matrices of Llama have equal work", "[optim]") {
  // Widths of Llama 3.2 1B and Llama 3 8B: attention with grouped keys, and a gated MLP, in 16 and 32 layers.
  struct Model {
    double width, keys, hidden;
    int layers;
  };
  for (const Model& m : {Model{2048, 512, 8192, 16}, Model{4096, 1024, 14336, 32}}) {
    std::vector<double> costs;
    const auto add = [&](double rows, double columns) {
      costs.push_back(matrix_cost({static_cast<int64_t>(rows), static_cast<int64_t>(columns)}));
    };
    for (int i = 0; i < m.layers; ++i) {
      for (const double rows : {m.width, m.keys, m.keys, m.width}) add(rows, m.width);
      for (int k = 0; k < 3; ++k) add(m.hidden, m.width);
    }
    double total = 0;
    for (const double cost : costs) total += cost;
    for (const int64_t ranks : {1, 2, 4, 8, 16}) {
      std::vector<double> work(static_cast<size_t>(ranks));
      const auto owners = owners_of(costs, ranks);
      for (size_t i = 0; i < costs.size(); ++i) work[static_cast<size_t>(owners[i])] += costs[i];
      CAPTURE(m.width, ranks);
      CHECK(*std::max_element(work.begin(), work.end()) <= 1.1 * total / static_cast<double>(ranks));
    }
  }
}
