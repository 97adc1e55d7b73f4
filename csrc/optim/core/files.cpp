#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <type_traits>

#include <ATen/Functions.h>
#include <shoestring/files/safetensors.h>
#include <nlohmann/json.hpp>

#include "files/read_file.h"
#include "files/safetensors_format.h"
#include "optim/core/libtorch_options.h"
#include "optim/core/saved.h"
#include "optim/core/split_state.h"
#include "optim/core/stored.h"
#include "optim/split/split_params.h"

// The metadata of the file that save_optimizer writes has the key format, "shoestring.optimizer", beside
// those of Stored.

namespace shoestring::optim {
namespace {

using namespace detail;
using Json = nlohmann::json;
using files::quote;

constexpr const char* kFormat = "shoestring.optimizer";

std::string entry(size_t group, size_t index, const std::string& name) {
  return std::to_string(group) + "." + std::to_string(index) + "." + name;
}

template <class T>
Json json_of(const T& value) {
  return value;
}
template <class T>
Json json_of(const std::optional<T>& value) {
  return value ? Json(*value) : Json();
}
template <class... T>
Json json_of(const std::tuple<T...>& several) {
  return std::apply([](const T&... value) { return Json(std::vector<Json>{json_of(value)...}); }, several);
}

// Formats a text from a file for an error message. Quotes it if it is long or has non-printable characters.
std::string brief(const std::string& text) {
  const bool plain = std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c <= '~'; });
  return plain && text.size() <= 64 ? text : quote(text);
}

// Raises for a number outside int64_t, which json.get would silently change.
int64_t integer(const Json& json) {
  const bool fits =
      json.is_number_integer() && (!json.is_number_unsigned() || json.get<uint64_t>() <= INT64_MAX);
  TORCH_CHECK_VALUE(fits, "expected an integer, received ", quote(json.dump()));
  return json.get<int64_t>();
}

template <class T>
void read_field(const Json& json, T& value) {
  if constexpr (std::is_same_v<T, int64_t>) {
    value = integer(json);
  } else {
    json.get_to(value);
    if constexpr (std::is_same_v<T, std::string>) {
      TORCH_CHECK_VALUE(brief(value) == value, "expected the name of an option, received ", quote(value));
    }
  }
}
template <class T>
void read_field(const Json& json, std::optional<T>& value) {
  if (json.is_null()) {
    value = std::nullopt;
  } else {
    read_field(json, value.emplace());
  }
}
template <class... T>
void read_field(const Json& json, std::tuple<T...>& several) {
  size_t i = 0;
  TORCH_CHECK_VALUE(json.size() == sizeof...(T), "expected ", sizeof...(T), " numbers, received ",
                    json.size());
  std::apply([&](T&... value) { (read_field(json.at(i++), value), ...); }, several);
}

Json options_json(const LowMemoryOptions& options) {
  Json json = Json::object();
  for (const Field& field : Access::fields(options)) {
    std::visit([&](const auto* value) { json[field.name] = json_of(*value); }, field.value);
  }
  return json;
}

// Reads the sizes and options of the parameter groups, without the states of parameters. Throws a JSON
// exception if an entry is missing or has a wrong type.
std::vector<Saved::Group> read_groups(const Json& json, const LowMemoryOptimizer& optimizer,
                                      const char* where) {
  const char* name = Access::core(optimizer).name();
  const auto& ours = optimizer.param_groups();
  expect(json.size() == ours.size(), name, where, c10::str(ours.size(), " groups of parameters"),
         json.size());
  std::vector<Saved::Group> groups;
  for (size_t g = 0; g < ours.size(); ++g) {
    const int64_t size = integer(json.at(g).at("size")),
                  expected = static_cast<int64_t>(ours[g].params().size());
    expect(size == expected, name, where, c10::str(expected, " parameters in group ", g), size);
    Saved::Group& to = groups.emplace_back();
    to.states.resize(static_cast<size_t>(size));
    to.options = optimizer.defaults().clone();
    Json options = json.at(g).at("options");
    for (const Field& field : Access::fields(static_cast<const LowMemoryOptions&>(*to.options))) {
      std::visit([&](auto* value) { read_field(options.at(field.name), *value); }, field.value);
      options.erase(field.name);
    }
    expect(options.empty(), name, where, "this optimizer's options alone", brief(options.dump()));
  }
  return groups;
}

// Returns the value of a key, or "none".
std::string value_of(const Metadata& metadata, const char* key) {
  const auto entry = metadata.find(key);
  return entry == metadata.end() ? "none" : entry->second;
}

void expect_metadata(const Metadata& metadata, const char* key, const std::string& expected,
                     const std::string& name, const std::string& where) {
  const std::string value = value_of(metadata, key);
  expect(value == expected, name.c_str(), where.c_str(), c10::str(key, " ", expected), brief(value));
}

