#include "planning/check.h"

// Each rule for the values of situations and plans exists once here, whether they come from a file, from
// Python or from a program.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include <c10/util/Exception.h>

#include "checkpoint/choices.h"
#include "optim/core/arena.h"
#include "planning/fields.h"

namespace shoestring::planning {
namespace {

constexpr const char* kFreedoms[] = {"exact", "rounding", "method"};
constexpr int64_t kMostRows = 1 << 20;       // of a batch
constexpr int64_t kMost = 1LL << 52;         // of bytes, which fit into 64 bits after sums
constexpr int64_t kMostWorkspace = 1 << 20;  // MiB of the fused loss
constexpr int64_t kMostPrefetch = 4;

std::string joined(const std::vector<std::string>& names) {
  std::string all;
  for (const std::string& name : names) all += (all.empty() ? "" : " | ") + name;
  return all;
}

void expect_one_of(const std::vector<std::string>& names, const std::string& received,
                   const std::string& where) {
  TORCH_CHECK_VALUE(std::find(names.begin(), names.end(), received) != names.end(), where, ": expected ",
                    joined(names), ", received ", shown(received));
}

const std::vector<std::string>& treatments() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const auto& choice : activations::choices()) all.push_back(choice.name);
    return all;
  }();
  return names;
}

constexpr const char* kDisk = "nvme:DIR";

// Returns the values of choices, by the names of TrainingPlan::levers(), and of what several processes do.
// Values of the others are numbers, and tiles are checked by check_lever().
const std::map<std::string, std::vector<std::string>>& lever_values() {
  static const std::map<std::string, std::vector<std::string>> values = [] {
    std::vector<std::string> activations = treatments();
    activations.emplace_back("mixed");
    return std::map<std::string, std::vector<std::string>>{
        {"precision", {"fp32", "tf32", "bf16", "fp16", "as the weights"}},
        {"weights", {"fp32", "bf16", "bf16-stochastic", "bf16-remainder", "fp16", "fp64"}},
        {"adapters", {"none", "lora"}},
        {"quantize", {"none", "nf4", "fp4", "int4", "int8"}},
        {"optimizer_state", {std::begin(optim::detail::kStates), std::end(optim::detail::kStates)}},
        {"step_in_backward", {"false", "true"}},
        {"offload", {"none", "cpu", "stream", kDisk}},
        {"weights_place", {"none", "cpu", kDisk}},
        {"parallel", {"none", "ddp", "zero1", "zero2", "zero3"}},
        {"activations", activations},
        {"keep", {}},
        {"tiles", {}},
        {"micro_batch", {}}};
  }();
  return values;
}

