#include "checkpoint/rng_state.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>

#include <mutex>
#include <utility>

namespace shoestring::activations {
namespace {

at::Tensor state_of(c10::Device device) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

}  // namespace

RngState::RngState(at::TensorList tensors) {
  const c10::Device cpu(c10::kCPU);
  states_.emplace_back(cpu, state_of(cpu));
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || tensor.is_cpu() || tensor.is_meta()) continue;
    bool is_saved = false;
    for (const auto& [device, state] : states_) is_saved |= device == tensor.device();
    if (!is_saved) states_.emplace_back(tensor.device(), state_of(tensor.device()));
  }
}

void RngState::restore() const {
  for (const auto& [device, state] : states_) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(state);
  }
}

RngState RngState::present() const {
  RngState now;
  for (const auto& [device, state] : states_) now.states_.emplace_back(device, state_of(device));
  return now;
}

}  // namespace shoestring::activations
