// Averages weights, for tests/python/optim/test_averages_files.py, which does the same in Python:
//
//   averages_file KIND FORMAT EVERY FOLDER
//
// FOLDER/weights.safetensors has the weights of each step, named "<step>.<name>". Names that begin with "p"
// are parameters, all others are buffers. FOLDER/state.safetensors has the state of the averages, which the
// program loads first. Then it updates the averages with the weights of each step, and overwrites the state.

#include <cstdio>
#include <string>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <shoestring/files/safetensors.h>
#include <shoestring/optim.h>

namespace averages_file {

using namespace shoestring::optim;

namespace {

void run(const std::string& kind, const std::string& format, int64_t every, const std::string& folder) {
  const shoestring::SafetensorsFile file(folder + "/weights.safetensors");
  shoestring::TensorDict parameters, buffers;
  for (const auto& entry : file.entries()) {
    if (!entry.name.starts_with("0.")) continue;
    const std::string name = entry.name.substr(2);
    const at::Tensor tensor = at::zeros(entry.shape, entry.dtype);
    name[0] == 'p' ? parameters.insert(name, tensor.requires_grad_()) : buffers.insert(name, tensor);
  }
  Averages averages(parameters, AveragesOptions(kind).decay(0.9).format(format).every(every).last(3).seed(7),
                    buffers);
  averages.load_state(shoestring::load_safetensors(folder + "/state.safetensors"));
  for (int step = 0; file.contains(std::to_string(step) + "." + parameters.keys()[0]); ++step) {
    const at::NoGradGuard no_grad;
    for (const auto* tensors : {&parameters, &buffers}) {
      for (const auto& item : *tensors) {
        file.load_into(std::to_string(step) + "." + item.key(), item.value());
      }
    }
    averages.update();
  }
  shoestring::save_safetensors(folder + "/state.safetensors", averages.state());
}

}  // namespace

int program(int argc, char** argv) {
  if (argc != 5) return 2;
  try {
    run(argv[1], argv[2], std::stoll(argv[3]), argv[4]);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

}  // namespace averages_file
