// Tests the behaviour of the optimizer APOLLO. Whether its results equal those of Python is tested in
// tests/python/optim/test_optimizer_files.py.

#include "catch.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "optim/low_rank.h"

using at::Tensor;
using Catch::Contains;
using namespace shoestring::optim;

namespace {

APOLLOOptions apollo_of_rank_8() { return APOLLOOptions().rank(8).update_proj_gap(3).scale(0.5); }

}  // namespace

TEST_CASE("APOLLO scales gradients, by channel or as a whole, and lets their norm grow slowly", "[apollo]") {
  for (const bool mini : {false, true}) {
    for (const bool maximize : {false, true}) {
      CAPTURE(mini, maximize);
      const auto params = low_rank_parameters();
      const double lr = 0.01, decay = 0.2, clip = 5;
      APOLLO<AdamW> opt(params, AdamWOptions(lr).weight_decay(decay).state_format("fp32").maximize(maximize),
                        mini ? APOLLOOptions::mini() : apollo_of_rank_8());
      opt.set_max_grad_norm(clip);
      int limited = 0;
      const double scale = mini ? std::sqrt(128.0) : 0.5;
      std::vector<double> last(params.size());
      for (int step = 0; step < 5; ++step) {
        const auto before = clones(params);
        // From step 2 on, all steps have the same gradients, so that the norm of the update grows.
        new_gradients(params, std::min(step, 2));
        opt.step();
        double squares = 0;
        for (const Tensor& p : params) squares += p.grad().to(at::kDouble).square().sum().item<double>();
        CHECK(opt.grad_norm().item<double>() == Approx(std::sqrt(squares)).epsilon(1e-5));
        for (size_t i = 0; i < kProjected; ++i) {
          const Tensor g = params[i].grad().to(at::kDouble).flatten(1);
          const Tensor moved =
              (params[i].detach().to(at::kDouble) - (1 - lr * decay) * before[i].to(at::kDouble)).flatten(1);
          const int64_t along = g.size(0) <= g.size(1) ? 0 : 1;
          const Tensor factor = mini ? (moved * g).sum() / (g * g).sum()
                                     : (moved * g).sum(along, true) / (g * g).sum(along, true);
          CHECK(((maximize ? factor : -factor) > 0).all().item<bool>());
          CHECK(relative_error((factor * g).to(at::kFloat), moved) < 1e-4);
          if (!mini) CHECK(factor.std().item<double>() > 0.01 * factor.abs().mean().item<double>());
          const double norm = opt.update_norm(params[i]).item<double>();
          CHECK(moved.norm().item<double>() == Approx(norm * lr * scale).epsilon(1e-4));
          if (step > 0) CHECK(norm <= last[i] * 1.01 * (1 + 1e-6));
          limited += norm == Approx(last[i] * 1.01).epsilon(1e-6);
          last[i] = norm;
        }
      }
      CHECK(limited > 1);
    }
  }
}

TEST_CASE("APOLLO: what is not projected steps as by the base alone, with its state; the rest has little",
          "[apollo]") {
  const auto ours = low_rank_parameters(at::kBFloat16), theirs = low_rank_parameters(at::kBFloat16);
  APOLLO<AdamW> a(ours, AdamWOptions(0.01), apollo_of_rank_8());
  AdamW b(theirs, AdamWOptions(0.01));
  train(a, ours, 0, 5);
  train(b, theirs, 0, 5);
  for (size_t i = 0; i < ours.size(); ++i) {
    CHECK((at::equal(ours[i], theirs[i]) == (i >= kProjected)));
    CHECK((a.update_norm(ours[i]).defined() == (i < kProjected)));
  }
  const auto& low = a.base().param_groups()[1].params();
  REQUIRE(low.size() == kProjected);
  CHECK(low[1].sizes() == at::IntArrayRef({40, 8}));
  for (const Tensor& t : low) CHECK((t.storage().nbytes() <= 4 && !t.grad().defined()));
  CHECK(a.base().param_groups()[1].options().get_lr() == 1);
  CHECK(a.base().param_groups()[0].options().get_lr() == 0.01);
}

