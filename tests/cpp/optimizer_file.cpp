// Steps an optimizer whose state comes from Python, for tests/python/test_optimizer_files.py:
//
//   optimizer_file CLASS FOLDER FROM TO MAX_GRAD_NORM [CLASS FOLDER ...]
//
// FOLDER has params.safetensors ("<group>.<index>"), grads.safetensors ("<step>.<group>.<index>", where there is one)
// and optimizer.safetensors, with state and options. Weights and the latter are replaced by those after steps FROM to
// TO; those of ScheduleFreeAdamW are in eval mode then.

#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <shoestring/optim.h>
#include <shoestring/safetensors.h>

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
  const auto optimizer = make(name, groups);
  load_optimizer(*optimizer, state);
  auto* averages = dynamic_cast<ScheduleFreeAdamW*>(optimizer.get());
  if (averages != nullptr) averages->train();
  if (max_grad_norm > 0) optimizer->set_max_grad_norm(max_grad_norm);
  for (int step = from; step < to; ++step) {
    for (const auto& item : params) {
      const std::string key = std::to_string(step) + "." + item.key();
      item.value().mutable_grad() = gradients.contains(key) ? gradients.load(key) : at::Tensor();
    }
    optimizer->step();
  }
  if (averages != nullptr) averages->eval();
  shoestring::save_safetensors(weights, params);
  save_optimizer(*optimizer, state);
}

}  // namespace

int main(int argc, char** argv) {
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
