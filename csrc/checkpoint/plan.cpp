#include "checkpoint/plan.h"

// Finds the best checkpoint plan by dynamic programming over Pareto-optimal states.

#include <iterator>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <tuple>
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
  if (count == 3) {
    // All states before a state are at least as good in the first criterion. `staircase` maps the second
    // criterion of those that are optimal in the other two to the third, which falls along the map.
    std::map<int64_t, int64_t> staircase;
    for (const int64_t i : order) {
      const int64_t second = all[i][1], third = all[i][2];
      auto above = staircase.upper_bound(second);
      if (above != staircase.begin() && std::prev(above)->second <= third) continue;
      while (above != staircase.end() && above->second >= third) above = staircase.erase(above);
      staircase[second] = third;
      kept_states.push_back(i);
    }
    return kept_states;
  }
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
// state cannot lead to a valid plan. If more than `widest` states remain after a block, `narrow(next, done,
// kept)` reorders `kept`, the indices of the remaining states in `next`, and the first `widest` continue.
template <class Compare, class Narrow>
Search extend(const Model& model, int64_t budget, Compare criteria, Narrow narrow, size_t widest) {
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
      narrow(next, i + 1, kept_states);
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

// Returns the choices of all blocks that led to the state `at` after the last block.
std::vector<int64_t> choices_of(const Search& search, int64_t at) {
  std::vector<int64_t> choices(search.origins.size());
  for (size_t i = choices.size(); i-- > 0;) {
    choices[i] = search.origins[i][at].choice, at = search.origins[i][at].state;
  }
  return choices;
}

// A plan of the frontier. `budget`: the budget for which forward waits.
struct Point {
  int64_t peak, ticks, budget;
  std::vector<int64_t> choices;
};

// Returns the plan with the smallest peak memory, whose budget is this peak. The search assumes a budget of
// zero, so each block waits until all copies to the host have finished.
Point smallest(const Model& model) {
  const auto criteria = [&](const State& s, size_t, Criteria& to) {
    const int count = memory_criteria(model, s, to);
    to[count] = s.peak;
    return count + 1;
  };
  const Search search = extend(model, 0, criteria, [](const auto&, size_t, auto&) {}, kNone);
  int64_t at = 0;
  for (size_t s = 0; s < search.last.size(); ++s) {
    if (search.last[s].peak < search.last[at].peak) at = static_cast<int64_t>(s);
  }
  const int64_t peak = search.last[at].peak;
  std::vector<int64_t> choices = choices_of(search, at);
  State state;
  for (size_t i = 0; i < choices.size(); ++i)
    state = step(model, state, model.blocks[i], model.blocks[i].choices[choices[i]], peak);
  return {peak, state.seconds(), peak, std::move(choices)};
}

// Adds the plans that are optimal in peak and time if forward waits as it would with `budget`. At most
// `widest` states continue after a block.
void add_points(const Model& model, int64_t budget, bool copies, size_t widest, std::vector<Point>& points) {
  const auto criteria = [&](const State& s, size_t, Criteria& to) {
    int count = 1;
    if (copies) {
      count = all_criteria(model, s, to);
    } else {
      to[0] = s.held, to[count++] = s.seconds();
    }
    to[count++] = s.peak;
    return count;
  };
  // Keep the states with the least peak and the least time, and others at equal distances, in the order of
  // their held bytes, which is that of `kept`.
  const auto narrow = [&](const std::vector<State>& next, size_t, std::vector<int64_t>& kept) {
    std::vector<int64_t> chosen;
    const auto add_least = [&](const auto& key) {
      chosen.push_back(*std::min_element(kept.begin(), kept.end(),
                                         [&](int64_t a, int64_t b) { return key(next[a]) < key(next[b]); }));
    };
    add_least([](const State& s) { return std::pair(s.peak, s.seconds()); });
    add_least([](const State& s) { return std::pair(s.seconds(), s.peak); });
    const size_t places = widest - chosen.size();
    for (size_t i = 0; i < places; ++i) chosen.push_back(kept[i * (kept.size() - 1) / (places - 1)]);
    kept = std::move(chosen);
  };
  const Search search = extend(model, budget, criteria, narrow, widest);
  for (size_t s = 0; s < search.last.size(); ++s) {
    const State& state = search.last[s];
    points.push_back({state.peak, state.seconds(), budget, choices_of(search, static_cast<int64_t>(s))});
  }
}

}  // namespace
}  // namespace shoestring::plan

