// Tests of GaLore and APOLLO with the parts of FullyShard.

#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize.h>

#include <shoestring/optim.h>

#include "common.h"

namespace {

using shoestring::distributed::FullyShard;
namespace optim = shoestring::optim;

std::unique_ptr<optim::detail::LowRankCore> low_rank(const std::string& name,
                                                     const std::vector<Tensor>& params) {
  // eps keeps the steps of AdamW continuous in the projected gradients, whose sums are in another order.
  const auto base = optim::AdamWOptions(1e-2).eps(0.1).state_format("fp32");
  if (name == "apollo")
    return std::make_unique<optim::APOLLO<optim::AdamW>>(params, base,
                                                         optim::APOLLOOptions().rank(4).update_proj_gap(2));
  const auto options =
      optim::GaLoreOptions().rank(4).update_proj_gap(2).projection(name == "galore_left" ? "left" : "auto");
  return std::make_unique<optim::GaLore<optim::AdamW>>(params, base, options);
}

}  // namespace

// Steps agree with those of one process, although parts begin and end within rows, and continue after a load.
// The argument is the optimizer.
void fully_shard_low_rank(char** arguments) {
  const GroupPtr group = connect();
  torch::manual_seed(4);
  std::vector<Tensor> own, alone;
  for (const std::vector<int64_t>& shape :
       std::vector<std::vector<int64_t>>{{70, 41}, {5}, {7, 300}, {6, 5, 25}, {3, 100}}) {
    alone.push_back(at::randn(shape).requires_grad_());
    own.push_back(alone.back().detach().clone().requires_grad_());
  }
  FullyShard sharded(group);
  sharded.add(own);
  const std::string name = arguments[0];
  auto ours = low_rank(name, sharded.parameters());
  const auto whole = low_rank(name, alone);
  for (auto* optimizer : {ours.get(), whole.get()}) optimizer->set_max_grad_norm(10.0);
  for (int64_t step = 0; step < 5; ++step) {
    // All ranks have the same gradients, so those are their mean, too.
    Tensor sum = at::zeros({});
    for (Tensor& p : alone) p.mutable_grad() = at::randn(p.sizes());
    sharded
        .run(0, sum,
             [&](const Tensor& input) {
               Tensor y = input.clone();
               for (size_t i = 0; i < own.size(); ++i) y = y + (own[i] * alone[i].grad()).sum();
               return y;
             })
        .backward();
    ours->step();
    whole->step();
    ours->zero_grad();
    expect(at::allclose(ours->grad_norm(), whole->grad_norm(), 1e-5), "norms are equal");
    sharded.present([&] {
      for (size_t i = 0; i < own.size(); ++i) {
        // Five steps may each round weights of up to 4 in another way.
        const bool same = at::allclose(own[i], alone[i], 1e-5, 5 * 4.0 / (1 << 23));
        expect(same, c10::str("parameter ", i, " after step ", step));
      }
    });
    if (step != 2) continue;
    std::stringstream file;
    torch::serialize::OutputArchive saved;
    ours->save(saved);
    saved.save_to(file);
    ours = low_rank(name, sharded.parameters());
    ours->set_max_grad_norm(10.0);
    torch::serialize::InputArchive loaded;
    loaded.load_from(file);
    ours->load(loaded);
  }
}
