#include "adapters/targets.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>

#include "adapters/names.h"
#include "adapters/pattern.h"
#include "adapters/trained_copy.h"

namespace shoestring::lora {

using nn::AdaptableLayer;
using nn::AdaptableLinearImpl;

namespace {

// Reads a number of decimal digits; none for any other text.
std::optional<int64_t> number_of(const std::string& text) {
  int64_t number = 0;
  const char* end = text.data() + text.size();
  const bool is_decimal = std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
  const auto read = std::from_chars(text.data(), end, number);
  if (!is_decimal || read.ec != std::errc() || read.ptr != end) return std::nullopt;
  return number;
}

// Returns the first part of a name between two dots that is a number and follows at least two other parts. A
// later number may be the index of an expert.
std::optional<int64_t> first_number(const std::string& name) {
  size_t begin = 0;
  for (int part = 0; begin != std::string::npos; ++part) {
    const size_t end = name.find('.', begin);
    if (end == std::string::npos) break;
    if (part >= 2) {
      if (const auto number = number_of(name.substr(begin, end - begin))) return number;
    }
    begin = end + 1;
  }
  return std::nullopt;
}

std::optional<int64_t> layer_number(const std::string& name, const std::vector<std::string>& patterns) {
  if (patterns.empty()) return first_number(name);
  const auto match = first_match("lora::apply: layers_pattern", patterns, name, PatternRule::kLayer);
  if (match.index < 0) return std::nullopt;
  const auto number = number_of(match.group);
  TORCH_CHECK_VALUE(number.has_value(),
                    "lora::apply: layers_pattern: expected patterns whose first group is the layer's number, "
                    "received ",
                    listed(patterns), ", which find '", match.group, "'");
  return number;
}

// Raises if layers_to_transform contains a number that no target has.
void check_layers(const ApplyOptions& options, const std::vector<std::string>& known) {
  const auto& numbers = options.layers_to_transform();
  TORCH_CHECK_VALUE(numbers.empty() || !options.target_modules().empty(),
                    "lora::apply: layers_to_transform: expected none unless target_modules names modules, "
                    "received ",
                    at::ArrayRef<int64_t>(numbers));
  TORCH_CHECK_VALUE(
      !numbers.empty() || options.layers_pattern().empty(),
      "lora::apply: layers_to_transform: expected layer numbers, since layers_pattern is given, "
      "received none");
  if (numbers.empty()) return;
  std::set<int64_t> found;
  for (const auto& name : known) {
    if (!matches(name, options.target_modules())) continue;
    if (const auto number = layer_number(name, options.layers_pattern())) found.insert(*number);
  }
  std::vector<int64_t> missing;
  for (const int64_t number : numbers) {
    if (found.count(number) == 0) missing.push_back(number);
  }
  TORCH_CHECK_VALUE(missing.empty() || found.empty(),
                    "lora::apply: layers_to_transform: expected numbers of layers, received ",
                    at::ArrayRef<int64_t>(missing), ", which no layer has; these have target_modules: ",
                    at::ArrayRef<int64_t>(std::vector<int64_t>(found.begin(), found.end())));
}

bool is_layer_chosen(const std::string& name, const ApplyOptions& options) {
  const auto& numbers = options.layers_to_transform();
  const auto& whole = options.target_modules();
  if (numbers.empty() || std::find(whole.begin(), whole.end(), name) != whole.end()) return true;
  const auto number = layer_number(name, options.layers_pattern());
  return number && std::find(numbers.begin(), numbers.end(), *number) != numbers.end();
}

// Returns the value of the first pattern that matches the name or its ending after a dot.
template <class T>
T by_pattern(const char* caller, const std::vector<std::pair<std::string, T>>& patterns,
             const std::string& name, T otherwise) {
  if (patterns.empty()) return otherwise;
  std::vector<std::string> keys;
  for (const auto& [pattern, value] : patterns) keys.push_back(pattern);
  const auto match = first_match(caller, keys, name, PatternRule::kEnding);
  return match.index < 0 ? otherwise : patterns[static_cast<size_t>(match.index)].second;
}

constexpr const char* kRankPattern = "lora::apply: rank_pattern";
constexpr const char* kAlphaPattern = "lora::apply: alpha_pattern";

template <class T>
void check_patterns(const char* argument, const std::vector<std::pair<std::string, T>>& patterns,
                    const std::vector<std::string>& chosen) {
  std::vector<std::string> keys;
  for (const auto& [pattern, value] : patterns) keys.push_back(pattern);
  const auto match = [&](const std::string& name, const std::string& pattern) {
    return first_match(argument, {pattern}, name, PatternRule::kEnding).index == 0;
  };
  check_matched(argument, keys, chosen, match, "patterns for names of layers with an adapter");
}

// Raises if an entry of the adapter's own options matches none of the chosen layers.
void check_own(const nn::AnyAdapterOptions& options, const NamedLayers& layers) {
  std::vector<std::string> chosen;
  for (const auto& [name, layer] : layers) chosen.push_back(name);
  if (const auto* ia3 = std::get_if<nn::IA3Options>(&options)) {
    check_matched("lora::apply: feedforward_modules", ia3->feedforward_modules(), chosen);
  }
  if (const auto* lora = std::get_if<nn::LoraOptions>(&options)) {
    check_patterns(kRankPattern, lora->rank_pattern(), chosen);
    check_patterns(kAlphaPattern, lora->alpha_pattern(), chosen);
  }
}

}  // namespace

NamedLayers find_targets(const torch::nn::Module& module, const ApplyOptions& options,
                         const std::vector<std::string>& saved) {
  const auto& names = options.target_modules();
  std::vector<std::string> known;
  for (const auto& [name, each] : modules(module)) {
    if (!name.empty()) known.push_back(name);
  }
  check_matched("lora::apply: target_modules", names, known);
  check_matched("lora::apply: exclude_modules", options.exclude_modules(), known);
  check_layers(options, known);
  NamedLayers targets;
  for (const auto& [name, each] : modules(module)) {
    auto* layer = dynamic_cast<AdaptableLayer*>(each);
    const bool chosen = names.empty() ? dynamic_cast<AdaptableLinearImpl*>(each) != nullptr
                                      : !name.empty() && matches(name, names);
    if (!chosen || is_inside(name, saved) || matches(name, options.exclude_modules()) ||
        !is_layer_chosen(name, options))
      continue;
    TORCH_CHECK_VALUE(layer != nullptr,
                      "lora::apply: target_modules: expected shoestring::nn::AdaptableLinear, "
                      "AdaptableEmbedding or AdaptableConv1d, 2d or 3d layers, received ",
                      name, ", a ", each->name(), "; declare it as one of these");
    targets.emplace_back(name, layer);
  }
  TORCH_CHECK_VALUE(
      !targets.empty(),
      "lora::apply: target_modules: expected names of shoestring::nn layers, received names that match "
      "none of the module's ",
      all_of<AdaptableLayer>(module).size());
  check_own(options.adapter(), targets);
  return targets;
}

nn::AnyAdapterOptions own_options(const nn::AnyAdapterOptions& options, const std::string& name) {
  if (const auto* ia3 = std::get_if<nn::IA3Options>(&options)) {
    nn::IA3Options adapter = *ia3;
    return adapter.feedforward(matches(name, ia3->feedforward_modules()));
  }
  const auto* lora = std::get_if<nn::LoraOptions>(&options);
  if (lora == nullptr || (lora->rank_pattern().empty() && lora->alpha_pattern().empty())) return options;
  nn::LoraOptions adapter = *lora;
  adapter.rank(by_pattern(kRankPattern, lora->rank_pattern(), name, lora->rank()));
  adapter.alpha(by_pattern(kAlphaPattern, lora->alpha_pattern(), name, lora->alpha()));
  return adapter.rank_pattern({}).alpha_pattern({});
}

}  // namespace shoestring::lora
