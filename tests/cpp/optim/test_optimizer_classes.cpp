// Tests that each optimizer class passes every option to its operator under the right name.

#include "catch.h"
#include "operators.h"
#include "optim/optimizers.h"

using at::Tensor;
using Catch::Contains;
using namespace shoestring::optim;

namespace {

// Compares three steps of an optimizer class with three calls of its operator with fp32 state. `arguments`
// are the operator's arguments for `options`, and `moments` the names of the operator's moments.
template <class Optimizer, class Options>
void check_same(const std::string& op, const Options& options, const NamedArguments& arguments,
                const std::vector<std::string>& moments, const NamedArguments& extra = {}) {
  CAPTURE(op);
  at::manual_seed(4);
  // 512 elements are exactly two quantisation blocks
  const Tensor ours = at::randn({16, 32}).requires_grad_();
  const std::vector<Tensor> theirs{ours.detach().clone()};
  Optimizer opt(std::vector<Tensor>{ours}, Options(options).state_format("fp32").maximize(true));
  NamedArguments state{
      {"params", theirs}, {"step", at::zeros({1})}, {"maximize", true}, {"lr", options.lr()}};
  for (const std::string& name : moments) state.emplace_back(name, at::zeros({512}));
  for (int step = 0; step < 3; ++step) {
    const Tensor g = at::randn({16, 32});
    ours.mutable_grad() = g;
    opt.step();
    call(op, with(with({{"grads", gradients({g})}}, extra), with(arguments, state)));
    CHECK(at::equal(ours, theirs[0]));
  }
  for (const std::string& name : moments) {
    for (const auto& [key, value] : state) {
      if (key == name) CHECK(at::equal(state_of(opt, ours)[name].flatten(), value.toTensor()));
    }
  }
}

}  // namespace

TEST_CASE("classes are their operators", "[optim]") {
  const std::vector<std::string> adam{"exp_avg", "exp_avg_sq"};
  const NamedArguments betas{{"beta1", 0.7}, {"beta2", 0.8}, {"eps", 1e-3}, {"weight_decay", 0.25}};
  check_same<AdamW>("adamw_", AdamWOptions(0.1).betas({0.7, 0.8}).eps(1e-3).weight_decay(0.25), betas, adam);
  check_same<LAMB>("lamb_", LAMBOptions(0.1).betas({0.7, 0.8}).eps(1e-3).weight_decay(0.25), betas, adam);
  check_same<AdEMAMix>("ademamix_",
                       AdEMAMixOptions(0.1)
                           .betas({0.7, 0.8, 0.9})
                           .eps(1e-3)
                           .weight_decay(0.25)
                           .alpha(2.5)
                           .t_alpha(4)
                           .t_beta3(5),
                       with(betas, {{"beta3", 0.9}, {"alpha", 2.5}, {"t_alpha", 4}, {"t_beta3", 5}}),
                       {"exp_avg", "exp_avg_slow", "exp_avg_sq"});
  check_same<ScheduleFreeAdamW>(
      "schedule_free_adamw_",
      ScheduleFreeAdamWOptions(0.1).betas({0.7, 0.8}).eps(1e-3).weight_decay(0.25).warmup_steps(2),
      with(betas, {{"warmup_steps", 2}}), {"offset", "exp_avg_sq"});
  check_same<Lion>("lion_", LionOptions(0.1).betas({0.7, 0.8}).weight_decay(0.25),
                   {{"beta1", 0.7}, {"beta2", 0.8}, {"weight_decay", 0.25}}, {"exp_avg"});
  check_same<SGD>("sgd_", SGDOptions(0.1).momentum(0.7).dampening(0.2).weight_decay(0.25),
                  {{"momentum", 0.7}, {"dampening", 0.2}, {"weight_decay", 0.25}}, {"momentum_buffer"});
  check_same<SGD>("sgd_", SGDOptions(0.1).nesterov(true),
                  {{"momentum", 0.9}, {"dampening", 0.0}, {"weight_decay", 0.0}, {"nesterov", true}},
                  {"momentum_buffer"});
  check_same<Muon>("muon_",
                   MuonOptions(0.1)
                       .momentum(0.7)
                       .weight_decay(0.25)
                       .nesterov(false)
                       .ns_coefficients({3, -4, 2})
                       .eps(1e-3)
                       .ns_steps(3)
                       .adjust_lr_fn("match_rms_adamw"),
                   {{"momentum", 0.7},
                    {"weight_decay", 0.25},
                    {"nesterov", false},
                    {"ns_coefficients", std::vector<double>{3, -4, 2}},
                    {"eps", 1e-3},
                    {"ns_steps", 3},
                    {"adjust_lr_fn", "match_rms_adamw"}},
                   {"momentum_buffer"});
  const auto list = [](at::IntArrayRef shape) { return std::vector<Tensor>{at::zeros(shape)}; };
  check_same<CAME>(
      "came_",
      CAMEOptions(0.1).betas({0.7, 0.8, 0.6}).eps({1e-3, 1e-2}).clip_threshold(0.5).weight_decay(0.25),
      {{"beta1", 0.7},
       {"beta2", 0.8},
       {"beta3", 0.6},
       {"eps1", 1e-3},
       {"eps2", 1e-2},
       {"clip_threshold", 0.5},
       {"weight_decay", 0.25}},
      {"exp_avg"},
      {{"exp_avg_sq_row", list({16, 1})},
       {"exp_avg_sq_col", list({1, 32})},
       {"exp_avg_sq", list({0})},
       {"exp_avg_res_row", list({16, 1})},
       {"exp_avg_res_col", list({1, 32})}});
  for (double beta1 : {0.0, 0.7}) {
    check_same<Adafactor>(
        "adafactor_",
        AdafactorOptions(0.1).beta1(beta1).beta2_decay(-0.5).eps({1e-3, 0.5}).d(1.5).weight_decay(0.25),
        {{"beta1", beta1},
         {"beta2_decay", -0.5},
         {"eps1", 1e-3},
         {"eps2", 0.5},
         {"d", 1.5},
         {"weight_decay", 0.25}},
        beta1 > 0 ? std::vector<std::string>{"exp_avg"} : std::vector<std::string>(),
        {{"row_var", list({16, 1})}, {"col_var", list({1, 32})}, {"variance", list({0})}});
  }
}