namespace shoestring {

// Limit of the number of states, summed over all blocks. With it, a search takes a second or two.
constexpr size_t kStates = 100000;
// Limits of the number of states after each block of a frontier, without and with copies to the host.
constexpr size_t kFrontierStates = 1024, kLinkStates = 48;

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
    const auto narrow = [&](const std::vector<plan::State>& next, size_t done, std::vector<int64_t>& kept) {
      std::vector<int64_t> bounds(next.size());
      for (const int64_t k : kept) bounds[k] = bound(next[k], done);
      std::nth_element(kept.begin(), kept.begin() + widest, kept.end(), [&](int64_t a, int64_t b) {
        return std::pair(bounds[a], a) < std::pair(bounds[b], b);
      });
    };
    const plan::Search search = plan::extend(model, budget, criteria, narrow, widest);
    int64_t at = -1;
    for (size_t s = 0; s < search.last.size(); ++s) {
      if (search.last[s].seconds() < least) least = search.last[s].seconds(), at = s;
    }
    if (at >= 0) choices = plan::choices_of(search, at);
    complete = search.complete;
    if (complete) break;
  }
  if (least == plan::kNone) {
    // Either no plan fits, or the searches discarded the partial plans of all that do.
    const std::vector<CheckpointPlan> frontier = checkpoint_frontier(blocks, options);
    TORCH_CHECK(frontier.front().peak_bytes <= budget, op, ": budget: expected at least ",
                frontier.front().peak_bytes, " bytes, received ", budget,
                "; raise the budget, or add choices that keep less memory");
    for (const CheckpointPlan& plan : frontier) {
      if (plan.peak_bytes <= budget) choices = plan.choices;
    }
  }
  CheckpointPlan result = plan::simulate(model, std::move(choices), budget);
  result.least_seconds =
      complete ? result.seconds : std::min(result.seconds, bound(plan::State(), 0) * 1e-12);
  return result;
}

std::vector<CheckpointPlan> checkpoint_frontier(const std::vector<PlanBlock>& blocks,
                                                const CheckpointPlanOptions& options) {
  const plan::Model model = plan::make_model("checkpoint_frontier", blocks, 0, options);
  bool copies = false;
  for (const plan::Block& block : model.blocks) {
    for (const plan::Choice& choice : block.choices) copies |= choice.link > 0;
  }
  plan::Point smallest = plan::smallest(model);
  std::vector<plan::Point> points;
  // The budget is above every sum of bytes, so forward never waits.
  constexpr int64_t kNoLimit = int64_t{1} << 61;
  if (!copies) {
    plan::add_points(model, kNoLimit, false, kFrontierStates, points);
  } else {
    plan::add_points(model, 0, true, kLinkStates, points);
    plan::add_points(model, kNoLimit, true, kLinkStates, points);
    int64_t most = 0;
    for (const plan::Point& point : points) most = std::max(most, point.peak);
    for (int i = 0; i <= 6; ++i)
      plan::add_points(model, smallest.peak + (most - smallest.peak) * i / 7, true, kLinkStates, points);
  }
  points.push_back(std::move(smallest));
  std::stable_sort(points.begin(), points.end(), [](const plan::Point& a, const plan::Point& b) {
    return std::tie(a.peak, a.ticks) < std::tie(b.peak, b.ticks);
  });
  std::vector<CheckpointPlan> frontier;
  int64_t least = plan::kNone;
  for (plan::Point& point : points) {
    if (point.ticks >= least) continue;
    least = point.ticks;
    frontier.push_back(plan::simulate(model, std::move(point.choices), point.budget));
  }
  return frontier;
}

}  // namespace shoestring