Stored store_own(const LowMemoryOptimizer& optimizer) {
  Core& core = Access::core(optimizer);
  core.settle();
  Stored stored;
  stored.has_parts = true;
  Json groups = Json::array();
  for (size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    std::vector<Core::OwnState> states = core.own_states(g);
    groups.push_back({{"size", states.size()}, {"options", options_json(core.options(g))}});
    for (size_t i = 0; i < states.size(); ++i) {
      for (const auto& [name, tensor] : states[i].tensors) stored.tensors.insert(entry(g, i, name), tensor);
      for (auto& [name, split] : states[i].splits) stored.splits.emplace(entry(g, i, name), std::move(split));
    }
  }
  if (core.step_in_backward && core.clipping.norm.defined())
    stored.tensors.insert("grad_norm", core.clipping.norm);
  stored.metadata = {{"format_version", std::to_string(kFormatVersion)},
                     {"optimizer", core.name()},
                     {"groups", groups.dump()}};
  return stored;
}

// The tensors of each parameter by group, index and name.
using StatesByGroup = std::vector<std::vector<std::map<std::string, Tensor>>>;

// Sorts tensors by their names. `sizes` has the number of parameters of each group.
StatesByGroup states_by_group(const TensorDict& tensors, const std::vector<size_t>& sizes, const char* name,
                              const char* where) {
  StatesByGroup states;
  for (const size_t size : sizes) states.emplace_back(size);
  for (const auto& item : tensors) {
    size_t g = 0, i = 0;
    int length = 0;
    const bool parsed = std::sscanf(item.key().c_str(), "%zu.%zu.%n", &g, &i, &length) == 2 && length > 0;
    const std::string part = parsed ? item.key().substr(static_cast<size_t>(length)) : "";
    const bool fits = parsed && g < states.size() && i < states[g].size() && entry(g, i, part) == item.key();
    expect(fits, name, where, "tensors called <group>.<index>.<name>, of the file's groups",
           brief(item.key()));
    states[g][i][part] = item.value();
  }
  return states;
}

void restore_own(LowMemoryOptimizer& optimizer, const Stored& stored, const std::string& where) {
  const std::string name = Access::core(optimizer).name();
  expect_metadata(stored.metadata, "format_version", std::to_string(kFormatVersion), name, where);
  expect_metadata(stored.metadata, "optimizer", name, name, where);
  Saved saved;
  saved.has_parts = stored.has_parts;
  try {
    saved.groups = read_groups(files::parse_json(where + ": groups", value_of(stored.metadata, "groups")),
                               optimizer, where.c_str());
  } catch (const Json::exception& error) {
    expect(false, name.c_str(), where.c_str(), "groups with this optimizer's options", error.what());
  }
  TensorDict tensors;
  for (const auto& item : stored.tensors) {
    if (item.key() == "grad_norm") {
      saved.grad_norm = item.value();
    } else {
      tensors.insert(item.key(), item.value());
    }
  }
  std::vector<size_t> sizes;
  for (const auto& group : saved.groups) sizes.push_back(group.states.size());
  StatesByGroup states = states_by_group(tensors, sizes, name.c_str(), where.c_str());
  for (size_t g = 0; g < sizes.size(); ++g) {
    for (size_t i = 0; i < sizes[g]; ++i) saved.groups[g].states[i] = ParamState(std::move(states[g][i]));
  }
  restore(optimizer, std::move(saved));
}

// ---- LibTorch's optimizers

namespace libtorch = torch::optim;

// Returns the name of the optimizer's class in files. `what` begins the error for classes that have none.
std::string name_of(const libtorch::Optimizer& optimizer, const char* what) {
  if (dynamic_cast<const libtorch::AdamW*>(&optimizer) != nullptr) return "torch.AdamW";
  if (dynamic_cast<const libtorch::Adam*>(&optimizer) != nullptr) return "torch.Adam";
  if (dynamic_cast<const libtorch::SGD*>(&optimizer) != nullptr) return "torch.SGD";
  TORCH_CHECK_VALUE(false, what,
                    ": optimizer: expected an optimizer of shoestring with a rule of its own, or LibTorch's "
                    "Adam, AdamW or SGD, received another class");
}

// Calls visit(name, tensor) for the tensors of a parameter's state.
template <class State, class Visit>
void visit_adam_state(State& state, const Visit& visit) {
  visit("exp_avg", state.exp_avg());
  visit("exp_avg_sq", state.exp_avg_sq());
  visit("max_exp_avg_sq", state.max_exp_avg_sq());
}
template <class Visit>
void visit_state(libtorch::OptimizerParamState& state, const Visit& visit) {
  if (auto* adamw = dynamic_cast<libtorch::AdamWParamState*>(&state)) return visit_adam_state(*adamw, visit);
  if (auto* adam = dynamic_cast<libtorch::AdamParamState*>(&state)) return visit_adam_state(*adam, visit);
  visit("momentum_buffer", dynamic_cast<libtorch::SGDParamState&>(state).momentum_buffer());
}