bool is_whole_number(const std::string& text) {
  return !text.empty() && text.size() < 19 &&
         std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

void check_lever(const std::string& lever, const std::string& value, const std::string& where) {
  const std::vector<std::string>& known = lever_values().at(lever);
  const std::string disk = "nvme:";
  if (lever == "tiles") {
    const size_t equals = value.rfind('=');  // of the last layer; names of layers may contain anything
    TORCH_CHECK_VALUE(value == "none" || (equals != std::string::npos && equals > 0 &&
                                          is_whole_number(value.substr(equals + 1))),
                      where, ": expected none, or NAME=ROWS of layers, received ", shown(value));
  } else if (known.empty()) {
    TORCH_CHECK_VALUE(is_whole_number(value), where, ": expected a whole number, received ", shown(value));
  } else if (known.back() != kDisk || value.size() <= disk.size() || value.rfind(disk, 0) != 0) {
    expect_one_of(known, value, where);
  }
}

// Checks that all numbers of a structure are finite and at least 0, and that no sum of bytes overflows.
template <class T>
void check_numbers(T& value, const std::string& where) {
  if constexpr (IsVector<T>::value) {
    for (size_t i = 0; i < value.size(); ++i) check_numbers(value[i], where + "[" + std::to_string(i) + "]");
  } else if constexpr (std::is_same_v<T, MaybeInt>) {
    if (value) check_numbers(*value, where);
  } else if constexpr (std::is_same_v<T, int64_t>) {
    TORCH_CHECK_VALUE(value >= 0 && value <= kMost, where, ": expected 0 to 2^52, received ", value);
  } else if constexpr (std::is_same_v<T, double>) {
    TORCH_CHECK_VALUE(std::isfinite(value) && value >= 0, where,
                      ": expected a finite number of at least 0, received ", value);
  } else if constexpr (std::is_same_v<T, Tiles>) {
    for (const auto& [layer, rows] : value) {
      TORCH_CHECK_VALUE(!layer.empty(), where, ": expected names of layers, received an empty one");
      TORCH_CHECK_VALUE(rows >= 1 && rows <= kMost, where, ".", shown(layer),
                        ": expected 1 to 2^52 rows of a tile, received ", rows);
    }
  } else if constexpr (std::is_class_v<T> && !std::is_same_v<T, std::string> && !std::is_same_v<T, Texts>) {
    fields([&](const char* name, auto& field) { check_numbers(field, where + "." + name); }, value);
  }
}

void check_blocks(const std::vector<std::string>& names, const std::string& where) {
  std::set<std::string> seen;
  for (const std::string& name : names) {
    TORCH_CHECK_VALUE(!name.empty(), where, ": expected names of blocks, received an empty one");
    TORCH_CHECK_VALUE(seen.insert(name).second, where, ": expected each block once, received ", shown(name),
                      " twice");
  }
}

void check_pass(const MeasuredPass& pass, const MeasuredPass& first, const std::string& where) {
  TORCH_CHECK_VALUE(pass.rows > 0, where, ".rows: expected at least 1, received ", pass.rows);
  TORCH_CHECK_VALUE(
      !pass.freed.empty() && pass.freed.size() == first.freed.size() && pass.kept.size() == pass.freed.size(),
      where, ": expected as many kinds in freed and kept as in the first pass (", first.freed.size(),
      "), received ", pass.freed.size(), " and ", pass.kept.size());
  for (const auto* blocks : {&pass.freed, &pass.kept}) {
    for (size_t k = 0; k < blocks->size(); ++k) {
      const auto &choices = (*blocks)[k].choices, &expected = first.freed[k].choices;
      const bool alike = std::equal(choices.begin(), choices.end(), expected.begin(), expected.end(),
                                    [](const auto& a, const auto& b) { return a.name == b.name; });
      TORCH_CHECK_VALUE(alike && !choices.empty(), where, ": kind ", k,
                        ": expected the choices of the first pass, received others");
    }
  }
}

void check_form(const TrainingForm& form, const Situation& situation, const std::string& where,
                const std::string& at) {
  degree(form.freedom, at + ".freedom");
  TORCH_CHECK_VALUE(!form.passes.empty() && !form.optimizers.empty() && !form.places.empty(), at,
                    ": expected passes, optimizers and places, received ", form.passes.size(), ", ",
                    form.optimizers.size(), " and ", form.places.size());
  TORCH_CHECK_VALUE(
      form.kinds.size() == situation.blocks.size() + 2, at, ".kinds: expected ", situation.blocks.size() + 2,
      " (one for each block, and for what runs before and after the blocks), received ", form.kinds.size());
  int64_t before = 0;
  for (size_t p = 0; p < form.passes.size(); ++p) {
    const std::string pass = at + ".passes[" + std::to_string(p) + "]";
    check_pass(form.passes[p], form.passes[0], pass);
    TORCH_CHECK_VALUE(form.passes[p].rows > before, pass, ".rows: expected more than ", before, ", received ",
                      form.passes[p].rows);
    before = form.passes[p].rows;
  }
  const auto& kinds = form.passes[0].freed;
  for (size_t i = 0; i < form.kinds.size(); ++i) {
    const int64_t kind = form.kinds[i];
    TORCH_CHECK_VALUE(kind >= 0 && kind < static_cast<int64_t>(kinds.size()), at, ".kinds: expected 0 to ",
                      kinds.size() - 1, ", received ", kind);
    if (i == 0 || i + 1 == form.kinds.size()) continue;  // not a block of the model
    for (const PlanChoice& choice : kinds[kind].choices)
      expect_one_of(treatments(), choice.name, at + ".passes: kind " + std::to_string(kind) + ": a choice");
  }
  const size_t ends = kinds[form.kinds.back()].choices.size();
  TORCH_CHECK_VALUE(situation.workspaces.empty() || situation.workspaces.size() == ends, where,
                    ".workspaces: expected one for each of ", ends, " choices of the last block, received ",
                    situation.workspaces.size());
  check_lever("precision", form.precision, at + ".precision");
  check_lever("weights", form.weights, at + ".weights");
  check_lever("adapters", form.adapters, at + ".adapters");
  check_lever("quantize", form.quantize, at + ".quantize");
  for (size_t i = 0; i < form.optimizers.size(); ++i) {
    const OptimizerWay& way = form.optimizers[i];
    const std::string optimizer = at + ".optimizers[" + std::to_string(i) + "]";
    degree(way.freedom, optimizer + ".freedom");
    check_lever("optimizer_state", way.state, optimizer + ".state");
    check_lever("offload", way.offload, optimizer + ".offload");
  }
  for (size_t i = 0; i < form.places.size(); ++i) {
    check_lever("weights_place", form.places[i].place, at + ".places[" + std::to_string(i) + "].place");
  }
}

}  // namespace

std::string shown(std::string text) {
  constexpr size_t kLongest = 40;
  size_t size = std::min(text.size(), kLongest);
  while (size > 0 && size < text.size() && (text[size] & 0xC0) == 0x80) --size;  // a whole character of UTF-8
  text.resize(size);
  std::replace_if(text.begin(), text.end(), [](unsigned char c) { return c < ' ' || c == 0x7F; }, '?');
  return text;
}

size_t degree(const std::string& freedom, const std::string& where) {
  expect_one_of({std::begin(kFreedoms), std::end(kFreedoms)}, freedom, where);
  return std::find(std::begin(kFreedoms), std::end(kFreedoms), freedom) - std::begin(kFreedoms);
}

