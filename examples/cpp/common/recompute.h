#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

/// layer(x), of which backward keeps x alone: it runs the layer a second time then (gradient checkpointing, Chen et al.
/// 2016). The layer may have parameters, whose gradients are added to them as ever; it must compute the same both times,
/// so no dropout, and what it points to has to live until backward. Without gradients it is layer(x) and nothing else.
at::Tensor recompute(std::function<at::Tensor(const at::Tensor&)> layer, const at::Tensor& x);