// The number of steps, which SGD does not have.
int64_t* steps_of(libtorch::OptimizerParamState& state) {
  if (auto* adamw = dynamic_cast<libtorch::AdamWParamState*>(&state)) return &adamw->step();
  if (auto* adam = dynamic_cast<libtorch::AdamParamState*>(&state)) return &adam->step();
  return nullptr;
}

Stored store_libtorch(const std::string& name, const libtorch::Optimizer& optimizer) {
  Stored stored;
  stored.has_parts = true;
  Json groups = Json::array();
  for (size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const auto& group = optimizer.param_groups()[g];
    Json options = Json::object();
    visit_libtorch_options(*group.options().clone(),
                           [&](const char* option, const auto& value) { options[option] = json_of(value); });
    groups.push_back({{"size", group.params().size()}, {"options", options}});
    for (size_t i = 0; i < group.params().size(); ++i) {
      const auto param_state = optimizer.state().find(group.params()[i].unsafeGetTensorImpl());
      if (param_state == optimizer.state().end()) continue;
      if (const int64_t* steps = steps_of(*param_state->second))
        stored.tensors.insert(entry(g, i, "step"), at::scalar_tensor(*steps, at::kFloat));
      visit_state(*param_state->second, [&](const char* part, const Tensor& tensor) {
        if (!tensor.defined()) return;
        stored.tensors.insert(entry(g, i, part), tensor);
        if (const SplitParameter* split = split_of(group.params()[i]))
          stored.splits.emplace(entry(g, i, part), SplitTensor{*split, split->begins, split->sizes});
      });
    }
  }
  stored.metadata = {
      {"format_version", std::to_string(kFormatVersion)}, {"optimizer", name}, {"groups", groups.dump()}};
  return stored;
}

std::unique_ptr<libtorch::OptimizerParamState> new_state(const std::string& name) {
  if (name == "torch.AdamW") return std::make_unique<libtorch::AdamWParamState>();
  if (name == "torch.Adam") return std::make_unique<libtorch::AdamParamState>();
  return std::make_unique<libtorch::SGDParamState>();
}

void restore_libtorch(const std::string& name, libtorch::Optimizer& optimizer, const Stored& stored,
                      const std::string& where) {
  expect_metadata(stored.metadata, "format_version", std::to_string(kFormatVersion), name, where);
  expect_metadata(stored.metadata, "optimizer", name, name, where);
  const Json groups = files::parse_json(where + ": groups", value_of(stored.metadata, "groups"));
  auto& ours = optimizer.param_groups();
  expect(groups.is_array() && groups.size() == ours.size(), name.c_str(), where.c_str(),
         c10::str(ours.size(), " groups of parameters"), groups.size());
  std::vector<std::unique_ptr<libtorch::OptimizerOptions>> options;
  std::vector<size_t> sizes;
  try {
    for (size_t g = 0; g < ours.size(); ++g) {
      const auto expected = static_cast<int64_t>(ours[g].params().size());
      const int64_t size = integer(groups.at(g).at("size"));
      expect(size == expected, name.c_str(), where.c_str(), c10::str(expected, " parameters in group ", g),
             size);
      sizes.push_back(static_cast<size_t>(size));
      const Json& values = groups.at(g).at("options");
      // Python's optimizers can maximise, and LibTorch's cannot.
      expect(!values.value("maximize", false), name.c_str(), where.c_str(), "maximize=False", "True");
      options.push_back(ours[g].options().clone());
      visit_libtorch_options(*options.back(),
                             [&](const char* option, auto& value) { read_field(values.at(option), value); });
    }
  } catch (const Json::exception& error) {
    expect(false, name.c_str(), where.c_str(), "groups with this optimizer's options", error.what());
  }
  StatesByGroup tensors = states_by_group(stored.tensors, sizes, name.c_str(), where.c_str());
  std::vector<std::pair<void*, std::unique_ptr<libtorch::OptimizerParamState>>> states;
  for (size_t g = 0; g < sizes.size(); ++g) {
    for (size_t i = 0; i < sizes[g]; ++i) {
      auto& parts = tensors[g][i];
      if (parts.empty()) continue;
      const Tensor& param = ours[g].params()[i];
      auto state = new_state(name);
      if (int64_t* steps = steps_of(*state)) {
        expect(parts.count("step") > 0 && parts["step"].numel() == 1, name.c_str(), where.c_str(),
               "the number of steps of " + entry(g, i, "step"), "none");
        *steps = static_cast<int64_t>(parts["step"].item<double>());
        parts.erase("step");
      }
      visit_state(*state, [&](const char* part, auto&& get) {
        const auto saved = parts.find(part);
        if (saved == parts.end()) return;
        const at::IntArrayRef sizes = stored.has_parts ? param.sizes() : whole_sizes(param);
        expect(saved->second.sizes() == sizes, name.c_str(), where.c_str(),
               c10::str(entry(g, i, part), " of shape ", sizes), saved->second.sizes());
        if (const SplitParameter* split = split_of(param); split != nullptr && !stored.has_parts)
          saved->second = saved->second.reshape({-1}).narrow(0, split->begin(), param.numel());
        get = saved->second.to(param.options().requires_grad(false), /*non_blocking=*/false, /*copy=*/true);
        parts.erase(saved);
      });
      expect(parts.empty(), name.c_str(), where.c_str(), "the state of this optimizer",
             parts.empty() ? "" : brief(entry(g, i, parts.begin()->first)));
      states.emplace_back(param.unsafeGetTensorImpl(), std::move(state));
    }
  }
  for (size_t g = 0; g < ours.size(); ++g) ours[g].set_options(std::move(options[g]));
  optimizer.state().clear();
  for (auto& [key, state] : states) optimizer.state()[key] = std::move(state);
}

}  // namespace

