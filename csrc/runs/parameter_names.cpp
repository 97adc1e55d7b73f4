#include "runs/parameter_names.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "files/read_file.h"
#include "files/safetensors_format.h"
#include "optim/split/split_params.h"

namespace shoestring::runs {

namespace {

using NamesJson = nlohmann::json;
using at::Tensor;
using Names = std::vector<std::optional<std::string>>;

constexpr const char* kNames = "names";

// Returns the names of the parameters of each group.
std::vector<Names> names_of(const torch::optim::Optimizer& optimizer, const TrainingRun& run) {
  std::vector<Names> all;
  for (const auto& group : optimizer.param_groups()) {
    Names& names = all.emplace_back();
    for (const Tensor& p : group.params()) {
      std::optional<std::string>& name = names.emplace_back();
      for (const auto& item : run.tensors) {
        if (p.is_same(item.value()) || optim::is_part_of(p, item.value())) name = item.key();
      }
    }
  }
  return all;
}

std::string quoted(const std::optional<std::string>& name) { return name ? files::quote(*name) : "none"; }

// Returns, for each parameter of a group, its position in the group of the file.
std::vector<size_t> order_of(const Names& run_names, const Names& saved, const std::string& where) {
  constexpr size_t kNone = SIZE_MAX;
  std::vector<size_t> order;
  std::vector<bool> is_taken(saved.size());
  for (const auto& name : run_names) {
    const auto found = name ? std::find(saved.begin(), saved.end(), name) : saved.end();
    const auto at = static_cast<size_t>(found - saved.begin());
    const bool is_free = at < saved.size() && !is_taken[at];
    order.push_back(is_free ? at : kNone);
    if (is_free) is_taken[at] = true;
  }
  for (size_t i = 0, next = 0; i < order.size(); ++i) {
    if (order[i] != kNone) continue;
    while (is_taken[next]) ++next;
    TORCH_CHECK_VALUE(!run_names[i] || !saved[next], where, ": expected a state of the parameter ",
                      quoted(run_names[i]), ", received one of ", quoted(saved[next]),
                      " in its place. Give the groups the parameters that they had");
    order[i] = next;
    is_taken[next] = true;
  }
  return order;
}

// Reads the names of a file, whose groups must have the sizes of `run_names`.
std::vector<Names> read_names(const std::string& text, const std::vector<Names>& run_names,
                              const std::string& where) {
  const auto expect = [&](bool good) {
    TORCH_CHECK_VALUE(good, where, ": expected the names of the parameters of each group, received others");
  };
  const NamesJson json = files::parse_json(where + ": names", text);
  expect(json.is_array() && json.size() == run_names.size());
  std::vector<Names> all;
  for (size_t g = 0; g < run_names.size(); ++g) {
    expect(json[g].is_array() && json[g].size() == run_names[g].size());
    Names& names = all.emplace_back();
    for (const NamesJson& name : json[g]) {
      expect(name.is_string() || name.is_null());
      names.push_back(name.is_null() ? std::nullopt : std::optional(name.get<std::string>()));
    }
  }
  return all;
}

// Returns whether the groups of a file have the sizes of `run_names`.
bool has_sizes(const NamesJson& groups, const std::vector<Names>& run_names) {
  if (!groups.is_array() || groups.size() != run_names.size()) return false;
  return std::equal(run_names.begin(), run_names.end(), groups.begin(),
                    [](const Names& names, const NamesJson& group) {
                      return group.is_object() && group.contains("size") && group["size"] == names.size();
                    });
}

}  // namespace

void add_names(optim::detail::Stored& stored, const torch::optim::Optimizer& optimizer,
               const TrainingRun& run) {
  NamesJson json = NamesJson::array();
  bool is_any = false;
  const std::vector<Names> all = names_of(optimizer, run);
  for (size_t g = 0; g < all.size(); ++g) {
    NamesJson& group = json.emplace_back(NamesJson::array());
    for (size_t i = 0; i < all[g].size(); ++i) {
      const auto& name = all[g][i];
      group.push_back(name ? NamesJson(*name) : NamesJson());
      is_any |= name.has_value();
      const std::string prefix = c10::str(g, ".", i, ".");
      const bool is_left_out = !name && !optimizer.param_groups()[g].params()[i].requires_grad() &&
                               std::any_of(stored.tensors.begin(), stored.tensors.end(),
                                           [&](const auto& item) { return item.key().starts_with(prefix); });
      TORCH_CHECK_VALUE(!is_left_out, "save_training: tensors: expected each weight that has been trained, ",
                        "received none for parameter ", i, " of group ", g,
                        ", which is frozen now. Take training_tensors(module, /*frozen=*/true)");
    }
  }
  if (is_any) stored.metadata[kNames] = json.dump();
}

void match_names(optim::detail::Stored& stored, const torch::optim::Optimizer& optimizer,
                 const TrainingRun& run, const std::string& where) {
  const auto text = stored.metadata.find(kNames);
  if (text == stored.metadata.end()) return;
  const std::vector<Names> run_names = names_of(optimizer, run);
  const auto groups = stored.metadata.find("groups");
  const bool fits = groups != stored.metadata.end() &&
                    has_sizes(files::parse_json(where + ": groups", groups->second), run_names);
  if (!fits) return;  // restore() refuses the file
  const std::vector<Names> saved = read_names(text->second, run_names, where);
  std::map<std::string, std::string> places;  // beginnings of names in the file, and those of this optimizer
  for (size_t g = 0; g < run_names.size(); ++g) {
    const std::vector<size_t> order = order_of(run_names[g], saved[g], c10::str(where, ": group ", g));
    for (size_t i = 0; i < order.size(); ++i)
      places[c10::str(g, ".", order[i], ".")] = c10::str(g, ".", i, ".");
  }
  TensorDict tensors;
  for (const auto& item : stored.tensors) {
    const size_t dot = item.key().find('.'), end = item.key().find('.', dot + 1);
    const bool has_place = dot != std::string::npos && end != std::string::npos;
    const auto place = has_place ? places.find(item.key().substr(0, end + 1)) : places.end();
    tensors.insert(place == places.end() ? item.key() : place->second + item.key().substr(end + 1),
                   item.value());
  }
  stored.tensors = std::move(tensors);
}

}  // namespace shoestring::runs
