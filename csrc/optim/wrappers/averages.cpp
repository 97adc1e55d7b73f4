#include <shoestring/optim/averages.h>

#include "optim/wrappers/averages_core.h"

namespace shoestring::optim {
namespace {

using at::Tensor;
using detail::AveragesCore;

std::vector<bool> trained_flags(const std::vector<Tensor>& tensors) {
  std::vector<bool> flags;
  for (const Tensor& t : tensors) flags.push_back(t.requires_grad());
  return flags;
}

/// The names and tensors of a module's parameters, and then those of its buffers.
struct Named {
  explicit Named(const torch::nn::Module& module)
      : Named(module.named_parameters(), module.named_buffers()) {}
  Named(const TensorDict& parameters, const TensorDict& buffers)
      : names(parameters.keys()), tensors(parameters.values()), parameters(parameters.size()) {
    for (const auto& buffer : buffers) {
      names.push_back(buffer.key());
      tensors.push_back(buffer.value());
    }
  }

  std::vector<std::string> names;
  std::vector<Tensor> tensors;
  size_t parameters;
};

std::shared_ptr<AveragesCore> make_core(const Named& named, const AveragesOptions& options) {
  for (size_t i = 0; i < named.tensors.size(); ++i) {
    TORCH_CHECK_VALUE(named.tensors[i].defined(), "Averages: ", named.names[i],
                      ": expected a tensor, received an undefined one");
  }
  return std::make_shared<AveragesCore>(named.names, named.tensors, trained_flags(named.tensors),
                                        named.parameters, options);
}

}  // namespace

SwappedWeights::~SwappedWeights() {
  try {
    restore();
  } catch (const std::exception& error) {
    TORCH_WARN("Averages: swap: the training weights were not restored: ", error.what());
  }
}

void SwappedWeights::restore() {
  const auto core = std::exchange(core_, nullptr);
  if (core == nullptr) return;
  const auto alone = core->lock();
  core->swap_out();
}

Averages::Averages(const torch::nn::Module& module, const AveragesOptions& options) {
  const Named named(module);
  tensors_ = named.tensors;
  core_ = make_core(named, options);
}

Averages::Averages(const TensorDict& parameters, const AveragesOptions& options, const TensorDict& buffers) {
  const Named named(parameters, buffers);
  tensors_ = named.tensors;
  core_ = make_core(named, options);
}

void Averages::update() {
  const auto alone = core_->lock();
  core_->use(tensors_, trained_flags(tensors_));
  core_->update();
}

SwappedWeights Averages::swap() {
  const auto alone = core_->lock();
  core_->use(tensors_, trained_flags(tensors_));
  core_->swap_in();
  return SwappedWeights(core_);
}

void Averages::copy_to(torch::nn::Module& module) const {
  const Named named(module);
  const auto alone = core_->lock();
  core_->copy_to(named.names, named.tensors);
}

int64_t Averages::updates() const {
  const auto alone = core_->lock();
  return core_->updates();
}

TensorDict Averages::state() const {
  const auto alone = core_->lock();
  return core_->state();
}

void Averages::load_state(const TensorDict& state) {
  const auto alone = core_->lock();
  core_->load_state(state);
}

}  // namespace shoestring::optim
