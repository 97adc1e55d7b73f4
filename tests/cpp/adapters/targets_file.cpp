// Prints which layers lora::apply adapts, for tests/python/adapters/test_lora_targets.py:
//
//   targets_file KEY=VALUE ...
//
// module=NAME adds a linear layer. target=, exclude=, number=, layers_pattern=, rank=VALUE:PATTERN and
// alpha=VALUE:PATTERN add an entry to an option. apply=1 applies them to a new model of these layers, prints
// one line for each adapter ("NAME RANK ALPHA") or the error, and an empty line, and clears the options.

#include <cstdio>
#include <sstream>
#include <string>
#include <vector>

#include <shoestring/adapters/lora.h>

namespace targets_file {

namespace {

namespace lora = shoestring::lora;
namespace nn = shoestring::nn;

struct Node : torch::nn::Module {
  Node& child(const std::string& name) {
    for (const auto& item : named_children()) {
      if (item.key() == name) return dynamic_cast<Node&>(*item.value());
    }
    return *register_module(name, std::make_shared<Node>());
  }
  void add(const std::string& path) {
    Node* node = this;
    std::stringstream stream(path.substr(0, path.rfind('.') + 1));
    for (std::string part; std::getline(stream, part, '.');) node = &node->child(part);
    node->register_module(path.substr(path.rfind('.') + 1), nn::AdaptableLinear(4, 4));
  }
};

void print_adapted(const std::vector<std::string>& modules, const lora::ApplyOptions& options) {
  Node model;
  for (const auto& name : modules) model.add(name);
  try {
    for (const auto& name : lora::apply(model, options)) {
      for (const auto& item : model.named_modules("", /*include_self=*/false)) {
        auto* layer = item.key() == name ? dynamic_cast<nn::AdaptableLayer*>(item.value().get()) : nullptr;
        if (layer == nullptr) continue;
        const auto& own = *layer->adapters["default"]->lora();
        const auto rows = (*layer->adapters["default"])["lora_A"].size(0);
        std::printf("%s %ld %g\n", name.c_str(), static_cast<long>(rows), own.alpha());
      }
    }
  } catch (const c10::Error& error) {
    std::printf("%s\n", error.what_without_backtrace());
  }
  std::printf("\n");
}

void run(const std::vector<std::string>& arguments) {
  std::vector<std::string> modules;
  lora::ApplyOptions options;
  nn::LoraOptions adapter;
  for (const auto& argument : arguments) {
    const auto at = argument.find('=');
    const std::string key = argument.substr(0, at), value = argument.substr(at + 1);
    const auto colon = value.find(':');
    if (key == "module") modules.push_back(value);
    if (key == "target") options.target_modules().push_back(value);
    if (key == "exclude") options.exclude_modules().push_back(value);
    if (key == "number") options.layers_to_transform().push_back(std::stoll(value));
    if (key == "layers_pattern") options.layers_pattern().push_back(value);
    if (key == "rank") adapter.rank_pattern().emplace_back(value.substr(colon + 1), std::stoll(value));
    if (key == "alpha") adapter.alpha_pattern().emplace_back(value.substr(colon + 1), std::stod(value));
    if (key != "apply") continue;
    print_adapted(modules, options.adapter(adapter));
    options = lora::ApplyOptions();
    adapter = nn::LoraOptions();
  }
}

}  // namespace

int program(int argc, char** argv) {
  run({argv + 1, argv + argc});
  return 0;
}

}  // namespace targets_file