TEST_CASE("APOLLO resumes bit for bit from an archive", "[apollo]") {
  for (auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const char* state : kStates) {
      for (const bool mini : {false, true}) {
        CAPTURE(dtype, state, mini);
        const auto make = [&](const std::vector<Tensor>& params, const AdamWOptions& options, int64_t seed) {
          return APOLLO<AdamW>(
              params, options,
              (mini ? APOLLOOptions::mini() : apollo_of_rank_8()).update_proj_gap(3).seed(seed));
        };
        const auto through = low_rank_parameters(dtype), resumed = low_rank_parameters(dtype);
        auto opt = make(through, AdamWOptions(3e-3).weight_decay(0.1).state_format(state), 4);
        train(opt, through, 0, 5);
        opt.param_groups()[0].options().set_lr(1e-3);
        copy(through, resumed);
        auto other = make(resumed, {}, 0);
        load_archive(other, archived(opt));
        CHECK(other.param_groups()[0].options().get_lr() == 1e-3);
        train(opt, through, 5, 11);
        train(other, resumed, 5, 11);
        CHECK(equal(through, resumed));
        CHECK(at::equal(opt.update_norm(through[0]), other.update_norm(resumed[0])));
      }
    }
  }
}

TEST_CASE("APOLLO: a parameter without a gradient, and one that is zero", "[apollo]") {
  const auto params = low_rank_parameters();
  APOLLO<AdamW> opt(params, AdamWOptions(0.1).weight_decay(0), apollo_of_rank_8());
  const auto before = clones(params);
  params[1].mutable_grad() = at::zeros_like(params[1]);
  opt.step();
  CHECK(!opt.update_norm(params[0]).defined());
  for (size_t i = 0; i < 2; ++i) CHECK(at::equal(params[i], before[i]));
  new_gradients(params, 1);
  opt.step();
  for (size_t i = 0; i < 2; ++i) CHECK((params[i] != before[i]).all().item<bool>());
}

TEST_CASE("APOLLO refuses what does not fit", "[apollo]") {
  const auto params = low_rank_parameters();
  const auto make = [&](const APOLLOOptions& o) { APOLLO<AdamW>(params, {}, o); };
  CHECK_THROWS_WITH(make(APOLLOOptions().scale_type("row")),
                    Contains("APOLLO: scale_type: expected \"channel\" or \"tensor\", received \"row\""));
  CHECK_THROWS_WITH(make(APOLLOOptions().rank(0)),
                    Contains("APOLLO: rank: expected none or a number of at least 1"));
  CHECK_THROWS_WITH(APOLLO<SGD>(params, SGDOptions().weight_decay(0.1)),
                    Contains("APOLLO: weight_decay: expected 0 with SGD, where it is an L2 penalty"));
  CHECK_THROWS_WITH(
      APOLLO<AdamW>(params, AdamWOptions().weight_rounding("stochastic")),
      Contains("APOLLO: weight_rounding: expected \"nearest\" (or no rank), received \"stochastic\""));
  APOLLO<AdamW> opt(params, {}, apollo_of_rank_8()),
      mini(params, {}, apollo_of_rank_8().scale_type("tensor"));
  GaLore<AdamW> galore(params, {}, GaLoreOptions().rank(8));
  train(opt, params, 0, 1);
  CHECK_THROWS_WITH(
      load_archive(opt, archived(galore)),
      Contains("APOLLO: load: expected an archive of APOLLO of AdamW, format_version 1, received "
               "GaLore of AdamW's"));
  CHECK_THROWS_WITH(
      load_archive(opt, archived(mini)),
      Contains("APOLLO: load: expected rank 8, scale_type \"channel\" and 4 projected parameters"));
}