Stored detail::store(const torch::optim::Optimizer& optimizer) {
  const auto* low_memory = dynamic_cast<const LowMemoryOptimizer*>(&optimizer);
  return low_memory != nullptr ? store_own(*low_memory)
                               : store_libtorch(name_of(optimizer, "save"), optimizer);
}

std::vector<files::Source> detail::sources_of(const Stored& stored, const std::string& prefix,
                                              const std::string& caller, const std::string& path) {
  std::vector<files::Source> sources;
  for (const auto& item : stored.tensors) {
    files::Source source{files::info_of(caller, path, prefix + item.key(), item.value()),
                         [tensor = item.value()] { return tensor; }};
    if (const auto split = stored.splits.find(item.key()); split != stored.splits.end()) {
      source.info.shape = split->second.sizes;
      source.is_split = true;
      source.whole = [part = item.value(), how = split->second] { return gathered(part, how); };
    }
    sources.push_back(std::move(source));
  }
  return sources;
}

namespace {

// Returns a parameter of which processes have parts, or null.
const SplitParameter* split_parameter(const torch::optim::Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups()) {
    for (const Tensor& p : group.params()) {
      if (const SplitParameter* split = split_of(p)) return split;
    }
  }
  return nullptr;
}

const std::optional<Ranks>& ranks_of(const torch::optim::Optimizer& optimizer) {
  static const std::optional<Ranks> none;
  const auto* low_memory = dynamic_cast<const LowMemoryOptimizer*>(&optimizer);
  return low_memory != nullptr ? Access::core(*low_memory).ranks : none;
}

}  // namespace

bool detail::is_split(const torch::optim::Optimizer& optimizer) {
  return ranks_of(optimizer).has_value() || split_parameter(optimizer) != nullptr;
}

bool detail::writes(const torch::optim::Optimizer& optimizer) {
  if (const auto& ranks = ranks_of(optimizer)) return ranks->rank == 0;
  const SplitParameter* split = split_parameter(optimizer);
  return split == nullptr || (split->piece == 0 && !split->is_replica);
}

void detail::restore(torch::optim::Optimizer& optimizer, const Stored& stored, const std::string& where) {
  if (auto* low_memory = dynamic_cast<LowMemoryOptimizer*>(&optimizer))
    return restore_own(*low_memory, stored, where);
  restore_libtorch(name_of(optimizer, "load"), optimizer, stored, where);
}

void save_optimizer(const LowMemoryOptimizer& optimizer, const std::string& path) {
  Stored stored = store(optimizer);
  stored.metadata["format"] = kFormat;
  files::save_gathered("save_optimizer", path, sources_of(stored, "", "save_optimizer", path),
                       stored.metadata, writes(optimizer));
}

void load_optimizer(LowMemoryOptimizer& optimizer, const std::string& path) {
  const SafetensorsFile file(path);
  const std::string where = "load_optimizer: " + path;
  expect_metadata(file.metadata(), "format", kFormat, Access::core(optimizer).name(), where);
  Stored stored{TensorDict(), file.metadata()};
  const bool maps = is_split(optimizer);
  for (const auto& item : file.entries())
    stored.tensors.insert(item.name, maps ? file.map(item.name) : file.load(item.name));
  restore_own(optimizer, stored, where);
}

}  // namespace shoestring::optim