void check(Situation situation, const std::string& where) {
  TORCH_CHECK_VALUE(situation.batch_size >= 1 && situation.batch_size <= kMostRows, where,
                    ": batch_size: expected 1 to ", kMostRows, ", received ", situation.batch_size);
  for (const auto& budget : {situation.device_memory, situation.host_memory, situation.disk}) {
    TORCH_CHECK_VALUE(!budget || *budget >= 0, where, ": a budget: expected at least 0 bytes, received ",
                      *budget);
  }
  TORCH_CHECK_VALUE(!situation.forms.empty(), where, ": forms: expected one or more, received none");
  for (size_t f = 0; f < situation.forms.size(); ++f)
    check_form(situation.forms[f], situation, where, where + ".forms[" + std::to_string(f) + "]");
  check_blocks(situation.blocks, where + ".blocks");
  TORCH_CHECK_VALUE(situation.copy_share >= 0 && situation.copy_share <= 1, where,
                    ".copy_share: expected 0 to 1, received ", situation.copy_share);
  TORCH_CHECK_VALUE(situation.prefetch >= 1 && situation.prefetch <= kMostPrefetch, where,
                    ".prefetch: expected 1 to ", kMostPrefetch, ", received ", situation.prefetch);
  for (const int64_t size : situation.workspaces) {
    TORCH_CHECK_VALUE(size >= 0 && size <= kMostWorkspace, where, ".workspaces: expected 0 to ",
                      kMostWorkspace, " MiB, received ", size);
  }
  check_numbers(situation, where);
}

void check(TrainingPlan plan, const std::string& where) {
  degree(plan.freedom, where + ".freedom");
  for (const auto& [name, value] :
       {std::pair("micro_batch", plan.micro_batch), {"accumulate", plan.accumulate}}) {
    TORCH_CHECK_VALUE(value >= 1, where, ".", name, ": expected at least 1, received ", value);
  }
  TORCH_CHECK_VALUE(plan.micro_batch <= kMostRows / plan.accumulate, where, ".accumulate: expected at most ",
                    kMostRows, " rows in a batch, received ", plan.accumulate, " micro-batches of ",
                    plan.micro_batch);
  for (size_t i = 0; i < plan.checkpoints.size(); ++i) {
    expect_one_of(treatments(), plan.checkpoints[i].treatment,
                  where + ".checkpoints[" + std::to_string(i) + "].treatment");
  }
  check_numbers(plan, where);
  for (const auto& [lever, value] : plan.levers()) check_lever(lever, value, where + "." + lever);
  check_lever("parallel", plan.parallel, where + ".parallel");
  TORCH_CHECK_VALUE(plan.keep == 0 || plan.weights_place != "none", where,
                    ".keep: expected 0, since weights_place is none, received ", plan.keep);
  TORCH_CHECK_VALUE(plan.workspace_mb <= kMostWorkspace, where, ".workspace_mb: expected 0 to ",
                    kMostWorkspace, ", received ", plan.workspace_mb);
  std::vector<std::string> blocks;
  for (const BlockPlan& block : plan.checkpoints) blocks.push_back(block.block);
  check_blocks(blocks, where + ".checkpoints");
  int64_t peak = -1;
  for (const PlanPhase& phase : plan.phases) peak = std::max(peak, phase.bytes);
  TORCH_CHECK_VALUE(peak >= 0, where, ".phases: expected one or more, received none");
  TORCH_CHECK_VALUE(plan.peak_bytes == peak, where, ".peak_bytes: expected the largest of the phases, ", peak,
                    ", received ", plan.peak_bytes);
  TORCH_CHECK_VALUE(plan.least_seconds <= plan.seconds, where,
                    ".least_seconds: expected at most the seconds, ", plan.seconds, ", received ",
                    plan.least_seconds);
  const auto expect_lever = [&](const std::string& lever, const std::string& at) {
    TORCH_CHECK_VALUE(lever_values().count(lever), at,
                      ": expected the name of a choice, such as micro_batch, ", "received ", shown(lever));
  };
  for (size_t i = 0; i < plan.reasons.size(); ++i) {
    const std::string& lever = plan.reasons[i].lever;
    if (!lever.empty()) expect_lever(lever, where + ".reasons[" + std::to_string(i) + "].lever");
  }
  for (size_t i = 0; i < plan.alternatives.size(); ++i) {
    const std::string at = where + ".alternatives[" + std::to_string(i) + "]";
    degree(plan.alternatives[i].freedom, at + ".freedom");
    for (const auto& [lever, value] : plan.alternatives[i].levers) {
      expect_lever(lever, at + ".levers");
      check_lever(lever, value, at + ".levers." + lever);
    }
  }
  for (size_t i = 0; i < plan.frontier.size(); ++i) {
    TORCH_CHECK_VALUE(plan.frontier[i].micro_batch >= 1, where, ".frontier[", i,
                      "].micro_batch: expected at least 1, received ", plan.frontier[i].micro_batch);
  }
}

}  // namespace shoestring::planning
