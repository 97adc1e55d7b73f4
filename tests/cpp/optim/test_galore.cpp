#include "catch.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include <torch/optim/schedulers/step_lr.h>

#include "optim/low_rank.h"

using at::Tensor;
using Catch::Contains;
using namespace shoestring::optim;

namespace {

GaLoreOptions galore_of_rank_8() { return GaLoreOptions().rank(8).update_proj_gap(3).scale(0.5); }

}  // namespace

TEST_CASE("GaLore agrees with fp64, and its projections with an SVD", "[galore]") {
  for (const char* side : {"auto", "left", "right"}) {
    for (bool maximize : {false, true}) {
      CAPTURE(side, maximize);
      auto params = low_rank_parameters();
      const double lr = 0.01, decay = 0.2, clip = 5;
      GaLore<AdamW> opt(
          params, AdamWOptions(lr).weight_decay(decay).eps(1e-4).state_format("fp32").maximize(maximize),
          galore_of_rank_8().projection(side));
      opt.set_max_grad_norm(clip);
      std::vector<Tensor> exact, last(params.size());
      std::vector<Adam64> adams(params.size());
      for (const Tensor& p : params) exact.push_back(p.detach().to(at::kDouble));
      for (int step = 0; step < 8; ++step) {
        new_gradients(params, step);
        if (step == 4) params[0].mutable_grad() = Tensor();
        double squares = 0;
        for (const Tensor& p : params) {
          if (p.grad().defined()) squares += p.grad().to(at::kDouble).square().sum().item<double>();
        }
        opt.step();
        CHECK(std::abs(opt.grad_norm().item<double>() - std::sqrt(squares)) < 1e-4);
        for (size_t i = 0; i < params.size(); ++i) {
          if (!params[i].grad().defined() || params[i].numel() == 0) continue;
          exact[i] = exact[i] * (1 - lr * decay);
          const Tensor g = params[i].grad().to(at::kDouble) *
                           ((maximize ? -1 : 1) * std::min(1.0, clip / std::sqrt(squares)));
          Tensor basis = opt.projection(params[i]);
          CHECK(basis.defined() == (i < kProjected || (i == 4 && std::string(side) == "right")));
          if (!basis.defined()) {
            exact[i] = exact[i] + lr * adams[i](g);
            continue;
          }
          basis = basis.to(at::kDouble);
          const Tensor matrix = g.flatten(1);
          const bool left = basis.size(0) == matrix.size(0) &&
                            (std::string(side) != "right" || matrix.size(0) == matrix.size(1));
          // If this step has changed the basis of the projection, compare the new basis with an SVD of the
          // gradient.
          if (!last[i].defined() || !at::equal(basis, last[i])) {
            const auto [u, s, vh] = at::linalg_svd(matrix, false);
            const double captured =
                (left ? basis.mT().mm(matrix) : matrix.mm(basis)).square().sum().item<double>();
            CHECK(captured >
                  0.98 * s.narrow(0, 0, std::min<int64_t>(8, s.numel())).square().sum().item<double>());
            CHECK((basis.mT().mm(basis) - at::eye(8)).abs().max().item<double>() < 5e-6);
            if (last[i].defined()) CHECK(((basis * last[i]).sum(0) > 0).all().item<bool>());
            CHECK((!last[i].defined() || step == 3 || step == 6 || (i == 0 && step == 7)));
          }
          last[i] = basis;
          const Tensor low = adams[i](left ? basis.mT().mm(matrix) : matrix.mm(basis));
          exact[i] =
              exact[i] + 0.5 * lr * (left ? basis.mm(low) : low.mm(basis.mT())).view(params[i].sizes());
        }
      }
      for (size_t i = 0; i + 1 < params.size(); ++i) CHECK(relative_error(params[i], exact[i]) < 1e-6);
    }
  }
}

TEST_CASE("GaLore: full rank is the dense step", "[galore]") {
  for (auto dtype : {at::kFloat, at::kBFloat16}) {
    CAPTURE(dtype);
    std::vector<Tensor> ours{at::zeros({16, 24}, dtype).requires_grad_()},
        theirs{at::zeros({16, 24}, dtype).requires_grad_()};
    const auto options = SGDOptions(0.1).state_format("fp32");
    GaLore<SGD> a(ours, options, GaLoreOptions().rank(16).scale(1));
    SGD b(theirs, options);
    train(a, ours, 0, 6);
    train(b, theirs, 0, 6);
    CHECK(relative_error(ours[0], theirs[0].detach().to(at::kDouble)) < (dtype == at::kFloat ? 1e-6 : 1e-2));
    CHECK(theirs[0].norm().item<double>() > 1);
  }
}

