#pragma once

// Running statistics of batch norm for averaged weights. shoestring/optim.h includes this header.

#include <functional>

#include <torch/nn/module.h>

#include <shoestring/core/export.h>

namespace shoestring::optim {

/// Computes the running statistics of all batch norm layers again, as torch.optim.swa_utils.update_bn does in
/// Python. Averaged weights need it if the statistics were not averaged. Example:
///
///     update_batch_norm(*model, [&] {
///       for (const auto& batch : batches) model->forward(batch);
///     });
///
/// `forward` runs the model on all batches. The statistics are reset before, and become the mean over the
/// batches, whatever the layers' momenta are. `forward` runs in training mode without gradients. Layers
/// without running statistics do not change. A layer that no batch reaches, such as one in a branch that
/// stochastic depth leaves out, is left with reset statistics: switch stochastic depth off before. A module
/// without batch norm returns at once.
///
/// The modes and momenta of all modules are restored afterwards. If `forward` throws, the statistics are
/// restored as well. Throws c10::Error, and restores the statistics, if no layer has seen a batch.
SHOESTRING_API void update_batch_norm(torch::nn::Module& module, const std::function<void()>& forward);

}  // namespace shoestring::optim
