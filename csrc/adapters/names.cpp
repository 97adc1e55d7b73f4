#include "adapters/names.h"

#include <algorithm>
#include <cmath>
#include <regex>
#include <set>

#include <shoestring/adapters/lora.h>

#include "files/safetensors_format.h"
#include "quantization/packed.h"

namespace shoestring::lora {
namespace {

constexpr size_t kLongestAdapterName = 200;

}  // namespace

bool matches(const std::string& name, const std::vector<std::string>& targets) {
  for (const auto& target : targets) {
    if (name == target) return true;
    if (name.size() > target.size() && name.ends_with(target) && name[name.size() - target.size() - 1] == '.')
      return true;
  }
  return false;
}

std::vector<std::string> shortest_names(const torch::nn::Module& module,
                                        const std::vector<std::string>& chosen) {
  std::set<std::string> last, meant;
  for (const auto& name : chosen) last.insert(name.substr(name.rfind('.') + 1));
  const std::vector<std::string> list(last.begin(), last.end());
  for (const auto& child : module.named_modules("", false)) {
    if (matches(child.key(), list)) meant.insert(child.key());
  }
  const std::set<std::string> sorted(chosen.begin(), chosen.end());
  return meant == sorted ? list : std::vector<std::string>(sorted.begin(), sorted.end());
}

void check_matched(const std::string& argument, const std::vector<std::string>& names,
                   const std::vector<std::string>& known, const Match& match, const char* expected) {
  std::vector<std::string> missing;
  for (const auto& pattern : names) {
    const bool is_known =
        std::any_of(known.begin(), known.end(), [&](const auto& name) { return match(name, pattern); });
    if (!is_known) missing.push_back("'" + pattern + "'");
  }
  if (missing.empty()) return;
  std::set<std::string> last;
  for (const auto& name : known) last.insert(name.substr(name.rfind('.') + 1));
  TORCH_CHECK_VALUE(false, argument, ": expected ", expected, ", received ", listed(missing), ", which match",
                    missing.size() == 1 ? "es" : "", " nothing; the module has ",
                    listed({last.begin(), last.end()}));
}

std::vector<std::pair<std::string, torch::nn::Module*>> modules(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, torch::nn::Module*>> result{
      {"", const_cast<torch::nn::Module*>(&module)}};
  for (const auto& child : module.named_modules("", /*include_self=*/false))
    result.emplace_back(child.key(), child.value().get());
  return result;
}

std::vector<std::pair<std::string, nn::AdaptableLayer*>> adapted_layers(const torch::nn::Module& module) {
  auto layers = all_of<nn::AdaptableLayer>(module);
  std::erase_if(layers, [](const auto& layer) { return !layer.second->has_adapter(); });
  return layers;
}

void check_adapter(const std::string& caller, const nn::AnyAdapterOptions& options) {
  if (const auto* lora = std::get_if<nn::LoraOptions>(&options)) {
    const auto check_rank = [&](const char* option, int64_t rank) {
      TORCH_CHECK_VALUE(rank >= 1, caller, ": ", option, ": expected at least 1, received ", rank);
    };
    // The initial values of these two contain the square root of 1 / scaling.
    const bool roots = lora->init().starts_with("pissa") || lora->init() == "loftq";
    const auto check_alpha = [&](const char* option, double alpha) {
      TORCH_CHECK_VALUE(std::isfinite(alpha) && (!roots || alpha > 0), caller, ": ", option, ": expected ",
                        roots ? "a positive number with init '" + lora->init() + "'" : "a finite number",
                        ", received ", alpha);
    };
    check_rank("rank", lora->rank());
    for (const auto& [pattern, rank] : lora->rank_pattern()) check_rank("rank_pattern", rank);
    check_alpha("alpha", lora->alpha());
    for (const auto& [pattern, alpha] : lora->alpha_pattern()) check_alpha("alpha_pattern", alpha);
    TORCH_CHECK_VALUE(lora->dropout() >= 0 && lora->dropout() < 1, caller,
                      ": dropout: expected a probability in [0, 1), received ", lora->dropout());
    static const std::regex known("default|gaussian|pissa(_niter_[1-9][0-9]{0,3})?|olora|loftq");
    TORCH_CHECK_VALUE(std::regex_match(lora->init(), known), caller,
                      ": init: expected 'default', 'gaussian', 'pissa', "
                      "'pissa_niter_N', 'olora' or 'loftq', received '",
                      lora->init(), "'");
    TORCH_CHECK_VALUE(lora->loftq_iterations() >= 1, caller,
                      ": loftq_iterations: expected at least 1, received ", lora->loftq_iterations());
    TORCH_CHECK_VALUE(!lora->dora() || !lora->changes_base(), caller,
                      ": init: expected its default with dora, received '", lora->init(), "'");
    TORCH_CHECK_VALUE(!lora->dora() || !lora->lora_bias(), caller,
                      ": lora_bias: expected false with dora, received true");
  }
  if (const auto* vera = std::get_if<nn::VeraOptions>(&options)) {
    TORCH_CHECK_VALUE(vera->rank() >= 1, caller, ": rank: expected at least 1, received ", vera->rank());
    TORCH_CHECK_VALUE(vera->dropout() >= 0 && vera->dropout() < 1, caller,
                      ": dropout: expected a probability in [0, 1), received ", vera->dropout());
  }
}

void check_bias(const std::string& caller, const nn::AnyAdapterOptions& options, const std::string& bias) {
  const char* const own_biases[] = {"lora_only", "", "vera_only"};
  const std::string only = own_biases[options.index()];
  TORCH_CHECK_VALUE(bias == "none" || (!only.empty() && (bias == "all" || bias == only)), caller,
                    ": bias: expected 'none'", only.empty() ? "" : ", 'all' or '" + only + "'",
                    ", received '", bias, "'");
}

void check_name(const std::string& caller, const std::string& adapter_name) {
  const bool is_reserved = adapter_name == "base" || adapter_name == "weight" || adapter_name == "bias";
  // The name is also that of a folder, in save_adapter.
  const bool folder = adapter_name.size() <= kLongestAdapterName && files::is_visible(adapter_name) &&
                      adapter_name.find_first_of("./\\") == std::string::npos;
  TORCH_CHECK_VALUE(
      !adapter_name.empty() && folder && !is_reserved, caller,
      ": adapter_name: expected a name without dots, slashes and control characters, of at most ",
      kLongestAdapterName, " bytes, that is not base, weight or bias, received ",
      files::quote(adapter_name.substr(0, kLongestAdapterName)));
}

void check_known(const std::string& caller, const torch::nn::Module& module,
                 const std::vector<std::string>& names) {
  const auto known = adapter_names(module);
  for (const auto& name : names) {
    TORCH_CHECK_VALUE(std::find(known.begin(), known.end(), name) != known.end(), caller,
                      ": adapter_names: expected names of this "
                      "module's adapters, ",
                      listed(known), "; received '", name, "'");
  }
}

void check_quantize(const std::string& caller, const std::string& quantize, int64_t block_size,
                    bool double_quant) {
  TORCH_CHECK_VALUE(quantize == "none" || quantize == "nf4" || quantize == "fp4" || quantize == "int4" ||
                        quantize == "int8",
                    caller, ": quantize: expected none, nf4, fp4, int4 or int8, received '", quantize, "'");
  TORCH_CHECK_VALUE(
      quantize != "int8" || (block_size == QuantizeOptions().block_size() && !double_quant), caller,
      ": block_size and "
      "double_quant: expected the defaults with int8, whose rows have one scale each, received ",
      block_size, " and ", double_quant);
  TORCH_CHECK_VALUE(quantize != "int4" || !double_quant, caller,
                    ": double_quant: expected false with int4, whose scales are bf16, received true");
  if (quantize != "none" && quantize != "int8") quantization::check_block_size(caller.c_str(), block_size);
}

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "none" : text;
}

}  // namespace shoestring::lora