TEST_CASE("GaLore: what is not projected steps as by the base alone, with its state; the rest has little",
          "[galore]") {
  auto ours = low_rank_parameters(at::kBFloat16), theirs = low_rank_parameters(at::kBFloat16);
  GaLore<Lion> a(ours, LionOptions(0.01), galore_of_rank_8());
  Lion b(theirs, LionOptions(0.01));
  train(a, ours, 0, 5);
  train(b, theirs, 0, 5);
  for (size_t i = 0; i < ours.size(); ++i) CHECK((at::equal(ours[i], theirs[i]) == (i >= kProjected)));
  CHECK(a.projection(ours[1]).sizes() == at::IntArrayRef({24, 8}));
  CHECK(a.projection(ours[1]).scalar_type() == at::kBFloat16);
  // Between steps, the low-rank parameters of GaLore's base optimizer keep their shapes but occupy at most 4
  // bytes each.
  const auto& low = a.base().param_groups()[1].params();
  REQUIRE(low.size() == kProjected);
  CHECK(low[1].sizes() == at::IntArrayRef({40, 8}));
  for (const Tensor& t : low) CHECK((t.storage().nbytes() <= 4 && !t.grad().defined()));
}

TEST_CASE("GaLore rounds 16-bit weights once", "[galore]") {
  auto params = low_rank_parameters(at::kBFloat16), wide = low_rank_parameters();
  const auto options = AdamWOptions(0.01).weight_decay(0.3).eps(1e-4).state_format("fp32");
  GaLore<AdamW> opt(params, options, galore_of_rank_8().scale(1));
  std::vector<Tensor> before;
  for (const Tensor& p : params) before.push_back(p.detach().to(at::kDouble));
  train(opt, params, 0, 1);
  for (size_t i = 0; i < kProjected; ++i) {
    const Tensor basis = opt.projection(params[i]).to(at::kDouble),
                 g = params[i].grad().to(at::kDouble).flatten(1);
    const bool left = g.size(0) <= g.size(1);
    const Tensor low = Adam64()(left ? basis.mT().mm(g) : g.mm(basis));
    const Tensor exact =
        before[i] * (1 - 0.003) + 0.01 * (left ? basis.mm(low) : low.mm(basis.mT())).view(params[i].sizes());
    const Tensor unit = at::exp2(exact.abs().log2().floor()) / 128;
    CHECK(((params[i].detach().to(at::kDouble) - exact).abs() <= 0.502 * unit + 1e-6).all().item<bool>());
  }
}

TEST_CASE("GaLore resumes bit for bit from an archive", "[galore]") {
  for (auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const char* state : {"8bit", "fp32"}) {
      CAPTURE(dtype, state);
      auto through = low_rank_parameters(dtype), resumed = low_rank_parameters(dtype);
      GaLore<AdamW> opt(through, AdamWOptions(3e-3).weight_decay(0.1).state_format(state),
                        galore_of_rank_8().seed(4));
      train(opt, through, 0, 5);
      opt.param_groups()[0].options().set_lr(1e-3);
      const std::string bytes = archived(opt);
      for (size_t i = 0; i < through.size(); ++i) resumed[i].detach().copy_(through[i].detach());
      GaLore<AdamW> other(resumed, {}, GaLoreOptions().rank(8));
      load_archive(other, bytes);
      CHECK(other.param_groups()[0].options().get_lr() == 1e-3);
      train(opt, through, 5, 11);
      train(other, resumed, 5, 11);
      CHECK(equal(through, resumed));
      CHECK(at::equal(opt.projection(through[0]), other.projection(resumed[0])));
    }
  }
}

TEST_CASE("GaLore waits for a gradient that says something", "[galore]") {
  std::vector<Tensor> weight{at::zeros({16, 24}).requires_grad_()};
  GaLore<AdamW> opt(weight, AdamWOptions(0.01), GaLoreOptions().rank(2));
  weight[0].mutable_grad() = at::zeros({16, 24});
  opt.step();
  const Tensor first = opt.projection(weight[0]);
  CHECK((first.mT().mm(first) - at::eye(2)).abs().max().item<double>() < 1e-5);
  at::manual_seed(1);
  const Tensor direction = at::randn({16, 1});
  weight[0].mutable_grad() = direction.mm(at::randn({1, 24}));
  opt.step();
  const Tensor found = opt.projection(weight[0]).narrow(1, 0, 1);
  CHECK(relative_error(found.mm(found.mT().mm(direction)), direction.to(at::kDouble)) < 1e-5);
  CHECK(weight[0].abs().max().item<double>() > 0);
}

TEST_CASE("GaLore: groups, closures and schedules", "[galore]") {
  auto params = low_rank_parameters(), theirs = low_rank_parameters();
  Groups groups;
  groups.emplace_back(std::vector<Tensor>{params[0]});
  groups.emplace_back(std::vector<Tensor>{params[2]},
                      std::make_unique<AdamWOptions>(AdamWOptions(0).state_format("fp32")));
  GaLore<AdamW> opt(groups, AdamWOptions(0.1), galore_of_rank_8());
  opt.add_param_group({std::vector<Tensor>{params[1]}, std::make_unique<AdamWOptions>(0.5)},
                      GaLoreOptions().rank(std::nullopt));
  AdamW dense({theirs[1]}, AdamWOptions(0.5));
  torch::optim::StepLR schedule(opt, 1, 0.5), other(dense, 1, 0.5);
  const Tensor still = params[2].detach().clone();
  for (int step = 0; step < 3; ++step) {
    new_gradients(theirs, step);
    const Tensor loss = opt.step([&] {
      new_gradients(params, step);
      return at::full({}, step);
    });
    CHECK(loss.item<int>() == step);
    dense.step();
    schedule.step();
    other.step();
  }
  // params[1] is not projected, and follows the learning rate schedule of its group
  CHECK(at::equal(params[1], theirs[1]));
  CHECK(at::equal(params[2], still));  // params[2] does not change, because its group has lr = 0
  CHECK(opt.param_groups()[2].options().get_lr() == 0.125);
  CHECK(opt.projection(params[2]).defined());
  CHECK(!opt.projection(params[1]).defined());
}

