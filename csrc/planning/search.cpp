#include "planning/search.h"

// Searches exhaustively over forms, micro-batches, optimizers and places of weights, with the frontier of
// treatments of blocks for each. Bounds of time leave most frontiers out.

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>
#include <utility>

#include <c10/util/Exception.h>

#include "planning/check.h"

namespace shoestring::planning {
namespace {

std::string text_of(bool value) { return value ? "true" : "false"; }

// Returns a value that is affine in the rows, from its values at two numbers of rows; at least 0.
int64_t affine(int64_t at_a, int64_t at_b, double share) {
  // checkpoint_frontier refuses more bytes than 2^52
  return std::llround(std::clamp(at_a + (at_b - at_a) * share, 0.0, 0x1p53));
}
double affine(double at_a, double at_b, double share) { return std::max(0.0, at_a + (at_b - at_a) * share); }

}  // namespace

bool allows(const std::string& freedom, const std::string& needed) {
  return degree(needed, "plan_training: situation: freedom") <= degree(freedom, "plan_training: freedom");
}

const Levers& plain_levers() {
  static const Levers plain{
      {"precision", "fp32"},   {"weights", "fp32"},         {"adapters", "none"},
      {"quantize", "none"},    {"optimizer_state", "8bit"}, {"step_in_backward", "false"},
      {"offload", "none"},     {"weights_place", "none"},   {"keep", "0"},
      {"activations", "keep"}, {"micro_batch", ""},         {"workspace_mb", ""},
      {"tiles", "none"}};
  return plain;
}

Levers outer_levers(const TrainingForm& form, const OptimizerWay& optimizer, const WeightsPlace& place,
                    int64_t micro_batch) {
  return {{"precision", form.precision},
          {"weights", form.weights},
          {"adapters", form.adapters},
          {"quantize", form.quantize},
          {"optimizer_state", optimizer.state},
          {"step_in_backward", text_of(optimizer.step_in_backward)},
          {"offload", optimizer.offload},
          {"weights_place", place.place},
          {"keep", std::to_string(place.keep)},
          {"tiles", tiles_text(place.tiles)},
          {"micro_batch", std::to_string(micro_batch)}};
}

std::string tiles_text(const std::map<std::string, int64_t>& tiles) {
  std::string text;
  for (const auto& [layer, rows] : tiles)
    text += (text.empty() ? "" : ",") + layer + "=" + std::to_string(rows);
  return text.empty() ? "none" : text;
}

Search::Search(const Situation& situation) : situation_(situation) {
  check(situation, "plan_training: situation");
  for (int64_t rows = 1; rows <= situation.batch_size; ++rows) {
    if (situation.batch_size % rows == 0) micro_batches_.push_back(rows);
  }
}

std::vector<PlanBlock> Search::blocks_of(size_t form, int64_t rows, bool kept) const {
  const TrainingForm& from = situation_.forms[form];
  const auto& passes = from.passes;
  // the two nearest passes, between which the rows are if possible
  size_t b = 0;
  while (b + 1 < passes.size() && (passes[b].rows < rows || b == 0)) ++b;
  const size_t a = b > 0 ? b - 1 : 0;
  const MeasuredPass &low = passes[a], &high = passes[b];
  // One pass alone tells nothing of what does not depend on the rows, so everything is taken to do so.
  const bool one = a == b;
  const double share = one ? static_cast<double>(rows) / low.rows
                           : static_cast<double>(rows - low.rows) / (high.rows - low.rows);
  std::vector<PlanBlock> kinds = kept ? high.kept : high.freed;
  for (size_t k = 0; k < kinds.size(); ++k) {
    PlanBlock& block = kinds[k];
    const PlanBlock zero, &before = kept ? low.kept[k] : low.freed[k];
    const auto set = [&](auto& to, auto at_low) { to = affine(one ? 0 * at_low : at_low, to, share); };
    set(block.forward_seconds, before.forward_seconds);
    set(block.backward_seconds, before.backward_seconds);
    for (size_t c = 0; c < block.choices.size(); ++c) {
      PlanChoice& choice = block.choices[c];
      const PlanChoice& smaller = before.choices[c];
      set(choice.bytes, smaller.bytes);
      set(choice.extra_seconds, smaller.extra_seconds);
      set(choice.link_bytes, smaller.link_bytes);
      set(choice.forward_bytes, smaller.forward_bytes);
      set(choice.backward_bytes, smaller.backward_bytes);
    }
  }
  std::vector<PlanBlock> blocks;
  for (const int64_t kind : from.kinds) blocks.push_back(kinds[kind]);
  return blocks;
}

bool Search::keeps_gradients(const Candidate& c) const {
  return !optimizer(c).step_in_backward && accumulate(c) == 1;
}

CheckpointPlanOptions Search::link() const {
  return CheckpointPlanOptions()
      .out_bytes_per_second(situation_.out_bytes_per_second)
      .in_bytes_per_second(situation_.in_bytes_per_second)
      .copy_share(situation_.copy_share)
      .prefetch(situation_.prefetch);
}

// Returns the host memory that the first block needs for its copy, that the first two blocks need, and so on.
std::vector<int64_t> Search::copied_bytes(const Candidate& c) const {
  std::vector<int64_t> sums;
  int64_t sum = 0;
  for (const PlanBlock& block : blocks_of(c.form, c.micro_batch, false)) {
    int64_t most = 0;
    for (const PlanChoice& choice : block.choices) most = std::max(most, choice.link_bytes);
    sums.push_back(sum += most);
  }
  return sums;
}

// Returns how many blocks may copy activations to the host, so that all of them fit into its budget. They are
// the first ones, whose copies have the most time until backward.
size_t Search::copying(const Candidate& c) const {
  if (!copies()) return 0;
  if (!situation_.host_memory) return form(c).kinds.size();
  const int64_t left = *situation_.host_memory - optimizer(c).host_bytes - place(c).host_bytes;
  const std::vector<int64_t> sums = copied_bytes(c);
  return std::upper_bound(sums.begin(), sums.end(), left) - sums.begin();
}

// Returns the host memory with which copying() lets all blocks copy that do so in a plan.
int64_t Search::room_for_copies(const Found& found) const {
  const std::vector<PlanChoice> chosen = choices(found);
  size_t last = chosen.size();
  while (last > 0 && chosen[last - 1].link_bytes == 0) --last;
  return last == 0 ? 0 : copied_bytes(found.candidate)[last - 1];
}

// Returns the treatments of blocks that are the fastest for some device memory. `copying`: how many blocks,
// from the first one on, may copy activations to the host.
const std::vector<CheckpointPlan>& Search::treatments(const Candidate& c, const std::string& activations,
                                                      size_t copying) {
  const bool kept = keeps_gradients(c);
  const Key key{c.form, c.micro_batch, kept, activations, copying};
  if (const auto known = treatments_.find(key); known != treatments_.end()) return known->second;
  std::vector<PlanBlock> blocks = blocks_of(c.form, c.micro_batch, kept);
  std::vector<std::vector<int64_t>> indices(blocks.size());  // of the choices that remain
  for (size_t i = 0; i < blocks.size(); ++i) {
    std::vector<PlanChoice> remaining;
    const bool inner = i > 0 && i + 1 < blocks.size();
    for (size_t choice = 0; choice < blocks[i].choices.size(); ++choice) {
      const PlanChoice& one = blocks[i].choices[choice];
      if (inner && !activations.empty() && one.name != activations) continue;
      if (i >= copying && one.link_bytes > 0) continue;
      remaining.push_back(one), indices[i].push_back(static_cast<int64_t>(choice));
    }
    blocks[i].choices = std::move(remaining);
    if (blocks[i].choices.empty()) return treatments_[key];  // a block has no such treatment
  }
  std::vector<CheckpointPlan> plans = checkpoint_frontier(blocks, link());
  for (CheckpointPlan& plan : plans) {
    for (size_t i = 0; i < blocks.size(); ++i) plan.choices[i] = indices[i][plan.choices[i]];
  }
  if (copying > 0) {
    // Plans with copies are a selection. Those without them are exact.
    const auto& without = treatments(c, activations, 0);
    plans.insert(plans.end(), without.begin(), without.end());
    std::stable_sort(plans.begin(), plans.end(), [](const CheckpointPlan& a, const CheckpointPlan& b) {
      return std::pair(a.peak_bytes, a.seconds) < std::pair(b.peak_bytes, b.seconds);
    });
    double least = std::numeric_limits<double>::infinity();
    std::erase_if(plans, [&](const CheckpointPlan& plan) {
      if (plan.seconds >= least) return true;
      least = plan.seconds;
      return false;
    });
  }
  return treatments_[key] = std::move(plans);
}

// Returns a time that no plan of the candidate goes below.
double Search::least_seconds(const Candidate& c) {
  const bool kept = keeps_gradients(c);
  const auto [at, is_new] = least_seconds_.try_emplace({c.form, c.micro_batch, kept}, 0.0);
  if (is_new) {
    for (const PlanBlock& block : blocks_of(c.form, c.micro_batch, kept)) {
      double extra = std::numeric_limits<double>::infinity();
      for (const PlanChoice& choice : block.choices) extra = std::min(extra, choice.extra_seconds);
      at->second += block.forward_seconds + block.backward_seconds + extra;
    }
    // Times are rounded to picoseconds.
    at->second -= 1e-12 * static_cast<double>(4 * form(c).kinds.size());
  }
  const double pass = std::max(at->second, place(c).seconds);
  return seconds_of_batch(c, pass);
}

// Returns the time of a batch whose micro-batches each take `pass`.
double Search::seconds_of_batch(const Candidate& c, double pass) const {
  const OptimizerWay& way = optimizer(c);
  const auto passes = static_cast<double>(accumulate(c));
  return passes * pass + (passes - 1) * way.sum_seconds + way.seconds + way.backward_seconds;
}

double Search::least_seconds(const std::string& freedom, const Levers& fixed) {
  double least = std::numeric_limits<double>::infinity();
  for (const Candidate& c : candidates(freedom, fixed)) least = std::min(least, least_seconds(c));
  return least;
}

Found Search::found(const Candidate& c, const CheckpointPlan& plan) const {
  const TrainingForm& in = form(c);
  const OptimizerWay& way = optimizer(c);
  const WeightsPlace& weights = place(c);
  const int64_t shared =
      situation_.host_is_device ? way.host_bytes + weights.host_bytes : 0;  // of one memory
  const int64_t base = situation_.reserve_bytes + weights.device_bytes + way.device_bytes + shared;
  const int64_t sums = accumulate(c) > 1 ? way.sum_bytes : 0;
  const int64_t gradients = way.step_in_backward ? way.gradient_bytes + sums : in.gradient_bytes;
  // If gradients stay and there is one micro-batch, the plan of the blocks has the gradients.
  const int64_t beside = keeps_gradients(c) ? 0 : gradients;
  Found found{c, plan, {}, 0, 0, 0, 0};
  found.phases = {
      {"loading", situation_.reserve_bytes + weights.device_bytes + in.load_bytes},
      {"forward and backward", base + beside + plan.peak_bytes},
      {"optimizer step", base + (way.step_in_backward ? 0 : gradients) + way.step_bytes},
      {"saving", base + in.saving_bytes},
  };
  for (const PlanPhase& phase : found.phases) found.peak = std::max(found.peak, phase.bytes);
  found.host = way.host_bytes + weights.host_bytes;
  found.disk = way.disk_bytes + weights.disk_bytes;
  found.seconds = seconds_of_batch(c, std::max(plan.seconds, weights.seconds));
  return found;
}

std::vector<Candidate> Search::candidates(const std::string& freedom, const Levers& fixed) const {
  std::vector<Candidate> all;
  for (size_t f = 0; f < situation_.forms.size(); ++f) {
    const TrainingForm& in = situation_.forms[f];
    if (!allows(freedom, in.freedom)) continue;
    for (size_t o = 0; o < in.optimizers.size(); ++o) {
      if (!allows(freedom, in.optimizers[o].freedom)) continue;
      for (size_t w = 0; w < in.places.size(); ++w) {
        for (const int64_t rows : micro_batches_) {
          const Levers choices = outer_levers(in, in.optimizers[o], in.places[w], rows);
          const bool fits = std::all_of(fixed.begin(), fixed.end(), [&](const auto& given) {
            const auto chosen = choices.find(given.first);
            return chosen == choices.end() || chosen->second == given.second;
          });
          if (fits) all.push_back({f, o, w, rows});
        }
      }
    }
  }
  return all;
}

Levers Search::levers(const Found& found) const {
  const Candidate& c = found.candidate;
  Levers all = outer_levers(form(c), optimizer(c), place(c), c.micro_batch);
  std::set<std::string> treatments;
  const auto& blocks = form(c).passes[0].freed;
  for (size_t i = 1; i + 1 < found.plan.choices.size(); ++i)
    treatments.insert(blocks[form(c).kinds[i]].choices[found.plan.choices[i]].name);
  all["activations"] = treatments.empty() ? "keep" : treatments.size() == 1 ? *treatments.begin() : "mixed";
  return all;
}

std::vector<PlanChoice> Search::choices(const Found& found) const {
  const Candidate& c = found.candidate;
  std::vector<PlanChoice> all;
  for (PlanBlock& block : blocks_of(c.form, c.micro_batch, false))
    all.push_back(std::move(block.choices[found.plan.choices[all.size()]]));
  return all;
}

std::vector<int64_t> Search::pending_bytes(const Found& found) const {
  const Candidate& c = found.candidate;
  const int64_t peak = found.plan.peak_bytes;
  int64_t spare = peak / 20;
  if (situation_.device_memory) spare = std::min(spare, *situation_.device_memory - found.peak);
  std::vector<PlanBlock> blocks = blocks_of(c.form, c.micro_batch, keeps_gradients(c));
  for (size_t i = 0; i < blocks.size(); ++i) blocks[i].choices = {blocks[i].choices[found.plan.choices[i]]};
  const std::vector<int64_t> first(blocks.size(), 0);  // the only choice of each block
  return simulate_checkpoint_plan(blocks, first, peak + spare, link()).pending_bytes;
}

namespace {

// Returns the number of choices that differ from those of plain training.
int64_t techniques(const Levers& levers, int64_t batch_size) {
  int64_t count = 0;
  for (const auto& [name, value] : levers) {
    const std::string plain = name == "micro_batch" ? std::to_string(batch_size) : plain_levers().at(name);
    count += value != plain;
  }
  return count;
}

std::string activations_of(const Levers& fixed) {
  const auto given = fixed.find("activations");
  return given == fixed.end() ? "" : given->second;
}

}  // namespace

// Returns the fastest plan of a candidate within the device memory.
std::optional<Found> Search::fitting(const Candidate& c, const Levers& fixed, size_t copying) {
  const auto& plans = treatments(c, activations_of(fixed), copying);
  // The peak of the plans rises along the frontier, and so does that of the step.
  for (size_t i = plans.size(); i-- > 0;) {
    Found one = found(c, plans[i]);
    if (!situation_.device_memory || one.peak <= *situation_.device_memory) return one;
  }
  return std::nullopt;
}

std::optional<Found> Search::fastest(const std::string& freedom, const Levers& fixed) {
  std::vector<std::pair<double, Candidate>> order;
  for (const Candidate& c : candidates(freedom, fixed)) order.emplace_back(least_seconds(c), c);
  std::stable_sort(order.begin(), order.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::optional<Found> best;
  for (const auto& [bound, c] : order) {
    if (best && bound > best->seconds) break;
    const Found outer = found(c, CheckpointPlan());
    if (situation_.disk && outer.disk > *situation_.disk) continue;
    if (situation_.host_memory && outer.host > *situation_.host_memory) continue;
    std::optional<Found> one = fitting(c, fixed, copying(c));
    if (!one) continue;
    if (copies()) {
      // Activations do not leave without need.
      std::optional<Found> without = fitting(c, fixed, 0);
      if (without && without->seconds <= one->seconds) one = std::move(without);
    }
    const bool better =
        !best || one->seconds < best->seconds ||
        (one->seconds == best->seconds &&
         techniques(levers(*one), situation_.batch_size) < techniques(levers(*best), situation_.batch_size));
    if (better) best = std::move(one);
  }
  return best;
}

std::vector<Found> Search::frontier(const std::string& freedom, const Levers& fixed, size_t form) {
  std::vector<Found> all;
  for (const Candidate& c : candidates(freedom, fixed)) {
    if (c.form != form) continue;
    for (const CheckpointPlan& plan : treatments(c, activations_of(fixed), copying(c))) {
      Found one = found(c, plan);
      if (situation_.disk && one.disk > *situation_.disk) continue;
      if (situation_.host_memory && one.host > *situation_.host_memory) continue;
      all.push_back(std::move(one));
    }
  }
  std::stable_sort(all.begin(), all.end(), [](const Found& a, const Found& b) {
    return std::pair(a.peak, a.seconds) < std::pair(b.peak, b.seconds);
  });
  std::vector<Found> frontier;
  for (Found& one : all) {
    if (frontier.empty() || one.seconds < frontier.back().seconds) frontier.push_back(std::move(one));
  }
  return frontier;
}

LeastBudgets Search::least_budgets(const std::string& freedom, const Levers& fixed) {
  LeastBudgets least;
  const auto lower = [](std::optional<int64_t>& to, int64_t bytes) {
    to = std::min(to.value_or(std::numeric_limits<int64_t>::max()), bytes);
  };
  const auto within = [](const std::optional<int64_t>& budget, int64_t bytes) {
    return !budget || bytes <= *budget;
  };
  for (const Candidate& c : candidates(freedom, fixed)) {
    // More host memory lets more blocks copy their activations.
    for (const size_t count : {copying(c), copies() ? form(c).kinds.size() : 0}) {
      const auto& plans = treatments(c, activations_of(fixed), count);
      if (plans.empty()) continue;
      const Found one = found(c, plans.front());
      const int64_t in_host = one.host + room_for_copies(one);
      const bool device = within(situation_.device_memory, one.peak),
                 host = within(situation_.host_memory, in_host), disk = within(situation_.disk, one.disk);
      if (host && disk) lower(least.device, one.peak);
      if (device && disk) lower(least.host, in_host);
      if (device && host) lower(least.disk, one.disk);
    }
  }
  return least;
}

void Search::check_fixed(const Levers& fixed) const {
  for (const auto& [name, value] : fixed) {
    std::set<std::string> values;
    if (name == "activations") {
      for (const TrainingForm& in : situation_.forms) {
        for (size_t i = 1; i + 1 < in.kinds.size(); ++i) {
          for (const PlanChoice& choice : in.passes[0].freed[in.kinds[i]].choices) values.insert(choice.name);
        }
      }
    } else {
      for (const Candidate& c : candidates("method", {})) {
        const Levers choices = outer_levers(form(c), optimizer(c), place(c), c.micro_batch);
        const auto found = choices.find(name);
        if (found != choices.end()) values.insert(found->second);
      }
    }
    std::string known;
    for (const std::string& one : values) known += (known.empty() ? "" : " | ") + one;
    TORCH_CHECK_VALUE(values.count(value), "plan_training: fixed: ", name.substr(0, 40), ": expected ",
                      known.empty() ? "the name of a choice, such as micro_batch" : known, ", received ",
                      value.substr(0, 40));
  }
}

}  // namespace shoestring::planning
