// Continues the steps of an optimizer whose state comes from Python, for
// tests/python/optim/test_optimizer_files.py:
//
//   optimizer_file CLASS FOLDER FROM TO MAX_GRAD_NORM [CLASS FOLDER ...]
//
// FOLDER has three files. params.safetensors has the weights, named "<group>.<index>". grads.safetensors has
// the gradients, named "<step>.<group>.<index>"; a parameter may have no gradient in a step.
// optimizer.safetensors has the optimizer's state and options. The program does the steps FROM, ..., TO - 1.
// It then overwrites params.safetensors and optimizer.safetensors. The saved weights of ScheduleFreeAdamW are
// those of eval mode. GaLore, APOLLO and APOLLOMini do not read optimizer.safetensors; they start with the
// options in the code below.

#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <shoestring/files/safetensors.h>
#include <shoestring/optim.h>

namespace optimizer_file {

using namespace shoestring::optim;
using Groups = std::vector<torch::optim::OptimizerParamGroup>;

namespace {

template <class Optimizer>
std::unique_ptr<LowMemoryOptimizer> made(const Groups& groups) {
  return std::make_unique<Optimizer>(groups);
}

std::unique_ptr<LowMemoryOptimizer> make(const std::string& name, const Groups& groups) {
  static const std::map<std::string, std::unique_ptr<LowMemoryOptimizer> (*)(const Groups&)> classes{
      {"AdamW", made<AdamW>},
      {"Lion", made<Lion>},
      {"SGD", made<SGD>},
      {"AdEMAMix", made<AdEMAMix>},
      {"ScheduleFreeAdamW", made<ScheduleFreeAdamW>},
      {"LAMB", made<LAMB>},
      {"Adafactor", made<Adafactor>},
      {"Muon", made<Muon>},
      {"CAME", made<CAME>}};
  TORCH_CHECK(classes.count(name) > 0, "optimizer_file: no class ", name);
  return classes.at(name)(groups);
}

// Returns the low-rank optimizer called `name` with AdamW as its base, or null if there is no such optimizer.
std::unique_ptr<torch::optim::Optimizer> around(const std::string& name, const Groups& groups,
                                                double max_grad_norm) {
  const AdamWOptions options = AdamWOptions(0.01).weight_decay(0.3).state_format("fp32");
  const auto apollo = name == "APOLLOMini" ? APOLLOOptions::mini() : APOLLOOptions().rank(4).scale(0.5);
  std::unique_ptr<shoestring::optim::detail::LowRankCore> optimizer;
  if (name == "GaLore") {
    optimizer =
        std::make_unique<GaLore<AdamW>>(groups, options, GaLoreOptions().rank(4).update_proj_gap(2).seed(3));
  } else if (name == "APOLLO" || name == "APOLLOMini") {
    optimizer =
        std::make_unique<APOLLO<AdamW>>(groups, options, APOLLOOptions(apollo).update_proj_gap(2).seed(3));
  }
  if (optimizer != nullptr && max_grad_norm > 0) optimizer->set_max_grad_norm(max_grad_norm);
  return optimizer;
}

void run(const std::string& name, const std::string& folder, int from, int to, double max_grad_norm) {
  const std::string weights = folder + "/params.safetensors", state = folder + "/optimizer.safetensors";
  const shoestring::SafetensorsFile gradients(folder + "/grads.safetensors");
  shoestring::TensorDict params;
  Groups groups;
  {
    const shoestring::SafetensorsFile file(weights);
    for (size_t g = 0; file.contains(std::to_string(g) + ".0"); ++g) {
      std::vector<at::Tensor> members;
      for (size_t i = 0; file.contains(std::to_string(g) + "." + std::to_string(i)); ++i) {
        const std::string key = std::to_string(g) + "." + std::to_string(i);
        members.push_back(params.insert(key, file.load(key).requires_grad_()));
      }
      groups.emplace_back(std::move(members));
    }
  }
  auto optimizer = around(name, groups, max_grad_norm);
  LowMemoryOptimizer* own = nullptr;
  if (optimizer == nullptr) {
    auto made = make(name, groups);
    own = made.get();
    load_optimizer(*own, state);
    if (max_grad_norm > 0) own->set_max_grad_norm(max_grad_norm);
    optimizer = std::move(made);
  }
  auto* averages = dynamic_cast<ScheduleFreeAdamW*>(own);
  if (averages != nullptr) averages->train();
  for (int step = from; step < to; ++step) {
    for (const auto& item : params) {
      const std::string key = std::to_string(step) + "." + item.key();
      item.value().mutable_grad() = gradients.contains(key) ? gradients.load(key) : at::Tensor();
    }
    optimizer->step();
  }
  if (averages != nullptr) averages->eval();
  shoestring::save_safetensors(weights, params);
  if (own != nullptr) save_optimizer(*own, state);
}

}  // namespace

int program(int argc, char** argv) {
  if (argc < 6 || argc % 5 != 1) return 2;
  try {
    for (char** a = argv + 1; a < argv + argc; a += 5) {
      run(a[0], a[1], std::stoi(a[2]), std::stoi(a[3]), std::stod(a[4]));
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

}  // namespace optimizer_file