TEST_CASE("GaLore refuses what does not fit, and changes nothing", "[galore]") {
  auto params = low_rank_parameters();
  const auto make = [&](const GaLoreOptions& o) { GaLore<AdamW>(params, {}, o); };
  CHECK_THROWS_WITH(make(GaLoreOptions().rank(0)),
                    Contains("GaLore: rank: expected none or a number of at least 1, received 0"));
  CHECK_THROWS_WITH(make(GaLoreOptions().update_proj_gap(0)),
                    Contains("update_proj_gap: expected a number of at least 1"));
  CHECK_THROWS_WITH(make(GaLoreOptions().scale(-1)),
                    Contains("scale: expected a number above 0, received -1"));
  CHECK_THROWS_WITH(make(GaLoreOptions().projection("std")),
                    Contains("\"auto\", \"left\" or \"right\", received \"std\""));
  CHECK_THROWS_WITH(GaLore<SGD>(params, SGDOptions().weight_decay(0.1)),
                    Contains("GaLore: weight_decay: expected 0 with SGD, where it is an L2 penalty"));
  CHECK_THROWS_WITH(GaLore<AdamW>(params, AdamWOptions(-1)),
                    Contains("AdamW: lr: expected a number of at least 0"));
  Groups foreign;
  foreign.emplace_back(params, std::make_unique<LionOptions>());
  CHECK_THROWS_WITH(GaLore<AdamW>(foreign), Contains("expected AdamWOptions in every group"));
  std::vector<Tensor> doubles{at::zeros({200, 200}, at::kDouble).requires_grad_()};
  CHECK_THROWS_WITH(GaLore<AdamW>(doubles), Contains("params: expected fp32, bf16 or fp16, received Double"));

  GaLore<AdamW> opt(params, AdamWOptions(0.25), galore_of_rank_8()),
      twin_opt(params, AdamWOptions(0.25), galore_of_rank_8());
  CHECK_THROWS_WITH(opt.set_max_grad_norm(0), Contains("max_grad_norm: expected a number above 0"));
  train(opt, params, 0, 2);
  const std::string good = archived(opt);
  AdamW plain(params);
  CHECK_THROWS_WITH(load_archive(opt, archived(plain)),
                    Contains("expected an archive of GaLore of AdamW, format_version 1"));
  GaLore<Lion> lion(params, {}, galore_of_rank_8());
  CHECK_THROWS_WITH(load_archive(opt, archived(lion)),
                    Contains("received GaLore of Lion's, format_version 1"));
  GaLore<AdamW> larger(params, {}, GaLoreOptions().rank(10));
  CHECK_THROWS_WITH(load_archive(opt, archived(larger)),
                    Contains("expected rank 8, projection \"auto\" and 4 projected parameters"));
  CHECK_THROWS_WITH(load_archive(larger, good), Contains("expected rank 10"));
  CHECK(archived(opt).size() == good.size());
  CHECK(opt.param_groups()[0].options().get_lr() == 0.25);
}

TEST_CASE("Optimizers at low rank refuse an offloaded base, and go on where it lies on the device again",
          "[galore]") {
  const auto check = [](auto& opt, const std::vector<Tensor>& params) {
    train(opt, params, 0, 2);
    auto& base = static_cast<AdamW&>(opt.base());
    const std::string good = archived(opt);
    std::vector<Tensor> before;
    for (const Tensor& p : params) before.push_back(p.detach().clone());
    for (const char* where : {"stream", "cpu", "nvme:/tmp"}) {
      base.set_offload(where);
      CHECK_THROWS_WITH(train(opt, params, 2, 3),
                        Contains(": base: expected an optimizer whose state lies on the device; call "
                                 "set_offload(std::nullopt), received set_offload(\"" +
                                 std::string(where) + "\")"));
      CHECK(equal(params, before));
    }
    base.set_offload(std::nullopt);
    CHECK(archived(opt) == good);
    train(opt, params, 2, 3);
    CHECK_FALSE(equal(params, before));
  };
  const auto one = low_rank_parameters(), other = low_rank_parameters();
  GaLore<AdamW> galore(one, AdamWOptions(0.25), galore_of_rank_8());
  check(galore, one);
  APOLLO<AdamW> apollo(other, AdamWOptions(0.25), APOLLOOptions().rank(8));
  check(apollo, other);
}
