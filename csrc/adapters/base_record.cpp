// Describes the base model of an adapter, so that a loader refuses an adapter of another base.
#include "adapters/base_record.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

#include <ATen/Functions.h>

#include <shoestring/adapters/adaptable_linear.h>

#include "adapters/names.h"
#include "adapters/peft_config.h"
#include "adapters/trained_copy.h"
#include "files/read_file.h"

namespace shoestring::lora {
namespace {

using at::Tensor;

constexpr size_t kTensors = 48;  // maximum number of described weights
constexpr int64_t kValues = 8;   // number of sampled values of each weight
// Two roundings to bf16 of the same number differ by at most 2^-8 of it.
constexpr double kRelative = 0x1p-7, kAbsolute = 1e-7;

// Returns the dense weights of the base model, by name. Leaves out biases, which an adapter may train, and
// weights that an adapter has changed or replaced.
std::map<std::string, Tensor> base_weights(const torch::nn::Module& module) {
  std::vector<std::string> copied;
  for (const auto& [name, copy] : trained_copies(module)) copied.push_back(name);
  std::map<std::string, Tensor> result;
  for (const auto& [name, each] : modules(module)) {
    const auto* layer = dynamic_cast<const nn::AdaptableLayer*>(each);
    const bool changed =
        layer != nullptr && std::any_of(layer->adapters.begin(), layer->adapters.end(),
                                        [](const auto& item) { return item.value()->has("initial_A"); });
    if (changed || is_inside(name, copied) || dynamic_cast<const nn::AdapterImpl*>(each) != nullptr) continue;
    for (const auto& item : each->named_parameters(/*recurse=*/false)) {
      if (item.key() == "bias" || !item.value().defined() || !item.value().is_floating_point()) continue;
      result[name.empty() ? item.key() : name + "." + item.key()] = item.value();
    }
  }
  return result;
}

// Returns whether a weight can be read. Weights that are away or split among processes raise errors.
bool has_memory(const Tensor& weight) {
  if (weight.is_meta()) return false;
  try {
    weight.storage().data();
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

// Returns evenly spaced values of a weight; none if the weight cannot be read.
std::vector<double> sample(const Tensor& weight) {
  if (!has_memory(weight)) return {};
  const int64_t size = weight.numel();
  std::vector<int64_t> places;
  for (int64_t k = 0; k < kValues && size > 0; ++k) places.push_back((2 * k + 1) * size / (2 * kValues));
  const Tensor index = at::tensor(places, at::kLong).to(weight.device());
  const Tensor values = weight.detach().reshape({-1}).index_select(0, index).to(at::kCPU, at::kDouble);
  return {values.data_ptr<double>(), values.data_ptr<double>() + values.numel()};
}

bool are_numbers(const Json& value) {
  return value.is_array() &&
         std::all_of(value.begin(), value.end(), [](const Json& item) { return item.is_number(); });
}

bool is_near(double a, double b) {
  return std::abs(a - b) <= kRelative * std::max(std::abs(a), std::abs(b)) + kAbsolute;
}

// Returns how the weight of the module differs from its description; empty if it does not differ.
std::string difference(const Json& described, const Tensor& weight) {
  const Json shape = weight.sizes().vec();
  if (described["shape"] != shape)
    return "the shape " + shape.dump() + " instead of " + described["shape"].dump();
  const auto expected = described["values"].get<std::vector<double>>();
  if (expected.empty()) return "";
  const auto received = sample(weight);
  if (received.empty()) return "";
  const bool same = std::equal(expected.begin(), expected.end(), received.begin(), received.end(), is_near);
  return same ? "" : "other values";
}

}  // namespace

std::string base_record(const torch::nn::Module& module, const TensorDict& written) {
  auto weights = base_weights(module);
  std::erase_if(weights, [&](const auto& item) {
    return item.second.requires_grad() || written.contains(kPrefix + item.first);
  });
  std::vector<std::string> names;
  for (const auto& [name, weight] : weights) names.push_back(name);
  Json tensors = Json::object();
  const size_t count = std::min(names.size(), kTensors);
  for (size_t i = 0; i < count; ++i) {
    const std::string& name = names[i * names.size() / count];
    auto values = sample(weights[name]);
    // JSON has no number for a value that is not finite.
    if (std::any_of(values.begin(), values.end(), [](double value) { return !std::isfinite(value); }))
      values = {};
    tensors[name] = {{"shape", weights[name].sizes().vec()}, {"values", values}};
  }
  return Json{{"architecture", nullptr}, {"tensors", tensors}}.dump();
}

void check_base_record(const torch::nn::Module& module, const SafetensorsFile& file) {
  const auto text = file.metadata().find(kBase);
  if (text == file.metadata().end()) return;
  const std::string where = "lora::load_adapter: " + file.path() + ": " + kBase;
  const Json record = files::parse_json(where, text->second);
  const bool good = record.is_object() && record.contains("tensors") && record["tensors"].is_object();
  TORCH_CHECK_VALUE(good, where, ": expected an object with tensors, received something else");
  const auto weights = base_weights(module);
  for (const auto& [name, described] : record["tensors"].items()) {
    TORCH_CHECK_VALUE(described.is_object() && described.contains("shape") && described.contains("values") &&
                          are_numbers(described["shape"]) && are_numbers(described["values"]),
                      where, ": expected a shape and values of each tensor, received something else");
    const auto weight = weights.find(name);
    if (weight == weights.end()) continue;  // quantised here, or a part that the module lacks
    const std::string mismatch = difference(described, weight->second);
    TORCH_CHECK_VALUE(mismatch.empty(), "lora::load_adapter: module: expected the base model of the adapter ",
                      file.path(), ", received a module whose ", name, " has ", mismatch,
                      ". Load the adapter onto its own base, or insist with any_base");
  }
}

}  // namespace shoestring::lora
