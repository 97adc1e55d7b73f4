#include "checkpoint/plan.h"

// Finds the best checkpoint plan by dynamic programming over Pareto-optimal states.

#include <limits>
#include <numeric>
#include <optional>
#include <utility>

#include <c10/util/Exception.h>

#include "checkpoint/plan_bound.h"

namespace shoestring::plan {

std::vector<int64_t> best(const std::vector<Criteria>& all, int count) {
  std::vector<int64_t> order(all.size());
  std::iota(order.begin(), order.end(), 0);
  // Sort the states lexicographically by their criteria. A state that is at least as good as another state in
  // all criteria then comes before it.
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return std::lexicographical_compare(all[a].begin(), all[a].begin() + count, all[b].begin(),
                                        all[b].begin() + count);
  });
  std::vector<int64_t> kept_states;
  std::vector<Criteria> values;
  for (const int64_t i : order) {
    const Criteria& candidate = all[i];
    bool needed = true;
    for (size_t j = values.size(); needed && j-- > 0;) {
      bool better = true;
      for (int d = 0; better && d < count; ++d) better = values[j][d] <= candidate[d];
      needed = !better;
    }
    if (needed) kept_states.push_back(i), values.push_back(candidate);
  }
  return kept_states;
}

namespace {

constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

struct Origin {
  // How the search reached a state. `state` is the index of the preceding state among all states after the
  // previous block. `choice` is the choice of the last block.
  int64_t state, choice;
};

int memory_criteria(const Model& model, const State& s, Criteria& to) {
  int count = 0;
  to[count++] = s.held;
  // The memory criteria of a state are the bytes on the device during the next block, during the block after
  // it, and so on. Each is the sum of the held bytes and of the bytes that are being copied back at that
  // time.
  for (int last = model.prefetch - 1; last >= 0; --last) {
    int64_t sum = s.held;
    for (int j = 0; j <= last; ++j) sum += s.link[j];
    to[count++] = sum;
  }
  return count;
}

// Writes all criteria of a state to `to`: the memory criteria, and sums of a forward time and a backward
// time. The total time of a plan is the length of its longest chain of dependent operations, through forward
// and then backward. The length of each chain is one of these sums plus the time of later blocks.
int all_criteria(const Model& model, const State& s, Criteria& to) {
  int count = memory_criteria(model, s, to);
  for (const int64_t forward : {s.out, s.compute}) {
    for (int j = 0; j < model.prefetch; ++j) to[count++] = forward + s.arrival[j];
    to[count++] = forward + s.rest;
  }
  return count;
}

struct Search {
  std::vector<State> last;                   // the states after all blocks so far
  std::vector<std::vector<Origin>> origins;  // origins[i]: where each state after block i came from
  bool complete = true;  // false if states were discarded that might have led to a better plan
};

// Extends the states of the search block by block. `criteria(state, done, to)` fills the array `to` with the
// state's criteria, which decide which of two states is better, and returns their number. It returns 0 if the
// state cannot lead to a valid plan. If more than `widest` states remain after a block, only those with the
// smallest `rank(state, done)` continue.
template <class Compare, class Rank>
Search extend(const Model& model, int64_t budget, Compare criteria, Rank rank, size_t widest) {
  Search search{{State()}, {}};
  for (size_t i = 0; i < model.blocks.size(); ++i) {
    std::vector<State> next;
    std::vector<Origin> from;
    std::vector<Criteria> values;
    int count = 0;
    for (size_t s = 0; s < search.last.size(); ++s) {
      for (size_t c = 0; c < model.blocks[i].choices.size(); ++c) {
        const State state = step(model, search.last[s], model.blocks[i], model.blocks[i].choices[c], budget);
        Criteria to{};
        const int state_count = criteria(state, i + 1, to);
        if (state_count == 0) continue;
        count = state_count;
        next.push_back(state), from.push_back({int64_t(s), int64_t(c)}), values.push_back(to);
      }
    }
    std::vector<int64_t> kept_states = best(values, count);
    if (kept_states.size() > widest) {
      std::vector<int64_t> ranks(next.size());
      for (const int64_t k : kept_states) ranks[k] = rank(next[k], i + 1);
      std::nth_element(kept_states.begin(), kept_states.begin() + widest, kept_states.end(),
                       [&](int64_t a, int64_t b) { return std::pair(ranks[a], a) < std::pair(ranks[b], b); });
      kept_states.resize(widest);
      search.complete = false;
    }
    search.last.clear();
    search.origins.emplace_back();
    for (const int64_t k : kept_states)
      search.last.push_back(next[k]), search.origins.back().push_back(from[k]);
  }
  return search;
}

// Returns the smallest peak memory of all plans, in bytes. The search assumes a budget of zero, so each block
// waits until all copies to the host have finished.
int64_t least_budget(const Model& model) {
  const auto criteria = [&](const State& s, size_t, Criteria& to) {
    const int count = memory_criteria(model, s, to);
    to[count] = s.peak;
    return count + 1;
  };
  int64_t least = kNone;
  for (const State& s :
       extend(model, 0, criteria, [](const State& s, size_t) { return s.peak; }, kNone).last) {
    least = std::min(least, s.peak);
  }
  return least;
}

}  // namespace
}  // namespace shoestring::plan

namespace shoestring {

// Limit of the number of states, summed over all blocks. With it, a search takes a second or two.
constexpr size_t kStates = 100000;

CheckpointPlan checkpoint_plan(const std::vector<PlanBlock>& blocks, int64_t budget,
                               const CheckpointPlanOptions& options) {
  constexpr const char* op = "checkpoint_plan";
  const plan::Model model = plan::make_model(op, blocks, budget, options);
  const plan::Bound bound(model, budget);
  // The time, in picoseconds, of the best plan so far. States that cannot lead to a faster plan are
  // discarded.
  int64_t least = plan::kNone;
  std::vector<int64_t> choices;
  bool complete = false;
  // A narrow search, which keeps few states per block, finds a good plan first. With the time of this plan as
  // a limit, the wide search can discard many states.
  for (const size_t widest : {size_t{64}, kStates / std::max<size_t>(blocks.size(), 1)}) {
    const auto criteria = [&](const plan::State& s, size_t done, plan::Criteria& to) {
      if (s.peak > budget || bound(s, done) >= least) return 0;
      return plan::all_criteria(model, s, to);
    };
    const plan::Search search = plan::extend(model, budget, criteria, bound, widest);
    int64_t at = -1;
    for (size_t s = 0; s < search.last.size(); ++s) {
      if (search.last[s].seconds() < least) least = search.last[s].seconds(), at = s;
    }
    if (at >= 0) {
      choices.resize(blocks.size());
      for (size_t i = blocks.size(); i-- > 0;) {
        choices[i] = search.origins[i][at].choice, at = search.origins[i][at].state;
      }
    }
    complete = search.complete;
    if (complete) break;
  }
  TORCH_CHECK(least != plan::kNone, op, ": budget: expected at least ", plan::least_budget(model),
              " bytes, received ", budget, "; raise the budget, or add choices that keep less memory");
  CheckpointPlan result = plan::simulate(model, std::move(choices), budget);
  result.least_seconds =
      complete ? result.seconds : std::min(result.seconds, bound(plan::State(), 0) * 1e-12);
  return result;
}

}  // namespace shoestring
