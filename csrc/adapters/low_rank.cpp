#include "adapters/low_rank.h"

#include <cmath>
#include <limits>

#include <ATen/Functions.h>
#include <torch/nn/init.h>

namespace shoestring::nn {

using at::Tensor;

Part taken_part(const AdapterImpl& adapter) {
  return {adapter["initial_A"], adapter["initial_B"], adapter.lora()->scaling(), Tensor()};
}

void concatenate(const std::vector<Part>& parts, LoraWeight& layer) {
  if (parts.empty()) return;
  if (parts.size() == 1) {
    layer.lora_A(parts[0].lora_A).lora_B(parts[0].lora_B).scaling(parts[0].scaling);
    return;
  }
  std::vector<Tensor> As, Bs;
  for (const Part& part : parts) {
    As.push_back(part.lora_A);
    Bs.push_back(part.lora_B * part.scaling);
  }
  layer.lora_A(at::cat(As)).lora_B(at::cat(Bs, 1)).scaling(1);
}

Tensor row_scale(const std::vector<Part>& parts, const Tensor& x) {
  std::vector<Tensor> columns;
  for (const Part& part : parts) {
    const Tensor ones =
        at::ones({x.size(0), part.lora_A.size(0)}, part.lora_A.options().requires_grad(false));
    columns.push_back(part.uses.defined() ? ones * part.uses : ones);
  }
  const Tensor scale = at::cat(columns, 1);
  std::vector<int64_t> shape(static_cast<size_t>(x.dim()), 1), whole = x.sizes().vec();
  shape.front() = x.size(0);
  shape.back() = whole.back() = scale.size(1);
  return scale.view(shape).expand(whole).reshape({-1, scale.size(1)});
}

Tensor low_rank_sum(const Tensor& dense, const std::vector<Part>& parts) {
  const torch::NoGradGuard no_grad;
  Tensor total = dense.clone();
  for (const Part& part : parts)
    total.addmm_(part.lora_B.to(dense.scalar_type()), part.lora_A.to(dense.scalar_type()), 1, part.scaling);
  return total;
}

AdapterImpl::Tensors draw(at::IntArrayRef down, at::IntArrayRef up, const LoraOptions& options,
                          std::optional<at::ScalarType> through) {
  Tensor A = at::empty(down);
  torch::nn::init::kaiming_uniform_(A, std::sqrt(5));
  torch::nn::init::kaiming_uniform_(at::empty(up), std::sqrt(5));
  if (options.lora_bias()) at::empty({up[0]}).uniform_();
  if (options.init() == "gaussian") {
    torch::nn::init::normal_(A, 0, 1 / static_cast<double>(options.rank()));
  } else {
    torch::nn::init::kaiming_uniform_(A, std::sqrt(5));
  }
  AdapterImpl::Tensors tensors;
  tensors.insert("lora_A", A.to(through.value_or(A.scalar_type())));
  tensors.insert("lora_B", at::zeros(up));
  if (options.lora_bias()) tensors.insert("lora_bias", at::zeros({up[0]}));
  return tensors;
}

LoraInput input_with(double dropout, const Tensor& x) {
  LoraInput input;
  if (dropout == 0) return input;
  const auto number = at::TensorOptions(at::kLong).device(x.device());
  return input.dropout(dropout).seed(at::randint(std::numeric_limits<int64_t>::max(), {1}, number));
}

std::array<double, 2> merge_error(const Tensor& before, const Tensor& exact, const Tensor& after) {
  const auto squares = [](const Tensor& t) { return t.to(at::kDouble).square().sum().item<double>(); };
  return {squares(after.to(exact.scalar_type()) - exact), squares(exact - before.to(exact.scalar_type()))};
}

}  // namespace shoestring::nn