TEST_CASE("options that no operator takes are refused at once", "[optim]") {
  const auto params = matrices();
  CHECK_THROWS_WITH(
      AdEMAMix(params, AdEMAMixOptions().betas({0.9, 0.99, 1})),
      Contains("AdEMAMix: betas: expected three numbers in [0, 1), received 0.9 and 0.99 and 1"));
  CHECK_THROWS_WITH(AdEMAMix(params, AdEMAMixOptions().t_alpha(0)),
                    Contains("AdEMAMix: t_alpha: expected None or a number of steps, received 0"));
  CHECK_THROWS_WITH(AdEMAMix(params, AdEMAMixOptions().betas({0.9, 0.99, 0.5}).t_beta3(3)),
                    Contains("AdEMAMix: betas: expected a third number of at least beta1, and beta1 above 0, "
                             "with t_beta3"));
  CHECK_THROWS_WITH(ScheduleFreeAdamW(params, ScheduleFreeAdamWOptions().betas({0, 0.9})),
                    Contains("ScheduleFreeAdamW: betas: expected a first number above 0, received 0"));
  CHECK_THROWS_WITH(
      ScheduleFreeAdamW(params, ScheduleFreeAdamWOptions().warmup_steps(-1)),
      Contains("ScheduleFreeAdamW: warmup_steps: expected a whole number of at least 0, received -1"));
  CHECK_THROWS_WITH(Adafactor(params, AdafactorOptions().eps({-1, 1})),
                    Contains("Adafactor: eps: expected two numbers of at least 0, received -1 and 1"));
  CHECK_THROWS_WITH(Adafactor(params, AdafactorOptions().d(0.5)),
                    Contains("Adafactor: d: expected a number of at least 1, received 0.5"));
  CHECK_THROWS_WITH(Adafactor(params, AdafactorOptions().beta2_decay(0.5)),
                    Contains("Adafactor: beta2_decay: expected a number of at most 0, received 0.5"));
  CHECK_THROWS_WITH(CAME(params, CAMEOptions().betas({0, 0.9, 0.9})),
                    Contains("CAME: betas: expected a first number above 0, since the instability is 0 "
                             "without a mean, received 0"));
  CHECK_THROWS_WITH(CAME(params, CAMEOptions().eps({0, 1e-16})),
                    Contains("CAME: eps: expected two numbers above 0, received 0 and 1e-16"));
  CHECK_THROWS_WITH(Muon(params, MuonOptions().ns_coefficients({1, 2})),
                    Contains("Muon: ns_coefficients: expected 3 numbers, received 2"));
  CHECK_THROWS_WITH(Muon(params, MuonOptions().ns_steps(0)),
                    Contains("Muon: ns_steps: expected a whole number from 1 to 99"));
  CHECK_THROWS_WITH(Muon(params, MuonOptions().adjust_lr_fn("none")),
                    Contains("Muon: adjust_lr_fn: expected None, \"original\" or"));
  CHECK_THROWS_WITH(Muon({params[0], at::ones({300})}),
                    Contains("Muon: params[1]: expected a matrix (use AdamW for parameters of other "
                             "shapes), received shape [300]"));
}
