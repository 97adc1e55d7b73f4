#include <array>
#include <cmath>

#include <shoestring/adapters/lora.h>

#include "adapters/names.h"
#include "adapters/trained_copy.h"

namespace shoestring::lora {

namespace {

double ratio(const std::array<double, 2>& squares) {
  return squares[1] > 0 ? std::sqrt(squares[0] / squares[1]) : 0;
}

}  // namespace

MergeReport merge(torch::nn::Module& module, const MergeOptions& options) {
  const auto adapted = adapted_layers(module);
  TORCH_CHECK_VALUE(
      !adapted.empty(),
      "lora::merge: module: expected a module with adapters, received one without; call lora::apply first");
  check_known("lora::merge", module, options.adapter_names());
  if (!options.adapter_names().empty())
    // Raises an error if the adapters that shall be merged cannot be active together.
    set_adapter(module, options.adapter_names());
  MergeReport report;
  std::array<double, 2> totals{};
  for (const auto& [name, layer] : adapted) {
    const auto squares = layer->merge(options);
    report.layers[name] = ratio(squares);
    totals = {totals[0] + squares[0], totals[1] + squares[1]};
  }
  for (const auto& [name, copy] : trained_copies(module)) {
    if (copy->merged) continue;
    copy->set_merged(true);
    if (!options.reversible()) copy->detach();
  }
  report.error = ratio(totals);
  return report;
}

void unmerge(torch::nn::Module& module) {
  int64_t count = 0;
  for (const auto& [name, layer] : all_of<nn::AdaptableLayer>(module)) {
    if (!layer->can_unmerge()) continue;
    layer->unmerge();
    ++count;
  }
  TORCH_CHECK_VALUE(count > 0,
                    "lora::unmerge: module: expected a module that was merged with reversible=true, received "
                    "one without saved weights");
  for (const auto& [name, copy] : trained_copies(module)) {
    if (copy->merged) copy->set_merged(false);
  }
}

}  // namespace shoestring::lora
