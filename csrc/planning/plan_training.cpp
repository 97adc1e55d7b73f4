#include <shoestring/planning/plan_training.h>

// Turns the result of the search into a plan with reasons and alternatives.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include <c10/util/Exception.h>

#include "planning/search.h"

namespace shoestring {
namespace {

using planning::Found;
using planning::Levers;
using planning::Search;

std::string gibibytes(int64_t bytes) {
  char text[48];
  constexpr double kMiB = 1 << 20;
  const auto size = static_cast<double>(bytes);
  if (size >= 100 * kMiB) {
    std::snprintf(text, sizeof text, "%.2f GiB", size / (1024 * kMiB));
  } else {
    std::snprintf(text, sizeof text, "%.1f MiB", size / kMiB);
  }
  return text;
}

std::string in_seconds(double seconds) {
  char text[48];
  std::snprintf(text, sizeof text, "%.3g s", seconds);
  return text;
}

// Returns "1.3 times" as slow or "4 %" slower.
std::string slower(double seconds, double than) {
  char text[64];
  const double ratio = seconds / than;
  if (ratio >= 1.5) {
    std::snprintf(text, sizeof text, "%.2g times as long", ratio);
  } else {
    std::snprintf(text, sizeof text, "%.1f %% longer", 100 * (ratio - 1));
  }
  return text;
}

// Returns the value of a choice in plain training.
std::string plain(const std::string& lever, const Situation& situation) {
  if (lever == "micro_batch") return std::to_string(situation.batch_size);
  return planning::plain_levers().at(lever);
}

std::string described(const std::string& lever, const std::string& value, const TrainingPlan& plan) {
  if (lever == "micro_batch") {
    return std::to_string(plan.accumulate) + " micro-batches of " + std::to_string(plan.micro_batch) +
           " rows";
  }
  if (lever == "activations") {
    std::string text;
    std::map<std::string, int64_t> counts;
    for (const BlockPlan& block : plan.checkpoints) ++counts[block.treatment];
    for (const auto& [treatment, count] : counts) {
      text += (text.empty() ? "" : ", ") + std::to_string(count) + " of " +
              std::to_string(plan.checkpoints.size()) + " blocks " + treatment;
    }
    return text;
  }
  if (lever == "tiles") {
    constexpr size_t kNamed = 3;
    std::string text;
    size_t named = 0;
    for (auto layer = plan.tiles.begin(); layer != plan.tiles.end() && named < kNamed; ++layer, ++named)
      text +=
          (named == 0 ? "" : ", ") + layer->first + " in tiles of " + std::to_string(layer->second) + " rows";
    const size_t rest = plan.tiles.size() - named;
    return rest == 0 ? text : text + ", and " + std::to_string(rest) + " more layers in tiles";
  }
  std::string option = "--" + (lever == "weights_place" ? std::string("offload-weights") : lever);
  std::replace(option.begin(), option.end(), '_', '-');
  return value == "true" ? option : option + " " + value;
}

std::vector<PlanReason> reasons_of(Search& search, const PlanOptions& options, const Found& best,
                                   const TrainingPlan& plan) {
  const Situation& situation = search.situation();
  std::vector<PlanReason> reasons;
  for (const auto& [lever, value] : search.levers(best)) {
    const std::string usual = plain(lever, situation);
    if (lever == "keep" || value == usual) continue;
    const std::string what = described(lever, value, plan);
    if (options.fixed().count(lever)) {
      reasons.push_back({lever, what + ": as given"});
      continue;
    }
    Levers without = options.fixed();
    without[lever] = usual;
    const auto other = search.fastest(options.freedom(), without);
    if (other && other->seconds < 1.005 * best.seconds) {
      const int64_t saved = other->peak - best.peak;
      reasons.push_back({lever, what + ": as fast as without it" +
                                    (saved >= 1 << 17 ? ", in " + gibibytes(saved) + " less memory" : "")});
    } else if (other) {
      reasons.push_back({lever, what + ": " + described(lever, usual, plan) + " would take " +
                                    in_seconds(other->seconds) + ", " +
                                    slower(other->seconds, best.seconds)});
      if (lever == "micro_batch" || lever == "activations" || lever == "tiles") {
        reasons.back().text = what + ": without it, a batch would take " + in_seconds(other->seconds) + ", " +
                              slower(other->seconds, best.seconds);
      }
    } else {
      const auto least = search.least_budgets(options.freedom(), without).device;
      reasons.push_back({lever, what + ": without it, no plan fits" +
                                    (least ? "; the least memory would be " + gibibytes(*least) : "")});
    }
  }
  const std::string spare = situation.device_memory ? gibibytes(*situation.device_memory - best.peak) : "";
  if (reasons.empty()) {
    reasons.push_back({"", spare.empty() ? "nothing is switched on, since there is no budget"
                                         : "nothing is switched on: it fits with " + spare + " to spare"});
  } else if (!spare.empty()) {
    reasons.push_back(
        {"", "the peak is " + gibibytes(best.peak) + ", in the phase " +
                 std::max_element(best.phases.begin(), best.phases.end(),
                                  [](const PlanPhase& a, const PlanPhase& b) { return a.bytes < b.bytes; })
                     ->name +
                 "; " + spare + " are spare"});
  }
  return reasons;
}

[[noreturn]] void nothing_fits(Search& search, const PlanOptions& options) {
  const Situation& situation = search.situation();
  const auto least = search.least_budgets(options.freedom(), options.fixed());
  std::string text;
  const auto add = [&](const char* name, const std::optional<int64_t>& budget,
                       const std::optional<int64_t>& needed) {
    if (!budget || !needed || *needed <= *budget) return;
    text += std::string(text.empty() ? "" : ", or ") + name + " of at least " + std::to_string(*needed) +
            " bytes (" + gibibytes(*needed) + "), received " + std::to_string(*budget);
  };
  add("device_memory", situation.device_memory, least.device);
  add("host_memory", situation.host_memory, least.host);
  add("disk", situation.disk, least.disk);
  std::string freer;
  for (const char* freedom : {"rounding", "method"}) {
    if (freer.empty() && !planning::allows(options.freedom(), freedom) &&
        search.fastest(freedom, options.fixed())) {
      freer = std::string("; with freedom \"") + freedom + "\" a plan fits";
    }
  }
  TORCH_CHECK_VALUE(
      !text.empty() || !freer.empty(),
      "plan_training: expected budgets or fixed choices with which a plan exists, received none; raise "
      "several budgets, or give fewer choices");
  TORCH_CHECK_VALUE(false, "plan_training: expected ", text.empty() ? "larger budgets" : text, freer);
}

}  // namespace

std::map<std::string, std::string> TrainingPlan::levers() const {
  std::map<std::string, std::string> all{{"precision", precision},
                                         {"weights", weights},
                                         {"adapters", adapters},
                                         {"quantize", quantize},
                                         {"optimizer_state", optimizer_state},
                                         {"step_in_backward", step_in_backward ? "true" : "false"},
                                         {"offload", offload},
                                         {"weights_place", weights_place},
                                         {"keep", std::to_string(keep)},
                                         {"tiles", planning::tiles_text(tiles)},
                                         {"micro_batch", std::to_string(micro_batch)}};
  std::string activations = checkpoints.empty() ? "keep" : checkpoints[0].treatment;
  for (const BlockPlan& block : checkpoints) {
    if (block.treatment != activations) activations = "mixed";
  }
  all["activations"] = activations;
  return all;
}

TrainingPlan plan_training(const Situation& situation, const PlanOptions& options) {
  Search search(situation);
  planning::allows(options.freedom(), "exact");  // checks the freedom
  search.check_fixed(options.fixed());
  const auto best = search.fastest(options.freedom(), options.fixed());
  if (!best) nothing_fits(search, options);
  const TrainingForm& form = situation.forms[best->candidate.form];
  const OptimizerWay& way = form.optimizers[best->candidate.optimizer];
  const WeightsPlace& place = form.places[best->candidate.place];
  TrainingPlan plan;
  plan.model = situation.model, plan.machine = situation.machine, plan.freedom = options.freedom();
  plan.micro_batch = best->candidate.micro_batch;
  plan.accumulate = situation.batch_size / plan.micro_batch;
  plan.precision = form.precision, plan.weights = form.weights;
  plan.adapters = form.adapters, plan.quantize = form.quantize;
  plan.optimizer_state = way.state, plan.step_in_backward = way.step_in_backward, plan.offload = way.offload;
  plan.weights_place = place.place, plan.keep = place.keep, plan.tiles = place.tiles;
  if (!situation.workspaces.empty()) plan.workspace_mb = situation.workspaces[best->plan.choices.back()];
  const auto& kinds = form.passes[0].freed;
  const std::vector<PlanChoice> choices = search.choices(*best);
  const std::vector<int64_t> pending = search.pending_bytes(*best);
  for (size_t i = 0; i < situation.blocks.size(); ++i) {
    plan.checkpoints.push_back(
        {situation.blocks[i], choices[i + 1].name, pending[i + 2], choices[i + 1].link_bytes});
    plan.host_bytes += choices[i + 1].link_bytes;
  }
  plan.phases = best->phases, plan.peak_bytes = best->peak;
  plan.host_bytes += best->host, plan.disk_bytes = best->disk;
  plan.seconds = plan.least_seconds = best->seconds;
  // The search has tried a selection of the plans that copy activations.
  if (search.copies()) {
    plan.least_seconds = std::min(best->seconds, search.least_seconds(options.freedom(), options.fixed()));
  }
  plan.reasons = reasons_of(search, options, *best, plan);
  const auto add = [&](const std::string& freedom, const Found& other) {
    plan.alternatives.push_back({freedom, search.levers(other), other.peak, other.seconds});
  };
  double fastest = best->seconds;
  for (const char* freedom : {"rounding", "method"}) {
    if (planning::allows(options.freedom(), freedom)) continue;
    const auto other = search.fastest(freedom, options.fixed());
    if (other && other->seconds < fastest) add(freedom, *other), fastest = other->seconds;
  }
  for (const Found& one : search.frontier(options.freedom(), options.fixed(), best->candidate.form)) {
    PlanPoint point{one.peak, one.seconds, one.candidate.micro_batch, 0};
    const auto& chosen = one.plan.choices;
    for (size_t i = 1; i + 1 < chosen.size(); ++i)
      point.recomputed += kinds[form.kinds[i]].choices[chosen[i]].name != "keep";
    plan.frontier.push_back(point);
  }
  return plan;
}

}  // namespace shoestring
